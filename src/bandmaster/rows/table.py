"""Handle arithmetic: the rows and columns of kept results that a handle stands for. Pure; it moves no row.

A *table* is an expression over kept results. Its leaves select rows of a result::

    result.rename(a="b")[10:20].join(other)

        Joined ─┬─ Renamed {b: a} ── Taken(result, range(10, 20))
                └─ Taken(other, range(0, 10))

Taking rows changes only the leaves, so that the size of a table depends only on its joins and concatenations. A
receiver gets the same table with `Addressed` leaves: these refer to the parts that the receiver needs by the labels of
their payloads, and not to results. `assemble` makes the rows from that table in the receiver.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from bandmaster.errors import BatchError
from bandmaster.plan.batch import Batch, concat_rows, copies_rows, join_rows, required_batch, take_rows
from bandmaster.plan.batch_types import Index
from bandmaster.plan.columns import Schema, choose_columns, dtypes_of, join_columns, stacked_schema

JoinPath = tuple[int, ...]  # of a table: its number in each of the joins around it
Names = Mapping[Any, Any]  # the former name of a column, by its new name
FEW_ROWS = 32  # looking them up and slicing them one by one is faster than numpy


class Part(NamedTuple):
    """The rows of a result that one rank has kept.

    Attributes:
        rank: The rank; None for rows of the controller.
        n_rows: Number of rows.
        nbytes: Their encoded size.
        kept: The kept rows; see `bandmaster.rows.kept.KeptPart`.
    """

    rank: int | None
    n_rows: int
    nbytes: int
    kept: Any


@dataclass(frozen=True, eq=False)
class ResultRows:
    """The rows that a call has left on its ranks.

    Attributes:
        method: ``"Class.method"``, for messages.
        parts: The parts, in the order of the rows.
        schema: The columns.
        is_fetched: Whether a host that reads rows of a part fetches all of it.
    """

    method: str
    parts: tuple[Part, ...]
    schema: Schema
    is_fetched: bool = False

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Number of the first row of each part."""
        return _starts(part.n_rows for part in self.parts)

    @cached_property
    def n_rows(self) -> int:
        """Number of rows."""
        return sum(part.n_rows for part in self.parts)


@dataclass(frozen=True, eq=False)
class Taken:
    """Some rows of a result."""

    result: ResultRows
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
        kinds: For each table a number, which is equal for equal dtypes in an equal order of columns; None if all are
            equal. Rows that are taken are a stack with tables of all kinds, because those without rows take part in
            determining the dtypes of the concatenation.
    """

    tables: tuple[Table, ...]
    order: np.ndarray[Any, Any] | None = None
    kinds: tuple[int, ...] | None = None

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return sum(table.n_rows for table in self.tables) if self.order is None else len(self.order)

    @property
    def schema(self) -> Schema:
        """The columns, by name."""
        return stacked_schema([table.schema for table in self.tables])


@dataclass(frozen=True, eq=False)
class Addressed:
    """Some rows of a result, in the form for a receiver.

    Attributes:
        starts: Number of the first row of each part that the receiver needs.
        labels: The label of the payload of each of these parts.
        index: The rows.
    """

    starts: tuple[int, ...]
    labels: tuple[Hashable, ...]
    index: Index

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return len(self.index)


Table = Taken | Renamed | Joined | Stacked


# --- operations ---


def take(table: Any, index: Index) -> Any:
    """The rows of a table with these numbers, which must exist. The table may have `Addressed` leaves."""
    if isinstance(table, Taken):
        return Taken(table.result, _compose(table.index, index))
    if isinstance(table, Addressed):
        return Addressed(table.starts, table.labels, _compose(table.index, index))
    if isinstance(table, Renamed):
        return Renamed(take(table.table, index), table.names)
    if isinstance(table, Joined):
        return Joined(tuple([take(one, index) for one in table.tables]))
    whole = index if table.order is None else _compose(table.order, index)
    found, order = _partition(whole, _starts(one.n_rows for one in table.tables))
    rows = dict(found or [(0, range(0))])
    if table.kinds is not None:
        rows.setdefault(0, range(0))  # the first table determines the order of the columns
        known = {table.kinds[number] for number in rows}
        for number, kind in enumerate(table.kinds):
            if kind not in known:
                rows[number] = range(0)
                known.add(kind)
    numbers = sorted(rows)
    tables = tuple([take(table.tables[number], rows[number]) for number in numbers])
    if len(tables) == 1 and order is None:
        return tables[0]
    kinds = None if table.kinds is None else tuple([table.kinds[number] for number in numbers])
    return Stacked(tables, order, kinds)


def select(table: Table, names: Names) -> Table:
    """Some columns of a table.

    Args:
        table: The table.
        names: The name of each column in the table, by its new name; the table must have these columns.
    """
    if isinstance(table, Renamed):
        return Renamed(table.table, {new: table.names[old] for new, old in names.items()})
    return Renamed(table, dict(names))


def join(tables: Sequence[Table], labels: Sequence[str]) -> Table:
    """The columns of several tables side by side.

    Args:
        tables: The tables, at least one.
        labels: The name of each table in messages.

    Raises:
        BatchError: The tables have different numbers of rows, a name twice, or columns without a name.
    """
    taken: dict[Any, str] = {}
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
        BatchError: The tables have different columns.
    """
    first = tables[0].schema
    for table, label in zip(tables, labels, strict=True):
        if table.schema.keys() != first.keys():
            raise BatchError(
                f"cannot concatenate {labels[0]} with {_listed(first)} and {label} with {_listed(table.schema)}; "
                "select or rename columns until they are the same"
            )
    if len(tables) == 1:
        return tables[0]
    stacks = [table if isinstance(table, Stacked) else Stacked((table,)) for table in tables]
    order = None
    if any(stack.order is not None for stack in stacks):
        starts = _starts(sum(one.n_rows for one in stack.tables) for stack in stacks)
        orders = [np.arange(stack.n_rows) if stack.order is None else stack.order for stack in stacks]
        order = np.concatenate([each + start for each, start in zip(orders, starts, strict=True)])
    flat = tuple([one for stack in stacks for one in stack.tables])
    dtypes = [dtypes_of(one.schema) for one in flat]
    kinds = tuple([dtypes.index(each) for each in dtypes])
    return Stacked(flat, order, kinds if any(kinds) else None)


