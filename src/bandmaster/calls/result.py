"""`Result`: the object behind a future, a call or rows derived from others; and the messages of waits that end."""

from __future__ import annotations

import contextlib
import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

from bandmaster.calls.progress import progress
from bandmaster.calls.request import CallSite
from bandmaster.contract import Workers
from bandmaster.errors import STILL_RUNS, STILL_STOPS, BatchError, CallTimeout, ResourceError, RowsLost, UsageError
from bandmaster.errors.failure import Failure, stacks_by_equality
from bandmaster.platform.deadline import Deadline
from bandmaster.platform.forks import of_parent
from bandmaster.platform.limits import start_thread
from bandmaster.platform.locks import SigintSafeLock
from bandmaster.rows.kept import KeptRows
from bandmaster.rows.table import Table

_log = logging.getLogger(__name__)
STACKS_WITHIN_S = 1.7  # more than the stacks of a call may take, of ranks on other hosts, too
LOOK_AROUND_S = 0.5  # another thread may cancel a call while this one waits for what the call needs
MOST_CALLS = 4  # described in the notes of a KeyboardInterrupt


class Done(NamedTuple):
    """The end of a result.

    Attributes:
        error: The exception that it raises; None if there is a value, or if rows were kept.
        value: The value, if it is here.
        is_here: Whether the value is in this process; kept rows may still lie elsewhere.
    """

    error: BaseException | None = None
    value: Any = None
    is_here: bool = True


class Result(ABC):
    """The object behind a future.

    Attributes:
        site: Its `CallSite`: names for messages, and limits.
        keeps_rows: Whether its rows stay where they are made.
        done: Its end; None before. It is set by one assignment.
        is_cancelled: Whether it was cancelled.
        is_released: Whether its rows were released, or will be when they are there.
        lock: Held by the thread that makes the end.
        is_sent: Whether it is a call that was sent.
        missing: The ranks that have not replied, if it is a call that was sent.
        behind: The failed calls before it that have not ended, in words for messages.
        parents: The futures that have to be done before it, as far as these may not be.
        is_unread: Whether it goes on when the items that it has made are taken, and nobody waits for more.
        is_awaited: Whether it is a stream, and the turn of another group waits until it has ended.

    Args:
        site: Its `CallSite`: names for messages, and limits.
        keeps_rows: Whether its rows stay where they are made.
    """

    is_cancelled: bool = False
    is_released: bool = False
    is_sent: bool = False
    missing: tuple[int, ...] = ()
    behind: str = ""
    is_unread: bool = False
    is_awaited: bool = False
    parents: Sequence[Any] = ()

    def __init__(self, site: CallSite, keeps_rows: bool) -> None:
        self.site, self.keeps_rows = site, keeps_rows
        self.done: Done | None = None
        self.lock: Any = threading.RLock()
        self._callbacks: deque[Callable[[], object]] = deque()

    @property
    def waits_for(self) -> Sequence[Result]:
        """The results that have to be done before this one, in order; none for a call that was sent."""
        return [parent._call for parent in self.parents]

    @property
    def state(self) -> str:
        """Its state in words, for the repr of its future."""
        return "waiting for the rows that it takes" if self.done is None else "done"

    @property
    def what_next(self) -> str:
        """The advice of its `CallTimeout`, once it was sent."""
        return STILL_STOPS if self.is_cancelled else STILL_RUNS

    def stacks(self) -> Mapping[int, str]:
        """The Python stacks of the missing ranks."""
        return {}

    @abstractmethod
    def wait(self, timeout_s: float | None) -> bool:
        """Wait until it is done; False if the time is over before."""

    @abstractmethod
    def cancel(self) -> bool:
        """Cancel it. Returns False if other code may use it, so that it goes on."""

    @abstractmethod
    def late(self, timeout_s: float) -> CallTimeout:
        """The `CallTimeout` to raise after a wait of ``timeout_s``."""

    def watch(self, when_done: Callable[[], object]) -> None:
        """Call a function once it is done: now, if it is; else no thread has to wait for it.

        Raises:
            ResourceError: The system allows no more threads or descriptors.
        """
        self._callbacks.append(when_done)
        if not self.wait(0):
            self.drive_in_background()
        self.tell()  # also if another thread has found it done meanwhile

    def unwatch(self, when_done: Callable[[], object]) -> None:
        """Undo `watch`, unless the function is called at this moment, or was called before."""
        with contextlib.suppress(ValueError):
            self._callbacks.remove(when_done)

    def tell(self) -> None:
        """Call the functions of `watch` if it is done. The caller holds no lock. Any thread may call this again."""
        if self.done is not None:
            with contextlib.suppress(IndexError):
                while True:
                    self._callbacks.popleft()()

    def drive_in_background(self) -> None:  # noqa: B027  # others may tell it of its end
        """Ensure that it is done, and that the functions of `watch` are called, though no thread waits for it."""

    def end_in_fork(self) -> None:
        """End with a UsageError in a fork, as the process from which it was forked gets the replies. Takes no lock."""
        self.lock = threading.RLock()
        self._callbacks.clear()
        self.done = self.done or Done(of_parent(f"the call of {self.site.method}"))

    def table(self) -> Table:
        """The rows; it is done, without an error, and keeps them."""
        raise AssertionError("it keeps no rows")

    def release(self) -> None:
        """Release the rows that are kept, or will be. Takes no lock, as garbage may be collected under any."""
        self.is_released = True
        self._drop_rows()
        if self.keeps_rows and self.done is not None and self.done.error is None:
            self.done = Done(is_here=False)

    def _drop_rows(self) -> None:  # noqa: B027  # there may be none yet
        """Drop the rows that are there, which were released."""

    def value(self, deadline: Deadline) -> Any:
        """The value; kept rows are read into this process. The result must be done. Raises its error.

        Raises:
            RowsLost: Some of the rows are gone; others may be there.
            CallTimeout: Some of the rows have not arrived in time.
            ResourceError: This process has no memory for them now.
        """
        done = self.done
        assert done is not None, "the caller has waited"
        if not done.is_here:
            with self.lock:
                done = self.done or done
                if not done.is_here:  # else another thread has read them
                    done = self.done = self._brought(deadline)
                    if self.is_released:  # meanwhile
                        self.release()
        if done.error is not None:
            raise done.error
        return done.value

    def _brought(self, deadline: Deadline) -> Done:
        """Read the rows. Returns the end with the value or an error. Raises temporary errors. `lock` is held."""
        raise AssertionError("it keeps no rows")

    def check_small_rows(self) -> None:  # noqa: B027  # most results have none
        """Join kept rows that arrived with the replies, so that `done` has the error if they cannot be joined."""


