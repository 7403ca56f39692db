"""Searches nodes for the entries of a resource pool: bin packing, with entries limited to some nodes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

__all__ = ["MAX_DEAD_ENDS", "Bins", "Item", "search"]

MAX_DEAD_ENDS = 10_000  # limit of the search; requests with few different sizes never reach it


class Item(NamedTuple):
    """An item to pack onto one node.

    Attributes:
        size: The room that it takes.
        kind: Items of one kind may go onto the same nodes.
        is_alone: Whether no other item may go onto its node.
    """

    size: int
    kind: int
    is_alone: bool


class Bins(NamedTuple):
    """The nodes to pack items onto.

    Attributes:
        room: The room on each node.
        open_to: The kinds of items that may go onto each node.
        is_many: Whether each stands for many nodes, so that several items can each be alone there.
        is_packed: Whether items prefer a node that already has items.
    """

    room: tuple[int, ...]
    open_to: tuple[frozenset[int], ...]
    is_many: tuple[bool, ...]
    is_packed: bool


@lru_cache(maxsize=256)
def search(items: tuple[Item, ...], bins: Bins) -> tuple[int, ...] | None:
    """Choose a node for each item; None if no choice is found. The largest items come first.

    A depth-first search without recursion. It reverts a choice as soon as the remaining items cannot fit, or have
    failed before in an equivalent state. It gives up after `MAX_DEAD_ENDS`.
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
    """The room that the nodes have left during the search.

    Args:
        bins: The nodes.
        some_are_alone: Whether some items must be alone, so that nodes with and without items differ.
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
        """A key that is equal for states in which the same items fit; equivalent nodes are interchangeable."""
        return tuple(sorted([self._alike(index) for index in range(len(self._left))]))

    def _alike(self, index: int) -> int:
        """A number that is equal for equivalent nodes: with equal room, open to the same kinds, and equally used."""
        use = 0
        if self._some_are_alone:
            use = 2 if self._is_closed[index] else int(self._n_items[index] > 0)
        return (self._left[index] * self._n_classes + self._class[index]) * 3 + use

    def candidates(self, items: Sequence[Item]) -> Iterator[int]:
        """Nodes for the first item, in the order to try them; one node stands for all equivalent ones.

        Unused nodes come before used ones, the tightest first. If items are packed, used nodes come first, and then
        unused nodes, the roomiest first.
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
        """Check a necessary condition: the items of each kind, and all items, fit into the room open to them."""
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
