"""The pool that users make, and the functions that merge and split pools."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from bandmaster.backends import get_backend
from bandmaster.contract import Slot
from bandmaster.errors import ClosedError, PlacementError, UsageError
from bandmaster.plan.placement import STRATEGIES, Request, node_choices
from bandmaster.plan.render import html_table
from bandmaster.platform.forks import n_forks
from bandmaster.platform.weak import living
from bandmaster.pool.checks import (
    check_count,
    checked_amount,
    checked_env,
    checked_modules,
    checked_resources,
    checked_sizes,
)
from bandmaster.pool.lease import Closes, Lease, SlotKey, WorkerStart, close_all, free, occupying, parts_of
from bandmaster.pool.plan import PlannedNode, PoolPlan

if TYPE_CHECKING:
    from typing_extensions import Self

_pools: weakref.WeakKeyDictionary[ResourcePool, int] = weakref.WeakKeyDictionary()  # the process that has made each


def open_pools() -> list[ResourcePool]:
    """The pools that this process has made and whose slots are not all released."""
    made = [pool for pool in living(_pools.keyrefs()) if _pools[pool] == n_forks()]
    return [pool for pool in made if not all(part.lease.is_closed for part in pool._parts)]


class ResourcePool:
    """Slots for workers; ``[4, 2]`` is four slots on one node and two on another.

    Groups on one pool share its slots: rank r of each group is on the same device. Ranks follow (node, device) order.
    The pool reserves its slots for the first group, in `reserve`, or on ``with pool:``, not when it is created.

    Args:
        process_on_nodes: Slots on each node, at least one per node; nodes may differ.
        backend: ``"local"`` (processes on this machine), ``"inprocess"`` (objects in this process), ``"ray"``, or a
            name that was registered.
        use_gpu: Whether every slot has GPUs of its own.
        gpus_per_worker: How many GPUs each slot has with ``use_gpu``. The worker's ``CUDA_VISIBLE_DEVICES`` lists them;
            its ``device`` is the first one.
        name_prefix: Name of the pool in messages, and prefix of its workers' names.
        max_colocate_count: How many groups may share a slot. Of the slot's GPU and CPUs, each group of verl's actors
            claims ``1 / max_colocate_count`` in Ray's accounting; neither memory nor computation is limited.
        cpus_per_worker: CPUs reserved for each slot, shared by all groups on it. Only a Ray cluster counts CPUs.
        placement_timeout: Seconds to wait for resources that other pools hold. Only backend ``"ray"`` waits.
        nodes: Where the nodes of the pool may be: the address or host name of a node, or a dict of labels
            (``{"zone": "a"}``, or ``{"zone": ["a", "b"]}`` where both will do); or a list with one of these, or None,
            for each node of the pool. Only a Ray cluster has nodes to choose from: elsewhere every node is this
            machine, whatever is asked for.
        resources_per_worker: Custom resources reserved for each slot, by name. Only a Ray cluster counts them.
        strategy: ``"spread"``: nodes of the pool are different hosts if there are enough; ``"strict_spread"``: they
            are, or the pool does not fit; ``"pack"``: they share hosts as far as they fit.
        spares: Slots of each spare node. Spare nodes are reserved like the others, each on a host of its own, and hold
            no group until a host is lost: `WorkerGroup.restart` then puts the ranks of that host there.
        preload: Names of modules that are imported before the workers are constructed, in this order. On backend
            ``"local"`` one process imports them, from which the workers of all pools with the same ``preload`` and
            ``env`` are forked; elsewhere each worker's process does. None: numpy, and of torch and some other modules
            that take long those that this process has imported by then. See docs/start-up.md.
        env: Environment variables of the workers, added to those of this process on backend ``"local"``, and to those
            of the cluster's nodes on ``"ray"``. They are set when the worker's process starts. On ``"inprocess"``
            they are set in this process while it has groups on the pool.

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
        gpus_per_worker: int = 1,
        nodes: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any] | None] | None = None,
        resources_per_worker: Mapping[str, float] | None = None,
        strategy: str = "spread",
        spares: Sequence[int] = (),
        preload: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        sizes = checked_sizes(process_on_nodes, "process_on_nodes", "node")
        has_none = isinstance(spares, list | tuple) and not spares
        spare_sizes = () if has_none else checked_sizes(spares, "spares", "spare node")
        check_count("max_colocate_count", max_colocate_count, ", the number of groups that may share a slot")
        check_count("gpus_per_worker", gpus_per_worker)
        cpus_per_worker = checked_amount("cpus_per_worker", cpus_per_worker)
        timeout_s = checked_amount("placement_timeout", placement_timeout)
        if strategy not in STRATEGIES:
            raise UsageError(f"strategy must be one of {', '.join(map(repr, STRATEGIES))}, got {strategy!r}")
        if not isinstance(use_gpu, bool):
            raise UsageError(f"use_gpu must be True (GPUs for every slot) or False (none), got {use_gpu!r}")
        if gpus_per_worker > 1 and not use_gpu:
            raise UsageError(f"gpus_per_worker={gpus_per_worker} needs use_gpu=True")
        if not isinstance(name_prefix, str | None):
            raise UsageError(f"name_prefix must be a string, or None for a pool without a name, got {name_prefix!r}")
        get_backend(backend)
        request = Request(
            name_prefix or "pool",
            sizes + spare_sizes,
            cpus_per_worker,
            gpus_per_worker if use_gpu else 0,
            checked_resources(resources_per_worker),
            node_choices(nodes, len(sizes), len(spare_sizes)),
            strategy,
            len(spare_sizes),
        )
        start = WorkerStart(checked_modules(preload), checked_env(env, use_gpu))
        lease = Lease(request, backend, max_colocate_count, timeout_s, start)
        places = [(lease, node, index) for node, size in enumerate(sizes) for index in range(size)]
        self._set_up(places, name_prefix or "", (lease,))

    def _set_up(self, places: Sequence[SlotKey], name_prefix: str, owned: tuple[Lease, ...]) -> None:
        self._places = tuple(places)  # the identity of each slot, in rank order: merged and split pools share slots
        self._parts = parts_of(places)
        self._owned = owned  # released when this pool is closed
        self._groups: weakref.WeakSet[Closes] = weakref.WeakSet()
        self._is_closed = False
        self.name_prefix = name_prefix
        _pools[self] = n_forks()

    @classmethod
    def _of(cls, places: Sequence[SlotKey], name_prefix: str) -> Self:
        pool = cls.__new__(cls)
        pool._set_up(places, name_prefix, ())
        return pool

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
        """Whether every slot has GPUs of its own."""
        return bool(self._lease.request.gpus_per_worker)

    @property
    def max_colocate_count(self) -> int:
        """The number of groups that may share a slot. A merged pool has the smallest value of its source pools."""
        return min(part.lease.max_colocate_count for part in self._parts)

    @property
    def gpus_per_worker(self) -> int:
        """The number of GPUs of each slot; 0 without ``use_gpu``."""
        return self._lease.request.gpus_per_worker

    @property
    def cpus_per_worker(self) -> float:
        """CPUs reserved for each slot."""
        return self._lease.request.cpus_per_worker

    @property
    def resources_per_worker(self) -> Mapping[str, float]:
        """Custom resources reserved for each slot."""
        return dict(self._lease.request.resources_per_worker)

    @property
    def preload(self) -> tuple[str, ...] | None:
        """The modules that are imported before the workers are constructed; None if the backend chooses them."""
        return self._lease.start.preload

    @property
    def env(self) -> Mapping[str, str]:
        """Environment variables of the workers, besides those that they inherit."""
        return dict(self._lease.start.env)

    @property
    def _lease(self) -> Lease:
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

    def plan(self) -> PoolPlan:
        """Return the hosts of the ranks, or, as long as nothing is reserved, those where they would be now.

        Raises:
            PlacementError: The slots are not reserved, and do not fit now.
            ClosedError: The pool was closed.
            UsageError: As for `reserve`.

        Example:
            >>> print(ResourcePool([2, 1]).plan())
            ResourcePool([2, 1], backend='local'), not reserved yet
            node  host          ranks  slots  takes
            0     this machine  0-1    2      nothing that is counted
            1     this machine  2      1      nothing that is counted
        """
        self._check_open()
        nodes = {lease: lease.nodes() for lease in dict.fromkeys(part.lease for part in self._parts)}
        found, rank = [], 0
        for part in self._parts:
            ranks = range(rank, rank := rank + len(part.indices))
            found.append(PlannedNode(nodes[part.lease][part.lease.entries[part.node]], ranks, len(part.indices)))
        spares = [
            PlannedNode(nodes[lease][entry], range(0), lease.request.workers[entry])
            for lease in self._owned
            for entry in lease.spares
        ]
        is_reserved = all(lease.is_reserved for lease in nodes)
        return PoolPlan(self._described(), is_reserved, tuple(found), tuple(spares), self._lease.request)

    def _renewed(self) -> tuple[Slot, ...]:
        """The slots in rank order; those of lost nodes are replaced by spare ones.

        Raises:
            PlacementError: A node is lost, and there is no spare one for it.
        """
        for lease in dict.fromkeys(part.lease for part in self._parts):
            lease.renew()
        return tuple(self._slots())

    def _give_back(self, kept: ResourcePool) -> None:
        """Release slots that no group is on, until a group needs them again, but for those of another pool."""
        for lease in {part.lease for part in self._parts} - {part.lease for part in kept._parts}:
            lease.give_back()

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
            close_all(chain(self._groups, self._owned))  # Ctrl-C in one does not keep it from the others
        except UsageError:
            self._is_closed = False
            raise

    def __enter__(self) -> ResourcePool:
        return self.reserve()

    def __exit__(self, *_: object) -> None:
        self.close()

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
        take(partial(free, places, holder))
        with occupying:
            for lease, node, index in places:
                lease.holders.setdefault((node, index), {})[holder] = name
            try:
                self._check_room(holder, name)
            except PlacementError:
                free(places, holder)  # under the lock, so that no other group counts this one
                raise
            for lease in {part.lease for part in self._parts}:
                lease.groups.add(owner)
            self._groups.add(owner)
        self.reserve()  # if another thread has given the slots back before the group was on them
        self._check_open()  # another thread may have closed the pool before the group was added to it
        return tuple(self._slots())

    def _check_room(self, holder: object, name: str) -> None:
        """Raise `PlacementError` if a slot of the pool holds more than ``max_colocate_count`` groups."""
        for lease, node, index in self._places:
            others = [other for key, other in list(lease.holders[node, index].items()) if key is not holder]
            if len(others) >= lease.max_colocate_count:
                raise PlacementError(
                    f"{self!r} has no room for group {name!r}: slot {index} of node {node} holds {len(others)} groups "
                    f"of at most {lease.max_colocate_count} ({', '.join(others)}); close one of them, or create the "
                    "pool with a larger max_colocate_count"
                )

    def _slots(self) -> Iterator[Slot]:
        for node_rank, part in enumerate(self._parts):
            for local_rank, index in enumerate(part.indices):
                share = 1 / part.lease.max_colocate_count
                entry = part.lease.entries[part.node]
                yield Slot(part.lease.reservation, entry, index, node_rank, local_rank, len(part.indices), share)

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
        groups = [lease.holders.get((node, index), {}).values() for lease, node, index in self._places]
        rows = [[*slot, ", ".join(names) or "-"] for slot, names in zip(slots, groups, strict=True)]
        return html_table(repr(self), ["rank", "node", "local rank", "groups"], rows)


