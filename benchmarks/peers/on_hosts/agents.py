"""bandmaster on two other hosts, whose agents start the ranks and pass calls on."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import ray

import bandmaster as bm
from peers.on_bandmaster import BandmasterPeer, Player
from peers.on_hosts.cluster import join


class Peer(BandmasterPeer):
    """A group on a pool of two nodes."""

    backend = "ray"

    def start(self, n_workers: int) -> None:
        join()
        self._pool = bm.ResourcePool([n_workers // 2] * 2, backend=self.backend)
        self._group = bm.WorkerGroup(self._pool, Player)
        if self._group.describe().count(" link ") != n_workers:
            raise RuntimeError(f"not all calls go by a link:\n{self._group.describe()}")
        if n_workers == 2:
            assert len(self._ends) == 2  # made now, lest the first call wait for them

    def make_on_first(self, nbytes: int, token: int) -> Any:
        return self._ends[0].make.submit(nbytes, token)

    def await_rows(self, rows: Any) -> None:
        len(rows)

    def read_on_second(self, rows: Any) -> list[float]:
        return self._ends[1].read.submit(rows).result()

    @cached_property
    def _ends(self) -> list[bm.WorkerGroup]:
        """A group of one rank on each host."""
        self._other_pool = bm.ResourcePool([1, 1], backend=self.backend)
        return [bm.WorkerGroup(pool, Player) for pool in bm.split_resource_pool(self._other_pool, 1)]

    def stop(self) -> None:
        if "_ends" in self.__dict__:
            self._other_pool.close()
        self._pool.close()
        ray.shutdown()
