"""Resource pools: reserved places for workers, and how pools are merged and split.

A pool knows no process: it asks its backend to reserve the places when the first group needs them (or on
``with pool:``), and to release them in the end. Merged and split pools share the places of the pools that they
were made from::

    ResourcePool([4]) ──┐
                        ├─ merge_resource_pool ──► nodes [4, 4], the same eight places
    ResourcePool([4]) ──┘
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Protocol

from bandmaster.backends import get_backend
from bandmaster.contract import Slot
from bandmaster.errors import ClosedError, PlacementError, UsageError
from bandmaster.plan.placement import RESERVING, Request
from bandmaster.plan.render import html_table
from bandmaster.platform.locks import check_not_held
from bandmaster.worker import ClassLoading

__all__ = ["ResourcePool", "merge_resource_pool", "split_resource_pool"]


class Closes(Protocol):
    """What holds places of a pool, and gives them back when it is closed: a worker group."""

    def close(self) -> None:
        """Give the places back."""


_occupying = threading.RLock()  # one group at a time takes places; re-entrant, as a signal handler may close a pool


class ResourcePool:
    """Places for workers, ``[4, 2]`` being four on one node and two on another.

    Groups on one pool share its places: rank r of each is on the same device. Ranks follow (node, device) order.
    Nothing is reserved until the first group or ``with`` asks for it.

    Args:
        process_on_nodes: Places on each node, at least one each; nodes may differ.
        backend: ``"local"`` (processes on this machine), ``"inprocess"`` or ``"ray"``.
        use_gpu: Whether every place has a GPU of its own.
        name_prefix: Name of the pool in messages, and the beginning of its workers' names.
        max_colocate_count: How many groups may share a place; each is given that part of its GPU and CPUs.
        cpus_per_worker: CPUs reserved for each place, for all groups on it together.
        placement_timeout: Seconds to wait for places that others hold; on this machine nothing is waited for.

    Raises:
        UsageError: A value that makes no sense, or a backend that does not exist or is not installed.

    Example:
        >>> pool = ResourcePool([4, 2])
        >>> pool.world_size, pool.local_rank_list()
        (6, [0, 1, 2, 3, 0, 1])
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        *,
        backend: str = "local",
        use_gpu: bool = False,
        name_prefix: str | None = None,
        max_colocate_count: int = 10,
        cpus_per_worker: float = 1,
        placement_timeout: float = 60.0,
    ) -> None:
        nodes = _checked_nodes(process_on_nodes)
        is_count = isinstance(max_colocate_count, int) and not isinstance(max_colocate_count, bool)
        if not is_count or max_colocate_count < 1:
            raise UsageError(f"max_colocate_count is the number of groups on a place, not {max_colocate_count!r}")
        for what, amount in (("cpus_per_worker", cpus_per_worker), ("placement_timeout", placement_timeout)):
            if isinstance(amount, bool) or not isinstance(amount, int | float) or not amount >= 0:
                raise UsageError(f"{what} is a number of 0 or more, not {amount!r}")
        if not isinstance(use_gpu, bool):
            raise UsageError(f"use_gpu is True or False, one GPU for every place or none, not {use_gpu!r}")
        if not isinstance(name_prefix, str | None):
            raise UsageError(f"name_prefix is a string, or None for a pool without a name, not {name_prefix!r}")
        get_backend(backend)
        request = Request(name_prefix or "pool", nodes, cpus_per_worker, int(use_gpu))
        lease = _Lease(request, backend, max_colocate_count, placement_timeout)
        parts = [_Part(lease, node, tuple(range(size))) for node, size in enumerate(nodes)]
        self._set_up(parts, name_prefix or "", (lease,))

    def _set_up(self, parts: Sequence[_Part], name_prefix: str, owned: tuple[_Lease, ...]) -> None:
        self._parts = tuple(parts)
        self._owned = owned  # leases that end with this pool
        self._groups: weakref.WeakSet[Closes] = weakref.WeakSet()
        self._is_closed = False
        self.name_prefix = name_prefix

    @classmethod
    def _of(cls, parts: Sequence[_Part], name_prefix: str) -> ResourcePool:
        pool = ResourcePool.__new__(ResourcePool)
        pool._set_up(parts, name_prefix, ())
        return pool

    @property
    def process_on_nodes(self) -> tuple[int, ...]:
        """Places on each node."""
        return tuple(len(part.indices) for part in self._parts)

    @property
    def world_size(self) -> int:
        """Places in all."""
        return sum(self.process_on_nodes)

    @property
    def backend(self) -> str:
        """Name of the backend."""
        return self._lease.backend

    @property
    def use_gpu(self) -> bool:
        """Whether every place has a GPU of its own."""
        return bool(self._lease.request.gpus_per_worker)

    @property
    def max_colocate_count(self) -> int:
        """How many groups may share a place: the least of the pools that this one was merged from."""
        return min(part.lease.max_colocate_count for part in self._parts)

    @property
    def cpus_per_worker(self) -> float:
        """CPUs reserved for each place."""
        return self._lease.request.cpus_per_worker

    @property
    def _lease(self) -> _Lease:
        return self._parts[0].lease

    def local_rank_list(self) -> list[int]:
        """For each rank, its number on its node."""
        return [index for size in self.process_on_nodes for index in range(size)]

    def local_world_size_list(self) -> list[int]:
        """For each rank, how many ranks its node has."""
        return [size for size in self.process_on_nodes for _ in range(size)]

    def reserve(self) -> ResourcePool:
        """Take the places now, rather than with the first group.

        Raises:
            PlacementError: They do not fit, or did not become free in time.
            ClosedError: The pool was closed.
        """
        self._check_open()
        for part in self._parts:
            part.lease.open()
        self._check_open()  # another thread may have closed it meanwhile
        return self

    def close(self) -> None:
        """Close the groups on the pool and give its places back; places of merged and split pools stay theirs.

        Closing a pool also closes the groups of pools that were merged or split from it. Closing twice is fine.

        Raises:
            UsageError: A signal handler closes it in the middle of an operation of one of its groups, which stays open.
        """
        self._is_closed = True
        try:
            _close_all(self._groups)
            _close_all(self._owned)
        except UsageError:
            self._is_closed = False
            raise

    def __enter__(self) -> ResourcePool:
        return self.reserve()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _is_over(self) -> bool:
        """Whether it was closed, or a pool that it was merged or split from."""
        return self._is_closed or any(part.lease.is_closed for part in self._parts)

    def _check_open(self) -> None:
        if self._is_over:
            raise ClosedError(f"{self._described()} was closed; make a new pool")

    def _occupy(self, owner: Closes, name: str, take: Callable[[Callable[[], object]], object]) -> tuple[Slot, ...]:
        """Seats for a new group; ``take`` gets what gives them back, before anything is taken."""
        self.reserve()
        places = [(part.lease, part.node, index) for part in self._parts for index in part.indices]
        holder = object()
        take(partial(_free, places, holder))
        with _occupying:
            for lease, node, index in places:
                lease.holders.setdefault((node, index), {})[holder] = name
            try:
                self._check_room(holder, name)
            except PlacementError:
                _free(places, holder)  # before others count it
                raise
            for lease in {part.lease for part in self._parts}:
                lease.groups.add(owner)
            self._groups.add(owner)
        self._check_open()  # another thread may have closed it before it knew of this group
        return tuple(self._slots())

    def _check_room(self, holder: object, name: str) -> None:
        """Make sure that a holder is not one too many at any of its places."""
        for part in self._parts:
            for index in part.indices:
                holders = dict(part.lease.holders[part.node, index])
                del holders[holder]
                if len(holders) >= part.lease.max_colocate_count:
                    names = ", ".join(holders.values())
                    raise PlacementError(
                        f"{self!r} has no room for group {name!r}: place {index} of node {part.node} holds "
                        f"{len(holders)} groups of at most {part.lease.max_colocate_count} ({names}); "
                        "close one of them, or make the pool with a larger max_colocate_count"
                    )

    def _slots(self) -> Iterator[Slot]:
        for node_rank, part in enumerate(self._parts):
            for local_rank, index in enumerate(part.indices):
                share = 1 / part.lease.max_colocate_count
                yield Slot(part.lease.reservation, part.node, index, node_rank, local_rank, len(part.indices), share)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a ResourcePool stays in its controller; pass the values that the workers need instead")

    def __repr__(self) -> str:
        return f"<closed {self._described()}>" if self._is_over else self._described()

    def _described(self) -> str:
        prefix = f", name_prefix={self.name_prefix!r}" if self.name_prefix else ""
        gpu = ", use_gpu=True" if self.use_gpu else ""
        return f"ResourcePool({list(self.process_on_nodes)}, backend={self.backend!r}{gpu}{prefix})"

    def _repr_html_(self) -> str:
        slots = [(rank, s.node_rank, s.local_rank) for rank, s in enumerate(self._slots())]
        places = [part.lease.names((part.node, index)) for part in self._parts for index in part.indices]
        rows = [[*slot, ", ".join(names) or "-"] for slot, names in zip(slots, places, strict=True)]
        return html_table(repr(self), ["rank", "node", "local rank", "groups"], rows)


