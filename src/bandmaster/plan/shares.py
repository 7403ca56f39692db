"""Shares of a call: sets of ranks with one result each, for calls whose results are not joined. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bandmaster.plan.arguments import groups_by_rank
from bandmaster.plan.rows import CollectEach
from bandmaster.plan.transfer import Concat, Incoming, Only


class Share(NamedTuple):
    """Ranks that act together, one of which returns the value of the share.

    Attributes:
        rank: The rank that returns the value.
        ranks: All ranks of the share, that rank first.
    """

    rank: int
    ranks: tuple[int, ...]


def shares(ranks: Sequence[int], receivers: Sequence[Sequence[int]], collected: Sequence[int]) -> tuple[Share, ...]:
    """One share for each collected rank.

    A rank that is not collected belongs to the first collected rank that receives the same arguments, else to the first
    collected rank of all.

    Args:
        ranks: The ranks that run the method.
        receivers: Item i lists the ranks that receive argument group i.
        collected: The ranks that return values; at least one.

    Example:
        >>> shares([0, 1, 2, 3], [[0, 1], [2, 3]], [0, 2])
        (Share(rank=0, ranks=(0, 1)), Share(rank=2, ranks=(2, 3)))
    """
    received = groups_by_rank(ranks, receivers)
    leaders: dict[tuple[int, ...], int] = {}
    for rank in collected:
        leaders.setdefault(received[rank], rank)
    found = {rank: [rank] for rank in collected}
    for rank in ranks:
        if rank not in found:
            found[leaders.get(received[rank], collected[0])].append(rank)
    return tuple([Share(rank, tuple(members)) for rank, members in found.items()])


def of_one_rank(incoming: Incoming | CollectEach, rank: int) -> Incoming | CollectEach:
    """The collect for the value of a single rank: it removes padding, and neither joins nor lists."""
    if isinstance(incoming, Concat):
        return incoming
    if isinstance(incoming, CollectEach):
        items = [each if isinstance(each, Concat) else Only() for each, _ in incoming.collects]
        return CollectEach(tuple([(each, (rank,)) for each in items]))
    return Only()
