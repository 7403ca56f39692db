"""Planning: which rows go to which rank, and which ranks' values come back. Pure functions of mesh + protocol.

Axes that the six protocols of `Dispatch` name (dp, pp, tp, micro_dp, gen_pp, gen_tp) count as size 1 where a mesh does
not have them, in any protocol. Other axes that it does not have are errors.

The core calls `pack` for every group call. `plan` answers the same question for a person, without any process::

    >>> from bandmaster import Dispatch, Mesh
    >>> print(plan(Dispatch.DP_PROTO, Mesh(dp=4), rows=10))
    TransferProtocol(outgoing=Split('dp'), incoming=Concat('dp')) on Mesh(dp=4), 10 rows
    rank  dp  gets       back
    0     0   rows 0:3   part 0
    1     1   rows 3:6   part 1
    2     2   rows 6:8   part 2
    3     3   rows 8:10  part 3
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from bandmaster.batch import KNOWN, concat_rows, count_rows, describe, pad_rows, slice_rows, split_rows
from bandmaster.errors import ArgumentError, BatchError, MeshError, ProtocolError
from bandmaster.mesh import Mesh
from bandmaster.render import Box, svg_bands, text_table
from bandmaster.transfer import (
    Broadcast,
    Concat,
    Custom,
    Dispatch,
    Gather,
    Incoming,
    Outgoing,
    PerRank,
    Reduce,
    Split,
    TransferProtocol,
    as_protocol,
)

__all__ = [
    "Packed",
    "Parcel",
    "Slot",
    "TransferPlan",
    "alike",
    "everywhere",
    "first_ranks",
    "pack",
    "plan",
    "row_ranges",
    "scatter",
    "sources",
]


TABLE_AXES = frozenset(axis for dispatch in Dispatch for axis in dispatch.value.axis_names)


class Slot(NamedTuple):
    """One argument of a call: its position or keyword, the parameter that it binds to, and the value."""

    key: int | str
    name: str
    value: Any


class Parcel(NamedTuple):
    """Arguments that go to the same ranks, and so are encoded and written once.

    Attributes:
        items: ``(position or keyword, value)`` of each.
        names: The parameter that each belongs to; there may be more names than items.
        ranks: The ranks that get them.
    """

    items: tuple[tuple[int | str, Any], ...]
    names: tuple[str, ...]
    ranks: tuple[int, ...]


class RealRows(NamedTuple):
    """How many rows the ranks of a group are sent.

    Attributes:
        counts: Per rank, without padding.
        padded_to: How many each rank is sent with its padding; None where the split does not pad.
    """

    counts: tuple[int, ...]
    padded_to: int | None = None


class Cut(NamedTuple):
    """So many rows under a split on a mesh.

    Attributes:
        receivers: The ranks that get part 0, part 1, …
        ranges: The rows of each part.
        real_rows: The same by rank.
    """

    receivers: tuple[tuple[int, ...], ...]
    ranges: tuple[tuple[int, int], ...]
    real_rows: RealRows


class CollectEach(NamedTuple):
    """What a tuple of collects is on a mesh: each with the ranks whose values it takes."""

    collects: tuple[tuple[Incoming, tuple[int, ...]], ...]


class Packed(NamedTuple):
    """A call's arguments, ready to be encoded.

    Attributes:
        parcels: What goes out; a rank gets all parcels that name it.
        real_rows: What each rank gets of the rows that are split; of those that are padded, where there are several
            splits. None where nothing is split.
    """

    parcels: tuple[Parcel, ...]
    real_rows: RealRows | None = None


@lru_cache(maxsize=1024)
def alike(
    ranks: tuple[int, ...], receivers: tuple[tuple[int, ...], ...], collected: tuple[int, ...]
) -> tuple[tuple[tuple[int, ...], tuple[int, ...], bool], ...]:
    """Ranks that are asked for the very same: ``(ranks, numbers of their parcels, whether they are collected)``.

    Args:
        ranks: Those that are called.
        receivers: The ranks that get parcel 0, parcel 1, …
        collected: Those whose values come back.
    """
    parcels: dict[int, tuple[int, ...]] = dict.fromkeys(ranks, ())
    for number, members in enumerate(receivers):
        for rank in members:
            parcels[rank] += (number,)
    groups: dict[tuple[tuple[int, ...], bool], list[int]] = {}
    wanted = set(collected)
    for rank, numbers in parcels.items():
        groups.setdefault((numbers, rank in wanted), []).append(rank)
    return tuple((tuple(members), numbers, is_collected) for (numbers, is_collected), members in groups.items())


def row_ranges(rows: int, parts: int, pad: bool = False) -> tuple[tuple[int, int], ...]:
    """``(start, stop)`` of every part: the first ones get one more row, or, padded, all as many as the largest.

    Padded ranges end at ``rows``: what is missing from a part is its padding.

    Example:
        >>> row_ranges(10, 4), row_ranges(5, 4, pad=True)
        (((0, 3), (3, 6), (6, 8), (8, 10)), ((0, 2), (2, 4), (4, 5), (5, 5)))
    """
    small, extra = divmod(rows, parts)
    if pad:
        size = small + bool(extra)
        return tuple((min(part * size, rows), min(part * size + size, rows)) for part in range(parts))
    starts = [part * small + min(part, extra) for part in range(parts + 1)]
    return tuple(pairwise(starts))


@lru_cache(maxsize=1024)
def part_numbers(mesh: Mesh, split: Split) -> tuple[int, ...]:
    """For each rank, the number of the part of a split that it gets.

    Raises:
        MeshError: An axis that ``mesh`` does not have, or axes that overlap.
    """
    return mesh.positions(*(axis for axis in split.axes if not _counts_as_one(mesh, axis)))


@lru_cache(maxsize=1024)
def shards(mesh: Mesh, split: Split) -> tuple[tuple[int, ...], ...]:
    """The ranks that get part 0, part 1, … of a split; raises as `part_numbers`."""
    numbers = part_numbers(mesh, split)
    parts: list[list[int]] = [[] for _ in range(max(numbers) + 1)]
    for rank, number in enumerate(numbers):
        parts[number].append(rank)
    return tuple(map(tuple, parts))


@lru_cache(maxsize=64)
def cut_rows(mesh: Mesh, split: Split, rows: int) -> Cut:
    """What each part and each rank gets of so many rows; raises as `part_numbers`."""
    receivers = shards(mesh, split)
    ranges = row_ranges(rows, len(receivers), split.pad)
    sizes = [stop - start for start, stop in ranges]
    counts = tuple(sizes[number] for number in part_numbers(mesh, split))
    return Cut(receivers, ranges, RealRows(counts, sizes[0] if split.pad else None))  # the first part is the largest


@lru_cache(maxsize=1024)
def sources(mesh: Mesh, incoming: Incoming | tuple[Incoming, ...]) -> tuple[int, ...]:
    """The ranks whose values come back, in the order in which they are joined or listed; of a tuple, those of any.

    Raises:
        MeshError: An axis that ``mesh`` does not have, axes that overlap, or a coordinate outside its axis.
    """
    if isinstance(incoming, tuple):
        return tuple(dict.fromkeys(rank for collect in incoming for rank in sources(mesh, collect)))
    at = dict(incoming.at)
    for axis in [axis for axis in at if _counts_as_one(mesh, axis)]:
        if (index := at.pop(axis)) not in (0, -1):
            raise MeshError(
                f"{axis}={index} is outside axis {axis!r}, which counts as size 1: {mesh!r} does not have it"
            )
    if isinstance(incoming, Gather | Reduce) and not incoming.axes:
        return mesh.ranks(**at)
    return mesh.select(*(axis for axis in incoming.axes if not _counts_as_one(mesh, axis)), **at)


def on_mesh(mesh: Mesh, incoming: Incoming | tuple[Incoming, ...]) -> Incoming | CollectEach:
    """What `bandmaster.collect.collect` needs to know of it."""
    if not isinstance(incoming, tuple):
        return incoming
    return CollectEach(tuple((collect, sources(mesh, collect)) for collect in incoming))


def _counts_as_one(mesh: Mesh, axis: str) -> bool:
    return axis in TABLE_AXES and axis not in mesh.axis_names


def pack(slots: Sequence[Slot], outgoing: Outgoing, rules: Mapping[str, Outgoing], mesh: Mesh, method: str) -> Packed:
    """Decide which argument goes where.

    Args:
        slots: The call's arguments.
        outgoing: The rule for arguments that ``rules`` does not name.
        rules: Outgoing transfers by parameter name.
        mesh: The group's.
        method: ``"Class.method"``, for messages.

    Raises:
        ArgumentError: A `PerRank` argument that is no sequence of one value per rank.
        BatchError: A batch that cannot be split as asked, or no batch at all where ``outgoing`` splits.
        MeshError: An axis that ``mesh`` does not have and that does not count as size 1.
    """
    by_rule: dict[Outgoing, list[Slot]] = {}
    for slot in slots:
        by_rule.setdefault(_rule_of(slot, outgoing, rules, method), []).append(slot)
    if isinstance(outgoing, Split) and not any(isinstance(rule, Split | PerRank) for rule in by_rule):
        _check_declared(slots, outgoing, rules, method)
    parcels: list[Parcel] = []
    real_rows = None
    for rule, members in by_rule.items():
        if isinstance(rule, Broadcast):
            parcels.append(everywhere(members, mesh.size))
        elif isinstance(rule, PerRank):
            parcels += scatter(members, mesh.size, method)
        else:
            cut = cut_rows(mesh, rule, _common_rows(members, method))
            columns = [_parts(slot, cut, method) for slot in members]
            parcels += _parcels(members, zip(*columns, strict=True), cut.receivers)
            if real_rows is None or rule.pad:
                real_rows = cut.real_rows
    return Packed(tuple(parcels), real_rows)


def everywhere(slots: Sequence[Slot], n_ranks: int) -> Parcel:
    """The same values for the ranks 0 … n_ranks-1."""
    items = tuple([(slot.key, slot.value) for slot in slots])
    return Parcel(items, tuple([slot.name for slot in slots]), first_ranks(n_ranks))


@lru_cache(maxsize=64)
def first_ranks(n: int) -> tuple[int, ...]:
    """0 … n-1."""
    return tuple(range(n))


def scatter(slots: Sequence[Slot], world_size: int, method: str) -> Iterable[Parcel]:
    """One value per rank; ranks that are given the very same objects share a parcel.

    Raises:
        ArgumentError: A value that is no sequence, or has another length than ``world_size``.
    """
    for slot in slots:
        if not isinstance(slot.value, Sequence) or isinstance(slot.value, str | bytes):
            raise ArgumentError(
                f"argument {slot.name!r} of {method} takes a sequence with one value per rank, "
                f"not {type(slot.value).__name__}; for {world_size} ranks give a list of {world_size} values"
            )
        if len(slot.value) != world_size:
            raise ArgumentError(
                f"argument {slot.name!r} of {method} has {len(slot.value)} values for {world_size} ranks; "
                "give one value per rank"
            )
    columns = [[slot.value[rank] for rank in range(world_size)] for slot in slots]  # kept: a range makes them anew
    same: dict[tuple[int, ...], list[int]] = {}
    for rank in range(world_size):
        same.setdefault(tuple(id(column[rank]) for column in columns), []).append(rank)
    return _parcels(slots, [[column[ranks[0]] for column in columns] for ranks in same.values()], same.values())


def _parcels(slots: Sequence[Slot], rows: Iterable[Sequence[Any]], receivers: Iterable[Sequence[int]]) -> list[Parcel]:
    """A parcel of each row, which has a value in place of that of each slot, for its receivers."""
    keys, names = [slot.key for slot in slots], tuple([slot.name for slot in slots])
    return [
        Parcel(tuple(zip(keys, values, strict=True)), names, tuple(ranks))
        for values, ranks in zip(rows, receivers, strict=True)
    ]


def _rule_of(slot: Slot, outgoing: Outgoing, rules: Mapping[str, Outgoing], method: str) -> Outgoing:
    rule = _declared(slot, rules)
    if rule is not None:
        return rule
    if isinstance(outgoing, Split) and _rows(slot, method) is None:
        return Broadcast()
    return outgoing


def _declared(slot: Slot, rules: Mapping[str, Outgoing]) -> Outgoing | None:
    rule = rules.get(slot.name)
    return rules.get(slot.key) if rule is None and isinstance(slot.key, str) else rule


def _check_declared(slots: Sequence[Slot], split: Split, rules: Mapping[str, Outgoing], method: str) -> None:
    """Refuse a call whose arguments all go to every rank, unless each of them is declared to."""
    found = [slot for slot in slots if _declared(slot, rules) is None]
    if found:
        types = ", ".join(f"{slot.name!r} is {describe(slot.value)}" for slot in found)
        declared = ", ".join(dict.fromkeys(f"{slot.name!r}: Broadcast()" for slot in found))
        raise BatchError(
            f"{method} splits batches by {split!r}, but got none: {types}. Every rank would get the same and return "
            f"the same rows. Give a batch ({KNOWN}), make its type one with register_batch_type, declare "
            f"arguments={{{declared}}}, or register the method with ONE_TO_ALL"
        )


def _rows(slot: Slot, method: str) -> int | None:
    try:
        return count_rows(slot.value)
    except BatchError as error:
        raise BatchError(
            f"argument {slot.name!r} of {method}: {error}; keep only batches of equal length in it, or declare the "
            f"whole with register(..., arguments={{{slot.name!r}: Broadcast()}})"
        ) from None


def _common_rows(slots: Sequence[Slot], method: str) -> int:
    first, common = slots[0], _rows(slots[0], method)
    for slot in slots:
        rows = _rows(slot, method)
        if rows is None:
            raise BatchError(
                f"argument {slot.name!r} of {method} is to be split, but {type(slot.value).__name__} has no rows; "
                f"give a batch, or declare arguments={{{slot.name!r}: Broadcast()}}"
            )
        if rows != common:
            raise BatchError(
                f"{method} got batches of unequal row counts: {first.name!r} has {common}, {slot.name!r} has {rows}; "
                f"make them equal, or declare arguments={{{slot.name!r}: Broadcast()}}"
            )
    assert common is not None
    return common


def _parts(slot: Slot, cut: Cut, method: str) -> list[Any]:
    """The rows of each part, with padding where the split pads."""
    size = cut.real_rows.padded_to
    try:
        if size is None:
            return split_rows(slot.value, cut.ranges)
        return [_padded(slot.value, start, stop, size) for start, stop in cut.ranges]
    except BatchError as error:
        raise BatchError(
            f"argument {slot.name!r} of {method}: {error}; give another type of batch, say with register_batch_type "
            f"how its rows are cut, or declare arguments={{{slot.name!r}: Broadcast()}}"
        ) from error


def _padded(value: Any, start: int, stop: int, size: int) -> Any:
    """The rows start … stop-1, and behind them rows of the whole until there are ``size``."""
    missing = size - (stop - start)
    if not missing:
        return slice_rows(value, start, stop)
    padding = slice_rows(pad_rows(value, missing), 0, missing)
    return concat_rows([slice_rows(value, start, stop), padding]) if start < stop else padding


# --- the same, for a person -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TransferPlan:
    """Who gets which rows and whose values come back, printable in a terminal and a notebook.

    Attributes:
        protocol: The protocol planned.
        mesh: The mesh that it is planned on.
        rows: Rows of the batch.
        received: Per rank, ``(start, stop)`` of its rows; None where the argument is not split.
        collected: The ranks whose values come back, in order; of a tuple of collects, those that any of them takes.
    """

    protocol: TransferProtocol
    mesh: Mesh
    rows: int
    received: tuple[tuple[int, int] | None, ...]
    collected: tuple[int, ...]

    def __str__(self) -> str:
        rows = [
            [rank, *self.mesh.coordinates(rank).values(), self._gets(rank), self._gives(rank)]
            for rank in range(self.mesh.size)
        ]
        title = f"{self.protocol} on {self.mesh}, {self.rows} rows"
        return text_table(title, ["rank", *self.mesh.axis_names, "gets", "back"], rows)

    def _repr_svg_(self) -> str:
        outgoing, incoming = self.protocol.outgoing, self.protocol.incoming
        bands = [
            (type(outgoing).__name__, self._sent_boxes()),
            *self._rank_bands(),
            *((type(collect).__name__, self._back_boxes(collect)) for collect in self.protocol.collects),
        ]
        return svg_bands(f"{outgoing} → {incoming}", f"{self.mesh}, {self.rows} rows", bands)

    def _gets(self, rank: int) -> str:
        received, first, outgoing = self.received[rank], self.received[0], self.protocol.outgoing
        if received is None or first is None:
            return "its own value" if isinstance(outgoing, PerRank) else "everything"
        (start, stop), largest = received, first[1] - first[0]
        padding = largest - (stop - start) if isinstance(outgoing, Split) and outgoing.pad else 0
        return f"rows {start}:{stop}" + (f" + {padding} padding" if padding else "")

    def _gives(self, rank: int) -> str:
        """What comes back from the rank, to each collect of a tuple."""
        given = [self._place(collect, rank) for collect in self.protocol.collects]
        return ", ".join(given) if rank in self.collected else "-"

    def _place(self, collect: Incoming, rank: int) -> str:
        """What the rank's value is to one collect."""
        ranks = sources(self.mesh, collect)
        kind = "part" if isinstance(collect, Concat) else "item"
        return f"{kind} {ranks.index(rank)}" if rank in ranks else "-"

    def _part(self, rank: int) -> int:
        """The number of what the rank gets: ranks with the same number get the same."""
        if isinstance(self.protocol.outgoing, Split):
            return part_numbers(self.mesh, self.protocol.outgoing)[rank]
        return rank if isinstance(self.protocol.outgoing, PerRank) else 0

    def _sent_boxes(self) -> list[Box]:
        if isinstance(self.protocol.outgoing, PerRank):
            return [Box((f"value {rank}",), rank) for rank in range(self.mesh.size)]
        any_rank = {self._part(rank): rank for rank in range(self.mesh.size)}
        return [Box((self._gets(rank),), part) for part, rank in sorted(any_rank.items())]

    def _back_boxes(self, collect: Incoming) -> list[Box]:
        ranks = sources(self.mesh, collect)
        return [
            Box((self._place(collect, rank), f"from rank {rank}"), self._part(rank), is_framed=True) for rank in ranks
        ]

    def _rank_bands(self) -> list[tuple[str, list[Box]]]:
        """The ranks, in a band for each coordinate of the slowest axis if there are others."""
        slowest, *others = self.mesh.shape
        made_by_refining = [axis for axis in self.mesh.axis_names if axis not in self.mesh.shape]
        named = [axis for axis in self.protocol.axis_names if axis in made_by_refining]
        refined = [axis for axis in named if self.mesh.axis_size(axis) > 1]
        boxes: dict[str, list[Box]] = {}
        for rank in range(self.mesh.size):
            where = self.mesh.coordinates(rank)
            lines = [", ".join(f"{axis} {where[axis]}" for axis in axes) for axes in (others or [slowest], refined)]
            text = (f"rank {rank}", *filter(None, lines), self._gets(rank))
            band = boxes.setdefault(f"{slowest} {where[slowest]}" if others else "ranks", [])
            band.append(Box(text, self._part(rank), is_framed=rank in self.collected))
        return list(boxes.items())