def merge_resource_pool(*pools: ResourcePool) -> ResourcePool:
    """One pool over the places of several, in their order; the places are shared, not moved.

    Pools that were themselves merged or split will do. Parts of one node that follow each other in the order of its
    devices become one node again.

    Args:
        *pools: Two pools or more, of one backend, all with GPUs or all without.

    Raises:
        UsageError: Pools that differ in backend or kind, or that have a place in common.
        ClosedError: One of them was closed.
    """
    if len(pools) < 2:
        raise UsageError(f"merge_resource_pool takes two pools or more, not {len(pools)}")
    for pool in pools:
        _check_pool(pool, "merge_resource_pool")
        for what in ("backend", "use_gpu", "cpus_per_worker"):
            ours, theirs = getattr(pools[0], what), getattr(pool, what)
            if ours != theirs:
                raise UsageError(
                    f"cannot merge {pools[0]!r} and {pool!r}: {what} is {ours!r} here and {theirs!r} there"
                )
    parts: list[_Part] = []
    taken: set[tuple[_Lease, int, int]] = set()
    for part in (part for pool in pools for part in pool._parts):
        places = {(part.lease, part.node, index) for index in part.indices}
        if places & taken:
            raise UsageError(
                f"cannot merge pools that share places: {', '.join(map(repr, pools))}; merge disjoint ones"
            )
        taken |= places
        parts.append(part)
    return ResourcePool._of(_joined(parts), "".join(pool.name_prefix for pool in pools))


