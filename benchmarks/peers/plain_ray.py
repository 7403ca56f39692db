"""Plain Ray as one would write it by hand for speed: actors, one `ray.put` per value that several read."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import ray

from peers.desk import Desk

INLINE_NBYTES = 100 * 1024  # Ray carries smaller arguments inside the call


def start_ray(n_workers: int) -> None:
    """A Ray of this process's own, with a CPU for every worker whatever the machine has."""
    n_cpus = n_workers + max(1, n_workers // 2)  # for those that `chain` starts
    ray.init("local", num_cpus=n_cpus, include_dashboard=False, log_to_driver=False, logging_level="ERROR")


class Halfway:
    """Between the ranks that make rows and those that read them: an object goes in and out for each."""

    def increment_each(self, *parts: np.ndarray) -> Any:
        changed = tuple([part + 1 for part in parts])
        return changed if len(changed) > 1 else changed[0]


class Peer:
    """Actors of `Desk` itself."""

    def start(self, n_workers: int) -> None:
        start_ray(n_workers)
        actor_class = ray.remote(num_cpus=1)(Desk)
        self._actors = [actor_class.remote(rank) for rank in range(n_workers)]

    def noop(self) -> list[int]:
        return ray.get([actor.noop.remote(1) for actor in self._actors])

    def load(self, module: str) -> list[bool]:
        return ray.get([actor.load.remote(module) for actor in self._actors])

    def broadcast(self, array: np.ndarray) -> list[float]:
        shared = ray.put(array) if array.nbytes >= INLINE_NBYTES else array
        return ray.get([actor.read.remote(shared) for actor in self._actors])

    def broadcast_read_all(self, array: np.ndarray) -> list[float]:
        shared = ray.put(array)
        return ray.get([actor.read_all.remote(shared) for actor in self._actors])

    def split_inc_concat(self, array: np.ndarray) -> np.ndarray:
        parts = np.array_split(array, len(self._actors))
        results = [actor.increment.remote(part) for actor, part in zip(self._actors, parts, strict=True)]
        return np.concatenate(ray.get(results))

    def gather(self, nbytes: int, token: int) -> list[np.ndarray]:
        return ray.get([actor.give.remote(nbytes, token) for actor in self._actors])

    def chain(self, nbytes: int, token: int) -> list[float]:
        n = len(self._actors)
        made = [actor.make.remote(nbytes // n, token) for actor in self._actors]
        each = n // len(self._others)  # parts for each of the others, who give one part back for each
        changed = [
            other.increment_each.options(num_returns=each).remote(*made[each * i : each * (i + 1)])
            for i, other in enumerate(self._others)
        ]
        parts = [part for group in changed for part in (group if each > 1 else [group])]
        return ray.get([actor.exact_sum.remote(part) for actor, part in zip(self._actors, parts, strict=True)])

    @cached_property
    def _others(self) -> list:
        """Half as many workers."""
        actor_class = ray.remote(num_cpus=1)(Halfway)
        return [actor_class.remote() for _ in range(max(1, len(self._actors) // 2))]

    def stop(self) -> None:
        ray.shutdown()
