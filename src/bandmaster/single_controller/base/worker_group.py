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
    """Look after workers for ever; once one is not alive, raise SIGABRT in this process.

    Args:
        workers: The workers.
        is_alive: Tells whether one of them is alive.
        gap_time: Seconds between two looks.
    """
    while True:
        for worker in workers:
            if not is_alive(worker):
                _log.warning("worker %s is not alive", worker)
                signal.raise_signal(signal.SIGABRT)
        time.sleep(gap_time)


class WorkerGroup:
    """What verl's functions ask of a group. `RayWorkerGroup` is one."""

    world_size: int

    def dispatch_info(self, mesh_name: str) -> Sequence[int]:
        """The data-parallel rank of every rank, on a mesh that the workers have registered."""
        raise NotImplementedError

    def collect_info(self, mesh_name: str) -> Sequence[bool]:
        """For every rank, whether its values are collected, on a mesh that the workers have registered."""
        raise NotImplementedError
