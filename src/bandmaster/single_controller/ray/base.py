"""bandmaster's classes under verl's names, with verl's parameters. No logic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bandmaster.group import WorkerGroup
from bandmaster.plan.mesh import Mesh
from bandmaster.pool import ResourcePool, merge_resource_pool, split_resource_pool
from bandmaster.worker import ClassWithInitArgs

__all__ = [
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "merge_resource_pool",
    "split_resource_pool",
]

RayClassWithInitArgs = ClassWithInitArgs


class RayResourcePool(ResourcePool):
    """A `ResourcePool` on backend ``"ray"``, by default with GPUs.

    Args:
        process_on_nodes: Slots on each node.
        use_gpu: Whether every slot has a GPU of its own.
        name_prefix: Name of the pool in messages, and prefix of its workers' names.
        max_colocate_count: How many groups may share a slot.
        cpus_per_worker: CPUs reserved for each slot.
        placement_timeout: Seconds to wait for resources that other pools hold.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        use_gpu: bool = True,
        name_prefix: str | None = None,
        max_colocate_count: int = 10,
        cpus_per_worker: float = 1,
        placement_timeout: float = 60.0,
    ) -> None:
        super().__init__(
            process_on_nodes,
            backend="ray",
            use_gpu=use_gpu,
            name_prefix=name_prefix,
            max_colocate_count=max_colocate_count,
            cpus_per_worker=cpus_per_worker,
            placement_timeout=placement_timeout,
        )


class RayWorkerGroup(WorkerGroup):
    """A `WorkerGroup` with verl's parameter names.

    Args:
        resource_pool: The slots for the workers, one worker per slot.
        ray_cls_with_init: The worker class and its constructor's arguments.
        name_prefix: Prefix of the workers' names.
        mesh: Named axes over the ranks.
    """

    def __init__(
        self,
        resource_pool: ResourcePool,
        ray_cls_with_init: Any,
        name_prefix: str | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        super().__init__(resource_pool, ray_cls_with_init, mesh=mesh, name_prefix=name_prefix)
