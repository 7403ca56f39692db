"""Resource pools: reserved slots for workers, and how pools are merged and split.

A pool starts no process. It asks its backend to reserve the slots when the first group needs them (or on
``with pool:``), and to release them when it is closed. Merged and split pools share the slots of the pools from which
they were made::

    ResourcePool([4]) ──┐
                        ├─ merge_resource_pool ──► nodes [4, 4], the same eight slots
    ResourcePool([4]) ──┘
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from bandmaster.backends import get_backend
from bandmaster.contract import Slot
from bandmaster.errors import ClosedError, PlacementError, UsageError
from bandmaster.plan.placement import RESERVING, Request
from bandmaster.plan.render import html_table
from bandmaster.platform.locks import check_not_held
from bandmaster.worker import ClassLoading

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ResourcePool", "merge_resource_pool", "split_resource_pool"]


class Closes(Protocol):
    """The part of a worker group that a pool uses: the group occupies slots, and `close` releases them."""

    def close(self) -> None:
        """Release the slots."""


_occupying = threading.RLock()  # one group at a time occupies slots; re-entrant, as a signal handler may close a pool


class ResourcePool:
    """Slots for workers; ``[4, 2]`` is four slots on one node and two on another.

    Groups on one pool share its slots: rank r of each group is on the same device. Ranks follow (node, device) order.
    The pool reserves its slots for the first group, in `reserve`, or on ``with pool:``, not when it is created.

    Args:
        process_on_nodes: Slots on each node, at least one per node; nodes may differ.
        backend: ``"local"`` (processes on this machine), ``"inprocess"`` (objects in this process), ``"ray"``, or a
            name that was registered.
        use_gpu: Whether every slot has a GPU of its own.
        name_prefix: Name of the pool in messages, and prefix of its workers' names.
        max_colocate_count: How many groups may share a slot. On Ray, each claims ``1 / max_colocate_count`` of the
            slot's GPU and CPUs in Ray's accounting; neither memory nor computation is limited.
        cpus_per_worker: CPUs reserved for each slot, shared by all groups on it. Only a Ray cluster counts CPUs.
        placement_timeout: Seconds to wait for resources that other pools hold. Only backend ``"ray"`` waits.
        is_detached: Whether the slots stay reserved when the pool is closed or its process ends; only on Ray.

    Raises:
        UsageError: A value has the wrong type or range, or the backend does not exist or is not installed.

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
        is_detached: bool = False,
    ) -> None:
        nodes = _checked_sizes(process_on_nodes, "process_on_nodes", "node")
        is_count = isinstance(max_colocate_count, int) and not isinstance(max_colocate_count, bool)
        if not is_count or max_colocate_count < 1:
            raise UsageError(
                "max_colocate_count must be an integer of at least 1, the number of groups that may share a slot, "
                f"got {max_colocate_count!r}"
            )
        for what, amount in (("cpus_per_worker", cpus_per_worker), ("placement_timeout", placement_timeout)):
            if isinstance(amount, bool) or not isinstance(amount, int | float) or not amount >= 0:
                raise UsageError(f"{what} must be a non-negative number, got {amount!r}")
        if not isinstance(use_gpu, bool):
            raise UsageError(f"use_gpu must be True (one GPU for every slot) or False (none), got {use_gpu!r}")
        if not isinstance(name_prefix, str | None):
            raise UsageError(f"name_prefix must be a string, or None for a pool without a name, got {name_prefix!r}")
        get_backend(backend)
        request = Request(name_prefix or "pool", nodes, cpus_per_worker, int(use_gpu), is_detached)
        lease = _Lease(request, backend, max_colocate_count, placement_timeout)
        parts = [_Part(lease, node, tuple(range(size))) for node, size in enumerate(nodes)]
        self._set_up(parts, name_prefix or "", (lease,))

    def _set_up(self, parts: Sequence[_Part], name_prefix: str, owned: tuple[_Lease, ...]) -> None:
        self._parts = tuple(parts)
        self._owned = owned  # released when this pool is closed
        self._groups: weakref.WeakSet[Closes] = weakref.WeakSet()
        self._is_closed = False
        self.name_prefix = name_prefix

    @classmethod
    def _of(cls, parts: Sequence[_Part], name_prefix: str) -> Self:
        pool = cls.__new__(cls)
        pool._set_up(parts, name_prefix, ())
        return pool

    def _take_over(self, reservation: Any) -> None:
        """Use slots that were reserved elsewhere, of the same number and kind; whoever reserved them releases them."""
        assert len(self._owned) == 1, "no slot of another pool is in use"
        self._owned[0].take_over(reservation)

    @property
    def process_on_nodes(self) -> tuple[int, ...]:
        """Number of slots on each node."""
        return tuple(len(part.indices) for part in self._parts)

    @property
    def world_size(self) -> int:
        """Total number of slots."""
        return sum(self.process_on_nodes)

    @property
    def backend(self) -> str:
        """Name of the backend, such as ``"local"``."""
        return self._lease.backend

    @property
    def use_gpu(self) -> bool:
        """Whether every slot has a GPU of its own."""
        return bool(self._lease.request.gpus_per_worker)

    @property
    def max_colocate_count(self) -> int:
        """How many groups may share a slot. A merged pool has the smallest value of its source pools."""
        return min(part.lease.max_colocate_count for part in self._parts)

    @property
    def is_detached(self) -> bool:
        """Whether the slots stay reserved when the pool is closed or its process ends."""
        return all(part.lease.request.is_detached for part in self._parts)

    @property
    def cpus_per_worker(self) -> float:
        """CPUs reserved for each slot."""
        return self._lease.request.cpus_per_worker

    @property
    def _lease(self) -> _Lease:
        return self._parts[0].lease

    def local_rank_list(self) -> list[int]:
        """For each rank, its index on its node."""
        return [index for size in self.process_on_nodes for index in range(size)]

    def local_world_size_list(self) -> list[int]:
        """For each rank, the number of ranks on its node."""
        return [size for size in self.process_on_nodes for _ in range(size)]

    def reserve(self) -> ResourcePool:
        """Reserve the slots now, rather than with the first group.

        Returns:
            The pool itself.

        Raises:
            PlacementError: The slots do not fit, or did not become free in time.
            ClosedError: The pool was closed.
            UsageError: The cluster can only be reached by Ray Client; or a signal handler, or a module that a worker
                imports, calls this.
            ResourceError: The working directory was removed.
        """
        self._check_open()
        for part in self._parts:
            part.lease.open()
        self._check_open()  # another thread may have closed the pool meanwhile
        return self

    def close(self) -> None:
        """Close the groups on the pool and release its slots.

        Closing a pool also closes the groups of pools that were merged or split from it. Closing a merged or split
        pool closes its groups, but the slots stay with the source pools. Closing a closed pool does nothing.

        Raises:
            UsageError: A signal handler called this during an operation of one of the pool's groups. The pool stays
                open.
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
    def _places(self) -> list[tuple[_Lease, int, int]]:
        """What identifies each slot, in rank order: merged and split pools share slots."""
        return [(part.lease, part.node, index) for part in self._parts for index in part.indices]

    @property
    def _is_over(self) -> bool:
        """Whether this pool, or a pool from which it was merged or split, was closed."""
        return self._is_closed or any(part.lease.is_closed for part in self._parts)

    def _check_open(self) -> None:
        if self._is_over:
            raise ClosedError(f"{self._described()} was closed; make a new pool")

    def _occupy(self, owner: Closes, name: str, take: Callable[[Callable[[], object]], object]) -> tuple[Slot, ...]:
        """Occupy every slot for a new group, and return the slots in rank order.

        Args:
            owner: The group, to be closed with the pool.
            name: The group's name, for messages.
            take: Called with the function that releases the slots, before any slot is occupied, so that an interrupt
                leaks none.

        Raises:
            PlacementError: The pool does not fit, or a slot already holds ``max_colocate_count`` groups.
            ClosedError: The pool was closed.
        """
        self.reserve()
        places = self._places
        holder = object()
        take(partial(_free, places, holder))
        with _occupying:
            for lease, node, index in places:
                lease.holders.setdefault((node, index), {})[holder] = name
            try:
                self._check_room(holder, name)
            except PlacementError:
                _free(places, holder)  # under the lock, so that no other group counts this one
                raise
            for lease in {part.lease for part in self._parts}:
                lease.groups.add(owner)
            self._groups.add(owner)
        self._check_open()  # another thread may have closed the pool before the group was added to it
        return tuple(self._slots())

    def _check_room(self, holder: object, name: str) -> None:
        """Raise `PlacementError` if a slot of the pool holds more than ``max_colocate_count`` groups."""
        for part in self._parts:
            for index in part.indices:
                holders = dict(part.lease.holders[part.node, index])
                del holders[holder]
                if len(holders) >= part.lease.max_colocate_count:
                    names = ", ".join(holders.values())
                    raise PlacementError(
                        f"{self!r} has no room for group {name!r}: slot {index} of node {part.node} holds "
                        f"{len(holders)} groups of at most {part.lease.max_colocate_count} ({names}); "
                        "close one of them, or create the pool with a larger max_colocate_count"
                    )

    def _slots(self) -> Iterator[Slot]:
        for node_rank, part in enumerate(self._parts):
            for local_rank, index in enumerate(part.indices):
                share = 1 / part.lease.max_colocate_count
                yield Slot(part.lease.reservation, part.node, index, node_rank, local_rank, len(part.indices), share)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a ResourcePool cannot be pickled: it belongs to its controller; pass the values that the workers need"
        )

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
    """Return one pool over the slots of several pools, in the given order. The slots are shared, not moved.

    The pools may themselves be merged or split. Adjacent parts of one node, in the order of its devices, become one
    node again.

    Args:
        *pools: Two pools or more, with the same ``backend``, ``use_gpu`` and ``cpus_per_worker``.

    Raises:
        UsageError: Fewer than two pools, an argument that is not a pool, pools that differ in the parameters above,
            or pools that share a slot.
        ClosedError: One of the pools was closed.
    """
    if len(pools) < 2:
        raise UsageError(f"merge_resource_pool takes two pools or more, got {len(pools)}")
    for pool in pools:
        _check_pool(pool, "merge_resource_pool")
        for what in ("backend", "use_gpu", "cpus_per_worker"):
            ours, theirs = getattr(pools[0], what), getattr(pool, what)
            if ours != theirs:
                raise UsageError(
                    f"cannot merge {pools[0]!r} and {pool!r}: {what} must be equal, got {ours!r} and {theirs!r}"
                )
    parts: list[_Part] = []
    taken: set[tuple[_Lease, int, int]] = set()
    for part in (part for pool in pools for part in pool._parts):
        places = {(part.lease, part.node, index) for index in part.indices}
        if places & taken:
            raise UsageError(
                f"cannot merge pools that share slots: {', '.join(map(repr, pools))}; merge disjoint pools"
            )
        taken |= places
        parts.append(part)
    return ResourcePool._of(_joined(parts), "".join(pool.name_prefix for pool in pools))


def split_resource_pool(pool: ResourcePool, split_size: int | Sequence[int]) -> list[ResourcePool]:
    """Return pools over consecutive slots of a pool, in rank order. The slots are shared, not moved.

    Args:
        pool: The pool to split; it may itself be merged or split.
        split_size: Slots of every part, or a list with the size of each part.

    Raises:
        UsageError: The first argument is not a pool, or the sizes do not add up to the pool's.
        ClosedError: The pool was closed.

    Example:
        >>> [part.process_on_nodes for part in split_resource_pool(ResourcePool([2, 4]), 3)]
        [(2, 1), (3,)]
    """
    _check_pool(pool, "split_resource_pool")
    size = pool.world_size
    if isinstance(split_size, int):
        if split_size < 1 or size % split_size:
            raise UsageError(f"cannot split {size} slots into parts of {split_size}; give a divisor or a list of sizes")
        split_size = [split_size] * (size // split_size)
    sizes = _checked_sizes(split_size, "split_size", "part")
    if sum(sizes) != size:
        raise UsageError(
            f"cannot split {size} slots into {list(sizes)}, which are {sum(sizes)}; give sizes that add up to {size}"
        )
    places = iter(pool._places)
    pools = []
    for n in sizes:
        parts = [_Part(lease, node, (index,)) for lease, node, index in (next(places) for _ in range(n))]
        pools.append(ResourcePool._of(_joined(parts), pool.name_prefix))
    return pools


class _Lease:
    """The slots of one pool made by `ResourcePool()`, which merged and split pools share.

    They are reserved at most once, and released by `close` or when the last pool that refers to them is collected.
    """

    def __init__(self, request: Request, backend: str, max_colocate_count: int, timeout_s: float) -> None:
        self.request = request
        self.backend = backend
        self.max_colocate_count = max_colocate_count
        self.holders: dict[tuple[int, int], dict[object, str]] = {}  # group names, by (node, index) and then by holder
        self.groups: weakref.WeakSet[Closes] = weakref.WeakSet()
        self.reservation: Any = None
        self.is_closed = False
        self._timeout_s = timeout_s
        self._lock = threading.RLock()  # held while the backend reserves the slots
        self._release: weakref.finalize[Any, _Lease] | None = None

    def open(self) -> None:
        ClassLoading.check()
        check_not_held(self._lock, RESERVING)
        with self._lock:
            if self._release is None:
                backend = get_backend(self.backend)
                self.reservation = backend.reserve(self.request, self._timeout_s)
                self._release = weakref.finalize(self, backend.release, self.reservation)
            if self.is_closed:  # another thread closed it meanwhile
                self._end()

    def take_over(self, reservation: Any) -> None:
        with self._lock:
            self._end()
            self.reservation = reservation
            self._release = weakref.finalize(self, _nothing)

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


def _nothing() -> None:
    """What is to be done about slots that somebody else releases."""


@dataclass(frozen=True)
class _Part:
    """Slots of one node of a `_Lease`: one node of a pool."""

    lease: _Lease
    node: int
    indices: tuple[int, ...]

    def continues_in(self, other: _Part) -> bool:
        is_same_node = self.lease is other.lease and self.node == other.node
        return is_same_node and self.indices[-1] < other.indices[0]


def _joined(parts: Sequence[_Part]) -> list[_Part]:
    """Merge neighbouring parts that are on one node, in the order of its devices."""
    joined: list[_Part] = []
    for part in parts:
        if joined and joined[-1].continues_in(part):
            part = _Part(part.lease, part.node, joined.pop().indices + part.indices)
        joined.append(part)
    return joined


def _free(places: Sequence[tuple[_Lease, int, int]], holder: object) -> None:
    """Remove a group from its slots. Takes no lock, as it may run as a finalizer at any moment in any thread."""
    for lease, node, index in places:
        lease.holders.get((node, index), {}).pop(holder, None)


def _close_all(things: Iterable[Closes | _Lease]) -> None:
    """Close every group or lease, even if closing one of them raises."""
    with _occupying:  # no group is added while the list is made
        listed = list(things)
    with contextlib.ExitStack() as closing:
        for thing in listed:
            closing.callback(thing.close)


def _check_pool(pool: object, function: str) -> None:
    if not isinstance(pool, ResourcePool):
        raise UsageError(f"{function} takes ResourcePools, got {type(pool).__name__} ({pool!r})")
    pool._check_open()


def _checked_sizes(sizes: object, name: str, unit: str) -> tuple[int, ...]:
    if not isinstance(sizes, Sequence) or isinstance(sizes, str) or not sizes:
        raise UsageError(f"{name} must be a list with one number per {unit}, such as [4, 2], got {sizes!r}")
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UsageError(
                f"every {unit} must have an integer number of slots of at least 1, got {size!r} in {list(sizes)}"
            )
    return tuple(sizes)
