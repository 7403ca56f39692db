"""The slots of one pool as its backend has reserved them, and the parts of them that merged and split pools have."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bandmaster.backends import get_backend
from bandmaster.contract import Backend
from bandmaster.errors import PlacementError, UsageError
from bandmaster.plan.placement import RESERVING, Node, Request, assign_nodes, cannot_place
from bandmaster.platform.forks import free_in_forks, in_forks
from bandmaster.platform.locks import check_not_held
from bandmaster.worker import check_not_loading


class Closes(Protocol):
    """The part of a worker group that a pool uses: the group occupies slots, and `close` releases them."""

    def close(self) -> None:
        """Release the slots."""


# One group at a time occupies slots; re-entrant, as a signal handler may close a pool.
occupying = free_in_forks(threading.RLock())


@dataclass(frozen=True)
class WorkerStart:
    """The options of a pool for the processes of its workers.

    Attributes:
        preload: Names of the modules that are imported first; None if the backend chooses them.
        env: Environment variables, by name.
    """

    preload: tuple[str, ...] | None
    env: tuple[tuple[str, str], ...]


class Lease:
    """The slots of one pool made by `ResourcePool()`, which merged and split pools share.

    They are reserved at most once, and released by `close` or when the last pool that refers to them is collected. An
    entry of the request is the slots of one node; when that node is lost, a spare entry takes its place.

    Attributes:
        entries: For each node of the pool, the entry of the request that it is now.
        spares: The entries of the request that are spare.
    """

    def __init__(
        self, request: Request, backend: str, max_colocate_count: int, timeout_s: float, start: WorkerStart
    ) -> None:
        self.request = request
        self.start = start
        self.backend = backend
        self.max_colocate_count = max_colocate_count
        self.holders: dict[tuple[int, int], dict[object, str]] = {}  # group names, by (node, index) and then by holder
        self.groups: weakref.WeakSet[Closes] = weakref.WeakSet()
        self.reservation: Any = None  # as long as the slots are not reserved
        self.is_closed = False
        self._set_entries()
        self._timeout_s = timeout_s
        self._lock = threading.RLock()  # held while the backend reserves the slots
        self._held: list[tuple[Backend, Any]] = []  # to be released; empty if the slots belong to others
        self._end_if_dropped = weakref.finalize(self, _release, self._held)
        in_forks(self, Lease._end_in_fork)

    def _set_entries(self) -> None:
        entries = list(range(len(self.request.workers)))
        n_used = len(entries) - self.request.n_spares
        self.entries, self.spares = entries[:n_used], entries[n_used:]

    def open(self) -> None:
        """Reserve the slots."""
        check_not_loading()
        check_not_held(self._lock, RESERVING)
        with self._lock:
            if not self.is_reserved:
                self._end()  # where Ctrl-C came as the slots were reserved or given back
                backend = get_backend(self.backend)
                reservation = backend.reserve(self.request, self._timeout_s)
                self._held.append((backend, reservation))
                self.reservation = reservation
            if self.is_closed:  # another thread closed it meanwhile
                self._end()

    def give_back(self) -> None:
        """Release the slots until `open` reserves some again, unless a group is on them or they belong to others."""
        with self._lock, occupying:
            if self._held and not self.is_closed and not any(self.holders.values()):
                self.reservation = None  # first: if Ctrl-C comes, no group is put on what is perhaps released
                self._set_entries()
                self._end()

    def take_over(self, reservation: Any) -> None:
        """Use slots that were reserved elsewhere, of the same number and kind; whoever reserved them releases them.

        Raises:
            UsageError: There are groups on the present slots.
        """
        with self._lock, occupying:
            if names := {name for held in self.holders.values() for name in held.values()}:
                raise UsageError(
                    f"pool {self.request.name!r} cannot use other slots while there are groups on its own: "
                    f"{', '.join(sorted(names))}; close these first, or make another pool"
                )
            self.reservation = reservation
            self._end()

    @property
    def is_reserved(self) -> bool:
        """Whether the slots are reserved."""
        return self.reservation is not None

    def nodes(self) -> list[Node | None]:
        """The node of each entry of the request; where it would be if the slots are not reserved; None if it is lost.

        Raises:
            PlacementError: The slots are not reserved, and do not fit now.
        """
        backend = get_backend(self.backend)
        if self.is_reserved:
            return list(backend.nodes(self.reservation))
        nodes = backend.inventory()
        assigned = assign_nodes(self.request, nodes)
        if assigned is None:
            raise cannot_place(self.request, nodes)
        return [nodes[index] for index in assigned]

    def renew(self) -> None:
        """Have spare entries take the place of those whose nodes are lost.

        Raises:
            PlacementError: There is no spare entry that can.
        """
        with self._lock:
            nodes = self.nodes()
            for node, entry in enumerate(self.entries):
                if nodes[entry] is None:
                    spare = self._spare_for(entry, nodes)
                    left, entries = [other for other in self.spares if other != spare], list(self.entries)
                    entries[node] = spare
                    self.entries, self.spares = entries, left  # in one step, as Ctrl-C may come

    def _spare_for(self, entry: int, nodes: Sequence[Node | None]) -> int:
        size, choice = self.request.workers[entry], self.request.choice(entry)
        for spare in self.spares:
            there = nodes[spare]
            if there is not None and self.request.workers[spare] >= size and there.allows(choice):
                return spare
        left = [self.request.workers[spare] for spare in self.spares if nodes[spare] is not None]
        raise PlacementError(
            f"node {self.entries.index(entry)} of pool {self.request.name!r} is lost, with its {size} slots, and no "
            f"spare node can take its place: {f'there are spare {left}' if left else 'there is none left'}; close the "
            f"pool and make another one, with spares=[{size}] where this has to be survived"
        )

    def close(self) -> None:
        """Close the groups, and release the slots."""
        self.is_closed = True
        try:
            close_all(self.groups)
            self._end()
            self._end_if_dropped.detach()
        except UsageError:
            self.is_closed = False
            raise
        except BaseException:  # Ctrl-C: each step may be taken again
            try:
                close_all(self.groups)
            finally:
                self._end()
            raise

    def _end(self) -> None:
        _release(self._held)

    def _end_in_fork(self) -> None:
        self._held.clear()


def _release(held: list[tuple[Backend, Any]]) -> None:
    """Release the slots of reservations."""
    for each in list(held):
        backend, reservation = each
        try:
            backend.release(reservation)
        except BaseException:  # Ctrl-C, also during a collection: each step of a release may be taken again
            backend.release(reservation)
            raise
        with contextlib.suppress(ValueError):  # another thread has done it, too
            held.remove(each)


SlotKey = tuple[Lease, int, int]  # what identifies a slot: node of the pool, and index there


@dataclass(frozen=True)
class Part:
    """Slots of one node of a `Lease`: one node of a pool."""

    lease: Lease
    node: int
    indices: tuple[int, ...]


def parts_of(places: Sequence[SlotKey]) -> tuple[Part, ...]:
    """Group neighbouring slots that are on one node, in the order of its devices."""
    parts: list[Part] = []
    for lease, node, index in places:
        last = parts[-1] if parts else None
        if last is not None and (last.lease, last.node) == (lease, node) and last.indices[-1] < index:
            parts[-1] = Part(lease, node, (*last.indices, index))
        else:
            parts.append(Part(lease, node, (index,)))
    return tuple(parts)


def free(places: Sequence[SlotKey], holder: object) -> None:
    """Remove a group from its slots. Takes no lock, as it may run as a finalizer at any moment in any thread."""
    for lease, node, index in places:
        lease.holders.get((node, index), {}).pop(holder, None)


def close_all(things: Iterable[Closes | Lease]) -> None:
    """Close every group or lease, even if closing one of them raises."""
    with occupying:  # no group is added while the list is made
        listed = list(things)
    with contextlib.ExitStack() as closing:
        for thing in listed:
            closing.callback(thing.close)
