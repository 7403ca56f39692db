"""The values of all requests of a map in one, in the order of the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from bandmaster.calls.future import Future, table_of
from bandmaster.calls.request import CallSite
from bandmaster.errors import BatchError, CollectError
from bandmaster.plan.batch_types import Index
from bandmaster.plan.collection import collect
from bandmaster.plan.rows import RealRows
from bandmaster.plan.transfer import Concat
from bandmaster.platform.deadline import Deadline
from bandmaster.requests.parts import MapOptions
from bandmaster.rows import table as handles
from bandmaster.rows.table import Table


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


def joined(parts: Sequence[Future[Any]], how: MapOptions, site: CallSite, deadline: Deadline) -> Any:
    """The values of requests that are done, as one: a list of the values of rows, or the joined rows of chunks.

    Args:
        parts: The futures of the requests, in the order of their rows.
        how: The options of the map.
        site: Its `CallSite`.
        deadline: When the rows have to be here.

    Raises:
        CollectError: The values cannot be joined.
        Exception: The error of a request, unless these are returned.
    """
    values: dict[Future[Any], Any] = {}
    failed: list[FailedRows] = []
    for part in parts:
        try:
            values[part] = part.result(deadline.left())
        except Exception as error:
            if how.on_error == "raise":
                raise
            failed.append(FailedRows(numbers_of(part), error))
    if how.chunk is None:
        value: Any = list(values.values())
    else:
        value = _concatenated(values, site) if values else None
    if how.on_error == "raise":
        return value
    return PartialResult(value, sorted(int(row) for one in values for row in numbers_of(one)), tuple(failed))


def _concatenated(values: Mapping[Future[Any], Any], site: CallSite) -> Any:
    """Join the values of chunks in the order of their rows.

    Raises:
        CollectError: The values cannot be joined; the message names the rank and the chunk, which count from 0.
    """
    chunks, numbers = list(values), tuple(range(len(values)))
    rows = RealRows(tuple(map(numbers_of, chunks)), holder="chunk")
    try:
        return collect(Concat("dp"), numbers, list(values.values()), site.method, rows)
    except CollectError as error:
        failure = error.failures[error.rank]
        failure = replace(failure, summary=f"in chunk {error.rank}, {failure.summary}")
        where = chunks[error.rank].rank or 0
        raise site.located(CollectError(site.method, {where: failure})) from error.__cause__


def numbers_of(part: Future[Any]) -> Index:
    """The numbers of the rows of a request in the batch."""
    assert part.numbers is not None, "requests of maps are labelled with their rows"
    return part.numbers


def stacked(chunks: Sequence[Future[Any]], method: str) -> Table:
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
                "in its order, so the order cannot be restored; return one row for each row, or call map without "
                "group_by"
            )
    restored: Table = handles.take(stacked, order)
    return restored
