"""Handle arithmetic: the kept rows and columns that a handle stands for. Pure; it moves no row.

A table has *blocks* of columns side by side, and each block has *leaves*, which are ranges of rows of kept parts::

    result.rename(a="b")[10:20].join(other)

        block b, c ─┬─ rows 10 to 15 of part 0 of result
                    └─ rows 0 to 3 of part 1 of result
        block d ────── rows 0 to 9 of part 0 of other

A part is the rows of one rank, see `bandmaster.rows.kept.KeptPart`. Rows that are taken by number leave the leaves as
they are, with an order of their rows. A receiver gets the same blocks with the labels of payloads in place of the
parts, and makes the rows from them with `assemble`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from bandmaster.errors import BatchError
from bandmaster.plan.batch import Batch, copies_rows, required_batch, take_rows
from bandmaster.plan.batch import concat as concat_batches
from bandmaster.plan.batch_types import Index
from bandmaster.plan.columns import Column, Schema, choose_columns, is_frame, join_columns

Names = Mapping[Any, Any]  # the former name of a column, by its new name
Leaf = tuple[Any, range, Names | None]  # see `Block.leaves`
FEW_ROWS = 32  # looking them up and slicing them one by one is faster than numpy


class Block(NamedTuple):
    """Columns of a table.

    Attributes:
        leaves: At least one ``(part, rows, names)``: the part, or its label in a message; the numbers of its rows; and
            the former name of each column by its new name, None for all columns under their own names. A leaf without
            rows determines a dtype, or the type if there is no row at all.
        order: For each row its number in the concatenation of the leaves; None for that order.
        kinds: For each leaf a number, which is equal for equal dtypes; None if all are equal. Rows that are taken keep
            a leaf of each kind, because all of them determine the dtypes of the concatenation.
    """

    leaves: tuple[Leaf, ...]
    order: np.ndarray[Any, Any] | None = None
    kinds: tuple[int, ...] | None = None

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return sum([len(rows) for _, rows, _ in self.leaves]) if self.order is None else len(self.order)

    @property
    def counts(self) -> Sequence[int]:
        """Number of rows of each leaf that the block has; a row that it has twice counts twice."""
        if self.order is None:
            return [len(rows) for _, rows, _ in self.leaves]
        counts: list[int] = np.bincount(_owners(self.leaves, self.order), minlength=len(self.leaves)).tolist()
        return counts


class Table(NamedTuple):
    """Rows of kept parts.

    Attributes:
        blocks: The blocks of columns, at least one, which have equally many rows.
    """

    blocks: tuple[Block, ...]

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return self.blocks[0].n_rows

    @property
    def block_of(self) -> dict[Any, int]:
        """The number of the block of each column; None is the name of the only column of rows without names."""
        return {name: number for number, block in enumerate(self.blocks) for name in _schema_of(block.leaves[0])}

    @property
    def schema(self) -> dict[Hashable, Column]:
        """The columns, by name."""
        return {name: column for block in self.blocks for name, column in _columns_of(block)}

    def rows_by_part(self) -> Iterator[tuple[Any, int]]:
        """Yield the part of each leaf, and the number of its rows that the table has."""
        for block in self.blocks:
            for (part, _, _), n in zip(block.leaves, block.counts, strict=True):
                yield part, n

    @property
    def nbytes(self) -> float:
        """Encoded size of the rows, estimated by the share in the rows and columns of each part."""
        counted = [(leaf, n) for block in self.blocks for leaf, n in zip(block.leaves, block.counts, strict=True)]
        return sum(n * _row_nbytes(leaf) for leaf, n in counted)

    @property
    def is_in_order(self) -> bool:
        """Whether the rows of all leaves are in their order."""
        return all(block.order is None for block in self.blocks)


def table_of(parts: Sequence[Any], counts: Sequence[int] | None = None) -> Table:
    """The rows of parts with the same columns, one after the other: the first of each part, if counts are given."""
    counts = [part.facts.n_rows for part in parts] if counts is None else counts
    return Table((_block([(part, range(n), None) for part, n in zip(parts, counts, strict=True)], None),))


# --- operations ---


def take(table: Table, index: Index) -> Table:
    """The rows of a table with these numbers, which must exist."""
    return Table(tuple([_taken(block, index) for block in table.blocks]))


def select(table: Table, names: Names) -> Table:
    """Some columns of a table.

    Args:
        table: The table.
        names: The name of each column in the table, by its new name; at least one. The table must have these columns.
    """
    block_of = table.block_of
    by_block = groupby(names.items(), lambda item: block_of[item[1]])
    return Table(tuple([_renamed(table.blocks[number], dict(items)) for number, items in by_block]))


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
        for name in table.block_of:
            if name in taken:
                raise BatchError(
                    f"cannot join {taken[name]} and {label}: both have a column {name!r}; rename one of them"
                )
            taken[name] = label
    return Table(tuple([block for table in tables for block in table.blocks]))


def concat(tables: Sequence[Table], labels: Sequence[str]) -> Table:
    """The rows of several tables one after the other.

    Raises:
        BatchError: The tables have different columns.
    """
    block_of = [table.block_of for table in tables]
    for table, label, columns in zip(tables, labels, block_of, strict=True):
        if columns.keys() != block_of[0].keys():
            raise BatchError(
                f"cannot concatenate {labels[0]} with {_listed(tables[0])} and {label} with {_listed(table)}; "
                "select or rename columns until they are the same"
            )
    if len(tables) == 1:
        return tables[0]
    blocks = []
    for numbers, names in groupby(block_of[0], lambda name: [columns[name] for columns in block_of]):
        chosen = {name: name for name in names}
        blocks.append(
            _stacked([_renamed(table.blocks[number], chosen) for table, number in zip(tables, numbers, strict=True)])
        )
    return Table(tuple(blocks or [_stacked([table.blocks[0] for table in tables])]))  # without columns there is one


def check_named(table: Table, label: str, what: str) -> None:
    """Raise BatchError if the table's columns have no names."""
    if None in table.block_of:
        kind = table.schema[None]
        raise BatchError(
            f"cannot {what} {label}: its rows have no named columns, they are {kind!r}; return a dict of columns or a "
            "TensorDict"
        )