class RowsResult(Result):
    """A result that workers send, and whose rows they may keep.

    The thread of `bandmaster.calls.progress` reads it if it is asked to.

    Attributes:
        workers: The workers.
        tickets: The ticket of each rank that has it, by rank; those of ranks whose replies were taken may be gone.
        due: The moment at which the thread that reads has to look again, by `time.monotonic`; None for no moment.
        is_watched: Whether that thread reads it, so that others that have read tell it.
    """

    workers: Workers
    tickets: dict[int, Any]
    due: float | None = None
    is_watched: bool = False
    _rows: KeptRows | None = None
    _interrupted: Set[int | None] = frozenset()  # ranks whose values have raised KeyboardInterrupt as they were decoded

    @property
    def unanswered(self) -> dict[int, Any]:
        """The tickets of the ranks that have not replied."""
        return {rank: ticket for rank, ticket in list(self.tickets.items()) if not ticket.is_done}

    def read_in_background(self) -> None:
        """Let that thread read its replies until it is done."""
        with SigintSafeLock():  # Ctrl-C does not leave a part of it
            self.is_watched = True  # first: a thread that stops reading from now on tells the other one
            self._ask_to_be_told()
            try:
                progress.add(self)
            except ResourceError:
                self.is_watched = False
                raise

    def _ask_to_be_told(self) -> None:  # some are told anyway
        """Have its tickets tell that thread when they are done."""

    def look(self) -> bool:
        """Take the replies that have arrived, in that thread. Returns whether it is done; then tells of it."""
        if not self.wait(0.0):
            return False
        self.is_watched = False
        self.tell()
        return True

    @property
    def state(self) -> str:
        """Its state in words, for the repr of its future."""
        if self.done is not None or not self.is_sent:
            return super().state
        ranks = ", ".join(map(str, self.missing))
        return f"{'cancelled, ' if self.is_cancelled else ''}waiting for rank {ranks}" if ranks else "done"

    def table(self) -> Table:
        """The rows that were kept; it is done, without an error.

        Raises:
            BatchError: The values of the ranks do not make up one batch.
        """
        assert self._rows is not None, "the future has checked keeps_rows"
        try:
            return self._rows.table
        except BatchError as error:
            raise BatchError(
                f"what {self.site.method} has returned cannot be passed on as rows: {error}; return a batch with the "
                "same columns on every rank, or collect with Gather() and pass the value of future.result()"
            ) from None

    def check_small_rows(self) -> None:
        """Join kept rows that arrived with the replies, so that `done` has the error if they cannot be joined."""
        if self._rows is not None and self._rows.is_here:
            try:
                self.value(Deadline(None))
            except BaseException as error:
                if self.done is None or self.done.error is not error:
                    raise

    def _drop_rows(self) -> None:
        if self._rows is not None:
            self._rows.release()

    def _read_rows(self, deadline: Deadline) -> tuple[dict[Any, Any], dict[int, Failure]]:
        """Read the kept rows. Returns the values by rank, and the failures of ranks whose rows cannot be read.

        Raises errors that may be temporary.
        """
        assert self._rows is not None, "rows were kept"
        values, failures = dict[Any, Any](), dict[int, Failure]()
        for rank, part in self._rows.parts.items():
            try:
                values[rank] = part.value(deadline)
            except (RowsLost, CallTimeout, ResourceError, UsageError):
                raise
            except BaseException as error:  # the user's objects may raise anything as they are unpickled
                failures[rank or 0] = self._unreadable(rank, error)
        return values, failures

    def _unreadable(self, rank: int | None, error: BaseException) -> Failure:
        """The failure of a rank whose value raised when it was decoded; raises the error again if Ctrl-C caused it."""
        was_interrupted = rank in self._interrupted
        if isinstance(error, KeyboardInterrupt):
            self._interrupted = {*self._interrupted, rank}
        return Failure.unreadable(error, was_interrupted)


