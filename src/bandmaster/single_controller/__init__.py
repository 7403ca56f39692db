"""verl's ``single_controller``, on bandmaster's groups.

A program written for verl runs with ``verl.single_controller`` replaced by ``bandmaster.single_controller``. Its
workers are Ray actors, which `ray.actor_workers` calls: two more implementations of `bandmaster.contract.Workers`.
"""

from bandmaster.single_controller.base import ClassWithInitArgs, ResourcePool, Worker, WorkerGroup

__all__ = ["ClassWithInitArgs", "ResourcePool", "Worker", "WorkerGroup"]
