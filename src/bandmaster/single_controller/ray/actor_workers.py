"""The controller's side of a group of Ray actors: actor tasks, and lanes to the actors on the controller's host."""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayError, RayTaskError, TaskCancelledError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from bandmaster import contract
from bandmaster.backends.ray.agents import host_lost
from bandmaster.backends.ray.backend import is_lost
from bandmaster.backends.ray.session import START_TIMEOUT_S, RaySession
from bandmaster.codec import Payload
from bandmaster.contract import (
    CLOSED,
    NOT_STARTED,
    QUEUED,
    Kept,
    Reply,
    RowFacts,
    Signs,
    Ticket,
    WorkerCall,
    WorkerRecord,
)
from bandmaster.errors import ClosedError, ConstructorError, PlacementError, RowsLost, UsageError, WorkerDied
from bandmaster.errors.failure import N_LAST_LINES, REPLACED, Failure, FailureKind
from bandmaster.platform.locks import SigintSafeLock
from bandmaster.single_controller.ray.actor import (
    FIRST_NUMBER,
    LONG_S,
    OTHERS,
    REFERRED,
    SHARED_S,
    ActorInfo,
    Timed,
    announced,
)
from bandmaster.single_controller.ray.launch import ActorLaunch
from bandmaster.single_controller.ray.listener import LaneListener, host_identity
from bandmaster.wire import status_page
from bandmaster.wire.client import MessageTicket
from bandmaster.wire.lanes import LaneClient
from bandmaster.wire.status_page import WorkerIdentity
from bandmaster.worker_process.rendezvous import rendezvous_environment

__all__ = ["ActorWorkers", "AttachedWorkers", "RayTicket"]

POLL_S = 0.1  # Ray has no event for "a resource became free" or "one of these calls failed"
PUT_NBYTES = 100 * 1024  # smaller payloads travel inside the call, as Ray's own small arguments do
CONNECT_TIMEOUT_S = 10.0
LAST_WORDS_TIMEOUT_S = 2.0  # for Ray to find out why an actor died whose lane was closed
LAST_NBYTES = 16 * 1024  # of standard error that are read for its last lines
FAR_TIMEOUT_S = 10.0  # for a task on another node
Origins = Sequence[tuple[str, object]]
_log = logging.getLogger(__name__)


class RayTicket(contract.Ticket):
    """One rank's part of a call that was submitted as an actor task.

    Attributes:
        reference: ObjectRef of the reply.
        rank: The rank.
        task: The number of the actor task, by which the call can be interrupted.
        rows: ObjectRef of the rows that the call keeps; None if it keeps none.
        takes: For each object that it takes kept rows from, the id and the name that messages use.
    """

    __slots__ = ("rank", "reference", "rows", "takes", "task")

    def __init__(self, reference: Any, rank: int, task: int, rows: Any = None, takes: Origins = ()) -> None:
        super().__init__()
        self.takes = takes
        self.reference = reference
        self.rank = rank
        self.task = task
        self.rows = rows


