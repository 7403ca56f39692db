"""Plans pull dispatch: chunks of rows that go to the next free replica, instead of one part for each replica. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bandmaster.calls.options import FlowOptions
from bandmaster.errors import ArgumentError, BatchError, UsageError
from bandmaster.plan.arguments import (
    BoundArgument,
    CallPlan,
    Share,
    SplitArguments,
    by_dispatch_rule,
    to_ranks,
)
from bandmaster.plan.batch import Batch
from bandmaster.plan.batch_types import Index
from bandmaster.plan.mesh import Mesh
from bandmaster.plan.rows import shards, sources
from bandmaster.plan.transfer import Concat, Custom, Outgoing, PerRank, Reduce, Split, TransferProtocol


def chunk_numbers(n_rows: int, size: int, keys: Sequence[Hashable] | None = None) -> tuple[Index, ...]:
    """Cut rows into chunks; zero rows make one chunk without rows.

    Args:
        n_rows: Number of rows.
        size: Rows of each chunk; the last one may have fewer.
        keys: For each row the key of its group. Rows of a group come into one chunk, which then may have fewer
            rows, or more if the group alone has more. Groups come in the order of their first rows.

    Returns:
        For each chunk the numbers of its rows, ascending.

    Example:
        >>> chunk_numbers(5, 2)
        (range(0, 2), range(2, 4), range(4, 5))
        >>> [chunk.tolist() for chunk in chunk_numbers(5, 2, ["a", "b", "a", "b", "c"])]
        [[0, 2], [1, 3], [4]]
    """
    if keys is None or not n_rows:
        starts = range(0, n_rows, size) or [0]
        return tuple([range(start, min(start + size, n_rows)) for start in starts])
    groups: dict[Hashable, list[int]] = {}
    for row, key in enumerate(keys):
        groups.setdefault(key, []).append(row)
    chunks: list[list[int]] = []
    for rows in groups.values():
        if chunks and len(chunks[-1]) + len(rows) <= size:
            chunks[-1] += rows
        else:
            chunks.append(list(rows))
    return tuple([np.array(sorted(rows), dtype=np.int64) for rows in chunks])


@dataclass(frozen=True, eq=False)
class PullPlan:
    """The chunks of a call.

    Attributes:
        chunks: For each chunk the numbers of its rows.
        split: The arguments that are split into the chunks' rows.
        whole: The arguments that go with every chunk.
    """

    chunks: tuple[Index, ...]
    split: tuple[tuple[BoundArgument, Batch], ...]
    whole: tuple[BoundArgument, ...]

    def of(self, chunk: int, ranks: tuple[int, ...]) -> CallPlan:
        """The arguments of a chunk, for the ranks of a replica."""
        rows = [argument._replace(value=batch.sent(self.chunks[chunk])) for argument, batch in self.split]
        whole = (to_ranks(self.whole, ranks),) if self.whole else ()
        return CallPlan((to_ranks(rows, ranks), *whole))


def replicas(protocol: TransferProtocol[Any, Any] | Custom, mesh: Mesh, method: str) -> tuple[Share, ...]:
    """The ranks that take a chunk together: the ranks to which a split would send the same part.

    Raises:
        UsageError: The protocol does not split rows, pads them, or does not join the returned values.
    """
    if not isinstance(protocol, TransferProtocol) or not isinstance(protocol.outgoing, Split):
        raise UsageError(f"{method} splits no rows, so there are none to pull; register it with Dispatch.DP_PROTO")
    split = protocol.outgoing
    if split.pad:
        raise UsageError(
            f"{method} is split by {split!r}, but with pull= there is no padding; register a method with a Split that "
            "does not pad"
        )
    if not all(isinstance(each, Concat | Reduce) for each in protocol.collects):
        raise UsageError(
            f"{method} collects with {protocol.incoming!r}, but with pull= there is no value of each rank; collect "
            "with Concat or Reduce"
        )
    collected = set(sources(mesh, protocol.incoming))
    found = []
    for ranks in shards(mesh, split):
        leader = next((rank for rank in ranks if rank in collected), None)
        if leader is None:
            raise UsageError(
                f"{method} collects from none of the ranks {', '.join(map(str, ranks))}, which would take chunks with "
                f"pull=; collect over the axes of {split!r}"
            )
        found.append(Share(leader, (leader, *(rank for rank in ranks if rank != leader))))
    return tuple(found)


def plan_pull(
    arguments: Sequence[BoundArgument],
    split: Split,
    rules: Mapping[str, Outgoing],
    method: str,
    how: FlowOptions,
) -> PullPlan:
    """Decide which arguments are cut into chunks; the other arguments go with each chunk.

    If the split balances, the chunks with the highest cost come first.

    Args:
        arguments: The bound arguments of the call.
        split: The dispatch rule for arguments that ``rules`` does not name.
        rules: Dispatch rules by parameter name.
        method: ``"Class.method"``, for messages.
        how: Its ``pull`` and ``group_by``.

    Raises:
        ArgumentError: An argument has a value for each rank.
        BatchError: There is no batch, batches are split in different ways, or ``group_by`` names no column.
    """
    assert how.pull is not None, "the caller has checked it"
    by_rule, batches = by_dispatch_rule(arguments, split, rules, method)
    for rule, members in by_rule.items():
        if isinstance(rule, PerRank):
            raise ArgumentError(
                f"argument {members[0].name!r} of {method} has a value for each rank, but with pull= a chunk goes to "
                "whichever ranks are free; pass a batch with a value for each row"
            )
        if isinstance(rule, Split) and rule != split:
            raise BatchError(
                f"argument {members[0].name!r} of {method} is split by {rule!r} and others by {split!r}, but with "
                "pull= all are cut into the same chunks; declare no other Split"
            )
    members = by_rule.get(split, [])
    if not members:
        raise BatchError(f"{method} got no batch, so there are no rows to pull; pass one")
    cut = SplitArguments(members, batches, arguments, method)
    keys, n_rows = None, cut.n_rows
    if how.group_by is not None:
        why = f"{method} is called with group_by={how.group_by!r}"
        column = cut.column(how.group_by, why)
        if column.shape != (n_rows,):
            raise BatchError(f"{why}, which has shape {column.shape} for {n_rows} rows; pass one value for each row")
        keys = column.tolist()
    whole = [argument for rule, others in by_rule.items() if rule != split for argument in others]
    chunks = chunk_numbers(n_rows, how.pull, keys)
    costs = cut.costs(split)
    if costs is not None:  # so that all replicas end at about the same time
        chunks = tuple(sorted(map(np.asarray, chunks), key=lambda rows: -costs[rows].sum()))
    return PullPlan(chunks, tuple(cut.batches), tuple(whole))