def _taken(block: Block, index: Index) -> Block:
    leaves, order, kinds = block
    if order is not None:
        index = order[index.start : index.stop] if isinstance(index, range) else order[index]
    index = index if isinstance(index, range) else _as_range(index)
    if not isinstance(index, range):
        return Block(leaves, index, kinds)
    rows: dict[int, range] = {}
    for number, start in enumerate(_starts(leaves)):
        if found := leaves[number][1][max(index.start - start, 0) : max(index.stop - start, 0)]:
            rows[number] = found
    return _kept(block, rows, None)


def _pruned(block: Block) -> Block:
    """The block without leaves of which it has no rows."""
    if block.order is None:
        return block
    owners = _owners(block.leaves, block.order)
    used: list[int] = np.flatnonzero(np.bincount(owners)).tolist()  # np.unique would import masked arrays
    if len(used) == len(block.leaves):
        return block
    rows = {number: block.leaves[number][1] for number in used}
    dropped = [0 if number in rows else len(leaf[1]) for number, leaf in enumerate(block.leaves)]
    return _kept(block, rows, block.order - np.cumsum(dropped)[owners])


def _kept(block: Block, rows: dict[int, range], order: np.ndarray[Any, Any] | None) -> Block:
    """A block with some rows of the leaves with these numbers, and a leaf of each kind."""
    leaves, kinds, rows = block.leaves, block.kinds, rows or {0: range(0)}
    if kinds is not None:
        for kind in dict.fromkeys(kinds).keys() - {kinds[number] for number in rows}:
            rows[kinds.index(kind)] = range(0)
        kinds = tuple([kinds[number] for number in sorted(rows)])
    kept = [(leaves[number][0], rows[number], leaves[number][2]) for number in sorted(rows)]
    return Block(tuple(kept), order, kinds)


