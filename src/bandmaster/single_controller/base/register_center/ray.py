"""The names of verl's ``base.register_center.ray``."""

from bandmaster.single_controller.ray.register_center import (
    WorkerGroupRegisterCenter,
    create_worker_group_register_center,
)

__all__ = ["WorkerGroupRegisterCenter", "create_worker_group_register_center"]
