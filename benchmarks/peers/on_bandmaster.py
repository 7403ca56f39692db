"""bandmaster, whatever the backend."""

from __future__ import annotations

from functools import cached_property

import numpy as np

import bandmaster as bm
from bandmaster import Broadcast, Concat, Dispatch, Gather, Split, TransferProtocol, register
from peers.desk import Desk


class Player(bm.Worker):
    """A desk as a worker class."""

    def __init__(self) -> None:
        self.desk = Desk(self.rank)

    @register(Dispatch.ONE_TO_ALL)
    def noop(self, value):
        return self.desk.noop(value)

    @register(Dispatch.ONE_TO_ALL)
    def load_torch(self):
        import torch  # in a method of the class, as users write it: a library may find it there

        return torch.__name__ == "torch"

    @register(Dispatch.ONE_TO_ALL)
    def read(self, array):
        return self.desk.read(array)

    @register(Dispatch.ONE_TO_ALL)
    def read_all(self, array):
        return self.desk.read_all(array)

    @register(Dispatch.DP_PROTO)
    def increment(self, rows):
        return self.desk.increment(rows)

    @register(TransferProtocol(Broadcast(), Concat("dp")))
    def make(self, nbytes, token):
        return self.desk.make(nbytes, token)

    @register(TransferProtocol(Split("dp"), Gather("dp")))
    def exact_sum(self, rows):
        return self.desk.exact_sum(rows)

    @register(Dispatch.DP_PROTO)
    def make_numbered(self, numbers, nbytes):
        return self.desk.make_numbered(nbytes, len(numbers), int(numbers[0]))

    @register(TransferProtocol(Split("dp"), Gather("dp")))
    def first_sum(self, rows):
        return self.desk.first_sum(rows)

    @register(Dispatch.DP_PROTO)
    def rest(self, seconds):
        return self.desk.rest(seconds)

    @register(Dispatch.REQUEST)
    def rest_one(self, seconds):
        return self.desk.rest(seconds)

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

    def load_torch(self) -> list[bool]:
        return self._group.load_torch()

    def broadcast(self, array: np.ndarray) -> list[float]:
        return self._group.read(array)

    def broadcast_read_all(self, array: np.ndarray) -> list[float]:
        return self._group.read_all(array)

    def split_inc_concat(self, array: np.ndarray) -> np.ndarray:
        return self._group.increment(array)

    def gather(self, nbytes: int, token: int) -> list[np.ndarray]:
        return self._group.give(nbytes, token)

    def chain(self, nbytes: int, token: int) -> list[float]:
        rows = self._group.make.submit(nbytes // self._group.world_size, token)
        return self._group.exact_sum(self._others.increment.submit(rows))

    def hold(self, nbytes: int, n_rows: int, is_each_an_object: bool = False) -> None:
        self._rows = self._group.make_numbered.submit(np.arange(n_rows), nbytes // self._group.world_size)
        assert len(self._rows) == n_rows

    def mini_batch(self, numbers: np.ndarray) -> list[float]:
        return self._group.first_sum(self._rows[numbers])

    def long_tail(self, seconds: np.ndarray) -> np.ndarray:
        return self._group.rest_one.map(seconds, chunk=1).result()

    def long_tail_split(self, seconds: np.ndarray) -> np.ndarray:
        return self._group.rest(seconds)

    @cached_property
    def _others(self) -> bm.WorkerGroup:
        """Half as many workers."""
        self._other_pool = bm.ResourcePool([max(1, self._group.world_size // 2)], backend=self.backend)
        return bm.WorkerGroup(self._other_pool, Player)

    def stop(self) -> None:
        if "_others" in self.__dict__:
            self._other_pool.close()
        self._pool.close()