class ActorWorkers:
    """The actors of one group. A ticket is a `RayTicket` or a `MessageTicket`.

    Attributes:
        actors: The actor handle of each rank.
        deaths: The failure of each rank whose actor is known to have died. A closed lane or a failed call shows a
            death; `check`, which asks Ray, finds the others.
        ranks_are_own: True.

    Args:
        launch: The group's launch.
        start_actor: Starts the actor of a rank and returns its handle.
    """

    ranks_are_own = True
    _first_number = FIRST_NUMBER

    def __init__(self, launch: ActorLaunch, start_actor: Callable[[ActorLaunch, int], Any]) -> None:
        self._launch = launch
        self._start_actor = start_actor
        self._group = f"group {launch.group!r}"
        self._session = RaySession()
        self.actors: dict[int, Any] = {}
        self._infos: dict[int, ActorInfo] = {}  # the reports of the running actors, by rank
        self._last_infos: dict[int, ActorInfo] = {}  # also of one that was ended, until its successor reports
        self._here = host_identity()
        self._client = LaneClient(self._how_it_died)
        self.deaths: Mapping[int, Failure] = self._client.deaths
        self.reports = self._client.reports
        self._has_lane: set[int] = set()  # ranks that are called over their lanes
        self._is_left = False  # whether the user has an actor handle
        self._lock = self._client.lock  # also guards the choice of channel and the order of calls
        self._serving: set[int] = set()  # ranks whose lane is not paused
        self._n_called: Counter[int] = Counter()  # actor tasks submitted, by rank
        self._told: dict[int, RayError] = {}  # the error that a call to a dead actor raised, by rank
        try:
            ranks = range(len(launch.slots))
            for rank in ranks:
                self._start(launch, rank)
            self._have_begun(ranks)
            self._open(ranks)
        except BaseException:
            self.stop(NOT_STARTED)
            raise

    def _start(self, launch: ActorLaunch, rank: int) -> None:
        with SigintSafeLock():  # Ctrl-C comes when the handle is here: without it, a detached actor would stay
            self.actors[rank] = self._start_actor(launch, rank)

    @property
    def _rendezvous(self) -> Mapping[str, str]:
        """The environment variables by which workers find the rendezvous on rank 0."""
        return rendezvous_environment(self._infos[0].address, self._infos[0].rendezvous_port)

    @property
    def address(self) -> tuple[str, str]:
        """Host and port of the rendezvous on rank 0."""
        return self._last_infos[0].address, str(self._last_infos[0].rendezvous_port)

    @property
    def nodes(self) -> list[str]:
        """The id of Ray's node of each rank."""
        return [info.node for _, info in sorted(self._last_infos.items())]

    def _open(self, ranks: Sequence[int]) -> None:
        """Prepare actors that have begun, and open lanes to those on this host."""
        unordered = {}
        for rank in ranks:
            context = self._launch.context(rank, self._infos[rank].device)
            environment = {**self._overwritten(), **self._launch.variables, **context.environment(), **self._rendezvous}
            environment["RAY_LOCAL_RANK"] = str(context.local_rank)
            prepared = self.actors[rank].bandmaster_prepare.remote(context, environment, sys.path)
            if self._infos[rank].overlaps:
                unordered[prepared] = rank
        self._unanswered(unordered, START_TIMEOUT_S)  # Ray could begin their constructors before
        self._connect([rank for rank in ranks if self._is_near(rank) and not self._infos[rank].overlaps])

    def _overwritten(self) -> dict[str, str]:
        """The variables that Ray sets in workers whatever ``runtime_env`` asks for."""
        return {name: value for name, value in self._launch.env.items() if name == "PYTHONBREAKPOINT"}

    def _have_begun(self, ranks: Sequence[int]) -> None:
        found = self._begun(ranks)
        self._infos.update(found)
        self._last_infos.update(found)

    def _begun(self, ranks: Sequence[int]) -> dict[int, ActorInfo]:
        """Wait until the processes of new actors run, and return their reports.

        Raises:
            CallTimeout: They did not start within the launch's ``start_timeout_s``.
            PlacementError: They did not start within `START_TIMEOUT_S`, or their host is lost.
            WorkerDied: An actor died as it started.
            ConstructorError: An actor's start raised.
        """
        launch, here, asked = self._launch, host_identity(), {}
        for rank in ranks:
            identity = WorkerIdentity.here(rank, len(launch.slots), launch.group, launch.is_detached)
            output = launch.output_file(rank)
            asked[self.actors[rank].bandmaster_begin.remote(launch.uses_gpu, identity, here, output)] = rank
        limit_s = START_TIMEOUT_S if launch.start_timeout_s is None else min(launch.start_timeout_s, START_TIMEOUT_S)
        missing = self._unanswered(asked, limit_s)
        if missing and limit_s < START_TIMEOUT_S:
            raise launch.late(sorted(missing), "Ray has not started their actors")
        if missing:
            raise PlacementError(
                f"{len(missing)} of {len(asked)} actors of {self._group} did not start within {START_TIMEOUT_S:g} s; "
                "`ray list actors` shows why they wait"
            )
        replies = {rank: self.fetch(RayTicket(reference, rank, 0)) for reference, rank in asked.items()}
        failures = {rank: reply for rank, reply in replies.items() if isinstance(reply, Failure)}
        if failures:
            self._check_hosts(list(failures))
            where = {rank: launch.mesh.coordinates(rank) for rank in failures}
            has_died = any(failure.kind is FailureKind.DIED for failure in failures.values())
            kind = WorkerDied if has_died else ConstructorError
            raise kind(launch.constructor, failures, where, launch.group, launch.mesh.shown_axes)
        return replies

    def _unanswered(self, asked: Mapping[Any, int], timeout_s: float) -> list[int]:
        """Wait until all ObjectRefs are ready or the time is over. Returns the ranks of those that are not ready.

        Raises:
            PlacementError: The host of one of these ranks is lost.
        """
        deadline, waiting = time.monotonic() + timeout_s, list(asked)
        while waiting and time.monotonic() < deadline:
            waiting = ray.wait(waiting, num_returns=len(waiting), timeout=min(1.0, timeout_s))[1]
            self._check_hosts([asked[reference] for reference in waiting])
        return [asked[reference] for reference in waiting]

    def _check_hosts(self, ranks: Sequence[int]) -> None:
        """Raise PlacementError if Ray says that the host of the slot of one of these ranks is lost."""
        slots = self._launch.slots
        by_node = {slots[rank].reservation.groups[slots[rank].node]: rank for rank in reversed(ranks)}
        for group, rank in by_node.items():  # Ray's answer takes a millisecond
            self._session.check(self._group)  # Ray's calls would start it anew
            if is_lost(group):
                raise host_lost(rank)

    def _connect(self, ranks: Sequence[int]) -> None:
        """Open lanes to workers on this host. If that fails, their calls go by actor tasks."""
        if not ranks:
            return
        try:
            sockets = self._connected(ranks)
        except (OSError, RayError) as error:  # if an actor has died meanwhile, its next call fails
            _log.warning(
                "cannot open direct sockets to %d workers on this host, so their calls go through Ray, more slowly: %r",
                len(ranks),
                error,
            )
            return
        with self._lock:
            for rank, sock in sockets.items():
                self._client.add(rank, sock, self._infos[rank].pid)
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

    def replace(self, rank: int) -> None:
        """Kill the actor of a rank and start a new one on its slot.

        Raises:
            PlacementError: Its host is lost; nothing was done.
            ClosedError: Another thread has stopped the workers.
        """
        self._check_hosts([rank])
        self._kill({rank: None}, REPLACED)
        try:
            self._start(replace(self._launch, is_again=True), rank)
            with self._lock:
                self._client.deaths.pop(rank, None)
            self._told.pop(rank, None)
            self._infos.pop(rank, None)
            self._have_begun([rank])
            self._open([rank])
            if rank == 0:
                self._announce()
        except BaseException as error:
            self._kill({rank: None}, "ended by the controller, because it could not be started")
            if self._client.is_stopped and isinstance(error, Exception):  # any step may fail without the actors
                raise ClosedError(CLOSED) from None
            raise

    def _announce(self) -> None:
        """Tell the other ranks of the rendezvous that a new rank 0 has opened."""
        for rank in set(self._infos).difference([0]):
            with self._lock:
                self._session.check(self._group)
                self._pause(rank)
                self.actors[rank].bandmaster_update_environment.remote(self._rendezvous)

    @property
    def arrivals(self) -> int | None:
        """A descriptor that is readable when a reply or a death may have arrived; None unless all ranks have lanes."""
        return self._client.arrivals if len(self._has_lane) == len(self.actors) else None

    @property
    def records(self) -> list[WorkerRecord]:
        """Host, process, device and channel of each rank. Handles are Ray's actor handles."""
        return [
            WorkerRecord(
                info.address,
                info.pid,
                info.device,
                "lane" if rank in self._has_lane else "ray",
                partial(self._hand_out, rank),
            )
            for rank, info in sorted(self._last_infos.items())
        ]

    def _hand_out(self, rank: int) -> Any:
        """Return the actor handle of a rank, and record that its actor must outlive this group.

        Calls that the user makes through the handle bypass the group. Lanes stay in use: a call through a handle waits
        until the actor looks for such calls, which it does more often from then on.
        """
        with self._lock:
            for other in list(self._has_lane):
                self._pause(other)
            self._is_left = True
        return self.actors[rank]

    def put(self, payloads: Sequence[Payload | Kept]) -> Sequence[Part]:
        """Wrap payloads. Calls write a payload when they name it, at most once for lanes and once for Ray."""
        return [Part(payload, self._client) for payload in payloads]

    def call(self, calls: Sequence[WorkerCall], tickets: dict[int, Any]) -> None:
        """Send calls over lanes where ranks have them; else by one actor task per rank."""
        self._send(calls, tickets, is_referred=False)

    def refer(self, calls: Sequence[WorkerCall]) -> dict[int, Any]:
        """Send calls by actor tasks, and return the ObjectRef of each rank's value.

        `ray.get` of it raises the exception of the method.
        """
        tickets: dict[int, Any] = {}
        try:
            self._send(calls, tickets, is_referred=True)
        except BaseException:  # Ctrl-C: the caller does not get the references
            self.interrupt(tickets)
            raise
        return {rank: ticket.reference for rank, ticket in tickets.items()}

    def _send(self, calls: Sequence[WorkerCall], tickets: dict[int, Any], is_referred: bool) -> None:
        self._session.check(self._group)
        for call in calls:
            if is_referred or len(self._by_lane(call)) < len(call.ranks):
                for part in (*call.parts, *(part for _, part in call.rows)):
                    part.on_ray()  # before the lock is taken: this waits while Ray's object store is full
        with self._lock:
            if self._client.is_stopped:
                raise ClosedError(CLOSED)
            for call in calls:
                self._call(call, tickets, is_referred)

    def _call(self, call: WorkerCall, tickets: dict[int, Any], is_referred: bool) -> None:
        by_lane = [] if is_referred else self._by_lane(call)
        if by_lane:
            for rank in by_lane:
                self._resume(rank)
            parts = tuple(part.on_lane() for part in call.parts)
            rows = tuple((label, part.on_lane()) for label, part in call.rows)
            self._client.send_calls([call._replace(ranks=by_lane, parts=parts, rows=rows)], tickets)
        for rank in call.ranks:
            if rank not in tickets:
                self._pause(rank)
                tickets[rank] = self._by_task(rank, call, is_referred)

    def _by_task(self, rank: int, call: WorkerCall, is_referred: bool) -> RayTicket:
        """Submit a call as an actor task."""
        labels = [(label, call.present.get(label)) for label, _ in call.rows]
        references = [part.on_ray() for part in (*call.parts, *(part for _, part in call.rows))]
        number = self._first_number + self._n_called[rank]
        self._n_called[rank] += 1
        method = self._method(self.actors[rank])
        if call.reply is Reply.KEEP:
            method = method.options(num_returns=2)
        how = REFERRED if is_referred else int(call.reply), call.is_timed
        done = method.remote(number, call.method, how, labels, *references)
        reference, rows = done if call.reply is Reply.KEEP else (done, None)
        return RayTicket(reference, rank, number, rows, [part.origin for _, part in call.rows if part.is_far])

    def _method(self, actor: Any) -> Any:
        """The method of an actor that runs calls."""
        return actor.bandmaster_call

    def _by_lane(self, call: WorkerCall) -> Sequence[int]:
        """The ranks to which a call is sent over their lanes."""
        if any(part.is_far for _, part in call.rows):
            return []
        return [rank for rank in call.ranks if rank in self._has_lane]

    def wait(self, tickets: Sequence[Any], timeout_s: float | None) -> list[Any]:
        """Wait for tickets, as `bandmaster.contract.Workers.wait`.

        If some of the calls are actor tasks, this polls every `POLL_S` seconds.
        """
        by_lane = [ticket for ticket in tickets if isinstance(ticket, MessageTicket)]
        if len(by_lane) == len(tickets):
            return self._client.wait(by_lane, timeout_s)
        by_reference = {ticket.reference: ticket for ticket in tickets if not isinstance(ticket, MessageTicket)}
        references = list(by_reference)
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while self._can_call_ray():
            left = max(0.0, min(POLL_S, deadline - time.monotonic()))
            ready = ray.wait(references, num_returns=len(references), timeout=left)[0]
            done: list[Any] = [by_reference[reference] for reference in ready]
            if by_lane:
                done += self._client.wait(by_lane, 0.0)
            if done or time.monotonic() >= deadline:
                return done
        return list(tickets)

    def fetch(self, ticket: Any) -> Any:
        """The reply of a ticket. Exceptions that Ray raises are returned as failures."""
        if isinstance(ticket, MessageTicket):
            return self._client.fetch(ticket)
        if ticket.outcome is not None:  # its actor was killed
            return ticket.outcome
        if not self._can_call_ray():
            why = CLOSED if self._client.is_stopped else self._session.ended(self._group)
            return self.deaths.get(ticket.rank) or Failure(FailureKind.DIED, why)
        try:
            reply = ray.get(ticket.reference)
            if isinstance(reply, Timed):
                reply, times = reply
                ticket.times = times, time.monotonic_ns()
            if isinstance(reply, RowFacts):
                return KeptObject(ticket.rows, reply)
            return reply.private() if isinstance(reply, Payload) else reply
        except RayActorError as error:
            return self._note_death(ticket.rank, error)
        except TaskCancelledError:
            return Failure(FailureKind.CANCELLED, "cancelled by the controller")
        except RayTaskError as error:
            if isinstance(error.cause, ObjectLostError):
                return _lost(ticket, error.cause)
            return Failure(FailureKind.RAISED, str(error.cause), str(error), error.cause)
        except RayError as error:
            return Failure.of(error)

    def request(self, rank: int, requests: Sequence[WorkerCall], take: Callable[[Sequence[Ticket]], object]) -> None:
        """Refuse: async methods of these actors overlap by Ray's own ``max_concurrency``."""
        raise UsageError(
            f"{requests[0].method} is registered as a request, which groups of actors do not have; use a "
            "bandmaster.WorkerGroup, or register it with another protocol"
        )

    def interrupt(self, tickets: Mapping[int, Any], kill_because: str | None = None) -> None:
        """Interrupt calls through the status page of each rank, on its own node; Ray cancels those that overlap.

        Args:
            tickets: The calls, by rank.
            kill_because: If it is given, the actors that are running these calls are killed instead.
        """
        if kill_because is not None:
            self._kill({rank: t for rank, t in tickets.items() if self._is_at(rank, t)}, kill_because)
            return
        for rank, ticket in tickets.items():
            if isinstance(ticket, MessageTicket):
                self._client.interrupt({rank: ticket})
            elif isinstance(ticket, RayTicket) and self._infos[rank].overlaps:
                if self._session.is_current:  # else it starts another Ray
                    ray.cancel(ticket.reference)
            elif isinstance(ticket, RayTicket):
                self._on_its_node(rank, status_page.interrupt, self._infos[rank].pid, ticket.task)

    def resume(self, tickets: Mapping[int, Any]) -> None:
        """Allow held calls to begin, see `contract.Workers.resume`. Only calls over lanes are held."""
        self._client.resume({rank: ticket for rank, ticket in tickets.items() if isinstance(ticket, MessageTicket)})

    def stacks(self, tickets: Mapping[int, Any]) -> dict[int, str]:
        """The Python stacks of ranks, read from their status pages on their own nodes."""
        by_node: dict[str, dict[int, int]] = {}
        for rank in tickets:
            if rank in self._infos:
                by_node.setdefault(self._infos[rank].node, {})[self._infos[rank].pid] = rank
        known = [rank for ranks in by_node.values() for rank in ranks.values()]
        queued = {rank: "" if self._is_at(rank, tickets[rank]) else QUEUED for rank in known}
        texts = {}
        for ranks in by_node.values():
            found = self._on_its_node(next(iter(ranks.values())), status_page.stacks, list(ranks)) or {}
            texts.update({ranks[pid]: queued[ranks[pid]] + text for pid, text in found.items()})
        return texts

    def signs(self, ranks: Sequence[int]) -> dict[int, Signs]:
        """The signs of life of ranks, read on their own nodes."""
        known = {rank: self._infos[rank].pid for rank in ranks if rank in self._infos}
        found = {rank: self._on_its_node(rank, status_page.signs_of, pid) for rank, pid in known.items()}
        return {rank: signs for rank, signs in found.items() if signs is not None}

    def _is_at(self, rank: int, ticket: Any) -> bool:
        """Whether an actor is running a call, or has not started; True for no call. A running call is announced."""
        if isinstance(ticket, MessageTicket):
            return self._client.is_at(rank, ticket) and announced(self._infos[rank].pid) != OTHERS
        if ticket is None or rank not in self._infos or self._infos[rank].overlaps:
            return True  # it has not started yet, or runs several
        return bool(ticket.task == self._on_its_node(rank, announced, self._infos[rank].pid))

    def check(self, is_thorough: bool = True) -> bool:
        """Read the lanes and, if ``is_thorough``, ask Ray about each actor. False once `stop` was called."""
        is_running = self._client.check()
        for rank, actor in self.actors.items() if is_thorough else ():
            if rank not in self.deaths and self._is_dead(actor):
                self._note_death(rank)
        return is_running

    def stop(self, why: str = CLOSED) -> None:
        """Close the lanes and kill the actors, except those that outlive the group."""
        self._client.close(why)
        for rank in self.actors:
            self._client.deaths.setdefault(rank, Failure(FailureKind.DIED, why))
        self._has_lane.clear()
        is_left = why == CLOSED and (self._launch.is_detached or self._is_left)
        if not is_left and self._session.is_current:
            for actor in list(self.actors.values()):
                ray.kill(actor)
        self.actors = {}  # last: this is called again if Ctrl-C comes before

    def _is_dead(self, actor: Any) -> bool:
        if not self._session.is_current:
            return True
        return bool(ray._private.state.actors(actor._actor_id.hex()).get("State") == "DEAD")

    def _can_call_ray(self) -> bool:
        return not self._client.is_stopped and self._session.is_current

    def _kill(self, tickets: Mapping[int, Any], why: str) -> None:
        """Kill the actors that are running these calls, which fail as cancelled; others tell of the death."""
        for rank, ticket in tickets.items():
            with self._lock:
                death = self._death(rank, why)
                if isinstance(ticket, MessageTicket):
                    self._client.fail_one(rank, ticket, replace(death, kind=FailureKind.CANCELLED))
                elif ticket is not None:
                    ticket.outcome = replace(death, kind=FailureKind.CANCELLED)
                self._client.note_death(rank, death)
                self._has_lane.discard(rank)
                self._serving.discard(rank)
            actor = self.actors.get(rank)  # `stop` takes them away
            if actor is not None and self._session.is_current:
                ray.kill(actor)

    def _resume(self, rank: int) -> None:
        """Make an actor serve its lane again, after the actor tasks that were submitted before."""
        if rank not in self._serving:
            self._serving.add(rank)
            self.actors[rank].bandmaster_serve.remote(0, SHARED_S if self._is_left else LONG_S)

    def _pause(self, rank: int) -> None:
        """Make an actor leave its lane, after the calls that were sent there, so that actor tasks can run."""
        if rank in self._serving:
            self._serving.remove(rank)
            self._client.pause(rank)

    def _note_death(self, rank: int, error: RayError | None = None) -> Failure:
        """Record the death of an actor that Ray reported, and return it as a failure."""
        if error is not None:
            self._told.setdefault(rank, error)
        with self._lock:
            self._client.note_death(rank)
        return self.deaths[rank]

    def _how_it_died(self, rank: int) -> Failure:
        error = self._told.get(rank) or self._last_words(rank)
        if not self._session.is_current:
            return Failure(FailureKind.DIED, self._session.ended(self._group))
        summary = "its process has ended" if error is None else f"{type(error).__name__}: {error}".strip()
        return self._death(rank, summary, self._last_errors(rank))

    def _death(self, rank: int, why: str, last_errors: str = "") -> Failure:
        info = self._infos.get(rank)
        if info is None:
            return Failure(FailureKind.DIED, why)
        return Failure.of_death(why, last_errors, info.host_name, info.pid, info.device)

    def _last_words(self, rank: int) -> RayError | None:
        """The error that Ray raises for an actor whose lane was closed; None if it raises none."""
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
            with open(self._infos[rank].stderr, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_NBYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        said = [line for line in lines if not line.startswith(":")]  # lines that Ray writes
        return "\n".join(said[-N_LAST_LINES:])

    def _is_near(self, rank: int) -> bool:
        return rank in self._infos and self._infos[rank].host == self._here

    def _on_its_node(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function on the node of a rank and return its result; None if the node cannot be reached."""
        if self._is_near(rank):
            return function(*args)
        if rank not in self._infos or not self._session.is_current:
            return None
        strategy = NodeAffinitySchedulingStrategy(self._infos[rank].node, soft=False)
        try:
            return ray.get(_run.options(scheduling_strategy=strategy).remote(function, *args), timeout=FAR_TIMEOUT_S)
        except (RayError, GetTimeoutError):
            return None


@ray.remote(num_cpus=0, max_retries=0)  # type: ignore[untyped-decorator]
def _run(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _lost(ticket: RayTicket, error: ObjectLostError) -> Failure:
    """The failure of a call that takes rows that Ray has lost."""
    origin = dict(ticket.takes).get(error.object_ref_hex, "rows")
    return Failure(FailureKind.LOST, f"{origin} are gone ({_in_short(error)})")


def _in_short(error: RayError) -> str:
    """The first sentence of an error of Ray, without its advice."""
    return f"Ray: {type(error).__name__}: {error}".split(". ")[0].split("\n")[0]


class Part:
    """A payload or kept rows that were passed to `ActorWorkers.put`, in the forms that lanes and actor tasks need."""

    def __init__(self, payload: Payload | Kept, client: LaneClient) -> None:
        self._payload = payload
        self._client = client
        self._by_lane: Any = None
        self._by_ray: Any = None

    def on_lane(self) -> Any:
        """The payload as `LaneClient.put` returns it. The caller holds the client's lock."""
        if self._by_lane is None:
            self._by_lane = self._client.place(self._payload)
        return self._by_lane

    def on_ray(self) -> Any:
        """The payload as an argument of actor tasks: an ObjectRef from `PUT_NBYTES` on, else the payload itself."""
        if self._by_ray is None and isinstance(self._payload, KeptObject):
            self._by_ray = self._payload.reference
        elif self._by_ray is None:
            payload = self._payload if isinstance(self._payload, Payload) else self._payload.payload()
            self._by_ray = ray.put(payload) if payload.nbytes >= PUT_NBYTES else payload.private()
        return self._by_ray

    @property
    def is_far(self) -> bool:
        """Whether the rows lie in Ray's object store, so that only actor tasks can refer to them."""
        return isinstance(self._payload, KeptObject)

    @property
    def origin(self) -> tuple[str, object]:
        """The id of the object that holds rows in Ray's object store, and the name that messages use for them."""
        assert isinstance(self._payload, KeptObject), "the caller has checked is_far"
        return self._payload.reference.hex(), self._payload.origin


class KeptObject:
    """Rows that lie in Ray's object store; see `bandmaster.contract.Kept`.

    Attributes:
        reference: ObjectRef of the payload.
        facts: Type, size and schema of the rows.
        place: ``"network"``.
        origin: The name that messages use for them.
    """

    place = "network"

    def __init__(self, reference: Any, facts: RowFacts) -> None:
        self.reference, self.facts = reference, facts
        self.origin: object = "rows"

    def payload(self, timeout_s: float | None = None) -> Payload:
        """The encoded rows, in memory of the reader's own."""
        try:
            payload: Payload = ray.get(self.reference, timeout=timeout_s)
        except ObjectLostError as error:
            raise RowsLost(f"{self.origin} are gone ({_in_short(error)}); make them again") from None
        return payload.private()


class AttachedWorkers(ActorWorkers):
    """Actors of another group, called by actor tasks alone, between the calls of the group that started them.

    They live on when this group ends. This group kills only a rank that does not stop within the grace of a call.

    Args:
        launch: The names of the group and its ranks.
        actors: The actor handle of each rank.

    Raises:
        UsageError: An actor is not a worker of bandmaster.
    """

    ranks_are_own = False

    def __init__(self, launch: ActorLaunch, actors: Sequence[Any]) -> None:
        for actor in actors:
            if not hasattr(actor, "bandmaster_info"):
                raise UsageError(f"{actor!r} is not a worker of a bandmaster group, so no group can be attached to it")
        self._first_number = FIRST_NUMBER + secrets.randbits(40) * (1 << 20)  # differs between attached groups
        super().__init__(launch, lambda _, rank: actors[rank])

    def _begun(self, ranks: Sequence[int]) -> dict[int, ActorInfo]:
        """Request the actors' infos without waiting: an actor may be busy, even with the call that attaches to it."""
        self._is_left = True
        self._asked = {self.actors[rank].bandmaster_info.remote(): rank for rank in ranks}
        return {}

    def _open(self, ranks: Sequence[int]) -> None:
        """Do nothing: the group that started the actors has prepared them."""

    def _take_infos(self) -> None:
        """Take the infos that have arrived. An actor sends its own before it replies to any call of this group."""
        asked = list(self._asked) if self._can_call_ray() else []
        for reference in ray.wait(asked, num_returns=len(asked), timeout=0)[0] if asked else ():
            if (rank := self._asked.pop(reference, None)) is None:
                continue  # another thread takes it
            info = self.fetch(RayTicket(reference, rank, 0))
            if isinstance(info, ActorInfo):
                self._infos[rank] = self._last_infos[rank] = info

    def wait(self, tickets: Sequence[Any], timeout_s: float | None) -> list[Any]:
        """Wait for tickets, see `ActorWorkers.wait`, and take the infos of actors that have arrived."""
        done = super().wait(tickets, timeout_s)
        self._take_infos()
        return done

    def interrupt(self, tickets: Mapping[int, Any], kill_because: str | None = None) -> None:
        """Interrupt the ranks whose infos have arrived; see `ActorWorkers.interrupt`."""
        self._take_infos()
        known = {rank: ticket for rank, ticket in tickets.items() if rank in self._infos}
        super().interrupt(known, kill_because)

    def stop(self, why: str = CLOSED) -> None:
        """Release the actors, which live on."""
        self.actors = {}
        super().stop(why)

    def _method(self, actor: Any) -> Any:
        return actor.bandmaster_call_of_others
