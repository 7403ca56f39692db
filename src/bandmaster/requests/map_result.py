"""`MapResult`: the whole result of a map, in the order of its rows."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from bandmaster.calls.future import Future, table_of
from bandmaster.calls.result import Done, Result
from bandmaster.errors import BatchError, CallTimeout, CollectError, ResourceError, RowsLost
from bandmaster.flow.feed import Feed
from bandmaster.flow.stream import Arrivals
from bandmaster.plan.batch_types import Index
from bandmaster.plan.collection import collect
from bandmaster.plan.rows import RealRows
from bandmaster.plan.transfer import Concat
from bandmaster.platform.deadline import Deadline
from bandmaster.requests.parts import MapOptions
from bandmaster.rows import table as handles
from bandmaster.rows.table import Table

AGAIN = "wait again with error.future.result(), or cancel it with error.future.cancel()"


class FailedRows(NamedTuple):
    """The rows of a request of a map that has failed.

    Attributes:
        numbers: The numbers of the rows in the batch.
        error: The error of the request.
    """

    numbers: Index
    error: BaseException


class PartialResult(NamedTuple):
    """The result of a map with ``on_error="return"``.

    Attributes:
        value: The results of the requests that have not failed, in the order of the batch: a list of values of single
            rows; or the joined rows of chunks, None if all have failed.
        numbers: The numbers of their rows in the batch.
        failed: The requests that have failed.
    """

    value: Any
    numbers: list[int]
    failed: tuple[FailedRows, ...]


class MapResult(Result):
    """The values of all requests of a map in one, in the order of the rows.

    Args:
        feed: Sends the requests.
        arrivals: Has their futures when all are done.
        how: The options of the map.
    """

    def __init__(self, feed: Feed, arrivals: Arrivals, how: MapOptions) -> None:
        super().__init__(feed.site, keeps_rows=how.chunk is not None and how.on_error == "raise")
        self._feed, self._arrivals, self._how = feed, arrivals, how
        self._parts: Sequence[Future[Any]] = ()
        self._table: Table | None = None
        feed.on_end = self._look

    @property
    def waits_for(self) -> Sequence[Result]:
        """The requests that run, and the calls of the rows that they take."""
        return self._feed.waits_for

    @property
    def is_cancelled(self) -> bool:  # type: ignore[override]  # here it is computed
        """Whether the map was cancelled."""
        return self._feed.is_cancelled

    def _look(self) -> None:
        if self.wait(0):
            self.tell()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until all requests are done, or one has failed; False if the time is over before."""
        if self.done is None:
            if not self._feed.ended.wait(Deadline(timeout_s).left()):
                return False
            with self.lock:
                if self.done is None:
                    self._conclude()
            if self.is_released:
                self.release()
        if not self.keeps_rows:
            with contextlib.suppress(Exception):  # it is the result
                self.value(Deadline(math.inf))
        return True

    def _conclude(self) -> None:
        feed = self._feed
        assert feed.done is not None, "it has ended"
        self._parts = sorted([*self._parts, *self._arrivals.drained()], key=lambda part: next(iter(_numbers(part)), 0))
        self.done = Done(feed.done.error) if feed.done.error is not None else Done(is_here=False)

    def cancel(self) -> bool:
        """Cancel the map."""
        return self._feed.cancel()

    def late(self, timeout_s: float) -> CallTimeout:
        """The `CallTimeout` to raise after a wait of ``timeout_s``."""
        return self._feed.late(timeout_s, AGAIN)

    def table(self) -> Table:
        """The rows, in the order of the batch; all chunks are done, without an error."""
        if self._table is None:
            self._table = _stacked(self._parts, self.site.method)
        return self._table

    def _brought(self, deadline: Deadline) -> Done:
        try:
            done = Done(value=self._joined(deadline))
        except (RowsLost, CallTimeout, ResourceError) as error:
            if self.keeps_rows:
                raise  # the rows of other chunks may be there, or these rows later
            done = Done(error)
        except Exception as error:  # a chunk's value cannot be read, or values cannot be joined
            done = Done(error)
        if not self.keeps_rows:
            self._parts = ()
        return done

    def _joined(self, deadline: Deadline) -> Any:
        values: dict[Future[Any], Any] = {}
        failed: list[FailedRows] = []
        for part in self._parts:
            try:
                values[part] = part.result(deadline.left())
            except Exception as error:
                if self._how.on_error == "raise":
                    raise
                failed.append(FailedRows(_numbers(part), error))
        if self._how.chunk is None:
            value: Any = list(values.values())
        else:
            value = self._concatenated(values) if values else None
        if self._how.on_error == "raise":
            return value
        return PartialResult(value, sorted(int(row) for one in values for row in _numbers(one)), tuple(failed))

    def _concatenated(self, values: Mapping[Future[Any], Any]) -> Any:
        """Join the values of chunks in the order of their rows.

        Raises:
            CollectError: The values cannot be joined; the message names the rank and the chunk, which count from 0.
        """
        chunks, numbers = list(values), tuple(range(len(values)))
        rows = RealRows(tuple(map(_numbers, chunks)), holder="chunk")
        try:
            return collect(Concat("dp"), numbers, list(values.values()), self.site.method, rows)
        except CollectError as error:
            failure = error.failures[error.rank]
            failure = replace(failure, summary=f"in chunk {error.rank}, {failure.summary}")
            where = chunks[error.rank].rank or 0
            raise self.site.located(CollectError(self.site.method, {where: failure})) from error.__cause__

    def release(self) -> None:
        """Release the rows that are there, or will be."""
        self.is_released = True
        if self.keeps_rows and self.done is not None and self.done.error is None:
            for part in self._parts:
                part.release()
            self._table, self.done = None, Done(is_here=False)


def _numbers(part: Future[Any]) -> Index:
    """The numbers of the rows of a request in the batch."""
    assert part.numbers is not None, "requests of maps are labelled with their rows"
    return part.numbers


def _stacked(chunks: Sequence[Future[Any]], method: str) -> Table:
    """A table of the rows of all chunks in their order in the batch; no row moves.

    Raises:
        BatchError: The chunks have different columns, or the order cannot be restored.
    """
    tables = [table_of(chunk) for chunk in chunks]
    with_rows = [number for number, table in enumerate(tables) if table.n_rows] or range(len(tables))
    stacked = handles.concat([tables[number] for number in with_rows], [f"chunk {number}" for number in with_rows])
    order = RealRows(tuple(map(_numbers, chunks))).order(range(len(chunks)))
    if order is None:
        return stacked
    for table, chunk in zip(tables, chunks, strict=True):
        if table.n_rows != len(_numbers(chunk)):
            raise BatchError(
                f"{method} returned {table.n_rows} rows for {len(_numbers(chunk))} rows of a batch that was not sent "
                "in its order, so the order cannot be restored; return one row for each row, or call map without "
                "group_by"
            )
    restored: Table = handles.take(stacked, order)
    return restored
