"""Handle arithmetic: which rows and columns of kept results a handle stands for. Pure; it moves no row.

A *table* is an expression over kept results. Its leaves say which rows of a result are meant::

    result.rename(a="b")[10:20].join(other)

        Joined ─┬─ Renamed {b: a} ── Taken(result, range(10, 20))
                └─ Taken(other, range(0, 10))

Taking rows changes the leaves only, so that a table stays as large as its joins and concatenations. `pieces` says what
a receiver needs of each part of each result; `assemble` makes the rows of that, where the receiver is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from bandmaster.errors import BatchError
from bandmaster.plan.batch import concat_rows, slice_rows, take_rows
from bandmaster.plan.batch_types import Index
from bandmaster.plan.columns import Schema, choose_columns, join_columns

__all__ = [
    "Elsewhere",
    "Joined",
    "Part",
    "Pieces",
    "Renamed",
    "Result",
    "Stacked",
    "Table",
    "Taken",
    "assemble",
    "check_named",
    "concat",
    "join",
    "nbytes_of",
    "pieces",
    "repeated",
    "results_of",
    "rows_by_part",
    "select",
    "shuffled",
    "take",
]

Names = Mapping[str, str]  # by the new name of a column, its name before


class Part(NamedTuple):
    """What one rank has kept of a result.

    Attributes:
        rank: The rank; None for rows of the controller.
        n_rows: Number of rows.
        nbytes: Their encoded size.
        kept: Where they lie, as the backend knows it.
    """

    rank: int | None
    n_rows: int
    nbytes: int
    kept: Any


@dataclass(frozen=True, eq=False)
class Result:
    """The rows that a call has left on its ranks.

    Attributes:
        method: ``"Class.method"``, for messages.
        parts: In the order of the rows.
        schema: The columns.
    """

    method: str
    parts: tuple[Part, ...]
    schema: Schema

    @cached_property
    def starts(self) -> np.ndarray[Any, Any]:
        """Number of the first row of each part; and the number of rows as the last item."""
        return np.array([0, *accumulate(part.n_rows for part in self.parts)])

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return int(self.starts[-1])


@dataclass(frozen=True, eq=False)
class Taken:
    """Some rows of a result."""

    result: Result
    index: Index

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return len(self.index)

    @property
    def schema(self) -> Schema:
        """The columns, by name."""
        share = self.n_rows / (self.result.n_rows or 1)
        columns = self.result.schema.items()
        return {name: column._replace(nbytes=round(column.nbytes * share)) for name, column in columns}


@dataclass(frozen=True, eq=False)
class Renamed:
    """Some columns of a table, with their new names."""

    table: Table
    names: Names

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return self.table.n_rows

    @property
    def schema(self) -> Schema:
        """The columns, by name."""
        before = self.table.schema
        return {new: before[old] for new, old in self.names.items()}


@dataclass(frozen=True, eq=False)
class Joined:
    """The columns of several tables with equally many rows."""

    tables: tuple[Table, ...]

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return self.tables[0].n_rows

    @property
    def schema(self) -> Schema:
        """The columns, by name."""
        return {name: column for table in self.tables for name, column in table.schema.items()}


@dataclass(frozen=True, eq=False)
class Stacked:
    """The rows of several tables with the same columns.

    Attributes:
        tables: The tables.
        order: For each row its number in the concatenation of the tables; None for that order.
    """

    tables: tuple[Table, ...]
    order: np.ndarray[Any, Any] | None = None

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return sum(table.n_rows for table in self.tables) if self.order is None else len(self.order)

    @property
    def schema(self) -> Schema:
        """The columns, by name."""
        schemas = [table.schema for table in self.tables]
        return {
            name: column._replace(nbytes=sum(schema[name].nbytes for schema in schemas))
            for name, column in schemas[0].items()
        }


Table = Taken | Renamed | Joined | Stacked


# --- operations ---


def take(table: Table, index: Index) -> Table:
    """The rows of a table with these numbers, all of which it has."""
    if isinstance(table, Taken):
        return Taken(table.result, _compose(table.index, index))
    if isinstance(table, Renamed):
        return Renamed(take(table.table, index), table.names)
    if isinstance(table, Joined):
        return Joined(tuple([take(one, index) for one in table.tables]))
    whole = index if table.order is None else _compose(table.order, index)
    starts = np.array([0, *accumulate(one.n_rows for one in table.tables)])
    found, order = _partition(whole, starts)
    tables = tuple([take(table.tables[number], rows) for number, rows in found or [(0, range(0))]])
    return tables[0] if len(tables) == 1 and order is None else Stacked(tables, order)


def select(table: Table, names: Names) -> Table:
    """Some columns of a table.

    Args:
        table: The table.
        names: By the new name of each column, its name in the table, which has all of them.
    """
    if isinstance(table, Renamed):
        return Renamed(table.table, {new: table.names[old] for new, old in names.items()})
    return Renamed(table, dict(names))


def join(tables: Sequence[Table], labels: Sequence[str]) -> Table:
    """The columns of several tables side by side.

    Args:
        tables: At least one.
        labels: What messages call each.

    Raises:
        BatchError: They have different numbers of rows, a name twice, or columns without a name.
    """
    taken: dict[str | None, str] = {}
    for table, label in zip(tables, labels, strict=True):
        if table.n_rows != tables[0].n_rows:
            raise BatchError(
                f"cannot join {labels[0]}, which has {tables[0].n_rows} rows, and {label}, which has {table.n_rows}; "
                "join results of the same rows"
            )
        check_named(table, label, "join")
        for name in table.schema:
            if name in taken:
                raise BatchError(
                    f"cannot join {taken[name]} and {label}: both have a column {name!r}; rename one of them"
                )
            taken[name] = label
    flat = [one for table in tables for one in (table.tables if isinstance(table, Joined) else [table])]
    return flat[0] if len(flat) == 1 else Joined(tuple(flat))


def concat(tables: Sequence[Table], labels: Sequence[str]) -> Table:
    """The rows of several tables one after the other.

    Raises:
        BatchError: They have different columns.
    """
    first = tables[0].schema
    for table, label in zip(tables, labels, strict=True):
        if table.schema.keys() != first.keys():
            raise BatchError(
                f"cannot concatenate {labels[0]} with {_listed(first)} and {label} with {_listed(table.schema)}; "
                "select or rename columns until they are the same"
            )
    return tables[0] if len(tables) == 1 else Stacked(tuple(tables))


def repeated(n_rows: int, n: int) -> Index:
    """Every row ``n`` times, one copy next to the other."""
    return np.repeat(np.arange(n_rows), n)


def shuffled(n_rows: int, seed: int) -> Index:
    """All rows in an order that depends on the seed alone."""
    return np.random.default_rng(seed).permutation(n_rows)


def check_named(table: Table, label: str, what: str) -> None:
    """Raise BatchError if the table's columns have no names."""
    if None in table.schema:
        kind = table.schema[None]
        raise BatchError(
            f"cannot {what} {label}: its rows have no named columns, they are {kind!r}; return a dict of columns or a "
            "TensorDict"
        )


