"""The Ray-named classes and functions under the seeds' path."""

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