def repeated(n_rows: int, n: int) -> Index:
    """The numbers of all rows, each ``n`` times in a row."""
    return np.repeat(np.arange(n_rows), n)


def shuffled(n_rows: int, seed: int) -> Index:
    """The numbers of all rows in an order that depends only on the seed and ``n_rows``."""
    return np.random.default_rng(seed).permutation(n_rows)


def check_named(table: Table, label: str, what: str) -> None:
    """Raise BatchError if the table's columns have no names."""
    if None in table.schema:
        kind = table.schema[None]
        raise BatchError(
            f"cannot {what} {label}: its rows have no named columns, they are {kind!r}; return a dict of columns or a "
            "TensorDict"
        )


# --- tables for a receiver ---


@dataclass(frozen=True, eq=False)
class Elsewhere:
    """Stands for rows among the arguments that are sent to ranks.

    Attributes:
        table: The result of `addressed`.
        shares: For each rank the ``(start, stop)`` of its rows; None if every rank gets all rows.
        batch_types: The batch types that the sender has registered, each pickled.
    """

    table: Any
    shares: Mapping[int, tuple[int, int]] | None = None
    batch_types: tuple[bytes, ...] = ()

    def share(self, rank: int) -> Any:
        """The table of the rows of a rank."""
        return self.table if self.shares is None else take(self.table, range(*self.shares[rank]))


def addressed(table: Table, label: Callable[[Part], Hashable]) -> Any:
    """The table with `Addressed` leaves, as `assemble` takes it.

    Args:
        table: The table.
        label: Called with every needed part; returns the label of its payload.
    """
    if isinstance(table, Taken):
        result = table.result
        needed = _parts_of(table.index, result.starts) or [0]  # an empty part determines the type of the rows
        starts = tuple([result.starts[number] for number in needed])
        return Addressed(starts, tuple([label(result.parts[number]) for number in needed]), table.index)
    if isinstance(table, Renamed):
        return Renamed(addressed(table.table, label), table.names)
    return replace(table, tables=tuple([addressed(one, label) for one in table.tables]))


def rows_needed(elsewhere: Elsewhere, ranks: Iterable[int]) -> dict[Hashable, Index]:
    """The rows of each part that some ranks need, ascending, by the label of the part.

    Args:
        elsewhere: The reference that is sent to these ranks, and perhaps to others.
        ranks: The ranks.
    """
    found: dict[Hashable, Index] = {}
    tables = [elsewhere.table] if elsewhere.shares is None else [elsewhere.share(rank) for rank in ranks]
    for table in tables:
        for leaf in _leaves(table):
            for number, rows in _partition(leaf.index, leaf.starts)[0] if len(leaf.index) else [(0, range(0))]:
                label = leaf.labels[number]
                found[label] = united(found[label], rows) if label in found else united(rows, range(0))
    return found


def united(one: Index, other: Index) -> Index:
    """All rows of two selections, each once and in ascending order.

    Example:
        >>> united(range(0, 3), range(2, 5))
        range(0, 5)
    """
    if isinstance(one, range) and isinstance(other, range):
        if not one or not other:
            return one or other
        if one.start <= other.stop and other.start <= one.stop:
            return range(min(one.start, other.start), max(one.stop, other.stop))
    both = np.concatenate([np.asarray(one, dtype=np.int64), np.asarray(other, dtype=np.int64)])
    both.sort()
    return _as_range(both[np.concatenate([[True], np.diff(both) > 0])]) if len(both) else range(0)