# --- what a receiver needs ---


class Pieces(NamedTuple):
    """Rows of parts of one result, for a receiver.

    Attributes:
        parts: For each part the label of its payload, and the rows of it: ``(start, stop)`` or their numbers.
        order: For each row its number in the concatenation of the parts' rows; None for that order.
    """

    parts: tuple[tuple[Hashable, tuple[int, int] | np.ndarray[Any, Any]], ...]
    order: np.ndarray[Any, Any] | None = None


class Elsewhere(NamedTuple):
    """Stands for rows among the arguments that are sent to a rank.

    Attributes:
        plan: What `pieces` has returned.
    """

    plan: Any


def pieces(table: Table, label: Callable[[Part], Hashable]) -> Any:
    """The table with `Pieces` as leaves, which `assemble` understands.

    Args:
        table: The table.
        label: Called with every part that is needed; returns the label of its payload.
    """
    if isinstance(table, Taken):
        found, order = _partition(table.index, table.result.starts)
        if not found:  # an empty part tells the type of the rows
            found = [(0, range(0))]
        parts = table.result.parts
        return Pieces(tuple([(label(parts[number]), _packed(rows)) for number, rows in found]), order)
    if isinstance(table, Renamed):
        return Renamed(pieces(table.table, label), table.names)
    inner = tuple([pieces(one, label) for one in table.tables])
    return Joined(inner) if isinstance(table, Joined) else Stacked(inner, table.order)


