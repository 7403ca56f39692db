"""verl's resource pools on Ray, over bandmaster's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bandmaster import pool as pools
from bandmaster.backends import get_backend, register_backend
from bandmaster.errors import PlacementError, UsageError
from bandmaster.pool import ResourcePool
from bandmaster.single_controller.ray.launch import ACTORS, ActorRequest

__all__ = [
    "RayResourcePool",
    "ResourcePoolManager",
    "SubRayResourcePool",
    "extract_pg_from_exist",
    "merge_resource_pool",
    "sort_placement_group_by_node_ip",
    "split_resource_pool",
]


class RayResourcePool(ResourcePool):
    """A `ResourcePool` on Ray, by default with GPUs, with verl's parameters.

    Ranks follow the order of nodes' addresses and of GPUs, as in every bandmaster pool.

    Args:
        process_on_nodes: Slots on each node.
        use_gpu: Whether every slot has a GPU of its own.
        name_prefix: Name of the pool in messages, and prefix of its workers' names.
        max_colocate_count: How many groups may share a slot.
        detached: Whether the placement groups stay when the pool is closed or this process ends.
        accelerator_type: Must be None: bandmaster places slots by the number of GPUs.
        cpus_per_worker: CPUs reserved for each slot.
        placement_timeout: Seconds to wait for resources that other pools hold.

    Raises:
        UsageError: A value has the wrong type or range; a number in the place of ``detached``, for example.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int] | None = None,
        use_gpu: bool = True,
        name_prefix: str | None = None,
        max_colocate_count: int = 10,
        detached: bool = False,
        accelerator_type: str | None = None,
        *,
        cpus_per_worker: float = 1,
        placement_timeout: float = 60.0,
    ) -> None:
        if not isinstance(detached, bool):
            raise UsageError(f"detached must be True or False, got {detached!r}; cpus_per_worker is a keyword")
        if accelerator_type is not None:
            raise UsageError(
                f"accelerator_type={accelerator_type!r} is not supported: start the worker group in a cluster, or with "
                "labels, that has only such GPUs, or leave it out"
            )
        super().__init__(
            [] if process_on_nodes is None else process_on_nodes,
            backend=ACTORS,
            use_gpu=use_gpu,
            name_prefix=name_prefix,
            max_colocate_count=max_colocate_count,
            cpus_per_worker=cpus_per_worker,
            placement_timeout=placement_timeout,
        )
        self._lease.request = ActorRequest(**vars(self._lease.request), is_detached=detached)

    _whole: RayResourcePool | None = None  # the pool of which this is a part

    @property
    def backend(self) -> str:
        """``"ray"``, although internally the slots are reserved by the backend ``"ray-actors"``."""
        return "ray"

    @property
    def detached(self) -> bool:
        """Whether the placement groups outlive the pool."""
        request = self._lease.request
        return isinstance(request, ActorRequest) and request.is_detached

    @property
    def store(self) -> list[int]:
        """Slots on each node; for a part of a split pool, on each node of the whole pool."""
        return list(self.process_on_nodes) if self._whole is None else self._whole.store

    def __call__(self) -> list[int]:
        """Slots on each node."""
        return self.store

    @property
    def n_gpus_per_node(self) -> int:
        """Slots on the first node."""
        return self.store[0]

    @property
    def accelerator_type(self) -> None:
        """Always None: bandmaster places slots by the number of GPUs."""

    def local_world_size_list(self) -> list[int]:
        """For each slot, the number of slots on its node."""
        return [size for size in self.store for _ in range(size)]

    def local_rank_list(self) -> list[int]:
        """For each slot, its index on its node."""
        return [index for size in self.store for index in range(size)]

    @property
    def pgs(self) -> list[Any] | None:
        """The placement group of each node; None before the slots are reserved. Setting it uses groups made elsewhere.

        A part of a split pool has the placement groups of the whole pool, and its ``start_bundle_index`` counts from
        their first slot.

        Raises:
            UsageError: The placement groups that are set have too few bundles, the pool was merged or split from
                others, whose slots it has, or there are groups on its slots.
        """
        if self._whole is not None:
            return self._whole.pgs
        if any(part.lease.reservation is None for part in self._parts):
            return None
        return [part.lease.reservation.groups[part.lease.entries[part.node]] for part in self._parts]

    @pgs.setter
    def pgs(self, groups: Sequence[Any]) -> None:
        asked, given = self.store, [group.bundle_count for group in groups]
        if len(given) < len(asked) or any(n < m for n, m in zip(given, asked, strict=False)):
            raise UsageError(f"{self!r} needs placement groups of {asked} bundles, got {given}")
        if not self._owned:
            raise UsageError(f"the slots of {self!r} are those of the pools that it was made of; set pgs of these")
        (lease,) = self._owned  # no slot of another pool is in use
        lease.take_over(_adopted(self.name_prefix, groups))

    def get_placement_groups(
        self, strategy: str = "STRICT_PACK", name: str | None = None, device_name: str = "cuda"
    ) -> list[Any]:
        """Reserve the slots, if they are not, and return the placement group of each node, whose bundles are the slots.

        Args:
            strategy: Ignored: the slots of an entry are always on one node.
            name: Ignored: placement groups are named after the pool.
            device_name: Ignored: slots have GPUs if the pool was made with ``use_gpu``.

        Raises:
            PlacementError: The slots do not fit, or did not become free in time.
        """
        self.reserve()
        groups = self.pgs
        assert groups is not None, "they are reserved"
        return groups


def _adopted(name: str, groups: Sequence[Any]) -> Any:
    from bandmaster.single_controller.ray.backend import ActorReservation  # here, as it imports Ray

    return ActorReservation.of(name, tuple(groups))