def contains(rows: Index, others: Index) -> bool:
    """Whether the ascending ``rows`` contain all of the ascending ``others``."""
    if isinstance(rows, range):
        return not len(others) or (rows.start <= int(others[0]) and int(others[-1]) < rows.stop)
    return len(united(rows, others)) == len(rows)


def _leaves(table: Any) -> list[Addressed]:
    return [table] if isinstance(table, Addressed) else [leaf for one in _inner(table) for leaf in _leaves(one)]


def _positions(there: Index | None, rows: Index) -> Index:
    """The positions of some rows among the present rows, which ascend; ``there`` is None if all rows are present."""
    if there is None:
        return rows
    if isinstance(there, range):
        shift = there.start
        return range(rows.start - shift, rows.stop - shift) if isinstance(rows, range) else rows - shift
    return _as_range(np.searchsorted(there, np.asarray(rows, dtype=np.int64)))


def assemble(
    table: Any,
    payloads: Callable[[Hashable, JoinPath], Any],
    views: Callable[[Hashable], Batch | None] = lambda label: None,
    there: Callable[[Hashable], Index | None] = lambda label: None,
    path: JoinPath = (),
    taken: dict[Hashable, _Taken] | None = None,
) -> Any:
    """The rows of a table with `Addressed` leaves, as one value.

    Args:
        table: The table.
        payloads: Returns the value of the part with a label for a table at a path; the result may share its memory.
            Values for different paths must not share memory. Called once for a label and path.
        views: Returns the value of the part with a label as a batch, from which rows are only copied; if it returns
            None, the value comes from ``payloads``.
        there: Returns the numbers of the rows of a part that its value contains; None for all.
        path: The table's number in each of the joins around it.
        taken: The rows that other tables of the surrounding concatenation have taken; None without one.
    """
    if isinstance(table, Addressed):
        found, order = _pieces(table)
        pieces = [(label, _positions(there(label), rows)) for number, rows in found for label in [table.labels[number]]]
        label, rows = pieces[0]
        if len(pieces) == 1 and isinstance(rows, range) and taken is None:
            return required_batch(payloads(label, path)).rows(rows)  # they share the value's memory
        taken = {} if taken is None else taken
        copies = []
        for label, rows in pieces:
            if view := views(label):
                copies.append((view, rows))
                continue
            if (label, path) not in taken:
                taken[label, path] = _Taken(partial(payloads, label), path)
            copies.append(taken[label, path].rows(rows))
        return _reordered(join_rows(copies), order)
    if isinstance(table, Renamed):
        return choose_columns(assemble(table.table, payloads, views, there, path, taken), table.names)
    if isinstance(table, Joined):
        tables = enumerate(table.tables)
        return join_columns([assemble(one, payloads, views, there, (*path, n), taken) for n, one in tables])
    taken = {} if taken is None else taken
    stack = [assemble(one, payloads, views, there, path, taken) for one in table.tables]
    return _reordered(concat_rows(stack), table.order)


class _Taken:
    """A part some of whose rows were taken. A row that is taken again comes from another value of the part.

    Otherwise the objects in the row, such as lists or arrays, would be in the result twice.
    """

    def __init__(self, payload: Callable[[JoinPath], Any], path: JoinPath) -> None:
        self._payload, self._path = payload, path
        self._batches = [required_batch(payload(path))]
        value, n_rows = self._batches[0].value, self._batches[0].n_rows
        self._n = None if copies_rows(value) else np.zeros(n_rows, np.int64)  # times that each row was taken

    def rows(self, index: Index) -> tuple[Batch, Index]:
        """A batch, and the positions in it of the rows ``index``."""
        if self._n is None or not len(index):
            return self._batches[0], index
        rows = np.asarray(index, np.int64)
        order = np.argsort(rows, kind="stable")
        ascending = rows[order]
        which = np.empty_like(rows)  # for each row, the number of its batch
        which[order] = np.arange(len(rows)) - np.searchsorted(ascending, ascending)
        which += self._n[rows]
        np.add.at(self._n, rows, 1)
        first, last = int(which.min()), int(which.max())
        while len(self._batches) <= last:
            self._batches.append(required_batch(self._payload((*self._path, -len(self._batches)))))
        if first == last:
            return self._batches[first], index
        values = [batch.value for batch in self._batches[first : last + 1]]
        return required_batch(concat_rows(values)), rows + (which - first) * len(self._n)


