"""`Pulled`: the result of a call whose chunks go to free replicas; it joins the results of the chunks in order."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from bandmaster.calls.future import Future, table_of
from bandmaster.calls.options import FlowOptions
from bandmaster.calls.request import CallSite
from bandmaster.calls.result import Done, Result
from bandmaster.calls.submission import Submitter
from bandmaster.errors import BatchError, CallTimeout, CollectError, ResourceError, RowsLost
from bandmaster.flow.feed import Feed
from bandmaster.plan.batch_types import Index
from bandmaster.plan.collection import collect
from bandmaster.plan.rows import CollectEach, RealRows
from bandmaster.plan.transfer import Concat, Incoming
from bandmaster.platform.deadline import Deadline
from bandmaster.rows import table as handles
from bandmaster.rows.table import Table

AGAIN = "wait again with error.future.result(), or cancel it with error.future.cancel()"


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


class Pulled(Feed, Result):
    """The result of a call whose chunks go to free replicas.

    Args:
        site: Its `CallSite`.
        submitter: Sends the calls of the group.
        how: The user's options.
        incoming: The collect rule of the method.
    """

    is_one_result = True
    tell = Result.tell

    def __init__(
        self, site: CallSite, submitter: Submitter, how: FlowOptions, incoming: Incoming | CollectEach
    ) -> None:
        self._parts: list[Future[Any] | None] = []
        Result.__init__(self, site, keeps_rows=isinstance(incoming, Concat) and how.on_error != "return")
        Feed.__init__(self, site, submitter, how, self._parts.append)
        self._incoming = incoming
        self._table: Table | None = None

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until all chunks are done, or one has failed; False if the time is over before."""
        deadline = Deadline(timeout_s)
        if self.done is None:
            self.work.wait_up_to(self, deadline)
        if not self.ended.wait(deadline.left()):
            return False
        if self.is_released:
            self.release()
        if not self.keeps_rows:
            with contextlib.suppress(Exception):  # it is the result
                self.value(Deadline(math.inf))
        return True

    def late(self, timeout_s: float, what_next: str = AGAIN) -> CallTimeout:
        """The `CallTimeout` to raise after a wait of ``timeout_s``."""
        return super().late(timeout_s, what_next)

    @property
    def _chunks(self) -> list[Future[Any]]:
        """The futures of all chunks, in the order of their first rows in the batch."""
        return sorted(filter(None, list(self._parts)), key=lambda future: next(iter(numbers_of(future)), 0))

    def table(self) -> Table:
        """The rows, in the order of the batch; all chunks are done, without an error."""
        if self._table is None:
            self._table = _stacked(self._chunks, self.site.method)
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
        values: dict[Future[Any], Any] = {}
        failed: list[FailedRows] = []
        for future in self._chunks:
            try:
                values[future] = future.result(deadline.left())
            except Exception as error:
                if not self._returns_errors:
                    raise
                failed.append(FailedRows(numbers_of(future), error))
        value = self._collected(values) if values else None
        if not self._returns_errors:
            return value
        return PartialResult(value, sorted(int(row) for one in values for row in numbers_of(one)), tuple(failed))

    def _collected(self, values: Mapping[Future[Any], Any]) -> Any:
        """Join the values of chunks in the order of their rows, or reduce them.

        Raises:
            CollectError: The values cannot be joined; the message names the rank and the chunk, which count from 0.
        """
        rule, chunks, numbers = self._incoming, list(values), tuple(range(len(values)))
        if isinstance(rule, CollectEach):
            rule = CollectEach(tuple([(each, numbers) for each, _ in rule.collects]))
        rows = RealRows(tuple(map(numbers_of, chunks)), holder="chunk")
        try:
            return collect(rule, numbers, list(values.values()), self.site.method, rows)
        except CollectError as error:
            failure = error.failures[error.rank]
            failure = replace(failure, summary=f"in chunk {error.rank}, {failure.summary}")
            where = chunks[error.rank].rank or 0
            raise self.site.located(CollectError(self.site.method, {where: failure})) from error.__cause__

    def release(self) -> None:
        """Release the rows that are there, or will be."""
        self.is_released = True
        if self.keeps_rows and self.done is not None and self.done.error is None:
            for future in self._chunks:
                future.release()
            self._table, self.done = None, Done(is_here=False)


def numbers_of(chunk: Future[Any]) -> Index:
    """The numbers of the rows of a chunk in the batch."""
    assert chunk.numbers is not None, "chunks are labelled with their rows"
    return chunk.numbers


def _stacked(chunks: Sequence[Future[Any]], method: str) -> Table:
    """A table of the rows of all chunks in their order in the batch; no row moves.

    Raises:
        BatchError: The chunks have different columns, or the order cannot be restored.
    """
    tables = [table_of(chunk) for chunk in chunks]
    with_rows = [number for number, table in enumerate(tables) if table.n_rows] or range(len(tables))
    stacked = handles.concat([tables[number] for number in with_rows], [f"chunk {number}" for number in with_rows])
    order = RealRows(tuple(map(numbers_of, chunks))).order(range(len(chunks)))
    if order is None:
        return stacked
    for table, chunk in zip(tables, chunks, strict=True):
        if table.n_rows != len(numbers_of(chunk)):
            raise BatchError(
                f"{method} returned {table.n_rows} rows for {len(numbers_of(chunk))} rows of a batch that was not sent "
                "in its order, so the order cannot be restored; return one row for each row, or call it without "
                "group_by"
            )
    restored: Table = handles.take(stacked, order)
    return restored
