"""Plain Ray as one would write it by hand for speed: actors, one `ray.put` per value that several read."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import ray
from ray.util import ActorPool

from peers.desk import Desk

INLINE_NBYTES = 100 * 1024  # Ray carries smaller arguments inside the call


def start_ray(n_workers: int) -> None:
    """A Ray of this process's own, with a CPU for every worker whatever the machine has.

    It is started again if need be, since Ray gives up after half a minute, which a busy machine may make too little.
    """
    n_cpus = n_workers + max(1, n_workers // 2)  # for those that `chain` starts
    for is_last in (False, False, True):
        try:
            ray.init("local", num_cpus=n_cpus, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
            return
        except Exception as error:
            if is_last or "timed out during startup" not in str(error):
                raise
            ray.shutdown()


class Halfway:
    """Between the ranks that make rows and those that read them: an object goes in and out for each."""

    def increment_each(self, *parts: np.ndarray) -> Any:
        changed = tuple([part + 1 for part in parts])
        return changed if len(changed) > 1 else changed[0]


class Holder(Desk):
    """A desk that holds rows, and reads those of others."""

    def make_objects(self, nbytes: int, n_rows: int, start: int) -> list:
        return [ray.put(row[None]) for row in self.make_numbered(nbytes, n_rows, start)]

    def first_sum_of(self, *rows: np.ndarray) -> float:
        return self.first_sum(np.concatenate(rows))

    def first_sum_in(self, owners: np.ndarray, numbers: np.ndarray, *parts: np.ndarray) -> float:
        return self.first_sum(
            np.concatenate([parts[owner][number][None] for owner, number in zip(owners, numbers, strict=True)])
        )


class Peer:
    """Actors of `Desk` itself."""

    def start(self, n_workers: int) -> None:
        start_ray(n_workers)
        actor_class = ray.remote(num_cpus=1)(Holder)
        self._actors = [actor_class.remote(rank) for rank in range(n_workers)]

    def noop(self) -> list[int]:
        return ray.get([actor.noop.remote(1) for actor in self._actors])

    def load_torch(self) -> list[bool]:
        return ray.get([actor.load_torch.remote() for actor in self._actors])

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

    def hold(self, nbytes: int, n_rows: int, is_each_an_object: bool = False) -> None:
        n = len(self._actors)
        self._is_each_an_object = is_each_an_object
        self._starts = [len(part) for part in np.array_split(np.arange(n_rows), n)]
        self._starts = np.cumsum([0, *self._starts])
        self._rows = []
        for rank, actor in enumerate(self._actors):
            start, stop = map(int, self._starts[rank : rank + 2])
            make = actor.make_objects if is_each_an_object else actor.make_numbered
            made = make.remote(nbytes // n, stop - start, start)
            self._rows += ray.get(made) if is_each_an_object else [made]
        ray.wait(self._rows, num_returns=len(self._rows), fetch_local=False)

    def mini_batch(self, numbers: np.ndarray) -> list[float]:
        asked = []
        for actor, share in zip(self._actors, np.array_split(numbers, len(self._actors)), strict=True):
            if self._is_each_an_object:
                asked.append(actor.first_sum_of.remote(*[self._rows[number] for number in share]))
            else:
                owners = np.searchsorted(self._starts, share, "right") - 1
                needed, positions = np.unique(owners, return_inverse=True)
                parts = [self._rows[owner] for owner in needed]
                asked.append(actor.first_sum_in.remote(positions, share - self._starts[owners], *parts))
        return ray.get(asked)

    def long_tail(self, seconds: np.ndarray) -> np.ndarray:
        pool = ActorPool(self._actors)
        return np.concatenate(
            list(pool.map(lambda actor, row: actor.rest.remote(row), np.split(seconds, len(seconds))))
        )

    def long_tail_split(self, seconds: np.ndarray) -> np.ndarray:
        parts = np.array_split(seconds, len(self._actors))
        return np.concatenate(ray.get([a.rest.remote(part) for a, part in zip(self._actors, parts, strict=True)]))

    @cached_property
    def _others(self) -> list:
        """Half as many workers."""
        actor_class = ray.remote(num_cpus=1)(Halfway)
        return [actor_class.remote() for _ in range(max(1, len(self._actors) // 2))]

    def stop(self) -> None:
        ray.shutdown()
