"""Which rows go to which rank, and which ranks' values come back. Pure functions of mesh and protocol.

Axes that the six protocols of `Dispatch` name (dp, pp, tp, micro_dp, gen_pp, gen_tp) count as size 1 where a mesh does
not have them, in any protocol. Other axes that it does not have are errors.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from bandmaster.errors import MeshError
from bandmaster.plan.mesh import Mesh
from bandmaster.plan.transfer import Dispatch, Gather, Incoming, Reduce, Split

__all__ = [
    "CollectEach",
    "Cut",
    "RealRows",
    "cut_rows",
    "on_mesh",
    "part_numbers",
    "row_ranges",
    "shards",
    "sources",
]

TABLE_AXES = frozenset(axis for dispatch in Dispatch for axis in dispatch.value.axis_names)


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
    """What `bandmaster.plan.collection.collect` needs to know of it."""
    if not isinstance(incoming, tuple):
        return incoming
    return CollectEach(tuple((collect, sources(mesh, collect)) for collect in incoming))


def _counts_as_one(mesh: Mesh, axis: str) -> bool:
    return axis in TABLE_AXES and axis not in mesh.axis_names
