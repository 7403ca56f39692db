"""The controller's side of a group of Ray actors: Ray's calls, and lanes to the actors on the controller's own host."""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RaySystemError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from bandmaster.backends import CLOSED, QUEUED, Call, Reply
from bandmaster.backends.ray_actor import CONSTRUCTION, OTHERS, Standing, host_identity
from bandmaster.backends.ray_session import RaySession
from bandmaster.errors import ClosedError
from bandmaster.failure import N_LAST_LINES, Failure, FailureKind
from bandmaster.wire import desk
from bandmaster.wire.codec import Payload
from bandmaster.wire.crew import LaneCrew, Ticket
from bandmaster.wire.gpu import Loan
from bandmaster.wire.lane import LaneListener

__all__ = ["POLL_S", "RayCrew", "RayTicket"]

POLL_S = 0.1  # Ray has no event for "a resource became free" or "one of these failed"
PUT_NBYTES = 100 * 1024  # smaller payloads travel inside the call, as Ray's own small arguments do
CONNECT_TIMEOUT_S = 10.0
LAST_WORDS_TIMEOUT_S = 2.0  # for Ray to notice why an actor died whose lane broke
LAST_NBYTES = 16 * 1024  # of standard error, among which its last lines are looked for
FAR_TIMEOUT_S = 10.0  # for a task on another node
STANDING = -1  # number of what an actor is asked itself; it cannot be given up
_log = logging.getLogger(__name__)


