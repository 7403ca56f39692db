"""The options of a map, and its plan: which rows go with each of its requests. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bandmaster.calls.options import FlowOptions, check_count
from bandmaster.errors import BatchError, UsageError
from bandmaster.plan.arguments import BoundArgument, SplitArguments, batch_of, declared
from bandmaster.plan.batch import KNOWN, Batch, describe
from bandmaster.plan.batch_types import Index
from bandmaster.plan.transfer import Outgoing


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
        check_count("in_flight", self.in_flight)
        check_count("chunk", self.chunk)
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
    batches = {argument.key: batch_of(argument, method) for argument in arguments if declared(argument, rules) is None}
    members = [argument for argument in arguments if batches.get(argument.key) is not None]
    whole = tuple([argument for argument in arguments if batches.get(argument.key) is None])
    if not members:
        types = ", ".join(f"{argument.name!r} is {describe(argument.value)}" for argument in arguments)
        raise BatchError(
            f"{method}.map got no batch, so there are no rows to send: {types or 'no arguments'}; pass one ({KNOWN})"
        )
    cut = SplitArguments(members, batches, arguments, method)
    if how.chunk is None:
        return Parts(range(cut.n_rows), tuple(cut.batches), whole)
    keys = None
    if how.group_by is not None:
        why = f"{method}.map was called with group_by={how.group_by!r}"
        column = cut.column(how.group_by, why)
        if column.shape != (cut.n_rows,):
            raise BatchError(
                f"{why}, which has shape {column.shape} for {cut.n_rows} rows; pass one value for each row"
            )
        keys = column.tolist()
    return Parts(chunk_numbers(cut.n_rows, how.chunk, keys), tuple(cut.batches), whole)


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
