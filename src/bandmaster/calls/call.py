"""`Call`: one call, from the moment it is submitted until it is done.

::

    WAITING ── its rows are there, and the calls before it were sent ──► SENT ── all ranks have replied ──► DONE
       └─────────────── it cannot be sent, or was cancelled ─────────────────────────────────────────────────┘

There is no reader thread. The thread that waits for a call reads its replies, and drives the escalation of earlier
calls: a rank can only begin with a call when it has ended those before. A call that no thread waits for, but for which
a callback was added, is read by the thread of `bandmaster.calls.progress`.

`lock` is the lock that a thread holds while it sends the call, reads its replies or makes its result. A thread that
looks without waiting and finds it taken returns; the thread that reads then tells the watch to look again.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

from bandmaster.calls.escalation import DEATH_PATIENCE_S, DEATH_WAIT_S, Escalation, Step
from bandmaster.calls.hooks import CallTrace
from bandmaster.calls.outcome import collected, error_of
from bandmaster.calls.progress import progress
from bandmaster.calls.request import NOTHING, CallRequest, CallSite
from bandmaster.calls.result import Done, Result, RowsResult, late, wait_for_all
from bandmaster.codec import Payload, decode
from bandmaster.contract import Ticket, Workers
from bandmaster.errors import CallCancelled, CallTimeout, ResourceError, UsageError
from bandmaster.errors.failure import Failure, FailureKind, is_in_debugger
from bandmaster.plan.rows import RealRows
from bandmaster.platform.deadline import Deadline
from bandmaster.platform.locks import check_not_held, run_if_free
from bandmaster.rows.kept import KeptPart, KeptRows

FENCE_LOOK_S = 0.02  # a failed call holds back the one that is waited for
AHEAD_LOOK_S = 0.5  # one that has not ended may fail between a look at it and a wait
LOOK_AROUND_S = 5.0  # another thread may cancel a call while this one waits for it
UNCHANGEABLE = {type(None), bool, int, float, str, bytes}


class Failures(dict[int, Failure]):
    """The failures of a call by rank, also of ranks that were not asked but have died. Calls made as one share them.

    Attributes:
        fenced: The tickets of ranks that have failed and wait until all ranks that run the call have ended the call.
    """

    __slots__ = ("fenced",)

    def __init__(self, deaths: Mapping[int, Failure] = MappingProxyType({})) -> None:
        super().__init__(deaths)
        self.fenced: dict[int, Any] = {}


class _OtherCalls(Protocol):
    """The interface to the other calls of the same workers that a call uses; see `bandmaster.calls.open_work`."""

    def first_before(self, call: Any) -> list[Any]: ...
    def send_in_background(self, call: Any) -> None: ...
    def wait_up_to(self, call: Any, deadline: Deadline) -> bool: ...
    def advance(self) -> None: ...
    def ahead_of(self, call: Any) -> Sequence[Call]: ...
    def has_unanswered(self, failures: Failures) -> bool: ...
    def forget(self, call: Any) -> None: ...


class Call(RowsResult):
    """One call.

    Attributes:
        is_cleanup: See `CallRequest`.
        request: The request, as long as the call is WAITING; its assignment to None makes the call SENT.
        done: The result or the error; its assignment makes the call DONE.
        workers: The workers that run the call, once it is sent.
        tickets: The tickets of the ranks that have not replied, by rank.
        failures: See `Failures`; once it is sent.
        has_ended: Whether all ranks are known to have replied. A thread that reads sets it.
        is_cancelled: Whether `cancel` was called.
        record: The record of the call, if a trace records.
        place: Its place among the calls of the same workers, in the order in which the ranks get them; 0, so that it
            counts as ahead of all, if it is not known: as the call is sent, or if Ctrl-C came then.
        real_rows: The rows that each rank was sent, if the call has split a batch.
        is_sent_in_background: Whether it is sent when its rows are there, though no thread waits for it.
        is_waited_for: Whether the thread that sends it waits for it at once.

    Args:
        request: The request.
        site: Its `CallSite`: names for messages, and limits.
        send: Sends it.
        work: The calls of the same workers.
    """

    failures: Failures

    def __init__(
        self, request: CallRequest, site: CallSite, send: Callable[[Call, CallRequest], None] | None, work: _OtherCalls
    ) -> None:
        super().__init__(site, request.keeps_rows)
        self.request: CallRequest | None = request
        self.is_cleanup, self._is_for_all = request.is_cleanup, request.is_for_all
        self.tickets: dict[int, Any] = {}
        self.place = 0
        self.real_rows: RealRows | None = None
        self.record: CallTrace | None = None
        self.has_ended = self.is_sent_in_background = self.is_waited_for = False
        self._send, self._work, self._collection = send, work, request.collection
        self._why: BaseException | None = None
        self._has_to_stop = self._was_missed = False
        self._has_failed = False  # whether a rank that runs the call has failed, or one was dead before it was sent
        self._values: dict[int, Any] = {}
        self._escalation: Escalation | None = None
        self._arrived: set[int] = set()  # ranks that had come to this call when the present grace began

    # --- WAITING ---

    @property
    def parents(self) -> Sequence[Any]:  # type: ignore[override]  # here it is computed
        """The futures of the rows that it takes, until it was sent."""
        request = self.request
        return () if request is None else request.parents

    @property
    def waits_for(self) -> Sequence[Result]:
        """The first call to the same workers that was not sent, and the calls of the rows that it takes."""
        return [*self._work.first_before(self), *super().waits_for]

    @property
    def is_sent(self) -> bool:  # type: ignore[override]  # here it is computed
        """Whether it was sent."""
        return self.request is None

    def begin(self, errors: type[BaseException] = BaseException) -> None:
        """Send it. An error is raised, and becomes the call's; ranks that have the call already are interrupted.

        Args:
            errors: The errors that become the call's. After others, such as Ctrl-C, it can be sent again.
        """
        request = self.request
        if request is None:  # it was cancelled
            return
        assert self._send is not None, "a call that is made as sent has no request"
        try:
            self._send(self, request)
        except errors as error:
            self.fail(error)
            raise
        finally:
            if self.is_watched:  # perhaps since before its tickets were there
                self.read_in_background()
        if self._callbacks:
            self.drive_in_background()

    def is_being_sent(self, workers: Workers, failures: Failures) -> None:
        """Enter the state SENT. `lock` is held until the tickets are there.

        Args:
            workers: The workers that run the call.
            failures: The failures known so far; calls that are sent as one share them.
        """
        self.workers, self.failures, self._has_failed = workers, failures, bool(failures)
        self.request = None

    def advance(self) -> bool:
        """Send it if the rows that it takes are there. Returns whether it is sent, or never will be, after an error."""
        if self.request is not None:
            if not wait_for_all(self.parents, Deadline(0.0)):
                return False
            with contextlib.suppress(Exception):  # it is the error of the call
                self.begin(Exception)
        return True

    def wait_until_sent(self, deadline: Deadline, last: Result) -> bool:
        """Wait until the rows that it takes are there, or it or ``last`` is cancelled; False if the time is over."""
        return wait_for_all(self.parents, deadline, self, last)

    def give_up(self, why: BaseException) -> bool:
        """Do not send it, for a reason. Returns False if it was sent, or is done."""
        with self.lock:  # the thread that sends the call holds it, too
            if self.request is None or self.done is not None:
                return False
            self.is_cancelled = True
            self.fail(why)
        self._work.advance()
        self.tell()
        return True

    def fail(self, why: BaseException) -> None:
        """End with an error, which also Ctrl-C becomes. If ranks have the call already, they are interrupted."""
        if not isinstance(why, Exception):
            why = CallCancelled(f"{self.site.method} was interrupted before it was sent; make the call again")
        with self.lock:
            self._why = self._why or why
            if self.request is None:
                self.cancel()
            elif self.done is None:
                self._finish(Done(self._why))
                self.has_ended, self.request = True, None

    # --- SENT ---

    @property
    def missing(self) -> tuple[int, ...]:  # type: ignore[override]
        """The ranks that have not replied."""
        return tuple(self.tickets)

    @property
    def answered(self) -> tuple[int, ...]:
        """The ranks that have replied with a value."""
        return tuple(self._values)

    @property
    def holds_back(self) -> bool:
        """Whether it has failed and a rank has not ended it, so that ranks wait before they begin later calls."""
        return bool(self.tickets and (self.failures or self.is_cancelled))

    def stacks(self) -> dict[int, str]:
        """The Python stacks of the ranks that have not replied."""
        return dict(self.workers.stacks(dict(self.tickets)))

    def late(self, timeout_s: float) -> CallTimeout:
        """The `CallTimeout` to raise after a wait of ``timeout_s``."""
        if self.request is not None:
            why = "takes its rows" if self.parents else "was submitted behind a call that takes its rows"
            return late(self, timeout_s, why)
        return CallTimeout(self.site.method, self.missing, timeout_s, self.stacks(), self.what_next, behind=self.behind)

    @property
    def behind(self) -> str:  # type: ignore[override]
        """The failed calls before it that have not ended, in words for messages; "" if there are none."""
        return "; ".join(
            f"{other.how_it_failed()} and has not ended on rank {', '.join(map(str, other.missing))}"
            for other in self._work.ahead_of(self)
            if other.holds_back and other.failures is not self.failures
        )

    def drive_in_background(self) -> None:
        """Send it and read its replies in the background.

        The calls before it are read as well: one that fails may have to be ended before this one can begin.
        """
        if self.request is not None:
            self._work.send_in_background(self)
        if self.request is None and self.done is None:
            for call in (*self._work.ahead_of(self), self):
                if not call.is_watched and (call is self or not call.has_ended):
                    call.read_in_background()

    def look(self) -> bool:
        """Take the replies that have arrived, in the thread of callbacks. Returns whether all ranks have ended it.

        It may be done before, with the death of a rank: others that go on with it may have to be ended.
        """
        if not self.wait(0.0):
            return False
        self.tell()
        self.due = self.drive()
        self.is_watched = not self.has_ended
        return self.has_ended

    def _ask_to_be_told(self) -> None:
        for ticket in list(self.tickets.values()):
            if isinstance(ticket, Ticket):
                ticket.on_done = partial(progress.look_at, self)

    def cancel(self) -> bool:
        """Interrupt the ranks that run the call; the others skip it. Any thread may call this."""
        if self.request is not None:
            text = f"{self.site.method} was cancelled before it was sent; make the call again"
            if self.give_up(CallCancelled(text)):
                return True
        before, self.is_cancelled = self.is_cancelled, True
        try:
            if tickets := dict(self.tickets):  # none if it was never sent
                self.workers.interrupt(tickets)
        except UsageError:
            self.is_cancelled = before
            raise
        return True

    def expire(self, why: BaseException) -> None:
        """Cancel it for a reason, which is its error at once, though ranks may still run it. Any thread may call this.

        A thread that waits for it notices within `LOOK_AROUND_S`, or when a rank has stopped.
        """
        self._why, self._has_to_stop = self._why or why, True
        self.cancel()
        if self.is_watched:
            progress.look_at(self)

    def wait(self, timeout_s: float | None, is_for_all: bool = False) -> bool:
        """Read replies until all are there, and make the result; False if the time is over before.

        Args:
            timeout_s: Seconds to wait; None sets no limit.
            is_for_all: Whether to read until every rank has replied or has ended, even if the call is done before.

        Raises:
            UsageError: This thread is about to send it, further up its stack.
        """
        if self.done is not None and not is_for_all:
            return True
        timeout_s = None if timeout_s is None or timeout_s > threading.TIMEOUT_MAX else max(0.0, timeout_s)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if self.request is not None:
            if not self._work.wait_up_to(self, Deadline(timeout_s)):
                return self.done is not None
            if self.request is not None:  # this thread is about to send it, further up its stack
                if self.done is None and timeout_s != 0.0:
                    raise UsageError(
                        f"{self.site.method} cannot be waited for here: this thread sends it once the method or signal "
                        "handler that runs now has returned; wait for it after that"
                    )
                return self.done is not None
            timeout_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        check_not_held(self.lock)
        try:
            if not self.lock.acquire(timeout=-1 if timeout_s is None else timeout_s):
                self._was_missed = True
                if not self.lock.acquire(blocking=False):
                    return False
            if (self.done is None or is_for_all) and self._read(deadline, is_for_all) and self.done is None:
                self._conclude()
            return self.done is not None
        finally:
            try:
                self.lock.release()  # not in a function, at whose beginning Ctrl-C may come
            except RuntimeError:  # this thread did not get it, because of the timeout or of Ctrl-C
                pass
            else:
                self._tell_if_missed()

    def drive(self) -> float | None:
        """Take the replies that have arrived and run the due steps of the escalation, unless another thread does so.

        Returns:
            The moment at which there is more to do, if there is one.
        """
        moments: list[float | None] = [None]
        self._if_free(lambda: self._drive(moments))
        return moments[-1]

    def _drive(self, moments: list[float | None]) -> None:
        self._take(0.0)
        moments.append(self._escalate())
        if self._note_end():
            moments.append(None)

    def take_arrived(self) -> None:
        """Take the replies that have arrived, unless another thread does so. Nothing is done about failed ranks."""
        if self.is_sent:
            self._if_free(self._take_arrived)

    def _take_arrived(self) -> None:
        self._take(0.0)
        self._note_end()

    def _if_free(self, step: Callable[[], object]) -> None:
        """Run a step under `lock`, unless the call has ended or a thread holds that."""
        if not (self.has_ended or self.lock._is_owned()) and run_if_free(self.lock, step):
            self._tell_if_missed()

    def _tell_if_missed(self) -> None:
        """Have the watch look again if it found `lock` taken meanwhile, or if replies are there without a result."""
        if self.is_watched and (self._was_missed or (self.has_ended and self.done is None)):
            self._was_missed = False
            progress.look_at(self)

    def _read(self, deadline: float | None, is_patient: bool = False) -> bool:
        """Read until all ranks have replied; False if the time is over before.

        After a failure, the other ranks are interrupted; after a death, the call stops waiting for them, unless
        ``is_patient``. `lock` is held.
        """
        if self.tickets and self.workers.deaths:
            self._take(0.0)  # replies that arrived before the death count
        while self.tickets:
            due = self.due = self._do_what_is_due()
            until = deadline if due is None or (deadline is not None and deadline < due) else due
            if self._has_to_stop and not is_patient:
                break
            self._take(LOOK_AROUND_S if until is None else min(max(0.0, until - time.monotonic()), LOOK_AROUND_S))
            if deadline is not None and self.tickets and time.monotonic() >= deadline:
                self.due = self._do_what_is_due()  # of the replies just taken: the watch looks again at that moment
                return False
        self._note_end()
        return True

    def _note_end(self) -> bool:
        """Set `has_ended` if all ranks have replied, and let failed ranks go on; returns it."""
        if not self.tickets:
            fenced = self.failures.fenced
            if fenced and not self._work.has_unanswered(self.failures):
                self.workers.resume(fenced)
                self.failures.fenced = {}
            if self.record is not None and self.done is None:
                self.record.is_done(self._error(), is_read=False)
            self.has_ended = True  # last: after Ctrl-C, all of this is repeated
        return self.has_ended

    def _take(self, timeout_s: float) -> None:
        """Take the replies that arrive within ``timeout_s``."""
        done = self.workers.wait(list(self.tickets.values()), timeout_s)
        replied = self.tickets
        still: dict[int, Any] = {}
        if len(done) < len(replied):
            finished = set(map(id, done))
            still = {rank: ticket for rank, ticket in replied.items() if id(ticket) not in finished}
            replied = {rank: ticket for rank, ticket in replied.items() if rank not in still}
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
                if value.kind is not FailureKind.DIED or rank not in self.failures:  # else that is why it has died
                    self.failures[rank] = value
                self._has_failed = True
                self.failures.fenced[rank] = ticket
            else:
                values[rank] = value
        self.tickets = still  # last: after Ctrl-C, the same replies are taken again

    # --- ranks that go on with a call that failed ---

    def _do_what_is_due(self) -> float | None:
        """Run the due steps of this call and of earlier calls. Returns the moment of the next step, or None.

        Earlier calls that no rank of this call can have begun have none: with many in a row, most are left out.
        """
        earlier = self._work.ahead_of(self)
        if not earlier:
            return self._escalate()
        moments: list[float | None] = [time.monotonic() + AHEAD_LOOK_S]
        busy = set[int]()
        for call in earlier:
            moments.append(call.drive())
            if call.holds_back:  # its last reply lets ranks go on, but wakes no thread that waits here
                moments.append(time.monotonic() + FENCE_LOOK_S)
            busy.update(call.tickets if call.place else ())  # else others may be ahead of it
            if busy.issuperset(self.tickets):
                break
        moments.append(self._escalate())
        return min([moment for moment in moments if moment is not None], default=None)

    def _escalate(self) -> float | None:
        """Run the due steps against ranks that go on with a failed call. Returns the moment of the next, or None."""
        deaths = self.workers.deaths
        if deaths and not self._is_for_all:
            deaths = {rank: deaths[rank] for rank in deaths if rank in self.tickets or rank in self.failures}
        if not (deaths or self.failures or self.is_cancelled):
            return None
        now = time.monotonic()
        self._escalation = self._escalation or Escalation(self.site.limits().grace)
        if self.is_cancelled:
            self._escalation.begin(now, 0.0)
        if deaths:
            self.failures.update({rank: death for rank, death in deaths.items() if rank not in self.failures})
            self._escalation.begin(now, DEATH_PATIENCE_S, DEATH_WAIT_S)
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
        """End the ranks that have been at this call for the whole grace; later ranks get a grace of their own."""
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
        """The given ranks that have not replied and are in debuggers."""
        asked = {rank: ticket for rank, ticket in self.tickets.items() if rank in ranks}
        stacks = self.workers.stacks(asked) if asked else {}
        return {rank for rank, stack in stacks.items() if is_in_debugger(stack)}

    def _ranks_at_this_call(self) -> set[int]:
        """The ranks that have replied to all earlier calls, but not to this one, and that wait for no other rank."""
        earlier = self._work.ahead_of(self)
        return set(self.tickets).difference(*[(*call.tickets, *list(call.failures.fenced)) for call in earlier])

    def how_it_failed(self) -> str:
        """The first failed rank and its reason, in words for messages of other calls that are affected."""
        if self.is_cancelled:
            return f"{self.site.method} was cancelled"
        rank, failure = min(self.failures.items(), key=lambda item: (*item[1].may_follow, item[0]))
        why = failure.summary.partition("\n")[0]
        return f"{self.site.method} failed on rank {rank} ({why})"

    # --- DONE ---

    def _conclude(self) -> None:
        """Make the result. After Ctrl-C in the user's collect function, the next wait makes it again."""
        if (error := self._error()) is not None:
            done = Done(error)
        elif self.keeps_rows:
            method, workers, record, values = self.site.method, self.workers, self.record, self._values
            kept = [KeptPart(method, rank, values[rank], workers, record) for rank in self._collection.ranks]
            self._rows = KeptRows(kept, self.real_rows)
            if self.is_released:
                self._rows.release()
            done = Done(is_here=False)
        else:
            done = collected(self._collection, self._values, self.site, self.real_rows)
        self._finish(done)
        if self.has_ended:
            self._work.forget(self)  # else its memory would stay in use until the next call of the group
        if self.is_watched:
            progress.look_at(self)

    def _finish(self, done: Done) -> None:
        """Enter the state DONE, and drop the objects that are not needed any more."""
        if self.record is not None:
            self.record.is_done(done.error)
        self.done = done
        self._values, self._send = {}, None
        if self._rows is None:
            self._collection = NOTHING  # the collection may refer to the group, which refers to its calls

    def _brought(self, deadline: Deadline) -> Done:
        values, failures = self._read_rows(deadline)
        if failures:
            return Done(error_of(self.site, failures))
        done = collected(self._collection, values, self.site, self.real_rows)
        if isinstance(done.error, ResourceError):
            raise done.error  # the rows are still there
        return done

    def has_value_of(self, rank: int) -> bool:
        """Whether a rank has a value among the kept rows."""
        return self._rows is not None and self._rows.parts[rank].has_value

    def _error(self) -> BaseException | None:
        """The error of the call; None if all ranks that run the call have replied with a value."""
        if self._why is not None:
            return self._why
        if self.is_cancelled:
            return CallCancelled(f"{self.site.method} was cancelled; make the call again")
        if not (self._has_failed or self.tickets):
            return None
        return error_of(self.site, dict(self.failures))  # others may share them, and add to them
