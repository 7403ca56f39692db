"""The names of verl's ``ray.base``."""

from bandmaster.single_controller.base import Worker
from bandmaster.single_controller.ray.classes import (
    RayClassWithInitArgs,
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
    create_colocated_worker_raw_cls,
)
from bandmaster.single_controller.ray.groups import RayWorkerGroup
from bandmaster.single_controller.ray.methods import func_generator
from bandmaster.single_controller.ray.pools import (
    RayResourcePool,
    ResourcePoolManager,
    SubRayResourcePool,
    extract_pg_from_exist,
    merge_resource_pool,
    sort_placement_group_by_node_ip,
    split_resource_pool,
)
from bandmaster.single_controller.ray.register_center import get_random_string

__all__ = [
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePoolManager",
    "SubRayResourcePool",
    "Worker",
    "create_colocated_worker_cls",
    "create_colocated_worker_cls_fused",
    "create_colocated_worker_raw_cls",
    "extract_pg_from_exist",
    "func_generator",
    "get_random_string",
    "merge_resource_pool",
    "sort_placement_group_by_node_ip",
    "split_resource_pool",
]