def wait_for_all(futures: Sequence[Any], deadline: Deadline, *needed_by: Result) -> bool:
    """Wait until the results of futures are done, or another thread ends one that needs them, which it cancels.

    Returns:
        False if the time was over before.
    """
    return all(wait_for_step(future._call.wait, deadline, *needed_by) for future in futures)


def wait_for_step(wait: Callable[[float | None], bool], deadline: Deadline, *needed_by: Result) -> bool:
    """Wait for a step before some calls; see `wait_for_all`. ``wait`` gets seconds, and returns whether it is made."""
    while not any(result.done is not None for result in needed_by):
        if wait(deadline.left(LOOK_AROUND_S)):
            return True
        if deadline.left() == 0.0:
            return False
    return True


def awaited(results: Sequence[Result]) -> Result | None:
    """The sent call whose replies some results wait for: one of them, or one that has to be done before them.

    None if there is none. Each result is visited once, however many others wait for it.
    """
    seen, todo = set[int](), list(reversed(results))
    while todo:
        one = todo.pop()
        if one.is_sent:
            return one
        seen.add(id(one))
        todo += [other for other in reversed(one.waits_for) if other.done is None and id(other) not in seen]
    return None


def late(result: Result, timeout_s: float, why: str, can_be_cancelled: bool = True) -> CallTimeout:
    """The `CallTimeout` to raise after a wait of ``timeout_s`` for a call that could not be sent.

    Args:
        result: The call.
        timeout_s: Duration of the wait, in seconds.
        why: Its relation to the call that it waits for, such as ``"takes its rows"``.
        can_be_cancelled: Whether it can be cancelled without the call that it waits for.
    """
    site, first = result.site, awaited([result])
    if first is None:
        return CallTimeout(site.method, (), timeout_s)
    alone = "cancel it alone with error.future.cancel(), or " if can_be_cancelled else ""
    cancels = f"{alone}cancel all calls of group {first.site.group!r} with its cancel()"
    what_next = f"wait again with error.future.result(), {cancels}"
    why, method, stacks = f"{site.method} {why}, and so was not sent: ", first.site.method, first.stacks()
    return CallTimeout(method, first.missing, timeout_s, stacks, what_next, behind=first.behind, why=why)


def note_calls(error: KeyboardInterrupt, results: Sequence[Result]) -> None:
    """Add notes to a KeyboardInterrupt that name the interrupted calls and show the stacks of their ranks.

    Returns within two seconds, even if a rank does not show its stack. Another Ctrl-C ends it at once. Does nothing
    on Python 3.10, whose exceptions have no notes.

    Args:
        error: The KeyboardInterrupt.
        results: The results that the interrupted thread waited for.
    """
    calls = [(result, missing) for result in results if (missing := _missing(result))]
    if not calls or not hasattr(error, "add_note") or getattr(error, "__notes__", None):  # noted by an inner wait
        return
    notes: list[str] = []
    is_done = threading.Event()
    with contextlib.suppress(ResourceError):  # there is no thread left
        start_thread("bandmaster-interrupted-call", _describe, calls[:MOST_CALLS], notes, is_done)
        is_done.wait(STACKS_WITHIN_S)
    described = list(notes)
    described += [f"{_summary(*call)}; its stacks could not be read" for call in calls[len(described) : MOST_CALLS]]
    if len(calls) > MOST_CALLS:
        described.append(f"and {len(calls) - MOST_CALLS} more calls")
    for note in described:
        error.add_note(note)


def _missing(result: Result) -> Sequence[int]:
    """The ranks whose replies a result waits for."""
    first = awaited([result])
    return result.missing or (() if first is None else first.missing)


def _describe(calls: Sequence[tuple[Result, Sequence[int]]], notes: list[str], is_done: threading.Event) -> None:
    """Append a note for each call and the ranks that were missing. Runs in a thread of its own."""
    try:
        for result, missing in calls:
            timeout = result.late(0.0)
            summary = _summary(result, missing, timeout)
            notes.append("\n".join(filter(None, (summary, stacks_by_equality(timeout.stacks)))))
    except Exception:
        _log.debug("cannot read the stacks of a call that Ctrl-C has interrupted", exc_info=True)
    finally:
        is_done.set()


def _summary(result: Result, missing: Sequence[int], timeout: CallTimeout | None = None) -> str:
    asked = method = result.site.method
    if timeout is not None and timeout.missing:  # else the stacks are unknown, or the ranks have replied since
        method, missing = timeout.method, timeout.missing
    what = method if method == asked else f"{asked}, which waited for {method},"
    return f"{what} was interrupted before rank {', '.join(map(str, missing))} had replied"
