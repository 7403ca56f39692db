"""The names of verl's ``base.worker_group``: pools, classes with arguments, and the base class of groups."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from bandmaster.pool import ResourcePool
from bandmaster.worker import ClassWithInitArgs

__all__ = ["ClassWithInitArgs", "ResourcePool", "WorkerGroup", "check_workers_alive"]

_log = logging.getLogger(__name__)


def check_workers_alive(workers: Sequence[Any], is_alive: Callable[[Any], bool], gap_time: float = 1) -> None:
    """Poll the workers forever, and raise SIGABRT in this process when one of them is not alive.

    Args:
        workers: The workers.
        is_alive: Returns whether a worker is alive.
        gap_time: Seconds between two rounds.
    """
    while True:
        for worker in workers:
            if not is_alive(worker):
                _log.warning("worker %s is not alive", worker)
                signal.raise_signal(signal.SIGABRT)
        time.sleep(gap_time)


class WorkerGroup:
    """The interface of a group that verl's dispatch and collect functions use. `RayWorkerGroup` implements it."""

    world_size: int

    def dispatch_info(self, mesh_name: str) -> Sequence[int]:
        """The data-parallel rank of every rank, on a mesh that the workers have registered."""
        raise NotImplementedError

    def collect_info(self, mesh_name: str) -> Sequence[bool]:
        """For every rank, whether its values are collected, on a mesh that the workers have registered."""
        raise NotImplementedError
