"""`PulledCall`: the result of a call whose chunks free replicas pull."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from bandmaster.calls.call import Call
from bandmaster.calls.future import Future, table_of
from bandmaster.calls.open_work import OpenWork
from bandmaster.calls.progress import Watchers
from bandmaster.calls.request import CallSite
from bandmaster.calls.result import Done, Result, late, wait_for_all
from bandmaster.errors import CallCancelled, CallTimeout, CollectError, ResourceError, RowsLost
from bandmaster.flow.chunks import stack_chunks
from bandmaster.flow.feeds import pending_calls
from bandmaster.flow.pull import Pull, Puller
from bandmaster.plan.arguments import Share
from bandmaster.plan.batch_types import Index
from bandmaster.platform.deadline import Deadline
from bandmaster.platform.locks import SigintSafeLock
from bandmaster.rows.table import Table


class FailedRows(NamedTuple):
    """The rows of a chunk that has failed.

    Attributes:
        numbers: The numbers of the rows in the batch.
        error: The error of the chunk.
    """

    numbers: Index
    error: BaseException


class PartialResult(NamedTuple):
    """The result of a call with ``on_error="return"``.

    Attributes:
        value: The results of the chunks that have not failed, in the order of the batch; None if all have failed.
        numbers: The numbers of their rows in the batch.
        failed: The chunks that have failed.
    """

    value: Any
    numbers: list[int]
    failed: tuple[FailedRows, ...]


class PulledCall(Result):
    """The result of a call whose chunks free replicas pull.

    Calls that are submitted after it are sent after its last chunk.

    Attributes:
        site: Its `CallSite`: names for messages, and limits.
        keeps_rows: Whether its rows stay where they are made.
        parents: The futures of the rows that it takes, until it has begun.
        done: Its end; None before.
        is_cancelled: Whether it was cancelled.

    Args:
        site: Its `CallSite`: names for messages, and limits.
        keeps_rows: Whether its rows stay where they are made.
        returns_errors: Whether the result contains the errors of failed chunks.
        parents: The futures of the rows that it takes.
        begin: Plans it; the rows are there by then.
        replicas: The ranks that take a chunk together.
        join: Makes the result from the row numbers, the value and the rank of each chunk.
        work: The calls of the same workers.
    """

    is_sent_in_background = False

    def __init__(
        self,
        site: CallSite,
        keeps_rows: bool,
        returns_errors: bool,
        parents: Sequence[Any],
        begin: Callable[[], Pull],
        replicas: Sequence[Share],
        join: Callable[[Sequence[Index], Sequence[Any], Sequence[int | None]], Any],
        work: OpenWork,
    ) -> None:
        self.site, self.keeps_rows, self.parents = site, keeps_rows and not returns_errors, tuple(parents)
        self.done: Done | None = None
        self.is_cancelled = False
        self._returns_errors, self._join, self._work = returns_errors, join, work
        self._begin: Callable[[], Pull] | None = begin
        self._replicas = replicas
        self._puller: Puller | None = None  # None after the last chunk, to break the reference cycle
        self._chunks: Sequence[Index] = ()
        self._futures: Sequence[Future[Any]] = ()
        self.lock = threading.RLock()
        self._table: Table | None = None
        self._is_released = False
        self._watchers = Watchers()
        self._sent, self._finished = threading.Event(), threading.Event()

    # --- in the queue of calls that are not sent yet ---

    def advance(self) -> bool:
        """Begin if the rows that it takes are there. Returns whether all chunks are sent."""
        if self._begin is not None and wait_for_all(self.parents, Deadline(0.0)):
            begin, self._begin, self.parents = self._begin, None, ()
            try:
                pull = begin()
                tell = self._chunk_done, self._fail, self._all_sent
                puller = self._puller = Puller(pull.chunks, self._replicas, pull.send, None, *tell)
                puller.go_on()
            except BaseException as error:
                self._fail(error)
                if not isinstance(error, Exception):
                    raise
        return self._sent.is_set()

    def wait_until_sent(self, timeout_s: float | None) -> bool:
        """Wait until all chunks are sent; False if the time is over before."""
        deadline = Deadline(timeout_s)
        if self._begin is not None:
            if not wait_for_all(self.parents, deadline):
                return False
            self._work.advance()  # begins it
        return self._sent.wait(deadline.left())

    @property
    def waits_for(self) -> Sequence[Result]:
        """The first call to the same workers that was not sent, the chunks that run, and the calls of its rows."""
        return [*self._work.first_before(self), *self._running(), *(parent._call for parent in self.parents)]

    def _running(self) -> list[Call]:
        puller = self._puller  # another thread may set it to None
        return [] if puller is None else pending_calls(puller.running)

    def tell(self) -> None:
        """Do nothing: watchers are notified after the last chunk."""

    def give_up(self, why: BaseException) -> None:
        """Send no more chunks, for a reason."""
        self._fail(why)

    def _all_sent(self) -> None:
        self._sent.set()
        self._work.advance()

    # --- in its future ---

    @property
    def is_over(self) -> bool:
        """Whether all chunks are done, or one has failed."""
        return self.done is not None

    is_ended = is_over

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until all chunks are done, or one has failed; False if the time is over before."""
        deadline = Deadline(timeout_s)
        if self._begin is not None:
            self._work.wait_up_to(self, deadline)
        if not self._finished.wait(deadline.left()):
            return False
        if not self.keeps_rows:
            with self.lock:
                if self.done is not None and not self.done.is_here:
                    self.done = self._brought(Deadline(math.inf))
        return True

    def drive(self) -> None:
        """Send the waiting calls and chunks that can be sent."""
        self._work.advance()

    def cancel(self) -> bool:
        """Cancel the chunks that run, and do not send the others."""
        self.is_cancelled = True
        self._fail(CallCancelled(f"{self.site.method} was cancelled; make the call again"))
        return True

    def late(self, timeout_s: float) -> CallTimeout:
        """The `CallTimeout` to raise after a wait of ``timeout_s``."""
        calls = self._running()
        if not calls:
            return late(self, timeout_s, "takes its rows, or was submitted behind it")
        missing = [rank for call in calls for rank in call.missing]
        stacks = {rank: stack for call in calls for rank, stack in call.stacks().items()}
        return CallTimeout(self.site.method, tuple(missing), timeout_s, stacks)

    def watch(self, when_done: Callable[[], object]) -> None:
        """Call a function when it is done."""
        self._watchers.add(when_done)

    def table(self) -> Table:
        """The rows, in the order of the batch; all chunks are done, without an error."""
        if self._table is None:
            tables = [table_of(future) for future in self._futures]
            self._table = stack_chunks(tables, self._chunks, self.site.method)
        return self._table

    def _brought(self, deadline: Deadline) -> Done:
        try:
            return Done(value=self._joined(deadline))
        except (RowsLost, CallTimeout, ResourceError) as error:
            if self.keeps_rows:
                raise  # the rows of other chunks may be there, or these rows later
            return Done(error)
        except Exception as error:  # a chunk's value cannot be read, or values cannot be joined
            return Done(error)

    def _joined(self, deadline: Deadline) -> Any:
        values: list[Any] = []
        numbers: list[Index] = []
        ranks: list[int | None] = []
        failed: list[FailedRows] = []
        for chunk, future in zip(self._chunks, self._futures, strict=True):
            try:
                values.append(future.result(deadline.left()))
                numbers.append(chunk)
                ranks.append(future.rank)
            except Exception as error:
                if not self._returns_errors:
                    raise
                failed.append(FailedRows(chunk, error))
        try:
            value = self._join(numbers, values, ranks) if values else None
        except CollectError as error:
            raise self.site.located(error) from error.__cause__
        if not self._returns_errors:
            return value
        return PartialResult(value, sorted(int(row) for chunk in numbers for row in chunk), tuple(failed))

    def release(self) -> None:
        """Release the rows that are there, or will be."""
        self._is_released = True
        for future in self._futures:
            future.release()
        self._table = None
        if self.done is not None and self.done.error is None:
            self.done = Done(is_here=False)

    def _chunk_done(self, future: Future[Any]) -> None:
        error = future.exception()
        if error is not None and not self._returns_errors:
            self._fail(error)
            return
        with self.lock:
            puller = self._puller
            if puller is None or puller.n_left:
                return
            self._chunks, self._futures, self._puller = puller.chunks, puller.done, None
            self._sent.set()  # before its end: what is over is given up no more if Ctrl-C comes now
            if self._is_released and self.keeps_rows:
                self.release()
            self.done = Done(is_here=False)
            self._finished.set()
        self._watchers.tell()

    def _fail(self, error: BaseException) -> None:
        with SigintSafeLock(), self.lock:  # so that after Ctrl-C it does not block later calls
            if self.done is not None:
                return
            self.done = Done(error)
            self._begin, self.parents = None, ()
            self._sent.set()
            self._finished.set()
            puller, self._puller = self._puller, None
        try:
            if puller is not None:
                puller.stop()
        finally:
            self._work.advance()
            self._watchers.tell()