def assemble(plan: Any, payloads: Callable[[Hashable], Any]) -> Any:
    """The rows that `pieces` has planned, as one value.

    Args:
        plan: What `pieces` returned.
        payloads: Returns the value of the part with a label.
    """
    if isinstance(plan, Pieces):
        values = [_rows_of(payloads(label), rows) for label, rows in plan.parts]
        return _in_order(values, plan.order)
    if isinstance(plan, Renamed):
        return choose_columns(assemble(plan.table, payloads), plan.names)
    values = [assemble(one, payloads) for one in plan.tables]
    return join_columns(values) if isinstance(plan, Joined) else _in_order(values, plan.order)


def rows_by_part(table: Table) -> dict[int, tuple[Part, int]]:
    """For each part that the table has rows of, by identity: the part, and how many rows."""
    if isinstance(table, Taken):
        parts = table.result.parts
        return {id(parts[n]): (parts[n], len(rows)) for n, rows in _partition(table.index, table.result.starts)[0]}
    found: dict[int, tuple[Part, int]] = {}
    for one in _inner(table):
        for key, (part, n) in rows_by_part(one).items():
            found[key] = (part, n + (found[key][1] if key in found else 0))
    return found


def nbytes_of(table: Table) -> float:
    """Encoded size of the rows of a table, estimated from its share in the rows and columns of each result."""
    if isinstance(table, Taken):
        return sum(part.nbytes * n / (part.n_rows or 1) for part, n in rows_by_part(table).values())
    if isinstance(table, Renamed):
        before = sum(column.nbytes for column in table.table.schema.values())
        share = sum(column.nbytes for column in table.schema.values()) / before if before else 1.0
        return nbytes_of(table.table) * share
    return sum(nbytes_of(one) for one in table.tables)


def results_of(table: Table) -> list[Result]:
    """The results that a table has rows of."""
    if isinstance(table, Taken):
        return [table.result]
    return list(dict.fromkeys(result for one in _inner(table) for result in results_of(one)))


def _inner(table: Renamed | Joined | Stacked) -> Sequence[Table]:
    return [table.table] if isinstance(table, Renamed) else table.tables


def _rows_of(value: Any, rows: tuple[int, int] | np.ndarray[Any, Any]) -> Any:
    return slice_rows(value, *rows) if isinstance(rows, tuple) else take_rows(value, rows)


def _in_order(values: Sequence[Any], order: np.ndarray[Any, Any] | None) -> Any:
    value = values[0] if len(values) == 1 else concat_rows(values)
    return value if order is None else take_rows(value, order)


def _packed(rows: Index) -> tuple[int, int] | np.ndarray[Any, Any]:
    return (rows.start, rows.stop) if isinstance(rows, range) else rows


def _compose(first: Index, then: Index) -> Index:
    """``first[i] for i in then``, as a range where it is one."""
    if isinstance(then, range):
        return first[then.start : then.stop]
    if isinstance(first, range):
        return _as_range(then + first.start)
    return _as_range(first[then])


def _as_range(index: np.ndarray[Any, Any]) -> Index:
    if len(index) and index[-1] - index[0] == len(index) - 1 and (np.diff(index) == 1).all():
        return range(int(index[0]), int(index[0]) + len(index))
    return index if len(index) else range(0)


def _partition(
    index: Index, starts: np.ndarray[Any, Any]
) -> tuple[list[tuple[int, Index]], np.ndarray[Any, Any] | None]:
    """The rows of each interval between ``starts``.

    Returns:
        ``(number of the interval, rows counted from its start)`` for each that has any, and the order in which the
        concatenation of these rows has to be read to get the index; None for as they are.
    """
    if isinstance(index, range):
        first = int(np.searchsorted(starts, index.start, "right")) - 1
        found: list[tuple[int, Index]] = []
        for number in range(first, len(starts) - 1):
            start, stop = int(starts[number]), int(starts[number + 1])
            if start >= index.stop:
                break
            rows = range(max(index.start, start) - start, min(index.stop, stop) - start)
            if rows:
                found.append((number, rows))
        return found, None
    owners = np.searchsorted(starts, index, "right") - 1
    numbers = np.flatnonzero(np.bincount(owners))  # np.unique would import masked arrays
    found = [(int(number), _as_range(index[owners == number] - starts[number])) for number in numbers]
    if (np.diff(owners) >= 0).all():
        return found, None
    order = np.empty(len(index), dtype=np.int64)
    order[np.argsort(owners, kind="stable")] = np.arange(len(index))
    return found, order


def _listed(schema: Schema) -> str:
    if None in schema:
        return f"rows of {schema[None]!r}"
    return "the columns " + ", ".join(map(repr, schema))
