"""`Router`: chooses replicas for the requests of one method, and sends them, or has them wait for a place. See `Route`.

Any thread may call it. A request is in `Replica.open` from the moment its replica was chosen until its ranks have
replied. What is in an outbox is sent by whoever calls `flush` next: at once, or, in an event loop, when its present
round has ended, so that all requests of the round go in one message.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby, takewhile
from typing import Any

from bandmaster.calls.open_work import OpenWork
from bandmaster.calls.progress import Once, progress
from bandmaster.calls.request import CallSite
from bandmaster.calls.spec import MethodSpec
from bandmaster.calls.submission import Submitter
from bandmaster.contract import CALLS_BACK, Reply, Ticket, WorkerCall, Workers
from bandmaster.errors import ClosedError, ResourceError
from bandmaster.plan.rows import replicas
from bandmaster.platform.deadline import Deadline
from bandmaster.requests.request import Replica, ReplicaLoad, Request
from bandmaster.requests.target import Target

TOLD_S = 0.5  # after which a death is known, or the rank was replaced
STACKS_FRESH_S = 0.5  # stacks that were read so long ago are shown again
_MAKING = threading.RLock()  # held while a router is made
MOST_KEYS = 100_000  # whose replicas are known; the one that was used longest ago is forgotten first


class Router:
    """Sends the requests of one method to the replicas of a group.

    Attributes:
        submitter: Sends the calls of the group.
        workers: The workers of the group; after a restart, it has another router.
        method: The workers' name of the method.
        is_exclusive: Whether the method is not async, so that it runs alone.
        is_idempotent: Whether requests that a worker may have begun may be sent again.
        concurrency: Most requests of the method that a replica runs at a time.
        replicas: The replicas.
        waiting: The requests that wait for a place, behind those to all replicas, which wait for their rows.
        are_requests: True.
        maps: The `MapFeed` of each map that is not over, which sends more requests as others end.
        watched: The requests that the thread of callbacks reads.
    """

    are_requests = True

    def __init__(self, submitter: Submitter, spec: MethodSpec, workers: Workers) -> None:
        protocol: Any = spec.registration.protocol
        self.submitter, self.workers, self.method = submitter, workers, submitter.prefix + spec.name
        self.is_exclusive, self.concurrency = not (spec.is_async or spec.is_generator), spec.registration.concurrency
        self.is_idempotent = spec.registration.is_idempotent
        loads = submitter.work.loads
        self.replicas = tuple(
            Replica(ranks, loads.setdefault((submitter, frozenset(ranks)), ReplicaLoad()), self.concurrency)
            for ranks in replicas(spec.mesh, protocol)
        )
        first = submitter.work.first_replica % len(self.replicas)
        self._order = self.replicas[first:] + self.replicas[:first]  # of equally busy ones, the first gets a request
        self.waiting: deque[Request] = deque()
        self.maps: set[Any] = set()
        self.watched: dict[Request, None] = {}
        self._look = Once(workers, self.advance)  # of the thread of callbacks
        self.site: CallSite = submitter.site(spec.name)
        self._work: OpenWork = submitter.work
        self._lock = submitter.work.sending
        self._is_woken, self._n_deaths = False, 0  # since requests that wait were looked at
        self._of_key: OrderedDict[Hashable, Replica] = OrderedDict()
        self._flushed_by: object = None  # the event loop that will call `flush`
        self._reads_stacks = threading.Lock()
        self._stacks: dict[int, tuple[float, str | None]] = {}  # by rank, with the moment at which each was read
        self._readers: dict[Any, None] = {}  # of the event loops whose requests may wait

    @classmethod
    def of(cls, submitter: Submitter, spec: MethodSpec) -> Router:
        """The router of a method."""
        routers, key, workers = submitter.work.routers, (submitter, spec.name), submitter.workers()
        router = routers.get(key)
        if isinstance(router, Router) and router.workers is workers:  # as most often
            return router
        with _MAKING:  # two routers would each give all places away
            router = routers.get(key)
            if isinstance(router, Router) and router.workers is workers:
                return router
            router = cls(submitter, spec, workers)
            workers.reports.on_change = submitter.work.wake_requests
            routers[key] = router  # last: Ctrl-C leaves no half of it
        return router

    # --- choosing ---

    def submit(self, request: Request) -> None:
        """Send a request, or have it wait for a place: in an event loop its future, else this thread.

        Raises:
            CallTimeout: No place has become free in time.
            ResourceError: The system allows no more threads or descriptors.
        """
        loop, parents = _running_loop(), request.parents
        is_chosen = self.put(request, is_flushed=loop is None)
        if parents:
            request.read_in_background()
            for parent in parents:
                parent.add_done_callback(lambda _: request.nudge())
            return
        if loop is None:
            timeout_s = request.site.limits().timeout
            if not (is_chosen or request.wait_until_sent(timeout_s)):
                assert timeout_s is not None, "only a deadline ends the wait early"
                raise request.late(timeout_s)
            return
        if is_chosen:
            self._flush_soon(loop)
        if not is_chosen or request.target.retries:  # it waits for a place, or may have to later
            from bandmaster.requests.reader import LoopReader

            reader = LoopReader.of(loop)
            reader.add(request)  # it may be awaited later, or never
            self.advance_in(reader)

    def advance_in(self, reader: Any) -> None:
        """Send requests that wait for a place, now and later, when the event loop of a reader learns of a free one."""
        self._readers[reader] = None  # first: a place may become free meanwhile
        if self.waiting:
            self.advance()

    def put(self, request: Request, is_flushed: bool = False) -> bool:
        """Choose a replica for a request, or have it wait for one. Returns whether there is one.

        Args:
            request: The request.
            is_flushed: Whether it is sent now, and not by the next `flush`.
        """
        request.is_submitted()
        self._work.read_in_background()
        with self._lock:
            self._flush_others()
            chosen = None if self.waiting and not request.target.is_all else self._choose(request)
            if chosen is not None:
                self._put(request, chosen)
            elif request.target.is_all:
                self.waiting.insert(_n_for_all(self.waiting), request)
            else:
                self.waiting.append(request)
            if is_flushed:
                self._flush_all()
            return chosen is not None

    def _choose(self, request: Request) -> Sequence[Replica] | None:
        """The replicas for a request, which `_put` then gets; None if it has to wait."""
        target = request.target
        if request.parents and not request.has_rows:
            return None
        if target.is_all:
            return None if self._work.renewed else self.replicas
        candidates = self._candidates(request)
        if not candidates:
            return None
        busy = self._busy if self.workers.reports else _n_open
        best = min(candidates, key=busy)
        if best.n_places <= 0:
            free = [replica for replica in candidates if replica.n_places > 0 and busy(replica) < math.inf]
            best = min(free, default=best, key=busy)
        if target.key is not None:
            known = self._of_key.get(target.key, best)
            if known in candidates and busy(known) <= busy(best) + target.spill:
                best = known
        return (best,) if best.n_places > 0 else None

    def _candidates(self, request: Request) -> Sequence[Replica]:
        """The replicas that a request may go to, whether or not they have a place."""
        target, renewed = request.target, self._work.renewed
        found = self._order if target.replica is None else [self.replicas[target.replica]]
        if request.avoids:
            found = [replica for replica in found if request.avoids.isdisjoint(replica.ranks)]
        if renewed or self.workers.deaths or self._work.died:
            since = time.monotonic() - TOLD_S
            just_died = [rank for rank, moment in self._work.died.items() if moment > since]
            lost = renewed.union(self.workers.deaths, just_died)
            alive = [replica for replica in found if lost.isdisjoint(replica.ranks)]
            if not alive and all(renewed.isdisjoint(replica.ranks) for replica in found):
                return found  # all are dead: the request says how one has died
            found = alive
        if target.min_version is not None:
            found = [replica for replica in found if self._version(replica) >= target.min_version]
        return found

    def note_deaths(self, ranks: Iterable[int]) -> None:
        """Note that ranks have died, as replies from another host say, before its agent tells of deaths."""
        untold = [rank for rank in ranks if rank not in self.workers.deaths]
        self._work.died = {**self._work.died, **dict.fromkeys(untold, time.monotonic())}

    def _busy(self, replica: Replica) -> float:
        reports = self.workers.reports.get(replica.ranks[0])
        return replica.load.estimate(reports.get(self.submitter.prefix) if reports else None)

    def _version(self, replica: Replica) -> float:
        """The version of its weights that all its ranks have reported at least."""
        reports = [self.workers.reports.get(rank, {}).get(self.submitter.prefix) for rank in replica.ranks]
        return min([-math.inf if one is None or one.version is None else one.version for one in reports])

    def why_waiting(self, target: Target) -> str:
        """The reason why requests wait for a place, and what to do."""
        if target.is_all:
            renewed = ", ".join(map(str, self._work.renewed))
            return f"rank {renewed or 'of a replica'} is being replaced; ask again when replace() has returned"
        wanted = range(len(self.replicas)) if target.replica is None else [target.replica]
        versions = {n: self._version(self.replicas[n]) for n in wanted}
        if target.min_version is not None and max(versions.values()) < target.min_version:
            told = [f"replica {n} {'none' if found < 0 else found}" for n, found in versions.items()]
            return (
                f"no replica has version {target.min_version} of its weights: {', '.join(told)}; have the workers load "
                "it, and tell so by report(self, version=...)"
            )
        which = f"each of the {len(wanted)} replicas" if target.replica is None else f"replica {target.replica}"
        if (known := self._of_key.get(target.key)) is not None and known.n_places <= 0:
            which = f"replica {self.replicas.index(known)}, to which key={target.key!r} went before,"
        return (
            f"{which} runs {self.concurrency} requests of the method, as its concurrency says; give it more, or send "
            "fewer at a time"
        )

    @property
    def can_advance(self) -> bool:
        """Whether a request that waits may get a place now."""
        return bool(self.waiting) and (self._is_woken or self._n_deaths != len(self.workers.deaths))

    def advance(self) -> None:
        """Send what is in outboxes, and the requests that wait for a place, as far as there are any."""
        if not (self.waiting or self._work.outgoing is self):  # as most often
            return
        with contextlib.suppress(ResourceError):  # then the calls are read by the threads that wait for them
            self._work.read_in_background()
        with self._lock:
            self._place_waiting()
            while self.can_advance:  # a place became free as none seemed to wait
                self._place_waiting()
            self._flush_all()

    def _place_waiting(self) -> None:
        """Choose replicas for the requests that wait, in their order. The lock is held."""
        self._is_woken, self._n_deaths = False, len(self.workers.deaths)  # first: what comes from here on is not missed
        n_places = sum([max(0, replica.n_places) for replica in self.replicas])
        n_kept, refused = 0, set[int]()  # targets for which there is no place
        while n_kept < len(self.waiting) and (n_places > 0 or self.waiting[n_kept].target.is_all):  # it needs no place
            request = self.waiting[n_kept]  # where others find it until it is open
            chosen = None if id(request.target) in refused else self._choose(request)
            if chosen is not None:
                self._put(request, chosen)
                self.waiting.remove(request)
                n_places -= 1
                continue
            n_kept += 1
            if request.has_rows and not request.avoids:
                refused.add(id(request.target))

    # --- sending ---

    def _flush_soon(self, loop: Any) -> None:
        if self._flushed_by is not loop:
            self._flushed_by = loop
            loop.call_soon(self.flush)

    def _put(self, request: Request, chosen: Sequence[Replica]) -> None:
        request.replicas = chosen  # first: another thread may send it as soon as it is in an outbox
        for replica in chosen:
            replica.add(request)
            replica.outbox.append(request)
        if (key := request.target.key) is not None:
            self._of_key[key] = chosen[0]
            self._of_key.move_to_end(key)
            if len(self._of_key) > MOST_KEYS:
                self._of_key.popitem(last=False)

    def flush(self) -> None:
        """Send the requests in the outboxes."""
        with self._lock:
            self._flush_all()

    def _flush_all(self) -> None:
        self._flushed_by = None
        if self._work.outgoing is self:
            self._work.outgoing = None
        for replica in self.replicas:
            if replica.outbox:
                self._flush(replica)

    def _flush_others(self) -> None:
        """Send what another method of the workers has in its outboxes, which was submitted before."""
        other, self._work.outgoing = self._work.outgoing, self
        if isinstance(other, Router) and other is not self:
            other._flush_all()

    def _flush(self, replica: Replica) -> None:
        """Send the requests in an outbox; the lock is held."""
        outbox, replica.outbox = replica.outbox, []
        calls: dict[Request, WorkerCall] = {}
        for request in outbox:
            arguments = request.arguments
            if request.is_cancelled or arguments is None:
                request.end()
                continue
            try:
                method = request.asks_for or self.method
                is_back = request.calls_back and not self.is_exclusive  # a method that runs alone overtakes nothing
                method = CALLS_BACK + method if is_back else method
                calls[request] = request.call(arguments, replica.ranks[:1], method)
            except ClosedError:  # the workers were stopped: the tickets will say why
                calls[request] = WorkerCall(replica.ranks[:1], method, (), Reply.DROP)
            except Exception as error:  # rows were lost, or there is no memory
                request.fail(error)
        for _, some in groupby(calls, lambda request: request if self.is_exclusive else request.calls_back):
            self._send(replica, {request: calls[request] for request in some})
        for request in calls:
            if request.is_cancelled:  # meanwhile
                self.workers.interrupt({rank: request.tickets[rank] for rank in request.missing})

    def _send(self, replica: Replica, calls: Mapping[Request, WorkerCall]) -> None:
        """Send requests to the ranks of a replica, in one message to each; only one if it runs alone."""
        batch = list(calls)
        try:
            for rank in replica.ranks:
                sent = list(calls.values())
                if rank != replica.ranks[0]:
                    sent = [call._replace(ranks=(rank,), reply=Reply.DROP) for call in sent]
                if not self.is_exclusive:
                    self.workers.request(rank, sent, partial(_take, batch, rank))
                    continue
                tickets: dict[int, Any] = {}
                self.workers.call(sent, tickets)
                _take(batch, rank, [tickets[rank]])
                batch[0].replied()  # the reply may have come before
                if self.workers.arrivals is None:  # it ran here: others wait for it
                    self.workers.check(is_thorough=False)
        except Exception as error:  # there is no memory, or the group was closed
            for request in batch:
                left = request.unanswered  # on ranks that it was sent to, which may wait for the others
                request.fail(error)
                with contextlib.suppress(ResourceError):
                    self.workers.interrupt(left)

    def stacks(self, tickets: Mapping[int, Ticket]) -> Mapping[int, str]:
        """The Python stacks of ranks; those of requests that are late at the same time are read once."""
        with self._reads_stacks:
            oldest = time.monotonic() - STACKS_FRESH_S
            known = {rank: one for rank, one in self._stacks.items() if one[0] >= oldest}
            if old := {rank: ticket for rank, ticket in tickets.items() if rank not in known}:
                found = self.workers.stacks(old)
                known |= {rank: (time.monotonic(), found.get(rank)) for rank in old}
            self._stacks = known
            return {rank: stack for rank in tickets if (stack := known[rank][1]) is not None}

    # --- the end of requests ---

    def has_ended(self, request: Request) -> None:
        """Free the places of a request, for which another may have waited. Any thread calls this; it does not block."""
        if self.watched:
            self.watched.pop(request, None)
        for replica in request.replicas:
            replica.remove(request)
        self.wake()

    def send_again(self, request: Request, replicas: Sequence[Replica]) -> None:
        """Have a request wait for a place again, as its replica has died. Any thread calls this; it does not block."""
        for replica in replicas:
            replica.remove(request)
        self.waiting.appendleft(request)
        with contextlib.suppress(ResourceError):  # then the thread that waits for it has it sent
            request.read_in_background()  # its caller may wait for others
        self.wake()

    def wake(self) -> None:
        """Have a request that waits be sent, if it can be now. Any thread calls this; it does not block."""
        self._is_woken = True  # first: a thread that looks may have taken all that wait
        if self.waiting:  # a thread that waits for a place looks by itself
            for reader in list(self._readers):
                if not reader.call(self.advance):  # an event loop that is stopped, or busy, does so later
                    self._readers.pop(reader, None)
            if self.maps or self.watched:
                with contextlib.suppress(ResourceError):  # there is no such thread, and so nobody to tell
                    progress.add(self._look)

    def withdraw(self, request: Request) -> None:
        """Take back a request that waits for a place."""
        with self._lock, contextlib.suppress(ValueError):  # it does not wait
            self.waiting.remove(request)

    def wait_until_over(self, deadline: Deadline) -> None:
        """Wait until no request is open.

        Raises:
            CallTimeout: One took too long.
        """
        while True:
            for request in self.open_requests():
                if not request.wait_until_ended(deadline.left()):
                    raise request.late(deadline.timeout_s or 0.0)
            if not (maps := [one for one in list(self.maps) if one.is_busy()]):
                if not self.open_requests():
                    return
            elif not progress.wait_for_look(maps[0], deadline):  # not in this thread: Ctrl-C is not to stop these maps
                raise maps[0].late(deadline.timeout_s or 0.0)

    def open_requests(self) -> list[Request]:
        """The requests that have not ended."""
        waiting = list(self.waiting)  # first: those that another thread sends meanwhile are with their replicas by then
        return [*(request for replica in self.replicas for request in list(replica.open)), *waiting]

    @property
    def is_ended(self) -> bool:
        """Whether no request is open, but for those of maps, which are calls in parts themselves."""
        return all(request.tell_map is not None for request in self.open_requests())

    def end_in_fork(self) -> None:
        """End all open requests in a fork; see `Result.end_in_fork`."""
        for request in self.open_requests():
            request.end_in_fork()
        self.waiting.clear()

    def cancel(self) -> bool:
        """Cancel all open requests but for those of maps. Returns whether nobody had cancelled one of them before."""
        is_new = False
        for request in reversed(self.open_requests()):  # those that wait first, so that none is sent meanwhile
            if request.tell_map is None and not request.is_cancelled:
                is_new |= request.cancel()
        return is_new


def _take(batch: Sequence[Request], rank: int, tickets: Sequence[Ticket]) -> None:
    """Take the tickets of the requests that are about to be sent to a rank."""
    for request, ticket in zip(batch, tickets, strict=True):
        request.tickets[rank] = ticket
        ticket.on_done, ticket.on_item = request.replied, request.on_item
        if request.record is not None:
            request.record.is_sent()


def _n_open(replica: Replica) -> int:
    return len(replica.load.open)


def _n_for_all(waiting: Iterable[Request]) -> int:
    """The number of requests to all replicas at the beginning of those that wait."""
    return sum(1 for _ in takewhile(lambda request: request.target.is_all, list(waiting)))


def _running_loop() -> Any:
    """The event loop that runs in this thread; None if there is none, also if asyncio was never imported."""
    asyncio = sys.modules.get("asyncio")
    return None if asyncio is None else asyncio._get_running_loop()