def _renamed(block: Block, names: Names) -> Block:
    """The block with some of its columns; the block itself if these are all its columns, under their names."""
    if list(names.items()) == [(name, name) for name in _schema_of(block.leaves[0])]:
        return block
    return _block([_with_names(leaf, names) for leaf in block.leaves], block.order)


def _with_names(leaf: Leaf, names: Names) -> Leaf:
    part, rows, known = leaf
    return part, rows, names if known is None else {new: known[old] for new, old in names.items()}


def _stacked(blocks: Sequence[Block]) -> Block:
    blocks, order = [_pruned(block) for block in blocks], None
    if any(block.order is not None for block in blocks):
        starts = accumulate([sum([len(rows) for _, rows, _ in block.leaves]) for block in blocks], initial=0)
        orders = [np.arange(block.n_rows) if block.order is None else block.order for block in blocks]
        order = np.concatenate([each + start for each, start in zip(orders, starts, strict=False)])
    return _block([leaf for block in blocks for leaf in block.leaves], order)


def _block(leaves: Sequence[Leaf], order: np.ndarray[Any, Any] | None) -> Block:
    """A block of leaves, which get their columns in the order of the first one; their dtypes are compared."""
    schemas = [_schema_of(leaf) for leaf in leaves]
    names = list(schemas[0])
    dtypes = [[schema[name].dtype for name in names] for schema in schemas]
    kinds = tuple([dtypes.index(each) for each in dtypes])
    in_order = {name: name for name in names}
    placed = [
        leaf if list(schema) == names else _with_names(leaf, in_order)
        for leaf, schema in zip(leaves, schemas, strict=True)
    ]
    return Block(tuple(placed), order, kinds if any(kinds) else None)


# --- tables for a receiver ---


@dataclass(frozen=True, eq=False)
class Elsewhere:
    """Stands for rows among the arguments that are sent to ranks.

    Attributes:
        blocks: The blocks of a table, with labels in place of the parts.
        shares: For each rank the ``(start, stop)`` of its rows; None if every rank gets all rows.
        batch_types: The batch types that the sender has registered, each pickled.
        is_row: Whether it stands for its only row itself, as `bandmaster.plan.batch.Batch.row` returns it.
    """

    blocks: tuple[Block, ...]
    shares: Mapping[int, tuple[int, int]] | None = None
    batch_types: tuple[bytes, ...] = ()
    is_row: bool = False

    def share(self, rank: int) -> Table:
        """The table of the rows of a rank."""
        table = Table(self.blocks)
        return table if self.shares is None else take(table, range(*self.shares[rank]))

    def has_plain_names(self) -> bool:
        """Whether the names of columns that are sent are strings and integers, which any pickler can encode."""
        sent = [names for block in self.blocks for _, _, names in block.leaves if names is not None]
        return all(type(name) in (str, int) for names in sent for name in (*names, *names.values()))


def addressed(table: Table, label: Callable[[Any], Hashable]) -> tuple[Block, ...]:
    """The blocks of a table with labels in place of the parts of which there are rows.

    Args:
        table: The table.
        label: Returns the label of the payload of a part.
    """
    return tuple(
        [
            Block(tuple([(label(part), rows, names) for part, rows, names in block.leaves]), block.order, block.kinds)
            for block in map(_pruned, table.blocks)
        ]
    )


def rows_needed(elsewhere: Elsewhere, ranks: Iterable[int]) -> dict[Hashable, Index]:
    """The rows of each part that some ranks need, ascending, by the label of the part.

    Args:
        elsewhere: The reference that is sent to these ranks, and perhaps to others.
        ranks: The ranks.
    """
    found: dict[Hashable, Index] = {}
    for rank in [0] if elsewhere.shares is None else ranks:
        for block in elsewhere.share(rank).blocks:
            for (part, _, _), rows in _pieces(block)[0]:
                found[part] = united(found.get(part, range(0)), rows)
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


