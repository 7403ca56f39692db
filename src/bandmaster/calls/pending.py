"""A call that is on its way: reading its replies, making its result, and the escalation when a rank does not stop.

::

    submission ── sends ──► PendingCall ◄── waits ── Future
                                │
                            OpenCalls   the calls of a group, in the order they were sent

There is no reader thread. The thread that waits for a call reads its replies, and drives the escalation of earlier
calls: a rank can only begin with a call when it has ended those before.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from bandmaster.calls.escalation import Escalation, Step
from bandmaster.calls.options import CallOptions, default_options
from bandmaster.calls.progress import CallWatch, progress
from bandmaster.codec import Payload, decode
from bandmaster.contract import Workers
from bandmaster.errors import (
    CallCancelled,
    CallTimeout,
    CollectError,
    RemoteError,
    ResourceError,
    RowsLost,
    UsageError,
    WorkerDied,
)
from bandmaster.errors.failure import Failure, FailureKind, is_in_debugger
from bandmaster.plan.collection import collect
from bandmaster.plan.mesh import Mesh
from bandmaster.plan.rows import CollectEach, RealRows
from bandmaster.plan.transfer import Gather, Incoming
from bandmaster.platform.deadline import Deadline
from bandmaster.platform.locks import SigintSafeLock, check_not_held
from bandmaster.rows.kept import KeptPart, KeptRows
from bandmaster.rows.table import Table
from bandmaster.tracing.records import CallRecord

__all__ = ["CallSite", "Collection", "Failures", "OpenCalls", "PendingCall"]

FENCE_LOOK_S = 0.02  # a failed call holds back the one that is waited for
LOOK_AROUND_S = 5.0  # a call that is waited for may be cancelled by another thread meanwhile
UNCHANGEABLE = {type(None), bool, int, float, str, bytes}
MANY = 64  # open calls; from there on, each new one looks whether the oldest is over


class CallSite(NamedTuple):
    """What messages say about a call, and how long it may take.

    Attributes:
        method: ``"Class.method"``.
        mesh: The group's mesh.
        group: The group's name.
        options: How long the call may take; None where nobody said so for this call.
        defaults: What the group says about its calls.
    """

    method: str
    mesh: Mesh
    group: str = ""
    options: CallOptions | None = None
    defaults: Mapping[str, float | None] = MappingProxyType({})

    def limits(self) -> CallOptions:
        """How long the call may take, as the call says, else its group, else the library."""
        if self.options is not None:
            return self.options
        options = default_options()
        return options.but(self.defaults) if self.defaults else options

    def located(self, error: CollectError) -> CollectError:
        """The error with the coordinates of its ranks."""
        where = {rank: self.mesh.coordinates(rank) for rank in error.failures}
        return CollectError(error.method, error.failures, where, axes=self.mesh.shown_axes)


class Collection(NamedTuple):
    """How the values of a call become its result.

    Attributes:
        incoming: How they are joined, listed or reduced.
        ranks: The ranks whose values come back, in order.
        finish: Makes the result of that; by default it is the result.
    """

    incoming: Incoming | CollectEach
    ranks: tuple[int, ...]
    finish: Callable[[Any], Any] | None = None


NOTHING = Collection(Gather(), ())


class Failures(dict[int, Failure]):
    """The failures of a call by rank, also of ranks that were not asked but have died. Calls made as one share them.

    Attributes:
        fenced: The tickets of ranks that have failed and wait until all ranks that were asked have ended the call.
    """

    __slots__ = ("fenced",)

    def __init__(self, deaths: Mapping[int, Failure] = MappingProxyType({})) -> None:
        super().__init__(deaths)
        self.fenced: dict[int, Any] = {}


class PendingCall:
    """What some ranks were asked, what they have replied, and in the end the result.

    Attributes:
        site: What messages say about it.
        failures: See `Failures`.
        is_over: Whether all ranks that were asked have replied, as far as any thread has looked.
        is_done: Whether the result or the error is there.
        outcome: The result, once it is done; None if there is an error.
        error: What is to be raised, once it is done; None if there is a result.
        due: The moment at which the thread that reads has to look again, by `time.monotonic`; None for no moment.
        on_done: If it is set, the thread that makes the result calls it afterwards; it must not block.
        workers: The workers that are asked.
        reading: Held by the thread that sends the call, reads its replies or makes its result of them.

    Args:
        workers: The workers that are asked.
        site: What messages say about it.
        collection: How the result is made.
        others: The calls of the same group.
        failures: To be shared; its own by default.
        keeps_rows: Whether the values stay where they are until somebody reads them.
    """

    waits_for = ()
    is_cleanup = False  # whether it frees what earlier calls hold, so that it is not cancelled with them
    is_for_all = True  # whether the death of a rank that was not asked fails it: those that were may wait for that one

    __slots__ = (
        "_arrived",
        "_cancelled_at",
        "_collection",
        "_escalation",
        "_has_failed",
        "_has_to_stop",
        "_interrupted",
        "_is_collected",
        "_is_released",
        "_kept_rows",
        "_others",
        "_values",
        "_was_missed",
        "_watch",
        "due",
        "error",
        "failures",
        "is_done",
        "is_over",
        "keeps_rows",
        "on_done",
        "outcome",
        "reading",
        "real_rows",
        "record",
        "site",
        "tickets",
        "workers",
    )

    def __init__(
        self,
        workers: Workers,
        site: CallSite,
        collection: Collection,
        others: OpenCalls | None = None,
        failures: Failures | None = None,
        keeps_rows: bool = False,
    ) -> None:
        self.keeps_rows, self._is_collected = keeps_rows, not keeps_rows
        self._kept_rows: KeptRows | None = None
        self.site = site
        self.tickets: dict[int, Any] = {}  # of ranks that have not replied
        self.failures = Failures() if failures is None else failures
        self.real_rows: RealRows | None = None
        self.record: CallRecord | None = None  # if a trace records
        self.is_over = self.is_done = self._has_to_stop = self._was_missed = self._is_released = False
        self.outcome: Any = None
        self.error: BaseException | None = None
        self.due: float | None = None
        self.on_done: Callable[[], object] | None = None
        self.reading = threading.RLock()
        self._has_failed = bool(self.failures)  # on a rank that was asked; else it is known to before it is sent
        self._values: dict[int, Any] = {}
        self.workers = workers
        self._collection = collection
        self._others = others
        self._escalation: Escalation | None = None
        self._arrived: set[int] = set()  # ranks that had come to this call when the present grace began
        self._cancelled_at: float | None = None
        self._watch: CallWatch | None = None
        self._interrupted: set[int] = set()  # ranks whose values have raised KeyboardInterrupt when they were decoded

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that have not replied."""
        return tuple(self.tickets)

    @property
    def is_cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled_at is not None

    @property
    def holds_back(self) -> bool:
        """Whether it has failed and a rank has not ended it, so that ranks wait before they begin later calls."""
        return bool(self.tickets and (self.failures or self.is_cancelled))

    def stacks(self) -> Mapping[int, str]:
        """The Python stacks of the ranks that have not replied."""
        return self.workers.stacks(dict(self.tickets))

    def fail(self, error: BaseException) -> None:
        """It could not be sent."""
        self.error = error
        self.is_over = self.is_done = True

    def late(self, timeout_s: float) -> CallTimeout:
        """The error for who has waited for so long."""
        return CallTimeout(self.site.method, self.missing, timeout_s, self.stacks(), behind=self.behind)

    @property
    def behind(self) -> str:
        """How calls that were sent before it have failed which are not over, for messages; "" if there are none."""
        return "" if self._others is None else self._others.failed_before(self)

    def watch(self, when_done: Callable[[], object]) -> None:
        """Read replies in the background, and call a function when the call is done.

        The calls before it are watched as well: one that fails may have to be ended before this one can begin.
        """
        if self._others is not None:
            self._others.watch_before(self)
        self._watched().watchers.add(when_done)

    def _watched(self) -> CallWatch:
        with SigintSafeLock(), progress.lock:
            if self._watch is None:
                watch = CallWatch(self)
                progress.add(watch)
                self._watch = watch
            return self._watch

    def cancel(self) -> bool:
        """Interrupt the call where it runs, and have it skipped where it does not run yet. From any thread."""
        before = self._cancelled_at
        self._cancelled_at = before or time.monotonic()
        try:
            self.workers.interrupt(dict(self.tickets))
        except UsageError:
            self._cancelled_at = before
            raise
        return True

    def wait(self, timeout_s: float | None) -> bool:
        """Read replies until all are there, and make the result; False when the time is over before."""
        if self.is_done:
            return True
        timeout_s = None if timeout_s is None or timeout_s > threading.TIMEOUT_MAX else max(0.0, timeout_s)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        check_not_held(self.reading)
        try:
            if not self.reading.acquire(timeout=-1 if timeout_s is None else timeout_s):
                self._was_missed = True
                if not self.reading.acquire(blocking=False):
                    return False
            if not self.is_done and self._read(deadline):
                self._conclude()
            return self.is_done
        finally:
            try:
                self.reading.release()  # first, as Ctrl-C cannot come before it
            except RuntimeError:
                pass  # it was not taken in time, or Ctrl-C came before
            else:
                if self._was_missed:
                    self._tell_who_missed()

    def wait_for_all(self) -> None:
        """Read until every rank has replied or was ended; without making the result."""
        with self.reading:
            self._read(None, is_patient=True)
        self._have_the_result_made()

    def drive(self) -> float | None:
        """Take what has arrived and do what the escalation says is due, unless another thread reads and does so itself.

        Returns:
            The moment at which there is more to do, if there is one.
        """
        if self.is_over or self.reading._is_owned():  # type: ignore[attr-defined]
            return None
        try:
            if not self.reading.acquire(blocking=False):
                return None
            self._take(0.0)
            moment = self._escalate()
            return None if self._note_end() else moment
        finally:
            try:
                self.reading.release()
            except RuntimeError:
                pass  # as in `wait`
            else:
                if self._was_missed:
                    self._tell_who_missed()
                self._have_the_result_made()

    def _tell_who_missed(self) -> None:
        """Tell of what has arrived while this thread read: who came for it went away."""
        self._was_missed = False
        self._tell()

    def _read(self, deadline: float | None, is_patient: bool = False) -> bool:
        """Read until all have replied; False when the time is over before.

        Once a rank has failed, the others are interrupted; after a death they are not waited for, unless
        ``is_patient``. `reading` is held.
        """
        if self.workers.deaths and self.tickets:
            self._take(0.0)  # what was replied before counts
        while self.tickets:
            due = self.due = self._do_what_is_due()
            until = deadline if due is None or (deadline is not None and deadline < due) else due
            if self._has_to_stop and not is_patient:
                break
            self._take(LOOK_AROUND_S if until is None else min(max(0.0, until - time.monotonic()), LOOK_AROUND_S))
            if deadline is not None and self.tickets and time.monotonic() >= deadline:
                self.due = self._do_what_is_due()  # of what was taken: who looks without waiting comes again only then
                return False
        self._note_end()
        return True

    def _have_the_result_made(self) -> None:
        """Tell of replies that this thread has taken without making the result: meanwhile nobody else could make it."""
        if self.is_over and not self.is_done:
            self._tell()

    def _tell(self) -> None:
        on_done = self.on_done  # another thread may reset it
        if on_done is not None:
            on_done()

    def _note_end(self) -> bool:
        """Whether all ranks have replied; those that have failed go on then."""
        if not self.tickets:
            fenced = self.failures.fenced
            if fenced and (self._others is None or not self._others.has_unanswered(self.failures)):
                self.workers.resume(fenced)
                self.failures.fenced = {}
            self.is_over = True  # last: Ctrl-C before this has all of it done again
        return self.is_over

    def _conclude(self) -> None:
        """Make the result. Ctrl-C while the user's own code collects it leaves it to be asked for again."""
        self.error = self._error()
        if self.error is None and self.keeps_rows:
            kept = {
                rank: KeptPart(self.site.method, rank, value, self.workers, self.record)
                for rank, value in self._values.items()
            }
            self._kept_rows = KeptRows(self.site.method, self._collection.ranks, kept, self.real_rows)
            if self._is_released:
                self._kept_rows.release()
        elif self.error is None:
            self._collect(self._values)
        self.is_done = True
        if self.record is not None:
            self.record.is_done()
        self._values = {}
        if self._kept_rows is None:
            self._collection = NOTHING  # which may refer to the group, that has the list of its calls
        if self._others is not None and self.is_over:
            self._others.forget(self)  # else what it holds would stay until the next call of the group
        if self.on_done is not None:
            self._tell()

    def bring_rows(self, deadline: Deadline) -> None:
        """Make the result, or the error, of rows that were kept; the call is done.

        Raises:
            RowsLost: Some of them are gone; others may be there.
            CallTimeout: Some of them have not come in time.
            ResourceError: This process has no memory for them now.
        """
        with self.reading:
            if self._is_collected or self._kept_rows is None:
                return
            values = {}
            for rank in self._collection.ranks:
                try:
                    values[rank] = self._kept_rows.value(rank, deadline)
                except (RowsLost, CallTimeout, ResourceError):
                    raise
                except BaseException as error:  # the user's objects may raise anything as they are unpickled
                    self.failures[rank] = self._unreadable(rank, error)
                    self._has_failed = True
            self.error = self._error()
            if self.error is None:
                self._collect(values)
            if isinstance(self.error, ResourceError):  # the rows are still there
                no_room, self.error = self.error, None
                raise no_room
            self._is_collected = True

    @property
    def rows_are_here(self) -> bool:
        """Whether all rows came with the replies, as they are small."""
        return self._kept_rows is not None and self._kept_rows.is_here

    def table(self) -> Table:
        """The rows that the ranks have kept; the call is done, without an error.

        Raises:
            UsageError: They are no batch together.
        """
        assert self._kept_rows is not None, "the future has looked"
        table = self._kept_rows.table
        if table is None:
            raise UsageError(
                f"the ranks of {self.site.method} returned values that are not rows of one kind, so that they cannot "
                "be passed on as rows; use the value of future.result()"
            )
        return table

    def release(self) -> None:
        """Let go of the rows that were kept, or will be. Takes no lock, as garbage may be collected under any."""
        self._is_released = True
        if self._kept_rows is not None:
            self._kept_rows.release()
        self.outcome = None
        self._is_collected = not self.keeps_rows

    def _collect(self, by_rank: Mapping[int, Any]) -> None:
        """Make the outcome of the values, or the error."""
        try:
            self.outcome = self._collected(by_rank)
        except MemoryError as error:
            self.error = ResourceError(
                f"the controller has no memory to join what the ranks of {self.site.method} have returned: {error}; "
                "free memory, and try again"
            )
            self.error.__cause__ = error
        except Exception as error:  # what collecting says, or the user's code
            self.error = error

    def _collected(self, by_rank: Mapping[int, Any]) -> Any:
        incoming, ranks, finish = self._collection
        values = [by_rank[rank] for rank in ranks]
        try:
            result = collect(incoming, ranks, values, self.site.method, self.real_rows)
        except CollectError as error:
            raise self.site.located(error) from error.__cause__
        return result if finish is None else finish(result)

    def _error(self) -> BaseException | None:
        """What is to be raised; None if all ranks that were asked have replied with a value."""
        if self._cancelled_at is not None:
            return CallCancelled(f"{self.site.method} was cancelled; make the call again")
        if not (self._has_failed or self.tickets):
            return None
        failures = dict(self.failures)  # others may share them, and add to them
        kinds = {failure.kind for failure in failures.values()}
        where = {rank: self.site.mesh.coordinates(rank) for rank in failures}
        if FailureKind.LOST in kinds and kinds <= {FailureKind.LOST, FailureKind.CANCELLED}:
            lost = {failure.summary: None for failure in failures.values() if failure.kind is FailureKind.LOST}
            return RowsLost(f"{self.site.method} of group {self.site.group!r} takes {'; '.join(lost)}; make them again")
        if FailureKind.UNRECEIVED in kinds and kinds <= {FailureKind.UNRECEIVED, FailureKind.CANCELLED}:
            ranks = sorted(rank for rank in failures if failures[rank].kind is FailureKind.UNRECEIVED)
            why = failures[ranks[0]]
            receiver = "the controller" if why.pid == os.getpid() else f"process {why.pid} on host {why.host}"
            return ResourceError(
                f"{self.site.method} of group {self.site.group!r} has run, but {receiver} cannot take the reply of "
                f"rank {', '.join(map(str, ranks))}: {why.summary}"
            )
        if FailureKind.DIED in kinds or kinds == {FailureKind.CANCELLED}:
            kind: Callable[..., BaseException] = WorkerDied
        elif kinds <= {FailureKind.RESULT, FailureKind.CANCELLED}:
            kind = CollectError
        else:
            kind = RemoteError
        return kind(self.site.method, failures, where, self.site.group, self.site.mesh.shown_axes)

    def _do_what_is_due(self) -> float | None:
        """About this call and those before it; the moment at which there is more to do, if there is one."""
        others = self._others.drive(self) if self._others is not None else None
        ours = self._escalate()
        return others if ours is None else ours if others is None else min(ours, others)

    def _escalate(self) -> float | None:
        """Do what is due about ranks that go on with a call that failed; the moment at which more is due."""
        deaths = self.workers.deaths
        if deaths and not self.is_for_all:
            deaths = {rank: deaths[rank] for rank in deaths if rank in self.tickets or rank in self.failures}
        if not (deaths or self.failures or self._cancelled_at is not None):
            return None
        now = time.monotonic()
        self._escalation = self._escalation or Escalation(self.site.limits().grace)
        if self._cancelled_at is not None:
            self._escalation.begin(self._cancelled_at, patience_s=0.0)
        if deaths:
            self.failures.update({rank: death for rank, death in deaths.items() if rank not in self.failures})
            self._escalation.after_a_death(now)
        elif self.failures:
            self._escalation.begin(now)
        while (step := self._escalation.due(now)) is not None:
            if step is Step.INTERRUPT:
                self.workers.interrupt(dict(self.tickets))
                self._arrived = self._ranks_at_this_call()
            elif step is Step.END:
                self._kill_the_stuck()
            else:
                self._has_to_stop = True
        return self._escalation.next

    def _kill_the_stuck(self) -> None:
        """End the ranks that have been at this call for the whole grace; those that came to it later get their own."""
        assert self._escalation is not None, "it says that this is due"
        debugged = self._in_debuggers(self._arrived)
        self._take(0.0)  # after that, as it takes a moment
        stuck = {rank: ticket for rank, ticket in self.tickets.items() if rank in self._arrived - debugged}
        if stuck:
            grace = self.site.limits().grace
            more = f" (grace {grace:g} s; options(grace=...) gives it more)" if grace else ""
            why = f"ended by the controller, as it had not stopped in time after {self.how_it_failed()}{more}"
            self.workers.interrupt(stuck, why)
        if self.tickets:
            self._arrived = self._ranks_at_this_call() - debugged
            self._escalation.put_off_the_end(time.monotonic())

    def _in_debuggers(self, ranks: set[int]) -> set[int]:
        """Of some ranks, those that have not replied and are in debuggers."""
        asked = {rank: ticket for rank, ticket in self.tickets.items() if rank in ranks}
        stacks = self.workers.stacks(asked) if asked else {}
        return {rank for rank, stack in stacks.items() if is_in_debugger(stack)}

    def _ranks_at_this_call(self) -> set[int]:
        """The ranks that have not replied to this call, but to all before it, and that wait for no other rank."""
        return set(self.tickets).difference(self._others.awaited_before(self) if self._others is not None else ())

    def how_it_failed(self) -> str:
        """What messages of calls that suffer from it say: which rank failed first, and why."""
        if self.is_cancelled:
            return f"{self.site.method} was cancelled"
        rank, failure = min(self.failures.items(), key=lambda item: (*item[1].may_follow, item[0]))
        why = failure.summary.partition("\n")[0]
        return f"{self.site.method} failed on rank {rank} ({why})"

    def _take(self, timeout_s: float) -> None:
        """Take the replies that come in this time."""
        done = self.workers.wait(list(self.tickets.values()), timeout_s)
        replied, still = self._replied(done)
        fetch, record, values = self.workers.fetch, self.record, self._values
        same = shared = None  # a payload that several ranks have sent alike, and its value
        for rank, ticket in replied.items():
            value = fetch(ticket)
            if record is not None:
                record.came(rank, ticket, value)
            if type(value) is Payload and not self.keeps_rows:
                try:
                    if value is not same:
                        same, shared = value, decode(value)
                    elif type(shared) not in UNCHANGEABLE:
                        shared = decode(value)
                    value = shared
                except BaseException as error:  # the user's objects may raise anything as they are unpickled
                    value = self._unreadable(rank, error)
            if type(value) is Failure:
                self.failures[rank], self._has_failed = value, True
                self.failures.fenced[rank] = ticket
            else:
                values[rank] = value
        self.tickets = still  # now that nothing can interrupt it any more

    def _replied(self, done: Sequence[Any]) -> tuple[dict[int, Any], dict[int, Any]]:
        """The tickets, by rank, of the ranks that have replied, and of those that have not."""
        if len(done) == len(self.tickets):
            return self.tickets, {}
        finished = set(map(id, done))
        replied = {rank: ticket for rank, ticket in self.tickets.items() if id(ticket) in finished}
        return replied, {rank: ticket for rank, ticket in self.tickets.items() if id(ticket) not in finished}

    def _unreadable(self, rank: int, error: BaseException) -> Failure:
        """The failure of a rank whose value raised as it was decoded; raises the error again if it is Ctrl-C's."""
        was_interrupted = rank in self._interrupted
        if isinstance(error, KeyboardInterrupt):
            self._interrupted.add(rank)
        return Failure.unreadable(error, was_interrupted)


