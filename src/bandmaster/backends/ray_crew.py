"""The controller's side of a group of Ray actors: Ray's calls, and lanes to the actors on the controller's own host."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RaySystemError, RayTaskError

from bandmaster.backends import Call, Reply
from bandmaster.backends.ray_actor import Standing, host_identity
from bandmaster.failure import Failure, FailureKind
from bandmaster.wire.codec import Payload
from bandmaster.wire.crew import LaneCrew, Ticket
from bandmaster.wire.lane import LaneListener

__all__ = ["POLL_S", "RayCrew"]

POLL_S = 0.1  # Ray has no event for "a resource became free" or "one of these failed"
PUT_NBYTES = 100 * 1024  # smaller payloads travel inside the call, as Ray's own small arguments do
CONNECT_TIMEOUT_S = 10.0
LAST_WORDS_TIMEOUT_S = 2.0  # for Ray to notice why an actor died whose lane broke


class RayCrew:
    """The actors of one group. A ticket is an ObjectRef, or a lane's.

    Attributes:
        actors: Their handles, one per rank.
    """

    has_native_tickets = True

    def __init__(self) -> None:
        self.actors: list[Any] = []
        self._standings: Mapping[int, Standing] = {}
        self._lanes: LaneCrew | None = None
        self._has_lane: set[int] = set()
        self._lock = threading.RLock()  # which way a call goes, and the order in which calls are sent
        self._serving: dict[int, Any] = {}  # the task that serves each lane that is not paused

    @property
    def handles(self) -> Sequence[Any]:
        """The actor handles. Who has them can call the actors past us, so from here on all calls are Ray's own."""
        with self._lock:
            for rank in list(self._has_lane):
                self._pause(rank)
            self._has_lane.clear()
            return self.actors

    @property
    def deaths(self) -> Mapping[int, Failure]:
        """Those that broke a lane; Ray itself tells of a death only to whoever waits for that actor."""
        return {} if self._lanes is None else self._lanes.deaths

    def describe(self) -> list[dict[str, Any]]:
        """Where each worker is, and whether it has a lane."""
        return [
            {"host": s.address, "pid": s.pid, "device": s.device, "lane": "yes" if rank in self._has_lane else "no"}
            for rank, s in sorted(self._standings.items())
        ]

    def connect(self, standings: Mapping[int, Standing]) -> None:
        """Open lanes to the workers that are on this host, where that works."""
        self._standings = standings
        here = host_identity()
        near = [rank for rank, standing in standings.items() if standing.host == here]
        if not near:
            return
        with LaneListener() as listener:
            asked = {rank: listener.introduction(rank) for rank in near}
            refs = [self.actors[rank].bandmaster_connect.remote(listener.name, asked[rank]) for rank in near]
            connected = [rank for rank, ok in zip(near, ray.get(refs, timeout=CONNECT_TIMEOUT_S), strict=True) if ok]
            sockets = listener.accept(connected, CONNECT_TIMEOUT_S)
        self._lanes = LaneCrew(sockets, self._how_it_died)
        self._has_lane = set(sockets)

    def put(self, payload: Payload) -> Part:
        """The payload, written at most once for the lanes and once for Ray, as soon as a call names it."""
        return Part(payload, self._lanes)

    def call(self, calls: Sequence[Call]) -> dict[int, Any]:
        """By lane where there is one and the ticket is not the user's; else one actor task each."""
        with self._lock:
            return self._call(calls)

    def _call(self, calls: Sequence[Call]) -> dict[int, Any]:
        tickets: dict[int, Any] = {}
        for call in calls:
            by_lane = [rank for rank in call.ranks if rank in self._has_lane and call.reply is not Reply.NATIVE]
            if by_lane:
                assert self._lanes is not None, "there are lanes"
                for rank in by_lane:
                    if rank not in self._serving:
                        self._serving[rank] = self.actors[rank].bandmaster_serve.remote()
                parts = tuple(part.on_lane() for part in call.parts)
                tickets.update(self._lanes.call([call._replace(ranks=by_lane, parts=parts)]))
            for rank in call.ranks:
                if rank not in tickets:
                    self._pause(rank)
                    references = [part.on_ray() for part in call.parts]
                    tickets[rank] = self.actors[rank].bandmaster_call.remote(call.method, call.reply, *references)
        return tickets

    def wait(self, tickets: Sequence[Any], timeout_s: float | None) -> list[Any]:
        """Wait for all, but look at what is done every now and then."""
        by_lane = [ticket for ticket in tickets if isinstance(ticket, Ticket)]
        if len(by_lane) == len(tickets) and self._lanes is not None:
            return self._lanes.wait(by_lane, timeout_s)
        references = [ticket for ticket in tickets if not isinstance(ticket, Ticket)]
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = max(0.0, min(POLL_S, deadline - time.monotonic()))
            done = list(ray.wait(references, num_returns=len(references), timeout=left)[0])
            if by_lane and self._lanes is not None:
                done += self._lanes.wait(by_lane, 0.0)
            if done or time.monotonic() >= deadline:
                return done

    def fetch(self, ticket: Any) -> Any | Failure:
        """The decoded value; exceptions of Ray's own become failures."""
        if isinstance(ticket, Ticket):
            assert self._lanes is not None, "it gave the ticket"
            return self._lanes.fetch(ticket)
        try:
            return ray.get(ticket)
        except RayActorError as error:
            return Failure(FailureKind.DIED, f"{type(error).__name__}: {error}".strip())
        except RaySystemError as error:  # what Ray makes of an exception while it unpickles
            return Failure.unreadable(getattr(error, "client_exc", error))
        except RayTaskError as error:
            return Failure(FailureKind.RAISED, str(error.cause), str(error), error.cause)
        except RayError as error:
            return Failure.of(error)

    def stop(self) -> None:
        """Hang up and kill the actors."""
        if self._lanes is not None:
            self._lanes.close_lanes()
        self._has_lane.clear()
        actors, self.actors = self.actors, []
        if ray.is_initialized():
            for actor in actors:
                ray.kill(actor)

    def _pause(self, rank: int) -> None:
        """Let the actor come back from its lane, once it has done what was sent there."""
        if self._serving.pop(rank, None) is not None and self._lanes is not None:
            self._lanes.tell(rank, "pause")

    def _how_it_died(self, rank: int) -> str:
        served = self._serving.get(rank)
        if served is None:
            return "it closed its lane"
        try:
            ray.get(served, timeout=LAST_WORDS_TIMEOUT_S)
        except RayError as error:
            return f"{type(error).__name__}: {error}".strip()
        return "it closed its lane"


class Part:
    """A payload that was put, in the form that each way takes it."""

    def __init__(self, payload: Payload, lanes: LaneCrew | None) -> None:
        self._payload = payload
        self._lanes = lanes
        self._by_lane: Any = None
        self._by_ray: Any = None

    def on_lane(self) -> Any:
        """As `LaneCrew.put` returns it."""
        if self._by_lane is None:
            assert self._lanes is not None, "a call goes by lane"
            self._by_lane = self._lanes.put(self._payload)
        return self._by_lane

    def on_ray(self) -> Any:
        """One object in the store, or the bytes themselves where they are few."""
        if self._by_ray is None:
            is_large = self._payload.nbytes >= PUT_NBYTES
            self._by_ray = ray.put(self._payload) if is_large else self._payload.private()
        return self._by_ray
