"""Plain Ray as one would write it by hand for speed: actors, one `ray.put` per value that several read."""

from __future__ import annotations

import numpy as np
import ray

from peers.desk import Desk

INLINE_NBYTES = 100 * 1024  # Ray carries smaller arguments inside the call


def start_ray(n_workers: int) -> None:
    """A Ray of this process's own, with a CPU for every worker whatever the machine has."""
    ray.init("local", num_cpus=n_workers, include_dashboard=False, log_to_driver=False, logging_level="ERROR")


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

    def stop(self) -> None:
        ray.shutdown()