def assemble(
    table: Table,
    read: Callable[[Any], Any],
    view: Callable[[Any], Batch | None] = lambda part: None,
    present: Mapping[Any, Index] = MappingProxyType({}),
) -> Any:
    """The rows of a table, as one value.

    Args:
        table: The table; its parts, or their labels, are the arguments of the functions.
        read: Returns the value of a part, in memory of its own each time; the result may share that memory.
        view: Returns the value of a part as a batch from which rows are only copied; if it returns None, the value
            comes from ``read``.
        present: For each part whose value does not contain all rows, the numbers of those that it contains, ascending.
    """
    values = []
    for block in table.blocks:
        pieces, order = _pieces(block)
        if present:
            pieces = [(leaf, _positions(present.get(leaf[0]), rows)) for leaf, rows in pieces]
        value = _assembled(pieces, read, view)
        values.append(value if order is None else take_rows(value, order))
    return values[0] if len(values) == 1 else join_columns(values)


def _assembled(
    pieces: Sequence[tuple[Leaf, Index]], read: Callable[[Any], Any], view: Callable[[Any], Batch | None]
) -> Any:
    """The rows of some leaves at these positions, in their order."""
    (part, _, names), positions = pieces[0]
    if len(pieces) == 1 and isinstance(positions, range):
        batch, positions = _chosen(required_batch(read(part)), positions, names)
        return batch.value if len(positions) == batch.n_rows else batch.rows(positions)  # shares the value's memory
    sources: dict[Any, Batch | _Copies] = {}  # by part
    found = []
    for (part, _, names), positions in pieces:
        source = sources.get(part)
        if source is None:
            source = sources[part] = view(part) or _Copies(read, part)
        batch, positions = (source, positions) if isinstance(source, Batch) else source.rows(positions)
        found.append(_chosen(batch, positions, names))
    return concat_batches(*zip(*found, strict=True))


def _chosen(batch: Batch, positions: Index, names: Names | None) -> tuple[Batch, Index]:
    """A batch with some columns of another one, and the positions of the same rows in it."""
    if names is None:
        return batch, positions
    if is_frame(batch.value):
        return required_batch(choose_columns(batch.rows(positions), names)), range(len(positions))
    return required_batch(choose_columns(batch.value, names)), positions


class _Copies:
    """Values of one part. A row that is taken again comes from another value.

    Otherwise the objects in the row, such as lists or arrays, would be in the result twice.
    """

    def __init__(self, read: Callable[[Any], Any], part: Any) -> None:
        self._read, self._part = read, part
        batch = required_batch(read(part))
        self._batches = [batch]
        self._n_taken = None if copies_rows(batch.value) else np.zeros(batch.n_rows, np.int64)  # of each row

    def rows(self, positions: Index) -> tuple[Batch, Index]:
        """A batch, and the positions in it of some rows."""
        if self._n_taken is None or not len(positions):
            return self._batches[0], positions
        rows = np.asarray(positions, np.int64)
        order = np.argsort(rows, kind="stable")
        which = np.empty_like(rows)  # for each row, the number of its value
        which[order] = np.arange(len(rows)) - np.searchsorted(rows[order], rows[order])
        which += self._n_taken[rows]
        np.add.at(self._n_taken, rows, 1)
        while len(self._batches) <= which.max():
            self._batches.append(required_batch(self._read(self._part)))
        first, last = int(which.min()), int(which.max())
        if first == last:
            return self._batches[first], positions
        joined = required_batch(concat_batches(self._batches[first : last + 1]))
        return joined, rows + (which - first) * len(self._n_taken)


# --- the rows of a block ---


