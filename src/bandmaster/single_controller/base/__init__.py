"""``Worker``, ``WorkerGroup``, ``ResourcePool`` and ``ClassWithInitArgs`` under their import path in verl."""

from bandmaster.single_controller.base.worker import Worker
from bandmaster.single_controller.base.worker_group import ClassWithInitArgs, ResourcePool, WorkerGroup

__all__ = ["ClassWithInitArgs", "ResourcePool", "Worker", "WorkerGroup"]
