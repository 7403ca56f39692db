"""``Worker``, ``WorkerGroup``, ``ResourcePool`` and ``ClassWithInitArgs`` under their import path in verl."""

from bandmaster.group import WorkerGroup
from bandmaster.pool import ResourcePool
from bandmaster.worker import ClassWithInitArgs, Worker

__all__ = ["ClassWithInitArgs", "ResourcePool", "Worker", "WorkerGroup"]
