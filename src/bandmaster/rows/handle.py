"""A future as a handle: facts about the rows that its call has left on the ranks, and operations that move no row."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bandmaster.errors import BatchError, UsageError
from bandmaster.plan.batch import required_batch
from bandmaster.plan.batch_types import Index
from bandmaster.plan.columns import Schema, ascending
from bandmaster.plan.render import Cell, svg_bands
from bandmaster.rows import table as handles
from bandmaster.rows.table import Table

if TYPE_CHECKING:
    from typing_extensions import Self

MOST_BOXES = 64  # of a drawing


class Place(NamedTuple):
    """The place of some rows.

    Attributes:
        method: The method that made them, ``"Class.method"``.
        rank: The rank that made them; None for the controller's own rows.
        host: Its host.
        n_rows: Number of these rows.
    """

    method: str
    rank: int | None
    host: str
    n_rows: int


class Handle:
    """The operations of a future on rows. They return futures, and are applied when the rows are there."""

    def _table(self) -> Table:
        """The rows; waits for the call.

        Raises:
            UsageError: The future has no rows.
            Exception: The exceptions of `Future.result`.
        """
        raise NotImplementedError

    def _derived(self, what: str, others: Sequence[Handle], make: Callable[[Sequence[Table]], Table]) -> Self:
        """A future of the table that ``make`` returns for the tables of this future and of others."""
        raise NotImplementedError

    def result(self, timeout: float | None = None) -> Any:
        """The rows themselves."""
        raise NotImplementedError

    def __len__(self) -> int:
        """Number of rows; waits for the call."""
        return self._table().n_rows

    def __bool__(self) -> bool:
        """Always true, whether there are rows or not."""
        return True

    __iter__ = None  # use `batches` to iterate

    @property
    def schema(self) -> Schema:
        """The columns by name, None for the only column of rows without names; waits for the call."""
        return self._table().schema

    @property
    def nbytes(self) -> int:
        """Encoded size of the rows in bytes, estimated if rows may differ in size; waits for the call."""
        return round(self._table().nbytes)

    @property
    def where(self) -> tuple[Place, ...]:
        """The rank and host that keeps each part of the rows; waits for the call."""
        counts: Counter[Any] = Counter()
        for block in self._table().blocks:
            in_block: Counter[Any] = Counter()
            for part, n in Table((block,)).rows_by_part():
                in_block[part.origin] += n
            counts |= in_block  # the larger number, as other blocks have other columns of the same rows
        return tuple([Place(origin.method, origin.rank, origin.host, n) for origin, n in counts.items()])

    def _drawing(self) -> str | None:
        """The places of the rows as an SVG drawing; None if there are too many places."""
        places = self.where
        if not 0 < len(places) <= MOST_BOXES:
            return None
        methods = dict.fromkeys(place.method for place in places)
        bands = [
            (method.rpartition(".")[2], [_box(place) for place in places if place.method == method])
            for method in methods
        ]
        columns = ", ".join(str(name) for name in self.schema if name is not None)
        return svg_bands(f"{len(self)} rows", columns, bands)

    def __getitem__(self, rows: Any) -> Self:
        """Select some of the rows.

        Args:
            rows: A slice, the numbers of rows, or a boolean for each row.
        """
        try:
            is_valid = range(0)[rows] is not None if isinstance(rows, slice) else np.ndim(rows) == 1
        except (TypeError, ValueError):  # a slice by 2.0 or with step 0, lists of unequal length
            is_valid = False
        if not is_valid:
            is_name = isinstance(rows, str)
            hint = f"rows.select({rows!r}) has that column alone" if is_name else "rows[i:i+1] is a single one"
            raise UsageError(
                "the rows of a future are selected by a slice of whole numbers, an array of numbers or a boolean mask, "
                f"got {rows!r}; {hint}"
            )
        chosen = rows if isinstance(rows, slice) else np.array(rows)  # a copy, as the caller may change it
        return self._taken("rows", lambda n_rows: index_of(chosen, n_rows))

    def select(self, *names: Hashable) -> Self:
        """The rows with only these columns, in this order."""
        return self._columns("select", lambda known: {name: name for name in names}, names)

    def drop(self, *names: Hashable) -> Self:
        """The rows without these columns."""
        return self._columns("drop", lambda known: {name: name for name in known if name not in names}, names)

    def rename(self, names: Mapping[Any, Hashable] | None = None, /, **more: str) -> Self:
        """The rows with other names for some columns: ``rename(old="new")``, or ``rename({0: "new"})``."""
        new = {**(names or {}), **more}
        return self._columns("rename", lambda known: {new.get(name, name): name for name in known}, tuple(new))

    def _columns(self, what: str, choose: Callable[[Sequence[Any]], dict[Any, Any]], asked: Sequence[Hashable]) -> Self:
        def make(tables: Sequence[Table]) -> Table:
            (table,) = tables
            handles.check_named(table, "rows", what)
            known = list(table.block_of)
            missing, listed = [name for name in asked if name not in known], ", ".join(map(str, known))
            if missing:
                raise BatchError(f"cannot {what} {', '.join(map(repr, missing))}: the columns are {listed}")
            chosen = choose(known)
            if not chosen:
                raise BatchError(f"no column would be left after {what}: the columns are {listed}")
            if what == "rename" and len(chosen) < len(known):
                raise BatchError(f"two columns would have one name after rename: the columns are {listed}")
            return handles.select(table, chosen)

        return self._derived(what, (), make)

    def join(self, *others: Handle) -> Self:
        """The rows with the columns of other futures, which have the same rows, added to their own."""
        labels = [f"rows {number}" for number in range(1 + len(others))]
        return self._derived("join", others, lambda tables: handles.join(tables, labels))

    def repeat(self, n: int) -> Self:
        """Every row ``n`` times, with the copies of a row next to each other."""
        if not isinstance(n, int | np.integer) or n < 0:
            raise UsageError(f"repeat takes a whole number of copies, 0 or more, got n={n!r}")
        return self._taken("repeat", lambda n_rows: np.repeat(np.arange(n_rows), n))

    def shuffle(self, seed: int) -> Self:
        """The rows in an order that depends only on the seed and the number of rows."""
        try:
            fixed = np.random.SeedSequence(operator.index(seed) if np.ndim(seed) == 0 else seed)
        except (TypeError, ValueError):
            raise UsageError(f"shuffle takes a whole number as its seed, 0 or more, got seed={seed!r}") from None
        return self._taken("shuffle", lambda n_rows: np.random.default_rng(fixed).permutation(n_rows))

    def _taken(self, what: str, numbers: Callable[[int], Index]) -> Self:
        """A future of the rows with the numbers that a function returns for the number of rows."""
        return self._derived(what, (), lambda tables: handles.take(tables[0], numbers(tables[0].n_rows)))

    def batches(self, n: int) -> Iterator[Self]:
        """Yield futures of ``n`` rows each; the last one may have fewer. Waits for the call."""
        if not isinstance(n, int | np.integer) or n < 1:
            raise UsageError(f"batches takes a whole number of rows, 1 or more, got n={n!r}")
        for start in range(0, len(self), n):
            yield self[start : start + n]

    def sort_by(self, name: Hashable) -> Self:
        """The rows in ascending order of a column, which the controller reads; equal values keep their order."""
        column = self._columns("sort", lambda known: {name: name}, (name,)).result()
        return self[ascending(required_batch(column).column(name), name)]


def index_of(rows: Any, n_rows: int) -> Index:
    """The numbers of the rows that a slice, numbers or a mask select.

    Raises:
        BatchError: A row does not exist, or the mask has another length.
    """
    if isinstance(rows, slice):
        chosen = range(n_rows)[rows]
        return chosen if chosen.step == 1 else np.arange(chosen.start, chosen.stop, chosen.step)
    index = np.asarray(rows)
    if index.dtype == bool:
        if len(index) != n_rows:
            raise BatchError(f"a mask of {len(index)} booleans was given for {n_rows} rows; give one for each row")
        return np.flatnonzero(index)
    if not len(index):
        return range(0)
    if not np.issubdtype(index.dtype, np.integer):
        raise BatchError(f"rows are selected by integers or booleans, got {index.dtype}")
    wrong = index[(index < -n_rows) | (index >= n_rows)]
    if len(wrong):
        raise BatchError(f"there is no row {wrong[0]} among {n_rows} rows")
    index = index.astype(np.int64)  # large enough for any number of rows
    return np.where(index < 0, index + n_rows, index)


def _box(place: Place) -> Cell:
    who = "controller" if place.rank is None else f"rank {place.rank}"
    return Cell((who, f"{place.n_rows} row{'s' if place.n_rows != 1 else ''}"), place.rank or 0)
