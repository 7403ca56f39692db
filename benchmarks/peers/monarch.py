"""Monarch: an actor mesh on processes of this host. It has no scatter, so rows go to slices of one rank each."""

from __future__ import annotations

import numpy as np
from monarch.actor import Actor, current_rank, endpoint, this_host

from peers.desk import Desk


class Player(Actor):
    """A desk as an actor."""

    def __init__(self) -> None:
        self.desk = Desk(current_rank().rank)

    @endpoint
    def noop(self, value):
        return self.desk.noop(value)

    @endpoint
    def load_torch(self):
        import torch  # in a method of the class, as users write it: a library may find it there

        return torch.__name__ == "torch"

    @endpoint
    def read(self, array):
        return self.desk.read(array)

    @endpoint
    def read_all(self, array):
        return self.desk.read_all(array)

    @endpoint
    def increment(self, rows):
        return self.desk.increment(rows)

    @endpoint
    def give(self, nbytes, token):
        return self.desk.give(nbytes, token)


class Peer:
    """One mesh of processes, one mesh of actors."""

    def start(self, n_workers: int) -> None:
        self._processes = this_host().spawn_procs({"ranks": n_workers})
        self._actors = self._processes.spawn("player", Player)
        self._each = [self._actors.slice(ranks=rank) for rank in range(n_workers)]

    def noop(self) -> list[int]:
        return _values(self._actors.noop.call(1))

    def load_torch(self) -> list[bool]:
        return _values(self._actors.load_torch.call())

    def broadcast(self, array: np.ndarray) -> list[float]:
        return _values(self._actors.read.call(array))

    def broadcast_read_all(self, array: np.ndarray) -> list[float]:
        return _values(self._actors.read_all.call(array))

    def split_inc_concat(self, array: np.ndarray) -> np.ndarray:
        parts = np.array_split(array, len(self._each))
        futures = [actor.increment.call_one(part) for actor, part in zip(self._each, parts, strict=True)]
        return np.concatenate([future.get() for future in futures])

    def gather(self, nbytes: int, token: int) -> list[np.ndarray]:
        return _values(self._actors.give.call(nbytes, token))

    def stop(self) -> None:
        self._processes.stop().get()


def _values(future) -> list:
    return list(future.get().values())