def _actor_backend() -> Any:
    from bandmaster.single_controller.ray.backend import ActorBackend  # here, as it imports Ray

    return ActorBackend()


register_backend(ACTORS, _actor_backend)


class SubRayResourcePool(RayResourcePool):
    """Consecutive slots of a `RayResourcePool`, as `split_resource_pool` returns them.

    Args:
        placement_groups: The placement groups of all slots.
        start_bundle_index: Number of the first slot.
        subgroup_world_size: Number of slots.
        **kwargs: Arguments of `RayResourcePool`, which apply to all slots.
    """

    def __init__(
        self, placement_groups: Sequence[Any], start_bundle_index: int, subgroup_world_size: int, **kwargs: Any
    ) -> None:
        whole = RayResourcePool(**kwargs)  # its slots are the bundles of the given placement groups
        whole.pgs = list(placement_groups)
        stop = start_bundle_index + subgroup_world_size
        if not 0 <= start_bundle_index < stop <= whole.world_size:
            raise UsageError(
                f"slots {start_bundle_index} to {stop - 1} are not among the {whole.world_size} of {whole!r}"
            )
        sizes = [size for size in (start_bundle_index, subgroup_world_size, whole.world_size - stop) if size]
        part = split_resource_pool(whole, sizes)[1 if start_bundle_index else 0]
        self._set_up(part._places, whole.name_prefix, ())
        self._place(whole, start_bundle_index)

    def _place(self, whole: RayResourcePool, start: int) -> None:
        self._whole = whole
        self.start_bundle_index = start
        self.subgroup_world_size = self.world_size


@dataclass
class ResourcePoolManager:
    """Several pools, and the pool of each role.

    Attributes:
        resource_pool_spec: Slots on each node, by name of the pool.
        mapping: Name of the pool by role.
        max_colocate_count: How many groups may share a slot.
        resource_pool_dict: The pools by name, once `create_resource_pool` was called.
    """

    resource_pool_spec: Mapping[str, Sequence[int]]
    mapping: Mapping[Any, str]
    max_colocate_count: int = 3
    resource_pool_dict: dict[str, RayResourcePool] = field(default_factory=dict)

    def create_resource_pool(self) -> None:
        """Make the pools.

        Raises:
            PlacementError: The GPUs of all pools together are more than the cluster has free.
        """
        for name, process_on_nodes in self.resource_pool_spec.items():
            self.resource_pool_dict[name] = RayResourcePool(
                process_on_nodes, use_gpu=True, max_colocate_count=self.max_colocate_count, name_prefix=name
            )
        self._check_resource_available()

    def get_resource_pool(self, role: Any) -> RayResourcePool:
        """The pool of a role."""
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """Number of GPUs of all pools."""
        return sum(sum(process_on_nodes) for process_on_nodes in self.resource_pool_spec.values())

    def _check_resource_available(self) -> None:
        nodes = get_backend("ray").inventory()
        gpus = [(node.name, node.free.get("GPU", 0), node.total.get("GPU", 0)) for node in nodes]
        free = sum(n_free for _, n_free, _ in gpus)
        if free < self.get_n_gpus():
            there = ", ".join(f"{name} {n_free:g} of {n_total:g}" for name, n_free, n_total in gpus)
            raise PlacementError(
                f"the pools {dict(self.resource_pool_spec)} need {self.get_n_gpus()} GPUs, "
                f"but {free:g} are free: {there}"
            )


def split_resource_pool(resource_pool: RayResourcePool, split_size: int | Sequence[int]) -> list[SubRayResourcePool]:
    """Reserve the slots of a pool and split it; see `bandmaster.split_resource_pool`."""
    resource_pool.reserve()
    start, found = getattr(resource_pool, "start_bundle_index", 0), []
    for index, part in enumerate(pools.split_resource_pool(resource_pool, split_size)):
        sub = SubRayResourcePool._of(part._places, f"{resource_pool.name_prefix}_split_{index}")
        sub._place(resource_pool._whole or resource_pool, start)
        start += sub.world_size
        found.append(sub)
    return found


def merge_resource_pool(*resource_pools: RayResourcePool) -> RayResourcePool:
    """Merge pools of this module into one; see `bandmaster.merge_resource_pool`."""
    merged = pools.merge_resource_pool(*resource_pools)
    return RayResourcePool._of(merged._places, "_".join(filter(None, (pool.name_prefix for pool in resource_pools))))


def sort_placement_group_by_node_ip(pgs: Sequence[Any]) -> list[Any]:
    """Sort placement groups by the addresses of their nodes, compared as strings."""
    import ray  # here, because making pools does not need Ray

    address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    table = ray.util.placement_group_table
    return sorted(pgs, key=lambda group: str(address[table(group)["bundles_to_node_id"][0]]))


def extract_pg_from_exist(
    resource_pools: Mapping[str, RayResourcePool], src_role_names: Sequence[str], resource_pool: RayResourcePool
) -> list[Any]:
    """The placement groups of some pools that have room for the nodes of another pool, in the order of its nodes.

    Raises:
        PlacementError: There are too few of them, or they are too small.
    """
    found = [pg for role in src_role_names for pg in resource_pools[role].get_placement_groups()]
    largest = sorted(found, key=lambda group: -group.bundle_count)
    order = sorted(range(len(resource_pool.store)), key=lambda node: -resource_pool.store[node])
    sizes = [group.bundle_count for group in largest]
    if len(sizes) < len(order) or any(sizes[i] < resource_pool.store[node] for i, node in enumerate(order)):
        raise PlacementError(f"{resource_pool!r} does not fit into placement groups of {sizes} bundles")
    chosen = dict(zip(order, largest, strict=False))
    return [chosen[node] for node in sorted(chosen)]
