"""The classes with Ray in their names, and the functions of pools, under their import path in verl."""

from bandmaster.single_controller.ray.base import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    merge_resource_pool,
    split_resource_pool,
)

__all__ = [
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "merge_resource_pool",
    "split_resource_pool",
]
