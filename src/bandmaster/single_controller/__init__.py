"""verl's ``single_controller``, on bandmaster's groups.

A program written for verl runs with ``verl.single_controller`` replaced by ``bandmaster.single_controller``.
"""

from bandmaster.single_controller.base import ClassWithInitArgs, ResourcePool, Worker, WorkerGroup

__all__ = ["ClassWithInitArgs", "ResourcePool", "Worker", "WorkerGroup"]