def _pieces(block: Block) -> tuple[list[tuple[Leaf, Index]], np.ndarray[Any, Any] | None]:
    """The rows to read of leaves, by their numbers in the part, and the order of all in their concatenation.

    The order is None if it is that of the concatenation.
    """
    leaves, order = block.leaves, block.order
    if order is None:
        return [(leaf, leaf[1]) for leaf in leaves], None
    if len(leaves) == 1:
        return [(leaves[0], order + leaves[0][1].start)], None
    starts = _starts(leaves)
    if len(order) <= FEW_ROWS and block.kinds is None:
        return _runs(leaves, starts, order.tolist()), None
    owners, found = _owners(leaves, order), []
    for number, (leaf, start) in enumerate(zip(leaves, starts, strict=True)):
        rows = order[owners == number]
        if len(rows) or block.kinds is not None:
            found.append((leaf, _as_range(rows + (leaf[1].start - start))))
    if (np.diff(owners) >= 0).all():
        return found, None
    places = np.empty(len(order), dtype=np.int64)
    places[np.argsort(owners, kind="stable")] = np.arange(len(order))
    return found, places


def _runs(leaves: Sequence[Leaf], starts: Sequence[int], order: Sequence[int]) -> list[tuple[Leaf, Index]]:
    """Few rows as ranges, in their order."""
    runs: list[tuple[int, range]] = []
    for row in order:
        number = bisect_right(starts, row) - 1
        row += leaves[number][1].start - starts[number]
        if runs and runs[-1][0] == number and runs[-1][1].stop == row:
            runs[-1] = number, range(runs[-1][1].start, row + 1)
        else:
            runs.append((number, range(row, row + 1)))
    return [(leaves[number], rows) for number, rows in runs]


def _starts(leaves: Sequence[Leaf]) -> list[int]:
    """The number of the first row of each leaf in their concatenation."""
    return list(accumulate([len(rows) for _, rows, _ in leaves[:-1]], initial=0))


def _owners(leaves: Sequence[Leaf], order: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """For each row of the concatenation of leaves, the number of its leaf."""
    return np.searchsorted(_starts(leaves), order, "right") - 1


def _schema_of(leaf: Leaf) -> Schema:
    """The columns of a part that a leaf has."""
    part, _, names = leaf
    schema: Schema = part.facts.schema
    return schema if names is None else {new: schema[old] for new, old in names.items()}


def _columns_of(block: Block) -> Iterator[tuple[Hashable, Column]]:
    """Yield the columns of a block with their names."""
    shares = [n / (part.facts.n_rows or 1) for (part, _, _), n in zip(block.leaves, block.counts, strict=True)]
    schemas = [_schema_of(leaf) for leaf in block.leaves]
    for name, first in schemas[0].items():
        columns = [schema[name] for schema in schemas]
        dtype = " or ".join(dict.fromkeys([column.dtype for column in columns]))
        nbytes = sum([column.nbytes * share for column, share in zip(columns, shares, strict=True)])
        yield name, Column(dtype, first.shape, round(nbytes))


def _row_nbytes(leaf: Leaf) -> float:
    """Average encoded size of the columns of a leaf, in bytes for each row."""
    n_rows, nbytes, schema = leaf[0].facts
    before = sum([column.nbytes for column in schema.values()])
    share = sum([column.nbytes for column in _schema_of(leaf).values()]) / before if before else 1.0
    return float(nbytes * share / (n_rows or 1))


def _positions(present: Index | None, rows: Index) -> Index:
    """The positions of some rows among the present rows, which ascend; ``present`` is None if all rows are present."""
    if present is None:
        return rows
    if isinstance(present, range):
        shift = present.start
        return range(rows.start - shift, rows.stop - shift) if isinstance(rows, range) else rows - shift
    return _as_range(np.searchsorted(present, np.asarray(rows, dtype=np.int64)))


def _as_range(index: np.ndarray[Any, Any]) -> Index:
    if len(index) and index[-1] - index[0] == len(index) - 1 and (np.diff(index) == 1).all():
        return range(int(index[0]), int(index[0]) + len(index))
    return index if len(index) else range(0)


def _listed(table: Table) -> str:
    if None in table.block_of:
        return f"rows of {table.schema[None]!r}"
    return "the columns " + ", ".join(map(repr, table.block_of))