class OpenCalls:
    """The calls of a group that may not be over, in the order they were sent.

    A rank can only begin with a call when it has ended those before. So the thread that waits for a call also drives
    the ones before it: one that failed, and that nobody waits for or even knows any more, must not hold up the others.
    """

    def __init__(self) -> None:
        self._calls: deque[PendingCall] = deque()

    def add(self, call: PendingCall) -> None:
        """A call is about to be sent."""
        self._calls.append(call)
        self._forget_over()
        if len(self._calls) > MANY:
            self._calls[0].drive()  # nobody may be waiting for it

    def drive(self, waiting: PendingCall) -> float | None:
        """Drive the calls that were sent before one, and those that were sent as one with it.

        Returns:
            The moment at which there is more to do, if there is one.
        """
        if len(self._calls) < 2:
            return None
        calls = list(self._calls)
        self._forget_over()
        moments, is_behind = [], False
        for call in calls:
            if call is waiting:
                is_behind = True
            elif is_behind and call.failures is not waiting.failures:
                break
            else:
                moments.append(call.drive())
                if call.holds_back:  # its last reply lets ranks go on, and wakes nobody who waits here
                    moments.append(time.monotonic() + FENCE_LOOK_S)
        return min((moment for moment in moments if moment is not None), default=None)

    def awaited_before(self, call: PendingCall) -> set[int]:
        """The ranks that have not replied to the calls before one, or have failed one that others have not ended."""
        return {rank for other in self._before(call) for rank in (*other.missing, *list(other.failures.fenced))}

    def failed_before(self, call: PendingCall) -> str:
        """How calls that were sent before one have failed which are not over, for messages; "" if there are none."""
        return "; ".join(
            f"{other.how_it_failed()} and has not ended on rank {', '.join(map(str, other.missing))}"
            for other in self._before(call)
            if other.holds_back
        )

    def watch_before(self, call: PendingCall) -> None:
        """Have the calls that were sent before one be done though no thread waits for them."""
        for other in self._before(call):
            if not other.is_over:
                other._watched()

    def _before(self, call: PendingCall) -> Iterator[PendingCall]:
        """The calls that were sent before one; other threads may add or forget some meanwhile."""
        return itertools.takewhile(lambda other: other is not call, list(self._calls))

    def has_unanswered(self, failures: Failures) -> bool:
        """Whether a rank has not replied to one of the calls that share these failures."""
        return any(call.failures is failures and call.tickets for call in list(self._calls))

    def unfinished(self) -> list[PendingCall]:
        """The calls that are not over, in the order they were sent. What has been replied counts."""
        calls = list(self._calls)
        for call in calls:
            call.drive()
        return [call for call in calls if not call.is_over]

    def cancel_all(self) -> None:
        """Cancel the calls that are not over, and wait until they are: at most for the grace of each."""
        open_calls = self.unfinished()
        for call in open_calls:
            if not call.is_cleanup:
                call.cancel()
        for call in open_calls:
            if call.is_cleanup and not call.wait(call.site.limits().grace):
                call.cancel()
            call.wait_for_all()

    def forget(self, call: PendingCall) -> None:
        """A call is over."""
        with contextlib.suppress(ValueError):  # it was forgotten before
            self._calls.remove(call)

    def clear(self) -> None:
        """Forget all calls: their workers are gone."""
        self._calls.clear()

    def _forget_over(self) -> None:
        try:
            while (first := self._calls[0]).is_over:
                self._calls.remove(first)
        except (IndexError, ValueError):  # it is empty, or another thread was faster
            pass