def merge_resource_pool(*pools: ResourcePool) -> ResourcePool:
    """Return one pool over the slots of several pools, in the given order. The slots are shared, not moved.

    The pools may themselves be merged or split. Adjacent parts of one node, in the order of its devices, become one
    node again.

    Args:
        *pools: Two pools or more, with the same ``backend``, ``use_gpu``, ``cpus_per_worker``,
            ``resources_per_worker``, ``preload`` and ``env``.

    Raises:
        UsageError: Fewer than two pools, an argument that is not a pool, pools that differ in the parameters above,
            or pools that share a slot.
        ClosedError: One of the pools was closed.
    """
    if len(pools) < 2:
        raise UsageError(f"merge_resource_pool takes two pools or more, got {len(pools)}")
    for pool in pools:
        _check_pool(pool, "merge_resource_pool")
        for what in ("backend", "use_gpu", "cpus_per_worker", "resources_per_worker", "preload", "env"):
            ours, theirs = getattr(pools[0], what), getattr(pool, what)
            if ours != theirs:
                raise UsageError(
                    f"cannot merge {pools[0]!r} and {pool!r}: {what} must be equal, got {ours!r} and {theirs!r}"
                )
    places = [place for pool in pools for place in pool._places]
    if len(set(places)) < len(places):
        raise UsageError(f"cannot merge pools that share slots: {', '.join(map(repr, pools))}; merge disjoint pools")
    return ResourcePool._of(places, "".join(pool.name_prefix for pool in pools))


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
    if isinstance(split_size, int | np.integer):
        if split_size < 1 or size % split_size:
            raise UsageError(f"cannot split {size} slots into parts of {split_size}; give a divisor or a list of sizes")
        split_size = [int(split_size)] * (size // int(split_size))
    sizes = checked_sizes(split_size, "split_size", "part")
    if sum(sizes) != size:
        raise UsageError(
            f"cannot split {size} slots into {list(sizes)}, which are {sum(sizes)}; give sizes that add up to {size}"
        )
    stops = list(accumulate(sizes, initial=0))
    return [ResourcePool._of(pool._places[start:stop], pool.name_prefix) for start, stop in pairwise(stops)]


def _check_pool(pool: object, function: str) -> None:
    if not isinstance(pool, ResourcePool):
        raise UsageError(f"{function} takes ResourcePools, got {type(pool).__name__} ({pool!r})")
    pool._check_open()