class RayCrew:
    """The actors of one group. A ticket is an ObjectRef, or a lane's.

    Attributes:
        actors: Their handles, one per rank.
        standings: What each says of itself.
        deaths: Of those that broke a lane or failed a call; otherwise Ray tells of a death only to who asks.

    Args:
        group: Name of the group.
    """

    has_native_tickets = True

    def __init__(self, group: str) -> None:
        self._group = f"group {group!r}"
        self._session = RaySession()
        self.actors: list[Any] = []
        self.standings: dict[int, Standing] = {}
        self._here = host_identity()
        self._lanes = LaneCrew({}, {}, self._how_it_died)
        self.deaths: Mapping[int, Failure] = self._lanes.deaths
        self._has_lane: set[int] = set()  # those that are to be called by it
        self._is_left = False  # whether the lanes are not to be used any more
        self._lock = self._lanes.lock  # also of which way a call goes, and of the order in which calls are sent
        self._serving: set[int] = set()  # ranks whose lane is not paused
        self._n_called: Counter[int] = Counter()  # by Ray's calls
        self._told: dict[int, RayError] = {}  # what Ray's calls said of actors that have died

    @property
    def handles(self) -> Sequence[Any]:
        """The actor handles. Who has them can call the actors past us, so from here on all calls are Ray's own."""
        with self._lock:
            for rank in list(self._has_lane):
                self._pause(rank)
            self._has_lane.clear()
            self._is_left = True
            return self.actors

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._lanes.is_stopped

    @property
    def processes(self) -> Mapping[int, int]:
        """Those on this host."""
        return {rank: standing.pid for rank, standing in self.standings.items() if self._is_near(rank)}

    def describe(self) -> list[dict[str, Any]]:
        """Where each worker is, and whether it has a lane."""
        return [
            {"host": s.address, "pid": s.pid, "device": s.device, "lane": "yes" if rank in self._has_lane else "no"}
            for rank, s in sorted(self.standings.items())
        ]

    def connect(self, ranks: Sequence[int]) -> None:
        """Open lanes to those of the workers that are on this host, where that works."""
        near = [rank for rank in ranks if self._is_near(rank)]
        if not near:
            return
        try:
            sockets = self._connected(near)
        except (OSError, RayError) as error:  # of an actor that has died meanwhile, the next call will tell
            _log.warning("calls of %d workers on this host go by Ray, as they have no lanes: %r", len(near), error)
            return
        for rank, sock in sockets.items():
            self._lanes.add_lane(rank, sock, self.standings[rank].pid)
        with self._lock:
            if not self._is_left:
                self._has_lane.update(sockets)

    def _connected(self, ranks: Sequence[int]) -> dict[int, socket.socket]:
        with LaneListener() as listener:
            asked = {
                self.actors[rank].bandmaster_connect.remote(listener.name, listener.introduction(rank)): rank
                for rank in ranks
            }

            def refusing() -> list[int]:
                answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=0)
                return [asked[reference] for reference in answered if not ray.get(reference)]

            return listener.accept(ranks, CONNECT_TIMEOUT_S, refusing)

    def lend(self, ranks: Sequence[int], memory: Any) -> Loan | None:
        """To those that have a lane."""
        with self._lock:
            if not (self._has_lane.issuperset(ranks) and self._session.is_current):
                return None
            for rank in ranks:
                self._resume(rank)
        return self._lanes.lend(ranks, memory)  # which waits for the GPU

    def put(self, payloads: Sequence[Payload]) -> Sequence[Part]:
        """The payloads, written at most once for the lanes and once for Ray, as soon as a call names them."""
        return [Part(payload, self._lanes) for payload in payloads]

    def call(self, calls: Sequence[Call], tickets: dict[int, Any]) -> None:
        """By lane where there is one and the ticket is not the user's; else one actor task each."""
        self._session.check(self._group)
        for call in calls:
            if len(self._by_lane(call)) < len(call.ranks):
                for part in call.parts:
                    part.on_ray()  # Ray's store may be full, and let us wait
        with self._lock:
            if self.is_stopped:
                raise ClosedError(CLOSED)
            self._call(calls, tickets)

    def _call(self, calls: Sequence[Call], tickets: dict[int, Any]) -> None:
        for call in calls:
            by_lane = self._by_lane(call)
            if by_lane:
                for rank in by_lane:
                    self._resume(rank)
                parts = tuple(part.on_lane() for part in call.parts)
                self._lanes.send_calls([call._replace(ranks=by_lane, parts=parts)], tickets)
            for rank in call.ranks:
                if rank not in tickets:
                    self._pause(rank)
                    references = [part.on_ray() for part in call.parts]
                    self._n_called[rank] += 1
                    number = CONSTRUCTION + self._n_called[rank]
                    done = self.actors[rank].bandmaster_call.remote(number, call.method, call.reply, *references)
                    tickets[rank] = done if call.reply is Reply.NATIVE else RayTicket(done, rank, number)

    def _by_lane(self, call: Call) -> Sequence[int]:
        """The ranks that a call goes to by their lanes."""
        if call.reply is Reply.NATIVE:
            return []
        if call.loans:
            return call.ranks  # the lanes are there, even if they were left since they were lent to
        return [rank for rank in call.ranks if rank in self._has_lane]

    def wait(self, tickets: Sequence[Any], timeout_s: float | None) -> list[Any]:
        """Wait for all, but look at what is done every now and then."""
        by_lane = [ticket for ticket in tickets if isinstance(ticket, Ticket)]
        if len(by_lane) == len(tickets):
            return self._lanes.wait(by_lane, timeout_s)
        by_reference = {ticket.reference: ticket for ticket in tickets if isinstance(ticket, RayTicket)}
        references = list(by_reference)
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while self._can_call_ray():
            left = max(0.0, min(POLL_S, deadline - time.monotonic()))
            ready = ray.wait(references, num_returns=len(references), timeout=left)[0]
            done: list[Any] = [by_reference[reference] for reference in ready]
            if by_lane:
                done += self._lanes.wait(by_lane, 0.0)
            if done or time.monotonic() >= deadline:
                return done
        return list(tickets)

    def fetch(self, ticket: Any) -> Any | Failure:
        """The decoded value; exceptions of Ray's own become failures."""
        if isinstance(ticket, Ticket):
            return self._lanes.fetch(ticket)
        if not self._can_call_ray():
            why = CLOSED if self.is_stopped else self._session.ended(self._group)
            return self.deaths.get(ticket.rank) or Failure(FailureKind.DIED, why)
        try:
            return ray.get(ticket.reference)
        except RayActorError as error:
            return self._note_death(ticket.rank, error)
        except RaySystemError as error:  # what Ray makes of an exception while it unpickles
            return Failure.unreadable(getattr(error, "client_exc", error))
        except RayTaskError as error:
            return Failure(FailureKind.RAISED, str(error.cause), str(error), error.cause)
        except RayError as error:
            return Failure.of(error)
        except BaseException as error:  # the user's objects may raise anything when they are unpickled
            return Failure.unreadable(error)

    def give_up(self, tickets: Mapping[int, Any]) -> None:
        """Through the desk of each, on its own node."""
        for rank, ticket in tickets.items():
            if isinstance(ticket, Ticket):
                self._lanes.give_up({rank: ticket})
            elif isinstance(ticket, RayTicket) and ticket.number != STANDING:
                self._on_its_node(rank, desk.give_up, self.standings[rank].pid, ticket.number)

    def stacks(self, tickets: Mapping[int, Any]) -> dict[int, str]:
        """Read the control page of each rank, on its own node."""
        texts = {}
        for rank, ticket in tickets.items():
            if rank in self.standings:
                pid, queued = self.standings[rank].pid, "" if self._is_at(rank, ticket) else QUEUED
                found = self._on_its_node(rank, desk.stacks, [pid]) or {}
                if pid in found:
                    texts[rank] = queued + found[pid]
        return texts

    def end(self, tickets: Mapping[int, Any], why: str) -> None:
        """Kill the actors."""
        self.kill([rank for rank, ticket in tickets.items() if self._is_at(rank, ticket)], why)

    def _is_at(self, rank: int, ticket: Any) -> bool:
        """Whether an actor has come to a call; what does not say so has not."""
        if isinstance(ticket, Ticket):
            return self._lanes.is_at(rank, ticket) and desk.announced(self._lanes.processes[rank]) != OTHERS
        if rank not in self.standings:
            return True  # it has not even said where it is
        return bool(ticket.number == self._on_its_node(rank, desk.announced, self.standings[rank].pid))

    def kill(self, ranks: Sequence[int], why: str) -> None:
        """Kill actors, whatever they do."""
        for rank in ranks:
            self._lanes.note_end(rank, why)
            if self._session.is_current:
                ray.kill(self.actors[rank])

    def bury(self, rank: int) -> None:
        """Note the death of a rank that was ended."""
        self._note_death(rank)
        self._has_lane.discard(rank)
        self._serving.discard(rank)

    def revive(self, rank: int) -> None:
        """A new actor for a rank that was buried."""
        self._lanes.forget_death(rank)
        self._told.pop(rank, None)
        self.standings.pop(rank, None)

    def update_environment(self, ranks: Sequence[int], environment: Mapping[str, str]) -> dict[int, Any]:
        """Tell ranks of variables that have changed; a ticket by rank."""
        with self._lock:
            for rank in ranks:
                self._pause(rank)
        return {rank: self.ask(rank, "bandmaster_update_environment", environment) for rank in ranks}

    def ask(self, rank: int, method: str, *args: Any, number: int = STANDING) -> RayTicket:
        """Call a method of an actor's own, not of its worker's."""
        return RayTicket(getattr(self.actors[rank], method).remote(*args), rank, number)

    def look_for_deaths(self) -> None:
        """Ask Ray about the actors, and look at the lanes."""
        self._lanes.look_for_deaths()
        for rank, actor in enumerate(self.actors):
            if rank not in self.deaths and self._is_dead(actor):
                self._note_death(rank)

    def _is_dead(self, actor: Any) -> bool:
        if not self._session.is_current:
            return True
        return bool(ray._private.state.actors(actor._actor_id.hex()).get("State") == "DEAD")

    def _can_call_ray(self) -> bool:
        return not self.is_stopped and self._session.is_current

    def stop(self, why: str = CLOSED) -> None:
        """Hang up and kill the actors."""
        self._lanes.close_lanes(why)
        for rank in range(len(self.actors)):
            self._lanes.deaths.setdefault(rank, Failure(FailureKind.DIED, why))
        self._has_lane.clear()
        actors, self.actors = self.actors, []
        if self._session.is_current:
            for actor in actors:
                ray.kill(actor)

    def _resume(self, rank: int) -> None:
        """Have the actor serve its lane, once it has done what Ray has for it."""
        if rank not in self._serving:
            self._serving.add(rank)
            self.actors[rank].bandmaster_serve.remote()

    def _pause(self, rank: int) -> None:
        """Let the actor come back from its lane, once it has done what was sent there."""
        if rank in self._serving:
            self._serving.remove(rank)
            self._lanes.pause(rank)

    def _note_death(self, rank: int, error: RayError | None = None) -> Failure:
        """An actor has died, as Ray says."""
        if error is not None:
            self._told.setdefault(rank, error)
        self._lanes.bury(rank)
        return self.deaths[rank]

    def _how_it_died(self, rank: int) -> Failure:
        error = self._told.get(rank) or self._last_words(rank)
        summary = "its process is gone" if error is None else f"{type(error).__name__}: {error}".strip()
        if not self._session.is_current:
            summary = self._session.ended(self._group)
        standing = self.standings.get(rank)
        if standing is None:
            return Failure(FailureKind.DIED, summary)
        return Failure.of_death(summary, self._last_errors(rank), standing.host_name, standing.pid, standing.device)

    def _last_words(self, rank: int) -> RayError | None:
        """What Ray says about an actor whose lane broke."""
        if rank in self._serving and self._session.is_current:
            try:
                ray.get(self.actors[rank].__ray_ready__.remote(), timeout=LAST_WORDS_TIMEOUT_S)
            except RayError as error:
                return error
        return None

    def _last_errors(self, rank: int) -> str:
        if not self._is_near(rank):
            return ""
        try:
            with open(self.standings[rank].stderr, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_NBYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        said = [line for line in lines if not line.startswith(":")]  # Ray's own marks
        return "\n".join(said[-N_LAST_LINES:])

    def _is_near(self, rank: int) -> bool:
        return rank in self.standings and self.standings[rank].host == self._here

    def _on_its_node(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function on the node of a rank; None if that cannot be."""
        if self._is_near(rank):
            return function(*args)
        if rank not in self.standings or not self._session.is_current:
            return None
        strategy = NodeAffinitySchedulingStrategy(self.standings[rank].node, soft=False)
        try:
            return ray.get(_run.options(scheduling_strategy=strategy).remote(function, *args), timeout=FAR_TIMEOUT_S)
        except (RayError, GetTimeoutError):
            return None


@ray.remote(num_cpus=0, max_retries=0)  # type: ignore[untyped-decorator]
def _run(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


class RayTicket(NamedTuple):
    """A call by Ray's own means.

    Attributes:
        reference: Of its value.
        rank: The rank.
        number: By which it can be given up.
    """

    reference: Any
    rank: int
    number: int


class Part:
    """A payload that was put, in the form that each way takes it."""

    def __init__(self, payload: Payload, lanes: LaneCrew) -> None:
        self._payload = payload
        self._lanes = lanes
        self._by_lane: Any = None
        self._by_ray: Any = None

    def on_lane(self) -> Any:
        """As `LaneCrew.put` returns it; the lock of the lanes is held."""
        if self._by_lane is None:
            self._by_lane = self._lanes.place(self._payload)
        return self._by_lane

    def on_ray(self) -> Any:
        """One object in the store, or the bytes themselves where they are few."""
        if self._by_ray is None:
            is_large = self._payload.nbytes >= PUT_NBYTES
            self._by_ray = ray.put(self._payload) if is_large else self._payload.private()
        return self._by_ray
