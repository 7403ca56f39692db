"""Rows of futures among the arguments of a call: their references in its payloads, and the kept rows that it needs.

::

    argument groups of a split            payloads
    Portion(rows, 0:4) ──► ranks 0, 1     rows in their order: one for each group, which names the parts it needs
    Portion(rows, 4:8) ──► ranks 2, 3     by an index: one for all, with the index and the portion of each rank

Rows that are fetched from other hosts have a payload for each group, too, so that a host fetches what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, groupby, pairwise
from typing import Any

import cloudpickle
import numpy as np

from bandmaster.calls.future import Future, table_of
from bandmaster.calls.hooks import CallTrace
from bandmaster.codec import add_plain
from bandmaster.contract import Workers
from bandmaster.errors import ArgumentError
from bandmaster.plan.arguments import ArgumentGroup
from bandmaster.plan.batch import Portion, users_batch_types
from bandmaster.plan.batch_types import BatchType
from bandmaster.plan.columns import may_hold_users_types
from bandmaster.rows import table as handles
from bandmaster.rows.kept import KeptPart
from bandmaster.rows.table import (
    Addressed,
    Elsewhere,
    Joined,
    Part,
    Renamed,
    Stacked,
    Table,
    addressed,
    is_in_order,
    results_of,
    rows_by_part,
)

_KINDS = {Future, Portion}
_pickled: tuple[tuple[tuple[type, BatchType], ...], tuple[bytes, ...]] = (), ()  # batch types

add_plain(Elsewhere, Addressed, Renamed, Joined, Stacked)


def refers_to_rows(groups: Iterable[ArgumentGroup]) -> bool:
    """Whether any argument is a future, or a portion of one."""
    for group in groups:
        for _, value in group.items:
            if type(value) in _KINDS:
                return True
    return False


class RowsElsewhere:
    """The kept rows that the arguments of a call refer to.

    Attributes:
        parts: The rows; their labels count from 0.

    Args:
        method: ``"Class.method"``, for messages.
        workers: The workers that are called.
    """

    def __init__(self, method: str, workers: Workers) -> None:
        self.parts: list[KeptPart] = []
        self._ranks_are_own = workers.ranks_are_own
        self._method = method
        self._labels: dict[int, int] = {}  # by identity of the part, which the futures keep
        self._needed: list[set[int]] = []  # for each argument group
        self._tables: list[Table] = []
        self._sent: list[list[Elsewhere]] = []  # for each argument group

    def addressed(self, groups: Iterable[ArgumentGroup]) -> list[ArgumentGroup]:
        """Replace the futures in argument groups by `Elsewhere` references to their rows.

        Raises:
            ArgumentError: A future has no rows.
            Exception: The exception of a future whose call has failed.
        """
        found = []
        for _, alike in groupby([group for group in groups if group.items], _values):
            members = list(alike)
            if len(members) > 1 and self._ranks_are_own:
                tables = [table_of(value.value) for _, value in members[0].items]
                members = [_joined(members)] if _are_for_all(tables) else members
            for group in members:
                self._needed.append(set())
                self._sent.append([])
                items = [(key, self._referring(value, name)) for (key, value), name in _named(group)]
                found.append(group._replace(items=tuple(items)))
        return found

    def needed(self, numbers: Sequence[int], parts: Sequence[Any]) -> tuple[tuple[int, Any], ...]:
        """The rows that some argument groups refer to, with their labels."""
        labels = sorted({label for number in numbers for label in self._needed[number]})
        return tuple([(label, parts[label]) for label in labels])

    def numbers(self, groups: Sequence[int]) -> Callable[[Sequence[int]], Mapping[Any, Any]]:
        """Return a function from ranks that get some argument groups to the numbers of the rows that they need."""
        sent = [elsewhere for number in groups for elsewhere in self._sent[number]]

        def needed(ranks: Sequence[int]) -> dict[Any, Any]:
            found: dict[Any, Any] = {}
            for elsewhere in sent:
                for label, rows in handles.rows_needed(elsewhere, ranks).items():
                    found[label] = handles.united(found[label], rows) if label in found else rows
            return found

        return needed

    def note_in(self, record: CallTrace) -> None:
        """Record the bytes of the rows that the call takes, and their sources."""
        for table in self._tables:
            for part, n in rows_by_part(table).values():
                nbytes = round(part.nbytes * n / (part.n_rows or 1))
                record.read(nbytes, part.kept.way, part.kept.record, part.rank)

    def _referring(self, value: Any, name: str) -> Any:
        """The value to send for an argument: an `Elsewhere` for rows of a future, else the value itself."""
        if type(value) is Future:
            try:
                table = table_of(value)
            except ArgumentError as error:
                what = f"argument {name!r} of {self._method} (Future) cannot be pickled: {error}"
                raise ArgumentError(what) from None
            return self._elsewhere(table)
        if type(value) is Portion:
            return self._elsewhere(handles.take(table_of(value.value), value.numbers))
        if type(value) is _Shares:
            return self._elsewhere(value.table, value.by_rank)
        return value

    def _elsewhere(self, table: Table, shares: dict[int, tuple[int, int]] | None = None) -> Elsewhere:
        self._tables.append(table)
        types = _pickled_types() if may_hold_users_types(table.schema) else ()  # readers have to import their modules
        sent = Elsewhere(addressed(table, self._label), shares, types)
        self._sent[-1].append(sent)
        return sent

    def _label(self, part: Part) -> int:
        """The label of a part; records that the last argument group needs it."""
        found = self._labels.get(id(part))
        if found is None:
            self.parts.append(part.kept)
            found = self._labels[id(part)] = len(self.parts) - 1
        self._needed[-1].add(found)
        return found


class _Shares:
    """The portions of several argument groups, in the order of these groups.

    Args:
        table: The rows of all.
        by_rank: The ``(start, stop)`` of each rank's portion.
    """

    def __init__(self, table: Table, by_rank: dict[int, tuple[int, int]]) -> None:
        self.table, self.by_rank = table, by_rank


def _pickled_types() -> tuple[bytes, ...]:
    """The pickled registered batch types; a type that cannot be pickled is left out, and unknown in other processes."""
    global _pickled
    types, found = users_batch_types(), []
    if types != _pickled[0]:
        for one in types:
            with suppress(Exception):
                found.append(cloudpickle.dumps(one))
        _pickled = types, tuple(found)
    return _pickled[1]


def _are_for_all(tables: Sequence[Table]) -> bool:
    """Whether it is best to send whole tables to all receivers of portions."""
    is_fetched = any(result.is_fetched for table in tables for result in results_of(table))
    return not is_fetched and not all(map(is_in_order, tables))


def _joined(groups: Sequence[ArgumentGroup]) -> ArgumentGroup:
    """One argument group for several that have portions of the same values."""
    ranks = tuple([rank for group in groups for rank in group.ranks])
    items = []
    for (key, value), *others in zip(*[group.items for group in groups], strict=True):
        numbers = [value.numbers, *(other.numbers for _, other in others)]
        ends = accumulate([len(one) for one in numbers], initial=0)
        bounds = {rank: ends for group, ends in zip(groups, pairwise(ends), strict=True) for rank in group.ranks}
        items.append((key, _Shares(handles.take(table_of(value.value), _one_after_the_other(numbers)), bounds)))
    return groups[0]._replace(items=tuple(items), ranks=ranks)


def _one_after_the_other(numbers: Sequence[Any]) -> Any:
    is_range = all(isinstance(one, range) for one in numbers)
    if is_range and all(one.stop == then.start for one, then in pairwise(numbers)):
        return range(numbers[0].start, numbers[-1].stop)
    return np.concatenate([np.asarray(one, dtype=np.int64) for one in numbers])


def _values(group: ArgumentGroup) -> tuple[Any, ...]:
    """A key that is equal for argument groups of portions of the same values, and unique for other groups."""
    if all(type(value) is Portion for _, value in group.items):
        return tuple([(key, id(value.value)) for key, value in group.items])
    return (id(group),)


def _named(group: ArgumentGroup) -> Any:
    return zip(group.items, group.names, strict=False)
