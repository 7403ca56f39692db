"""The rows of a map: its options, which rows go with each of its requests, and the values of all of them in one."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from bandmaster.calls.future import Future
from bandmaster.calls.options import FlowOptions, check_count
from bandmaster.calls.request import CallSite
from bandmaster.errors import BatchError, CollectError, UsageError
from bandmaster.plan.arguments import BoundArgument, SplitArguments, batch_of, declared
from bandmaster.plan.batch import KNOWN, Batch, describe
from bandmaster.plan.batch_types import Index
from bandmaster.plan.collection import collect
from bandmaster.plan.columns import as_array
from bandmaster.plan.rows import RealRows
from bandmaster.plan.transfer import Concat, Outgoing
from bandmaster.platform.deadline import Deadline
from bandmaster.rows import table as handles
from bandmaster.rows.table import Table


@dataclass(frozen=True)
class MapOptions(FlowOptions):
    """The options of a map; see `RequestMethod.map`.

    Attributes:
        in_flight: Most requests that are open at a time; None for as many as the replicas have places for.
        chunk: Most rows of each request; None for one row each, which is passed without its row dim.
        group_by: The column, or the argument, whose equal values keep rows in one chunk.

    Raises:
        UsageError: A value is invalid.
    """

    in_flight: int | None = None
    chunk: int | None = None
    group_by: str | None = None

    def __post_init__(self) -> None:
        check_count(self, "in_flight")
        check_count(self, "chunk")
        super().__post_init__()
        if self.group_by is not None and not isinstance(self.group_by, str):
            raise UsageError(f"group_by must be the name of a column or of an argument, got {self.group_by!r}")
        if self.group_by is not None and self.chunk is None:
            raise UsageError("group_by is about chunks of rows; set chunk= as well, to their number of rows")


@dataclass(frozen=True, eq=False)
class Parts:
    """The requests of a map.

    Attributes:
        numbers: For each request the numbers of its rows, or the number of the row that it gets.
        split: The arguments of which each request gets some rows.
        whole: The arguments that go with every request.
    """

    numbers: Sequence[Index | int]
    split: tuple[tuple[BoundArgument, Batch], ...]
    whole: tuple[BoundArgument, ...]

    def of(self, part: int) -> list[BoundArgument]:
        """The arguments of a request of which it gets its rows alone."""
        return [argument._replace(value=batch.sent(self.numbers[part])) for argument, batch in self.split]

    def rows_of(self, part: int) -> Index:
        """The numbers of the rows of a request."""
        numbers = self.numbers[part]
        return range(numbers, numbers + 1) if isinstance(numbers, int) else numbers


def plan_parts(
    arguments: Sequence[BoundArgument], rules: Mapping[str, Outgoing], method: str, how: MapOptions
) -> Parts:
    """Decide which arguments of a map are cut, and into which rows: those that are batches and have no rule.

    Args:
        arguments: The bound arguments.
        rules: Dispatch rules by parameter name.
        method: ``"Class.method"``, for messages.
        how: Its ``chunk`` and ``group_by``.

    Raises:
        BatchError: There is no batch, batches have different row counts, or ``group_by`` names no column.
    """
    pairs = [(one, batch_of(one, method) if declared(one, rules) is None else None) for one in arguments]
    members = [(argument, batch) for argument, batch in pairs if batch is not None]
    whole = tuple([argument for argument, batch in pairs if batch is None])
    if not members:
        types = ", ".join(f"{argument.name!r} is {describe(argument.value)}" for argument in arguments)
        raise BatchError(
            f"{method}.map got no batch, so there are no rows to send: {types or 'no arguments'}; pass one ({KNOWN})"
        )
    cut = SplitArguments(members, arguments, method)
    if how.chunk is None:
        return Parts(range(cut.n_rows), tuple(cut.batches), whole)
    try:
        keys = None if how.group_by is None else _keys(cut, how.group_by, method)
        return Parts(chunk_numbers(cut.n_rows, how.chunk, keys), tuple(cut.batches), whole)
    except (TypeError, RuntimeError) as error:  # a value has no hash; torch makes no array of a jagged column
        raise BatchError(
            f"{method}.map cannot group rows by {how.group_by!r} ({error}); pass a number, a string or a tuple of them "
            "for each row"
        ) from None


def _keys(cut: SplitArguments, group_by: str, method: str) -> list[Any]:
    """The value of each row by which rows are grouped."""
    why = f"{method}.map was called with group_by={group_by!r}"
    found = cut.column(group_by, why)
    if isinstance(found, list):  # whose values an array would convert to one type, so that different ones are equal
        return [value.tolist() if hasattr(value, "tolist") else value for value in found]
    column = as_array(found)
    if column.shape != (cut.n_rows,):
        raise BatchError(f"{why}, which has shape {column.shape} for {cut.n_rows} rows; pass one value for each row")
    return list(column.tolist())


def chunk_numbers(n_rows: int, size: int, keys: Sequence[Hashable] | None = None) -> tuple[Index, ...]:
    """Cut rows into chunks; zero rows make one chunk without rows.

    Args:
        n_rows: Number of rows.
        size: Rows of each chunk; the last one may have fewer.
        keys: For each row the key of its group. Rows of a group come into one chunk, which then may have fewer
            rows, or more if the group alone has more. Groups come in the order of their first rows.

    Returns:
        For each chunk the numbers of its rows, ascending.

    Example:
        >>> chunk_numbers(5, 2)
        (range(0, 2), range(2, 4), range(4, 5))
        >>> [chunk.tolist() for chunk in chunk_numbers(5, 2, ["a", "b", "a", "b", "c"])]
        [[0, 2], [1, 3], [4]]
    """
    if keys is None or not n_rows:
        starts = range(0, n_rows, size) or [0]
        return tuple([range(start, min(start + size, n_rows)) for start in starts])
    groups: dict[Hashable, list[int]] = {}
    for row, key in enumerate(keys):
        groups.setdefault(key, []).append(row)
    chunks: list[list[int]] = []
    for rows in groups.values():
        if chunks and len(chunks[-1]) + len(rows) <= size:
            chunks[-1] += rows
        else:
            chunks.append(list(rows))
    return tuple([np.array(sorted(rows), dtype=np.int64) for rows in chunks])


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
    tables = [chunk._table() for chunk in chunks]
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
    return handles.take(stacked, order)
