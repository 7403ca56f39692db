"""Rows of futures among the arguments of a call: their references in its payloads, and the kept rows that it needs.

::

    argument groups of a split            payloads
    Portion(rows, 0:4) ──► ranks 0, 1     rows in their order: one for each group, which names the parts it needs
    Portion(rows, 4:8) ──► ranks 2, 3     by an index: one for all, with the index and the portion of each rank

Rows that are fetched from other hosts have a payload for each group, too, so that a host fetches what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from itertools import accumulate, groupby, pairwise
from typing import Any

import cloudpickle
import numpy as np

from bandmaster.calls.future import Future
from bandmaster.calls.hooks import CallTrace
from bandmaster.codec import add_bare
from bandmaster.contract import Workers
from bandmaster.errors import ArgumentError
from bandmaster.plan.arguments import ArgumentGroup
from bandmaster.plan.batch import Portion, users_batch_types
from bandmaster.plan.batch_types import BatchType
from bandmaster.rows.kept import KeptPart
from bandmaster.rows.table import Elsewhere, Table, addressed, rows_needed, take, united

Shares = Mapping[int, tuple[int, int]]  # of ranks: the first of its rows, and the one behind its last
_KINDS = {Future, Portion}

add_bare(Elsewhere, Elsewhere.has_plain_names)


def refers_to_rows(groups: Iterable[ArgumentGroup]) -> bool:
    """Whether any argument is a future, or a portion of one."""
    for group in groups:
        for _, value in group.items:
            if type(value) in _KINDS:
                return True
    return False


class RowsElsewhere:
    """The kept rows that the arguments of a call refer to.

    Args:
        method: ``"Class.method"``, for messages.
        workers: The workers that are called.
    """

    def __init__(self, method: str, workers: Workers) -> None:
        self._ranks_are_own = workers.ranks_are_own
        self._method = method
        self._labels: dict[KeptPart, int] = {}
        self._found: dict[Future[Any], Table] = {}
        self._tables: list[Table] = []
        self._sent: list[list[Elsewhere]] = []  # for each argument group

    @property
    def parts(self) -> list[KeptPart]:
        """The rows; their labels count from 0."""
        return list(self._labels)

    def addressed(self, groups: Iterable[ArgumentGroup]) -> list[ArgumentGroup]:
        """Replace the futures in argument groups by `Elsewhere` references to their rows.

        Raises:
            ArgumentError: A future has no rows.
            Exception: The exception of a future whose call has failed.
        """
        found = []
        for group, shares in self._merged([group for group in groups if group.items]):
            self._sent.append([])
            named = zip(group.items, group.names, strict=False)
            items = [(key, self._referring(value, name, shares)) for (key, value), name in named]
            found.append(group._replace(items=tuple(items)))
        return found

    def named(self, groups: Sequence[int], placed: Sequence[Any]) -> tuple[tuple[int, Any], ...]:
        """The rows that some argument groups refer to, by their labels, which count the items of ``placed``."""
        sent = [elsewhere for group in groups for elsewhere in self._sent[group]]
        labels = {label for elsewhere in sent for block in elsewhere.blocks for label, _, _ in block.leaves}
        return tuple([(label, placed[label]) for label in sorted(labels)])

    def needed(self, groups: Sequence[int]) -> Callable[[Sequence[int]], Mapping[Any, Any]]:
        """Return a function from ranks that get some argument groups to the numbers of the rows that they need."""
        return partial(self._rows_needed, groups)

    def _rows_needed(self, groups: Sequence[int], ranks: Sequence[int]) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for elsewhere in [elsewhere for group in groups for elsewhere in self._sent[group]]:
            for label, rows in rows_needed(elsewhere, ranks).items():
                found[label] = united(found.get(label, range(0)), rows)
        return found

    def note_in(self, record: CallTrace) -> None:
        """Record the bytes of the rows that the call takes, and their sources."""
        for table in self._tables:
            for part, n in table.rows_by_part():
                nbytes = round(part.facts.nbytes * n / (part.facts.n_rows or 1))
                record.read(nbytes, part.kept.place, part.record, part.origin.rank)

    def _merged(self, groups: Sequence[ArgumentGroup]) -> Iterator[tuple[ArgumentGroup, Shares | None]]:
        """Yield the groups, one for all that have portions of the same values if their receivers get whole tables."""
        for _, alike in groupby(groups, _values):
            members = list(alike)
            if len(members) == 1 or not (self._ranks_are_own and self._is_for_all(members[0])):
                yield from ((member, None) for member in members)
                continue
            numbers = [member.items[0][1].numbers for member in members]
            bounds = pairwise(accumulate(map(len, numbers), initial=0))
            shares = {rank: each for member, each in zip(members, bounds, strict=True) for rank in member.ranks}
            is_range = all(isinstance(each, range) for each in numbers)  # of a split in their order, without padding
            whole = range(sum(map(len, numbers))) if is_range else np.concatenate(numbers)
            items = tuple([(key, Portion(value.value, whole)) for key, value in members[0].items])
            yield members[0]._replace(items=items, ranks=tuple(shares)), shares

    def _is_for_all(self, group: ArgumentGroup) -> bool:
        """Whether to send whole tables to all receivers of portions, as each of them needs most parts anyway."""
        tables = [self._table_of(value.value) for _, value in group.items]
        if all(table.is_in_order for table in tables):
            return False
        parts = {leaf[0] for table in tables for block in table.blocks for leaf in block.leaves}
        return not any(part.kept.place == "network" for part in parts)

    def _referring(self, value: Any, name: str, shares: Shares | None) -> Any:
        """The value to send for an argument: an `Elsewhere` for rows of a future, else the value itself."""
        if type(value) is Portion:
            is_row = isinstance(value.numbers, int)
            numbers = range(value.numbers, value.numbers + 1) if isinstance(value.numbers, int) else value.numbers
            return self._elsewhere(take(self._table_of(value.value), numbers), shares, is_row)
        if type(value) is not Future:
            return value
        try:
            return self._elsewhere(self._table_of(value))
        except ArgumentError as error:
            what = f"argument {name!r} of {self._method} (Future) cannot be pickled: {error}"
            raise ArgumentError(what) from None

    def _elsewhere(self, table: Table, shares: Shares | None = None, is_row: bool = False) -> Elsewhere:
        self._tables.append(table)
        types = _pickled(users_batch_types())
        blocks = addressed(table, lambda part: self._labels.setdefault(part, len(self._labels)))
        sent = Elsewhere(blocks, shares, types if types and _may_hold(table) else (), is_row)
        self._sent[-1].append(sent)
        return sent

    def _table_of(self, future: Future[Any]) -> Table:
        table = self._found.get(future)
        if table is None:
            table = self._found[future] = future._table()
        return table


@lru_cache(maxsize=1)
def _pickled(types: tuple[tuple[type, BatchType], ...]) -> tuple[bytes, ...]:
    """Pickled batch types; a type that cannot be pickled is left out, and unknown in other processes."""
    found = []
    for one in types:
        with suppress(Exception):
            found.append(cloudpickle.dumps(one))
    return tuple(found)


def _may_hold(table: Table) -> bool:
    """Whether rows may be, or hold, batches of user-registered types, whose modules the readers have to import."""
    return any(column.shape is None and column.dtype != "list" for column in table.schema.values())


def _values(group: ArgumentGroup) -> tuple[Any, ...]:
    """A key that is equal for argument groups of portions of the same values, and unique for other groups."""
    values = [(key, id(value.value)) for key, value in group.items if type(value) is Portion]
    return tuple(values) if len(values) == len(group.items) else (id(group),)
