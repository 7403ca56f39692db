"""Computes the rows that each rank receives and the collected ranks. Pure functions of mesh and protocol.

The axes in the six protocols of `Dispatch` (dp, pp, tp, micro_dp, gen_pp, gen_tp) count as size 1 on a mesh that does
not have them, in any protocol. Every other axis that the mesh does not have is an error.
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
    """The number of rows that each rank of a worker group receives.

    Attributes:
        counts: Number of rows of each rank, without padding.
        padded_to: Number of rows of each rank with padding; None if the split does not pad.
    """

    counts: tuple[int, ...]
    padded_to: int | None = None


class Cut(NamedTuple):
    """A split of a number of rows on a mesh.

    Attributes:
        receivers: For each part, the ranks that receive it.
        ranges: For each part, ``(start, stop)`` of its rows.
        real_rows: The number of rows of each rank.
    """

    receivers: tuple[tuple[int, ...], ...]
    ranges: tuple[tuple[int, int], ...]
    real_rows: RealRows


class CollectEach(NamedTuple):
    """A tuple of collects on a mesh, for a method that returns a tuple.

    Attributes:
        collects: One ``(collect, collected ranks)`` per item of the tuple.
    """

    collects: tuple[tuple[Incoming, tuple[int, ...]], ...]


def row_ranges(rows: int, parts: int, pad: bool = False) -> tuple[tuple[int, int], ...]:
    """``(start, stop)`` of every part. If the rows do not divide evenly, the first parts have one row more.

    With ``pad`` all parts have the size of the largest. Ranges are limited to ``rows``: the rows that a range lacks
    for that size are its padding.

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
    """For each rank, the index of the part of a split that it receives.

    Raises:
        MeshError: ``mesh`` does not have an axis, or axes overlap.
    """
    return mesh.positions(*(axis for axis in split.axes if not _counts_as_one(mesh, axis)))


@lru_cache(maxsize=1024)
def shards(mesh: Mesh, split: Split) -> tuple[tuple[int, ...], ...]:
    """For each part of a split, the ranks that receive it. Raises MeshError in the cases of `part_numbers`."""
    numbers = part_numbers(mesh, split)
    parts: list[list[int]] = [[] for _ in range(max(numbers) + 1)]
    for rank, number in enumerate(numbers):
        parts[number].append(rank)
    return tuple(map(tuple, parts))


@lru_cache(maxsize=64)
def cut_rows(mesh: Mesh, split: Split, rows: int) -> Cut:
    """Split ``rows`` rows over the ranks of a mesh. Raises MeshError in the cases of `part_numbers`."""
    receivers = shards(mesh, split)
    ranges = row_ranges(rows, len(receivers), split.pad)
    sizes = [stop - start for start, stop in ranges]
    counts = tuple(sizes[number] for number in part_numbers(mesh, split))
    return Cut(receivers, ranges, RealRows(counts, sizes[0] if split.pad else None))  # the first part is the largest


@lru_cache(maxsize=1024)
def sources(mesh: Mesh, incoming: Incoming | tuple[Incoming, ...]) -> tuple[int, ...]:
    """The collected ranks, in the order in which their values are joined or listed.

    Args:
        mesh: The mesh of the worker group.
        incoming: A collect, or a tuple of collects, for which the result has the ranks of any of them.

    Raises:
        MeshError: ``mesh`` does not have an axis, axes overlap, or a coordinate is outside its axis.
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
    """The first argument of `bandmaster.plan.collection.collect`: tuples become a `CollectEach` with their ranks."""
    if not isinstance(incoming, tuple):
        return incoming
    return CollectEach(tuple((collect, sources(mesh, collect)) for collect in incoming))


def _counts_as_one(mesh: Mesh, axis: str) -> bool:
    return axis in TABLE_AXES and axis not in mesh.axis_names
