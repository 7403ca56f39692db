"""Workers of a group that was attached to actors which another group has started, perhaps in another process."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import ray

from bandmaster.backends.ray_actor import FIRST_NUMBER, ActorInfo, host_identity
from bandmaster.backends.ray_workers import RayTicket, RayWorkers
from bandmaster.contract import CLOSED, Launch, WorkerRecord
from bandmaster.errors import UsageError
from bandmaster.failure import Failure, FailureKind

__all__ = ["AdoptedWorkers", "AttachedWorkers", "NamedWorkers"]

INFO_TIMEOUT_S = 1.0  # for idle actors to say where they are; of busy ones, Ray knows most of it


class AttachedWorkers(RayWorkers):
    """Actors that are called by actor tasks alone, between the calls of those who started them.

    They live on when this group ends. Only a rank that does not stop within the grace of a call is ended.

    Args:
        launch: What to call the group and its ranks.
        actors: The actor handle of each rank; None for a rank that is dead.

    Raises:
        UsageError: An actor is no worker of bandmaster.
    """

    ranks_are_own = False

    def __init__(self, launch: Launch, actors: Sequence[Any]) -> None:
        living = [rank for rank, actor in enumerate(actors) if actor is not None]
        for actor in (actors[rank] for rank in living):
            if not hasattr(actor, "bandmaster_info"):
                raise UsageError(
                    f"{actor!r} is no worker of a bandmaster group, so that no group can be attached to it"
                )
        self._first_number = FIRST_NUMBER + secrets.randbits(40) * (1 << 20)  # of those who have attached to them
        super().__init__(launch, lambda _, rank: actors[rank], living)
        for rank in set(range(len(actors))).difference(living):
            self._client.deaths[rank] = Failure(FailureKind.DIED, "it had died before this controller attached to it")

    def _begun(self, ranks: Sequence[int]) -> dict[int, ActorInfo]:
        """Ask where the actors are, without waiting: they may be busy, one of them even with this."""
        self._is_left = True
        self._asked = {self.actors[rank].bandmaster_info.remote(): rank for rank in ranks}
        return {}

    @property
    def rendezvous(self) -> Mapping[str, str]:
        """None of this group's."""
        return {}

    def open(self, ranks: Sequence[int], rendezvous: Mapping[str, str], paths: Sequence[str] | None = None) -> None:
        """Nothing: they were prepared by those who started them."""

    def _take_infos(self) -> None:
        """Take the answers that are there: an actor gives its own before the reply to any call of this group."""
        ready = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)[0] if self._asked else []
        for reference in ready:
            rank = self._asked.pop(reference)
            info = self.fetch(RayTicket(reference, rank, 0))
            if isinstance(info, ActorInfo):
                self._infos[rank] = info

    def wait(self, tickets: Sequence[Any], timeout_s: float | None) -> list[Any]:
        """As `RayWorkers.wait`."""
        done = super().wait(tickets, timeout_s)
        self._take_infos()
        return done

    def interrupt(self, tickets: Mapping[int, Any], kill_because: str | None = None) -> None:
        """As `RayWorkers.interrupt`, for ranks that have said where they are."""
        self._take_infos()
        known = {rank: ticket for rank, ticket in tickets.items() if rank in self._infos}
        super().interrupt(known, kill_because)

    def stop(self, why: str = CLOSED) -> None:
        """Let go of the actors, which live on."""
        self.actors = {}
        super().stop(why)

    def _method(self, actor: Any) -> Any:
        return actor.bandmaster_call_of_others


class NamedWorkers(AttachedWorkers):
    """The workers of a detached group, which this controller has found by their names; all of them, in rank order."""

    ranks_are_own = True

    def _begun(self, ranks: Sequence[int]) -> dict[int, ActorInfo]:
        """As for attached workers; until a busy actor answers, what Ray knows of it."""
        super()._begun(ranks)
        return {rank: self._known(self.actors[rank]) for rank in ranks}

    def _known(self, actor: Any) -> ActorInfo:
        """What Ray knows of an actor: where it is, so that its calls can be interrupted, but not its device."""
        known = ray._private.state.actors(actor._actor_id.hex())
        address, node = known["Address"]["IPAddress"], known["Address"]["NodeID"]
        host = host_identity() if node == ray.get_runtime_context().get_node_id() else ""
        overlaps = (self._launch.options.get("max_concurrency") or 1) > 1
        return ActorInfo(address, address, host, known["Pid"], "-", 0, node, "", overlaps)

    @property
    def records(self) -> list[WorkerRecord]:
        """Where each rank is; the device of a busy one may not be known yet."""
        if self._asked:
            ray.wait(list(self._asked), num_returns=len(self._asked), timeout=INFO_TIMEOUT_S)
            self._take_infos()
        living = iter(super().records)
        return [
            next(living) if rank in self._infos else WorkerRecord("-", 0, "-", "dead", partial(self._hand_out, rank))
            for rank in range(len(self._launch.slots))
        ]

    def _hand_out(self, rank: int) -> Any:
        if rank not in self.actors:
            raise UsageError(f"rank {rank} of {self._group} is dead, so that it has no actor")
        return super()._hand_out(rank)


class AdoptedWorkers(RayWorkers):
    """Actors that an agent has started for this group, and that the controller calls itself from here on.

    Args:
        launch: The group's launch.
        actors: The actor handle of each rank.
        start_actor: Starts another actor for a rank.
    """

    def __init__(self, launch: Launch, actors: Sequence[Any], start_actor: Callable[[Launch, int], Any]) -> None:
        self._given = dict(enumerate(actors))
        self._is_left = True
        super().__init__(
            launch, lambda asked, rank: self._given[rank] if rank in self._given else start_actor(asked, rank)
        )
        self._is_left = True
        self._given = {}

    def _begun(self, ranks: Sequence[int]) -> dict[int, ActorInfo]:
        if not self._given:
            return super()._begun(ranks)
        infos = ray.get([self.actors[rank].bandmaster_info.remote() for rank in ranks])
        return dict(zip(ranks, infos, strict=True))

    def open(self, ranks: Sequence[int], rendezvous: Mapping[str, str], paths: Sequence[str] | None = None) -> None:
        """Nothing, for those that were prepared by who started them."""
        if not self._given:
            super().open(ranks, rendezvous, paths)
