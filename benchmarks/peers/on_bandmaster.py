"""bandmaster, whatever the backend."""

from __future__ import annotations

import numpy as np

import bandmaster as bm
from bandmaster import Dispatch, register
from peers.desk import Desk


class Player(bm.Worker):
    """A desk as a worker class."""

    def __init__(self) -> None:
        self.desk = Desk(self.rank)

    @register(Dispatch.ONE_TO_ALL)
    def noop(self, value):
        return self.desk.noop(value)

    @register(Dispatch.ONE_TO_ALL)
    def load(self, module):
        return self.desk.load(module)

    @register(Dispatch.ONE_TO_ALL)
    def read(self, array):
        return self.desk.read(array)

    @register(Dispatch.ONE_TO_ALL)
    def read_all(self, array):
        return self.desk.read_all(array)

    @register(Dispatch.DP_PROTO)
    def increment(self, rows):
        return self.desk.increment(rows)

    @register(Dispatch.ONE_TO_ALL)
    def give(self, nbytes, token):
        return self.desk.give(nbytes, token)


class BandmasterPeer:
    """A group on a pool of one node."""

    backend: str

    def start(self, n_workers: int) -> None:
        self._pool = bm.ResourcePool([n_workers], backend=self.backend)
        self._group = bm.WorkerGroup(self._pool, Player)

    def noop(self) -> list[int]:
        return self._group.noop(1)

    def load(self, module: str) -> list[bool]:
        return self._group.load(module)

    def broadcast(self, array: np.ndarray) -> list[float]:
        return self._group.read(array)

    def broadcast_read_all(self, array: np.ndarray) -> list[float]:
        return self._group.read_all(array)

    def split_inc_concat(self, array: np.ndarray) -> np.ndarray:
        return self._group.increment(array)

    def gather(self, nbytes: int, token: int) -> list[np.ndarray]:
        return self._group.give(nbytes, token)

    def stop(self) -> None:
        self._pool.close()
