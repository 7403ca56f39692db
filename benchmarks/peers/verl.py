"""verl's single_controller: `RayWorkerGroup`, its own dispatch modes, rows in a `DataProto`."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import ray
import torch
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray.base import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

from peers.desk import Desk


class Player(Worker):
    """A desk as a worker class of verl."""

    def __init__(self) -> None:
        super().__init__()
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

    @register(Dispatch.DP_COMPUTE_PROTO)
    def increment(self, data):
        data.batch["rows"] = self.desk.increment(data.batch["rows"])
        return data

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def make(self, data):
        rows = self.desk.make(data.meta_info["nbytes"], data.meta_info["token"])
        return _rows(torch.from_numpy(rows))

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def increment_later(self, data):
        return _rows(self.desk.increment(data.batch["rows"]))

    @register(Dispatch.DP_COMPUTE_PROTO)
    def exact_sum(self, data):
        return _rows(torch.tensor([self.desk.exact_sum(data.batch["rows"].numpy())], dtype=torch.float64))

    @register(Dispatch.ONE_TO_ALL)
    def give(self, nbytes, token):
        return self.desk.give(nbytes, token)


def _rows(tensor: torch.Tensor) -> DataProto:
    return DataProto(batch=TensorDict({"rows": tensor}, batch_size=[len(tensor)]))


def _group(n_workers: int) -> RayWorkerGroup:
    pool = RayResourcePool([n_workers], use_gpu=False, max_colocate_count=1)
    return RayWorkerGroup(pool, RayClassWithInitArgs(cls=ray.remote(Player)))


class Peer:
    """A worker group on a pool of one node, without GPUs."""

    def start(self, n_workers: int) -> None:
        n_cpus = n_workers + max(1, n_workers // 2)  # for those that `chain` starts
        ray.init("local", num_cpus=n_cpus, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        self._group = _group(n_workers)

    def noop(self) -> list[int]:
        return self._group.noop(1)

    def load_torch(self) -> list[bool]:
        return self._group.load_torch()

    def broadcast(self, array: np.ndarray) -> list[float]:
        return self._group.read(array)

    def broadcast_read_all(self, array: np.ndarray) -> list[float]:
        return self._group.read_all(array)

    def split_inc_concat(self, array: np.ndarray) -> np.ndarray:
        return self._group.increment(_rows(torch.from_numpy(array))).batch["rows"].numpy()

    def gather(self, nbytes: int, token: int) -> list[np.ndarray]:
        return self._group.give(nbytes, token)

    def chain(self, nbytes: int, token: int) -> list[float]:
        n = self._group.world_size
        asked = _rows(torch.zeros(n))
        asked.meta_info = {"nbytes": nbytes // n, "token": token}
        return self._group.exact_sum(self._others.increment_later(self._group.make(asked))).batch["rows"].tolist()

    @cached_property
    def _others(self) -> RayWorkerGroup:
        """Half as many workers."""
        return _group(max(1, self._group.world_size // 2))

    def stop(self) -> None:
        ray.shutdown()