def _pieces(leaf: Addressed) -> Pieces:
    """The rows to read from each part for a leaf, and the order in which their concatenation has to be read."""
    if not len(leaf.index):
        return [(0, range(0))], None
    if isinstance(leaf.index, range) or len(leaf.index) > FEW_ROWS:
        return _partition(leaf.index, leaf.starts)
    rows = leaf.index.tolist()
    owners = [bisect_right(leaf.starts, row) - 1 for row in rows]
    if len(set(owners)) == 1:
        return [(owners[0], leaf.index - leaf.starts[owners[0]])], None
    found: list[tuple[int, range]] = []
    for row, number in zip(rows, owners, strict=True):
        row -= leaf.starts[number]
        if found and found[-1][0] == number and found[-1][1].stop == row:
            found[-1] = number, range(found[-1][1].start, row + 1)
        else:
            found.append((number, range(row, row + 1)))
    return found, None


def is_in_order(table: Table) -> bool:
    """Whether the table takes one range of rows of each result, in their order."""
    if isinstance(table, Taken):
        return isinstance(table.index, range)
    has_order = isinstance(table, Stacked) and table.order is not None
    return not has_order and all(is_in_order(one) for one in _inner(table))


def rows_by_part(table: Table) -> dict[int, tuple[Part, int]]:
    """Each part of which the table has rows, with the number of these rows, by identity of the part."""
    if isinstance(table, Taken):
        parts, pieces = table.result.parts, _partition(table.index, table.result.starts)[0]
        return {id(parts[number]): (parts[number], len(rows)) for number, rows in pieces}
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


def results_of(table: Table) -> list[ResultRows]:
    """The results of which a table has rows."""
    if isinstance(table, Taken):
        return [table.result]
    return list(dict.fromkeys(result for one in _inner(table) for result in results_of(one)))


def _inner(table: Renamed | Joined | Stacked) -> Sequence[Table]:
    return [table.table] if isinstance(table, Renamed) else table.tables


def _reordered(value: Any, order: np.ndarray[Any, Any] | None) -> Any:
    return value if order is None else take_rows(value, order)


def _compose(first: Index, then: Index) -> Index:
    """``first[i] for i in then``, as a range if possible."""
    if isinstance(then, range):
        return first[then.start : then.stop]
    if isinstance(first, range):
        return _as_range(then + first.start)
    return _as_range(first[then])


def _as_range(index: np.ndarray[Any, Any]) -> Index:
    if len(index) and index[-1] - index[0] == len(index) - 1 and (np.diff(index) == 1).all():
        return range(int(index[0]), int(index[0]) + len(index))
    return index if len(index) else range(0)


def _starts(counts: Iterable[int]) -> tuple[int, ...]:
    """Number of the first row of each part, by the row counts of the parts."""
    return tuple(accumulate(counts, initial=0))[:-1]


def _parts_of(index: Index, starts: Sequence[int]) -> Sequence[int]:
    """The numbers of the parts that have any of some rows; ``starts`` are the first rows of the parts."""
    if isinstance(index, range):
        return [number for number, _ in _partition(index, starts)[0]]
    if len(index) <= FEW_ROWS:
        return sorted({bisect_right(starts, row) - 1 for row in index.tolist()})
    owners = np.searchsorted(starts, index, "right") - 1
    found: list[int] = np.flatnonzero(np.bincount(owners)).tolist()  # np.unique would import masked arrays
    return found


Pieces = tuple[Sequence[tuple[int, Index]], np.ndarray[Any, Any] | None]


def _partition(index: Index, starts: Sequence[int]) -> Pieces:
    """Divide rows among parts; ``starts`` are the first rows of the parts.

    Returns:
        ``(number of the part, rows counted from its start)`` for each part that has any, and the order in which the
        concatenation of these rows has to be read to get the index; None for the order of the concatenation.
    """
    found: list[tuple[int, Index]] = []
    if isinstance(index, range):
        for number in range(bisect_right(starts, index.start) - 1, len(starts)):
            start, stop = starts[number], starts[number + 1] if number + 1 < len(starts) else index.stop
            if start >= index.stop:
                break
            rows = range(max(index.start, start) - start, min(index.stop, stop) - start)
            if rows:
                found.append((number, rows))
        return found, None
    owners = np.searchsorted(starts, index, "right") - 1
    for number in np.flatnonzero(np.bincount(owners)).tolist():
        found.append((number, _as_range(index[owners == number] - starts[number])))
    if (np.diff(owners) >= 0).all():
        return found, None
    order = np.empty(len(index), dtype=np.int64)
    order[np.argsort(owners, kind="stable")] = np.arange(len(index))
    return found, order


def _listed(schema: Schema) -> str:
    if None in schema:
        return f"rows of {schema[None]!r}"
    return "the columns " + ", ".join(map(repr, schema))
