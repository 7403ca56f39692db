"""`Request`: one request, from the moment it is submitted until it is done."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

from bandmaster.calls.escalation import DEATH_PATIENCE_S, PATIENCE_S, Escalation, Step
from bandmaster.calls.hooks import CallTrace, hooks
from bandmaster.calls.outcome import error_of
from bandmaster.calls.progress import progress
from bandmaster.calls.request import CallSite, encode_group
from bandmaster.calls.result import Done, RowsResult, late, wait_for_all
from bandmaster.calls.row_arguments import RowsElsewhere
from bandmaster.codec import decode
from bandmaster.contract import Reply, Report, Ticket, WorkerCall
from bandmaster.errors import CallCancelled, CallTimeout, ResourceError
from bandmaster.errors.failure import Failure, FailureKind, is_in_debugger
from bandmaster.platform.deadline import Deadline
from bandmaster.platform.locks import SigintSafeLock
from bandmaster.requests.arguments import Arguments
from bandmaster.requests.target import Target
from bandmaster.rows.kept import KeptPart, KeptRows

_SENDING_AGAIN = threading.RLock()  # held for a moment, as a request is sent again or cancelled
LOAD_FRESH_S = 5.0  # a load that was reported longer ago does not count
LOOK_AROUND_S = 5.0  # another thread may cancel a request while this one waits for it


class ReplicaLoad:
    """The load of a replica: the open requests of all methods of this caller, and the load that it reports.

    Attributes:
        open: The requests of all methods that it was sent, or is about to be, and that have not ended.
    """

    def __init__(self) -> None:
        self.open: dict[Request, None] = {}
        self._report: Report | None = None
        self._others, self._since = 0.0, 0.0  # the requests of other callers, when the report came

    def estimate(self, report: Report | None) -> float:
        """The number of its requests, of all callers."""
        n = len(self.open)
        if report is None or report.load is None:  # as most often
            return n
        if report is not self._report:
            self._report, self._others, self._since = report, max(0.0, report.load - n), time.monotonic()
        is_fresh = self._others == math.inf or time.monotonic() - self._since < LOAD_FRESH_S
        return n + self._others if is_fresh else n


class Replica:
    """One replica of the ranks of a group, for one method.

    Attributes:
        ranks: Its ranks, the one that returns the value first.
        load: How busy it is with all methods.
        most: The number of requests of the method that it runs at a time.
        open: The requests of the method that it was sent, or is about to be, and that have not ended.
        outbox: Of these, those that are not sent.
    """

    def __init__(self, ranks: tuple[int, ...], load: ReplicaLoad, most: int) -> None:
        self.ranks, self.load, self.most = ranks, load, most
        self.open: dict[Request, None] = {}
        self.outbox: list[Request] = []

    @property
    def n_places(self) -> int:
        """The number of requests of the method that it can run besides; 0 or less for none."""
        return self.most - len(self.open)

    def add(self, request: Request) -> None:
        """Note a request that is open here."""
        self.open[request] = self.load.open[request] = None

    def remove(self, request: Request) -> None:
        """Free the place of a request."""
        self.open.pop(request, None)
        self.load.open.pop(request, None)


_NOBODY = contextlib.nullcontext()


class Request(RowsResult):
    """One request.

    ::

        WAITING for a place ── a replica is chosen ──► SENT ── its ranks have replied ──► is_done ── first wait ──► DONE
                  ▲─────── it has died, and `Target.retries` allows it ── ┘

    Attributes:
        arguments: Its arguments, until its result was made.
        parents: The futures of the rows that it takes, as far as these may be missing, or of calls that it is behind.
        target: Where it may go, and how often. If to all replicas, its value is the list of theirs.
        router: The `Router` that has chosen its replica, or will; its module imports this one.
        replicas: The replicas that run it; empty as long as it waits for a place.
        tickets: The ticket of each rank, once it is sent.
        is_done: Whether its ranks have replied, or never will. Set by one assignment, by any thread.
        avoids: Ranks that it must not go to, though not all.
        tell_map: Tells its map that it has ended; None if it is part of no map.
        asks_for: What it asks the ranks for in place of the method of its router, as `bandmaster.contract` names it.
        calls_back: Whether a request that runs on its group waits for it.
        on_item: Takes the items that it makes, if it runs a generator.
        items: The items that have come and were not taken.
        waiters: Functions that tell event loops of its end.
        waiting: Called with it; returns a context for each wait.
        record: Its record, if a trace records.
    """

    asks_for: str | None = None
    calls_back = False
    on_item: Callable[[Any], object] | None = None
    items: Sequence[Any] = ()
    tell_map: Callable[[Request], object] | None = None
    waiting: Callable[[Request], contextlib.AbstractContextManager[object]] = staticmethod(lambda _: _NOBODY)

    def __init__(
        self, site: CallSite, arguments: Arguments, router: Any, target: Target, keeps_rows: bool = False
    ) -> None:
        super().__init__(site, keeps_rows)
        self.arguments: Arguments | None = arguments
        self.router, self.workers, self.target = router, router.workers, target
        self.replicas: Sequence[Replica] = ()
        self.tickets: dict[int, Ticket] = {}
        self.is_done = False
        self.avoids: frozenset[int] = frozenset()
        self.waiters: list[Callable[[Request], object]] = []
        self._lost: dict[int, Failure] = {}  # the ranks to which it was sent before, and how they have died
        self._n_sent_again = 0
        self._why: BaseException | None = None
        self.record: CallTrace | None = None
        self._watched: Mapping[int, Ticket] | None = None  # the tickets in which stragglers are looked for

    def is_submitted(self) -> None:
        """Begin its record, if a trace records."""
        if hooks.trace is not None:
            self.record = hooks.trace(self, self.workers)
            self.record.is_request = True
            self.record.is_encoded(0 if self.arguments is None else self.arguments.nbytes)

    def call(self, arguments: Arguments, ranks: Sequence[int], method: str) -> WorkerCall:
        """The call that asks ranks for it. The rows that it takes are there.

        Args:
            arguments: Its arguments.
            ranks: The ranks.
            method: The workers' name of the method.

        Raises:
            Exception: That of a future; rows were released; or there is no memory for the arguments.
        """
        workers, is_timed = self.workers, self.record is not None
        reply = Reply.KEEP if self.keeps_rows else Reply.RETURN
        if not arguments.rows:  # as most often
            return WorkerCall(ranks, method, tuple(workers.put(arguments.payloads)), reply, (), is_timed)
        elsewhere, groups = RowsElsewhere(self.site.method, workers), range(len(arguments.rows))
        addressed = [encode_group(group, self.site.method) for group in elsewhere.addressed(arguments.rows)]
        rows = elsewhere.named(groups, [part.placed(workers) for part in elsewhere.parts])
        if self.record is not None:
            elsewhere.note_in(self.record)
        parts, needed = tuple(workers.put([*arguments.payloads, *addressed])), elsewhere.needed(groups)
        return WorkerCall(ranks, method, parts, reply, rows, is_timed, needed)

    @property
    def has_rows(self) -> bool:
        """Whether the rows that it takes are there, or never will be."""
        if self.parents and all(parent._call.done is not None for parent in self.parents):
            self.parents = ()
        return not self.parents

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that run it."""
        return [rank for replica in self.replicas for rank in replica.ranks]

    @property
    def missing(self) -> tuple[int, ...]:  # type: ignore[override]
        """The ranks that have not replied."""
        return tuple(self.unanswered)

    @property
    def is_sent(self) -> bool:  # type: ignore[override]
        """Whether a replica was chosen."""
        return bool(self.replicas)

    @property
    def state(self) -> str:
        """Its state in words."""
        if self.is_done or self.replicas or not self.has_rows:
            return "done" if self.is_done else super().state
        return "waiting for a free replica"

    def stacks(self) -> Mapping[int, str]:
        """The Python stacks of the ranks that have not replied."""
        found: Mapping[int, str] = self.router.stacks(self.unanswered)
        return found

    def late(self, timeout_s: float) -> CallTimeout:
        """The `CallTimeout` to raise after a wait of ``timeout_s``."""
        if not self.has_rows:
            has_rows = self.arguments is not None and self.arguments.rows
            return late(self, timeout_s, "takes its rows" if has_rows else "was submitted behind it")
        if not self.replicas:
            return CallTimeout(self.site.method, (), timeout_s, what_next=self.router.why_waiting(self.target))
        return CallTimeout(self.site.method, self.missing, timeout_s, self.stacks(), self.what_next)

    # --- its end; any thread ---

    def replied(self) -> None:
        """Note that a rank has replied; the thread that has received the reply calls this, and holds a lock."""
        sent, n_ranks = self.tickets, sum([len(replica.ranks) for replica in self.replicas])
        has_replied = 0 < n_ranks == len(sent) and all(ticket.is_done for ticket in list(sent.values()))
        if has_replied and not (self.target.retries and self._is_sent_again(sent)):
            self.end()
        elif n_ranks > 1 and not (has_replied or self._watched is sent):
            self._watch_for_stragglers(sent)

    def _watch_for_stragglers(self, sent: Mapping[int, Ticket]) -> None:
        """If a rank has failed, have the others interrupted, which may wait for it."""
        failed = {rank: outcome for rank, outcome in self._outcomes().items() if isinstance(outcome, Failure)}
        if failed:
            self._watched = sent
            with contextlib.suppress(ResourceError):  # then they are waited for
                progress.add(_Stragglers(self, sent, failed))

    def _is_sent_again(self, sent: dict[int, Ticket]) -> bool:
        """Whether its ranks have died, so that it was given back to its router to be sent to others."""
        died = {rank: outcome for rank, ticket in sent.items() if _has_died(outcome := self.workers.fetch(ticket))}
        may_be_sent = self.router.is_idempotent or all(ticket.is_dropped for ticket in sent.values())
        if not (died and may_be_sent):
            return False
        self.router.note_deaths(died)
        with _SENDING_AGAIN:
            if self.tickets is not sent:  # by another thread, which has received the reply of another rank
                return True
            if self.is_cancelled or self._n_sent_again == self.target.retries:
                return False
            replicas, self.tickets, self.replicas = self.replicas, {}, ()
            self._n_sent_again += 1
            self._lost.update(died)
            self.router.send_again(self, replicas)
        return True

    def end(self) -> None:
        """Tell those who wait, and its record, that it is done. It may be called again."""
        if self.record is not None and not self.is_done:
            outcomes = self._outcomes()
            for rank, outcome in outcomes.items():
                self.record.came(rank, self.tickets[rank], outcome)
            self.record.is_done(self._error(outcomes), is_read=False)
        self.is_done = True
        self.router.has_ended(self)
        for tell in list(self.waiters):
            tell(self)
        self.nudge()

    def nudge(self) -> None:
        """Have the thread of callbacks look at it, or at its map, if that thread watches it."""
        tell_map = self.tell_map  # which the map may take away meanwhile
        if tell_map is not None:
            tell_map(self)
        elif self.is_watched:
            progress.look_at(self)

    def fail(self, why: BaseException) -> None:
        """End without having been sent, for a reason."""
        self._why = self._why or why
        self.end()

    def cancel(self) -> bool:
        """Cancel it: its coroutine is cancelled, or it is not sent. False if it had ended."""
        had_ended = self.is_done
        if had_ended and not self.is_cancelled:
            return False
        with SigintSafeLock():  # Ctrl-C does not leave a part of it
            with _SENDING_AGAIN:  # else it would be neither interrupted nor withdrawn
                self.is_cancelled = True  # first: it is not sent any more
            if self.replicas and not had_ended:
                self.workers.interrupt(self.unanswered)
            else:
                self.end()
            self.router.withdraw(self)
        return not had_ended

    def end_in_fork(self) -> None:
        """End with a UsageError in a fork; see `Result.end_in_fork`."""
        super().end_in_fork()
        self.is_done = True

    @property
    def has_outcome(self) -> bool:
        """Whether its ranks have replied, or never will, or it has an error before that."""
        return self.is_done or self.done is not None

    @property
    def has_news(self) -> bool:
        """Whether there is an item, or none follows."""
        return bool(self.items) or self.has_outcome

    def expire(self, why: BaseException) -> None:
        """Cancel it for a reason, which is its error at once, though its coroutine may have to end."""
        with self.lock:
            self.done = self.done or Done(why)
        self.cancel()
        for tell in list(self.waiters):
            tell(self)
        self.nudge()

    # --- waiting ---

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until it is done, and make the result; False if the time is over before."""
        if self.done is not None:
            return True
        return self._wait(Deadline(timeout_s), lambda: self.has_outcome) and self._conclude()

    def wait_until_ended(self, timeout_s: float | None) -> bool:
        """Wait until its ranks have replied, though it may have its result before; False if the time is over."""
        return self._wait(Deadline(timeout_s), lambda: self.is_done)

    def wait_until_sent(self, timeout_s: float | None) -> bool:
        """Wait for a place; False if the time is over before."""
        return self._wait(Deadline(timeout_s), lambda: self.is_done or bool(self.replicas))

    def _wait(self, deadline: Deadline, is_over: Callable[[], bool]) -> bool:
        with _NOBODY if deadline.timeout_s == 0.0 else self.waiting(self):
            if not (is_over() or wait_for_all(self.parents, deadline, self)):
                return False
            while True:
                if not self.tickets:  # else it was sent: a thread that sends may wait until this one reads its items
                    self.router.advance()
                if is_over():
                    return True
                left = deadline.left()
                if left == 0.0 and deadline.timeout_s:
                    return False
                self.workers.wait([_News(self, is_over)], LOOK_AROUND_S if left is None else min(left, LOOK_AROUND_S))
                if deadline.timeout_s == 0.0:
                    self.router.advance()
                    return is_over()

    def drive_in_background(self) -> None:
        """Let the thread of `bandmaster.calls.progress` read its replies until it is done."""
        if self.is_done:  # another thread has read the reply meanwhile, and knew of nobody to tell
            self.wait(0.0)
        elif not self.is_watched:
            self.read_in_background()

    def _ask_to_be_told(self) -> None:
        self.router.watched[self] = None
        if self.is_done:  # its router may have learned of that before
            self.router.watched.pop(self, None)

    def _conclude(self) -> bool:
        """Make the result. After Ctrl-C, the next wait makes it again."""
        with self.lock:
            if self.done is None:
                self.done = self._made()
                if self.record is not None:
                    self.record.is_done(self.done.error)
        if self.is_done:  # else its ranks have still to stop
            self.tickets, self.arguments = {}, None
        return True

    def outcome(self) -> Any:
        """The value, or its error is raised; it has an outcome."""
        self._conclude()
        return self.value(Deadline(None))

    def take_arrived(self) -> None:
        """Take the replies that have arrived; `end` tells its record."""
        if self.tickets:
            self.workers.check(is_thorough=False)

    def _outcomes(self) -> dict[int, Any]:
        """The replies of the ranks that have replied."""
        return {rank: self.workers.fetch(ticket) for rank, ticket in list(self.tickets.items()) if ticket.is_done}

    def _error(self, outcomes: Mapping[int, Any]) -> BaseException | None:
        """Its error, if it has ended with these replies."""
        if self.done is not None:
            return self.done.error
        if self.is_cancelled:
            return CallCancelled(f"{self.site.method} was cancelled; make the request again")
        if self._why is not None:
            return error_of(self.site, self._lost) if self._lost else self._why
        failures = {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, Failure)}
        if not failures:
            return None
        died = [rank for rank, failure in failures.items() if _has_died(failure)]
        self.router.note_deaths(died)
        return error_of(self.site, {**(self._lost if died else {}), **failures})

    def _made(self) -> Done:
        outcomes = self._outcomes()
        if (why := self._error(outcomes)) is not None:
            return Done(why)
        firsts = [replica.ranks[0] for replica in self.replicas]
        if self.keeps_rows:
            (rank,) = firsts
            self._rows = KeptRows([KeptPart(self.site.method, rank, outcomes[rank], self.workers, self.record)], None)
            return Done(is_here=False)
        values: list[Any] = []
        failures: dict[int, Failure] = {}
        for rank in firsts:
            try:
                values.append(decode(outcomes[rank]))
            except BaseException as error:  # the user's objects may raise anything as they are unpickled
                failures[rank] = self._unreadable(rank, error)
        if failures:
            return Done(error_of(self.site, failures))
        return Done(value=values if self.target.is_all else values[0])

    def _brought(self, deadline: Deadline) -> Done:
        values, failures = self._read_rows(deadline)
        return Done(error_of(self.site, failures)) if failures else Done(value=next(iter(values.values())))


def _has_died(outcome: object) -> TypeGuard[Failure]:
    return isinstance(outcome, Failure) and outcome.kind is FailureKind.DIED


class _News:
    """Stands for a request in `Workers.wait`, which ends when its wait is over, or one that waits may get a place."""

    outcome = None

    def __init__(self, request: Request, is_over: Callable[[], bool]) -> None:
        self._request, self._is_over = request, is_over

    @property
    def is_done(self) -> bool:
        return self._is_over() or (not self._request.tickets and self._request.router.can_advance)


class _Stragglers:
    """Ends a request on the other ranks of a replica once it has failed on one, for which they may wait.

    It is a watch of the thread of callbacks; see `bandmaster.calls.escalation`. The request may be sent again.

    Args:
        request: The request.
        sent: The tickets of the ranks of that replica.
        failed: The failures of the ranks that have failed.
    """

    def __init__(self, request: Request, sent: Mapping[int, Ticket], failed: Mapping[int, Failure]) -> None:
        self.workers, self._request, self._sent, self._failed = request.workers, request, sent, failed
        self._escalation = Escalation(request.site.limits().grace)
        has_died = any(map(_has_died, failed.values()))
        self._escalation.begin(time.monotonic(), DEATH_PATIENCE_S if has_died else PATIENCE_S)
        self.due = self._escalation.next

    def look(self) -> bool:
        """Take the steps that are due. Returns whether all ranks have ended the request."""
        while not self._is_over and (step := self._escalation.due(time.monotonic())) is not None:
            left = {rank: ticket for rank, ticket in list(self._sent.items()) if not ticket.is_done}
            if step is Step.INTERRUPT:
                self.workers.interrupt(left)
                continue
            if not any(map(is_in_debugger, self._request.router.stacks(left).values())):
                rank, failure = next(iter(self._failed.items()))
                why = f"ended by the controller, as it had not stopped {self._request.site.limits().grace:g} s after "
                why += f"{self._request.site.method} failed on rank {rank} ({failure.summary.partition(chr(10))[0]})"
                self.workers.interrupt(left, why)
            self._escalation.put_off_the_end(time.monotonic())  # of ranks that are in one, or have not come to it
            break  # the grace may be 0
        self.due = self._escalation.next
        return self._is_over

    @property
    def _is_over(self) -> bool:
        return self._request.is_done or self._request.tickets is not self._sent