def plan(protocol: object, mesh: Mesh, rows: int) -> TransferPlan:
    """What a call under ``protocol`` would do on ``mesh`` with a batch of ``rows`` rows. Starts nothing.

    Args:
        protocol: A `Dispatch` member, its name, or a `TransferProtocol`.
        mesh: The mesh of the group.
        rows: Rows of the batch, 0 or more.

    Raises:
        ProtocolError: ``protocol`` is none, or is a pair of functions, which cannot be planned.
        MeshError: The protocol names an axis that ``mesh`` does not have and that is not one of the six protocols'.
        BatchError: ``rows`` is negative.
    """
    parsed = as_protocol(protocol)
    if isinstance(parsed, Custom):
        raise ProtocolError("a custom dispatch_fn decides when it is called; only a TransferProtocol can be planned")
    if rows < 0:
        raise BatchError(f"a batch has 0 rows or more, not {rows}")
    received: tuple[tuple[int, int] | None, ...] = (None,) * mesh.size
    if isinstance(parsed.outgoing, Split):
        ranges = row_ranges(rows, len(shards(mesh, parsed.outgoing)), parsed.outgoing.pad)
        received = tuple(ranges[number] for number in part_numbers(mesh, parsed.outgoing))
    return TransferPlan(parsed, mesh, rows, received, sources(mesh, parsed.incoming))
