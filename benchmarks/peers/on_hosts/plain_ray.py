"""Plain Ray by hand on two hosts."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from peers import plain_ray
from peers.on_hosts.cluster import join, other_nodes


class Peer(plain_ray.Peer):
    """The same actors, half of them on each host."""

    def start(self, n_workers: int) -> None:
        join()
        nodes = other_nodes()[:2]
        actor_class = ray.remote(num_cpus=1)(plain_ray.Holder)
        places = [NodeAffinitySchedulingStrategy(nodes[2 * rank // n_workers], soft=False) for rank in range(n_workers)]
        self._actors = [
            actor_class.options(scheduling_strategy=place).remote(rank) for rank, place in enumerate(places)
        ]

    def make_on_first(self, nbytes: int, token: int) -> Any:
        return self._actors[0].make.remote(nbytes, token)

    def await_rows(self, rows: Any) -> None:
        ray.wait([rows], fetch_local=False)

    def read_on_second(self, rows: Any) -> list[float]:
        return ray.get([self._actors[-1].read.remote(rows)])
