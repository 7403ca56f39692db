"""Searches nodes for the entries of a resource pool: bin packing, with entries that may not go everywhere. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

__all__ = ["MAX_DEAD_ENDS", "Bins", "Item", "search"]

MAX_DEAD_ENDS = 10_000  # limit of the search; requests with few different sizes never reach it


class Item(NamedTuple):
    """What has to go onto one node.

    Attributes:
        size: How much room it takes.
        kind: Items of one kind may go onto the same nodes.
        is_alone: Whether nothing else may go onto its node.
    """

    size: int
    kind: int
    is_alone: bool


class Bins(NamedTuple):
    """The nodes.

    Attributes:
        room: How much each has room for.
        open_to: The kinds of items that may go onto each.
        is_many: Whether each stands for many nodes, so that an item can be alone and yet not the only one.
        is_packed: Whether items go rather onto a node that has some already.
    """

    room: tuple[int, ...]
    open_to: tuple[frozenset[int], ...]
    is_many: tuple[bool, ...]
    is_packed: bool


@lru_cache(maxsize=256)
def search(items: tuple[Item, ...], bins: Bins) -> tuple[int, ...] | None:
    """Choose a node for each item, the largest of which come first; None if no choice is found.

    A depth-first search without recursion. It reverts a choice as soon as the remaining items cannot fit, or have
    failed before in a state that is alike. It gives up after `MAX_DEAD_ENDS`.
    """
    state, chosen = _State(bins, any(item.is_alone for item in items)), list[int]()
    hopeless: set[tuple[int, ...]] = set()
    untried = [state.candidates(items)]
    while len(chosen) < len(items) and len(hopeless) < MAX_DEAD_ENDS:
        index = next(untried[-1], None)
        if index is not None:
            state.put(items[len(chosen)], index)
            chosen.append(index)
            rest = items[len(chosen) :]
            is_dead = state.key() in hopeless or not state.may_fit(rest)
            untried.append(iter(()) if is_dead else state.candidates(rest))
            continue
        hopeless.add(state.key())
        untried.pop()
        if not chosen:
            return None
        index = chosen.pop()
        state.take_back(items[len(chosen)], index)
    return tuple(chosen) if len(chosen) == len(items) else None


class _State:
    """How much room the nodes have left at some moment of the search.

    Args:
        bins: The nodes.
        some_are_alone: Whether it matters which nodes have items.
    """

    def __init__(self, bins: Bins, some_are_alone: bool) -> None:
        self._bins, self._some_are_alone = bins, some_are_alone
        self._left = list(bins.room)
        self._n_items = [0] * len(bins.room)
        self._is_closed = [False] * len(bins.room)  # an item is alone there
        classes = sorted(set(bins.open_to), key=sorted)
        self._class = [classes.index(kinds) for kinds in bins.open_to]
        self._n_classes = len(classes)

    def put(self, item: Item, index: int) -> None:
        """Put an item onto a node."""
        self._left[index] -= item.size
        self._n_items[index] += 1
        self._is_closed[index] = item.is_alone and not self._bins.is_many[index]

    def take_back(self, item: Item, index: int) -> None:
        """Undo the last `put` onto a node."""
        self._left[index] += item.size
        self._n_items[index] -= 1
        self._is_closed[index] = False

    def key(self) -> tuple[int, ...]:
        """Equal for states in which the same items fit; nodes that are alike are interchangeable."""
        return tuple(sorted([self._alike(index) for index in range(len(self._left))]))

    def _alike(self, index: int) -> int:
        """Equal for nodes onto which the same items fit, as far as one can tell from one node."""
        use = 0
        if self._some_are_alone:
            use = 2 if self._is_closed[index] else int(self._n_items[index] > 0)
        return (self._left[index] * self._n_classes + self._class[index]) * 3 + use

    def candidates(self, items: Sequence[Item]) -> Iterator[int]:
        """Nodes for the first item, in the order to try them in; one node stands for all that are alike.

        Unused nodes come before used ones, the tightest first. Where items are packed, used ones come first, and of the
        unused ones those with the most room.
        """
        if not items:
            return iter(())
        item, alike = items[0], dict[tuple[bool, int, int], int]()
        for index, left in enumerate(self._left):
            if left >= item.size and self._is_open(item, index):
                is_used, is_packed = self._n_items[index] > 0, self._bins.is_packed
                order = -left if is_packed and not is_used else left
                alike.setdefault((is_used != is_packed, order, self._class[index]), index)
        return iter([alike[key] for key in sorted(alike)])

    def _is_open(self, item: Item, index: int) -> bool:
        if self._is_closed[index] or item.kind not in self._bins.open_to[index]:
            return False
        return not item.is_alone or self._n_items[index] == 0 or self._bins.is_many[index]

    def may_fit(self, items: Sequence[Item]) -> bool:
        """A necessary condition, for the items of each kind on the nodes that are open to it, and for all items."""
        by_kind: dict[int | None, list[int]] = {None: [item.size for item in items]}
        if self._n_classes > 1:
            for item in items:
                by_kind.setdefault(item.kind, []).append(item.size)
        return all(_units_fit(sizes, self._room_for(kind)) for kind, sizes in by_kind.items())

    def _room_for(self, kind: int | None) -> list[int]:
        if kind is None:
            return self._left
        return [left for left, kinds in zip(self._left, self._bins.open_to, strict=True) if kind in kinds]


def _units_fit(sizes: Sequence[int], room: Sequence[int]) -> bool:
    """Whether, for every unit size, the nodes hold at least as many units as the items need."""
    return all(sum(fits // unit for fits in room) >= sum(size // unit for size in sizes) for unit in {1, *sizes})