def split_resource_pool(pool: ResourcePool, split_size: int | Sequence[int]) -> list[ResourcePool]:
    """Pools over parts of a pool's places, in rank order; the places are shared, not moved.

    Args:
        pool: The pool; one that was merged or split before will do.
        split_size: Places of every part, or a list with the size of each.

    Raises:
        UsageError: Sizes that do not add up to the pool's.
        ClosedError: The pool was closed.

    Example:
        >>> [part.process_on_nodes for part in split_resource_pool(ResourcePool([2, 4]), 3)]
        [(2, 1), (3,)]
    """
    _check_pool(pool, "split_resource_pool")
    size = pool.world_size
    if isinstance(split_size, int):
        if split_size < 1 or size % split_size:
            raise UsageError(
                f"cannot split {size} places into parts of {split_size}; give a divisor or a list of sizes"
            )
        split_size = [split_size] * (size // split_size)
    sizes = _checked_nodes(split_size)
    if sum(sizes) != size:
        raise UsageError(f"cannot split {size} places into {list(sizes)}, which are {sum(sizes)}")
    places = iter([(part.lease, part.node, index) for part in pool._parts for index in part.indices])
    pools = []
    for n in sizes:
        parts = [_Part(lease, node, (index,)) for lease, node, index in (next(places) for _ in range(n))]
        pools.append(ResourcePool._of(_joined(parts), pool.name_prefix))
    return pools


class _Lease:
    """The places of one base pool: reserved at most once, released at the latest when nobody refers to it."""

    def __init__(self, request: Request, backend: str, max_colocate_count: int, timeout_s: float) -> None:
        self.request = request
        self.backend = backend
        self.max_colocate_count = max_colocate_count
        self.holders: dict[tuple[int, int], dict[object, str]] = {}  # names of groups by (node, index) and holder
        self.groups: weakref.WeakSet[Closes] = weakref.WeakSet()
        self.reservation: Any = None
        self.is_closed = False
        self._timeout_s = timeout_s
        self._lock = threading.RLock()  # held while the places are reserved
        self._release: weakref.finalize[Any, _Lease] | None = None

    def open(self) -> None:
        ClassLoading.check()
        check_not_held(self._lock, RESERVING)
        with self._lock:
            if self._release is None:
                backend = get_backend(self.backend)
                self.reservation = backend.reserve(self.request, self._timeout_s)
                self._release = weakref.finalize(self, backend.release, self.reservation)
            if self.is_closed:  # by another thread, meanwhile
                self._end()

    def close(self) -> None:
        self.is_closed = True
        try:
            _close_all(self.groups)
        except UsageError:
            self.is_closed = False
            raise
        except BaseException:
            self._end()
            raise
        self._end()

    def names(self, place: tuple[int, int]) -> list[str]:
        return list(self.holders.get(place, {}).values())

    def _end(self) -> None:
        if self._release is not None:
            self._release()


@dataclass(frozen=True)
class _Part:
    """Places of one node of a lease: one node of a pool."""

    lease: _Lease
    node: int
    indices: tuple[int, ...]

    def continues_in(self, other: _Part) -> bool:
        is_same_node = self.lease is other.lease and self.node == other.node
        return is_same_node and self.indices[-1] < other.indices[0]


def _joined(parts: Sequence[_Part]) -> list[_Part]:
    """The parts, those of one node in the order of its devices made one."""
    joined: list[_Part] = []
    for part in parts:
        if joined and joined[-1].continues_in(part):
            part = _Part(part.lease, part.node, joined.pop().indices + part.indices)
        joined.append(part)
    return joined


def _free(places: Sequence[tuple[_Lease, int, int]], holder: object) -> None:
    """Give places back. Without a lock, as it may run as a finalizer at any moment in any thread."""
    for lease, node, index in places:
        lease.holders.get((node, index), {}).pop(holder, None)


def _close_all(things: Iterable[Closes | _Lease]) -> None:
    """Close groups or leases: all of them, though one may raise."""
    with _occupying:  # while they are listed, none is added
        listed = list(things)
    with contextlib.ExitStack() as closing:
        for thing in listed:
            closing.callback(thing.close)


def _check_pool(pool: object, function: str) -> None:
    if not isinstance(pool, ResourcePool):
        raise UsageError(f"{function} takes pools, not {pool!r}")
    pool._check_open()


def _checked_nodes(sizes: object) -> tuple[int, ...]:
    if not isinstance(sizes, Sequence) or isinstance(sizes, str) or not sizes:
        raise UsageError(f"places are given as a list with the number on each node, such as [4, 2], not {sizes!r}")
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UsageError(f"every node has at least one place, but {list(sizes)} asks for {size!r}")
    return tuple(sizes)
