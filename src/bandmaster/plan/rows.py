"""Computes the rows that each rank receives and the collected ranks. Pure functions of mesh and protocol.

The axes in the six protocols of `Dispatch` (dp, pp, tp, micro_dp, gen_pp, gen_tp) count as size 1 on a mesh that does
not have them, in any protocol. Every other axis that the mesh does not have is an error.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from bandmaster.errors import MeshError
from bandmaster.plan.batch_types import Index
from bandmaster.plan.mesh import Mesh
from bandmaster.plan.transfer import Concat, Dispatch, Gather, Incoming, Reduce, Route, Split, TransferProtocol

TABLE_AXES = frozenset(axis for dispatch in Dispatch for axis in dispatch.value.axis_names)


class RealRows(NamedTuple):
    """The rows that each rank of a worker group receives.

    Attributes:
        numbers: For each rank the numbers of its rows, without padding: a range, or an array if the split balances.
        padded_to: Number of rows of each rank with padding; None if the split does not pad.
        holder: The noun that messages use for a rank, such as ``"chunk"`` if chunks take the place of ranks.
    """

    numbers: tuple[Index, ...]
    padded_to: int | None = None
    holder: str = "rank"

    def order(self, ranks: Sequence[int]) -> np.ndarray[Any, Any] | None:
        """The permutation that restores the order of the rows before the split.

        Args:
            ranks: The ranks whose rows are concatenated.

        Returns:
            The number of each row in that concatenation; None if the split has left the rows in their order.
        """
        numbers = [self.numbers[rank] for rank in ranks]
        if all(isinstance(one, range) for one in numbers):
            return None
        return np.argsort(np.concatenate(numbers), kind="stable")


class Cut(NamedTuple):
    """A split of a number of rows on a mesh.

    Attributes:
        receivers: For each part, the ranks that receive it.
        numbers: For each part, the numbers of its rows, with those that pad it.
        real_rows: The number of rows of each rank.
    """

    receivers: tuple[tuple[int, ...], ...]
    numbers: tuple[Index, ...]
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
    starts = [part * small + min(part, extra) for part in range(parts + 1)]
    if pad:
        starts = [min(part * (small + bool(extra)), rows) for part in range(parts + 1)]
    return tuple(pairwise(starts))


def balanced(costs: np.ndarray[Any, Any], sizes: Sequence[int]) -> tuple[np.ndarray[Any, Any], ...]:
    """Choose rows for parts of given sizes so that the sums of their costs are about equal.

    The dearest rows are chosen first; each goes to the part with the least cost so far that is not full.

    Args:
        costs: The cost of each row, 0 or more.
        sizes: The number of rows of each part; their sum is the number of rows.

    Returns:
        For each part the numbers of its rows, ascending.

    Example:
        >>> [part.tolist() for part in balanced(np.array([9, 1, 2, 8]), [2, 2])]
        [[0, 1], [2, 3]]
    """
    chosen: list[list[int]] = [[] for _ in sizes]
    lightest = [(0.0, part) for part, size in enumerate(sizes) if size]
    for row in np.argsort(-costs, kind="stable").tolist():
        cost, part = lightest[0]
        chosen[part].append(row)
        if len(chosen[part]) < sizes[part]:
            heapq.heapreplace(lightest, (cost + float(costs[row]), part))
        else:
            heapq.heappop(lightest)
    return tuple([np.array(sorted(rows), dtype=np.int64) for rows in chosen])


@lru_cache(maxsize=1024)
def part_numbers(mesh: Mesh, split: Split | Route) -> tuple[int, ...]:
    """For each rank, the index of the part of a split that it receives, or of the replica that it belongs to.

    Raises:
        MeshError: ``mesh`` does not have an axis, or axes overlap.
    """
    return mesh.positions(*(axis for axis in split.axes if not _counts_as_one(mesh, axis)))


@lru_cache(maxsize=1024)
def shards(mesh: Mesh, split: Split | Route) -> tuple[tuple[int, ...], ...]:
    """For each part of a split, or replica, its ranks. Raises MeshError in the cases of `part_numbers`."""
    numbers = part_numbers(mesh, split)
    parts: list[list[int]] = [[] for _ in range(max(numbers) + 1)]
    for rank, number in enumerate(numbers):
        parts[number].append(rank)
    return tuple(map(tuple, parts))


def replicas(mesh: Mesh, protocol: TransferProtocol[Any, Any]) -> tuple[tuple[int, ...], ...]:
    """For each replica of a request, its ranks, the one that returns the value first. Raises MeshError as `shards`."""
    route: Route = protocol.outgoing
    leaders = sources(mesh, Concat(*route.axes, **dict(protocol.incoming.at)))
    return tuple(
        (leader, *(rank for rank in ranks if rank != leader))
        for leader, ranks in zip(leaders, shards(mesh, route), strict=True)
    )


def cut_rows(mesh: Mesh, split: Split, rows: int, costs: np.ndarray[Any, Any] | None = None) -> Cut:
    """Split ``rows`` rows over the ranks of a mesh.

    Args:
        mesh: The mesh.
        split: The split.
        rows: Number of rows.
        costs: The cost of each row, if the split balances.

    Raises:
        MeshError: In the cases of `part_numbers`.
    """
    return _cut_in_order(mesh, split, rows) if costs is None else _cut(mesh, split, rows, costs)


def _cut(mesh: Mesh, split: Split, rows: int, costs: np.ndarray[Any, Any] | None = None) -> Cut:
    receivers = shards(mesh, split)
    ranges = row_ranges(rows, len(receivers), split.pad)
    numbers: Sequence[Index] = [range(start, stop) for start, stop in ranges]
    size = len(numbers[0]) if split.pad else None  # the first part is the largest
    if costs is not None:
        numbers = balanced(costs, [len(part) for part in numbers])
    real = RealRows(tuple([numbers[number] for number in part_numbers(mesh, split)]), size)
    return Cut(receivers, tuple(numbers if size is None else [_padded(part, size, rows) for part in numbers]), real)


def _padded(numbers: Index, size: int, rows: int) -> Index:
    """Row numbers, followed by the first of the others up to some size: a row twice may be one object twice."""
    missing, own = size - len(numbers), np.asarray(numbers, np.int64)
    return np.concatenate([own, np.delete(np.arange(rows), own)[:missing]]) if missing else numbers


_cut_in_order = lru_cache(maxsize=64)(_cut)


@lru_cache(maxsize=1024)
def sources(mesh: Mesh, incoming: Incoming | tuple[Incoming, ...]) -> tuple[int, ...]:
    """The collected ranks, in the order in which their values are joined or listed.

    Args:
        mesh: The mesh of the worker group.
        incoming: A collect, or a tuple of collects; for a tuple, the result has the ranks of all its collects.

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
