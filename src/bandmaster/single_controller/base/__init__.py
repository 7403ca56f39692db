"""``Worker``, ``WorkerGroup``, ``ResourcePool`` and ``ClassWithInitArgs`` under the seeds' path."""

from bandmaster.group import WorkerGroup
from bandmaster.pool import ResourcePool
from bandmaster.worker import ClassWithInitArgs, Worker

__all__ = ["ClassWithInitArgs", "ResourcePool", "Worker", "WorkerGroup"]
