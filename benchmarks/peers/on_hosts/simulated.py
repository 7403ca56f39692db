"""bandmaster with agents in processes of this machine, whose ranks are objects: what a controller does is the same."""

from __future__ import annotations

import bandmaster as bm
from bandmaster.backends import register_backend
from bandmaster.testing.simulated_hosts import SimulatedHosts
from peers.on_bandmaster import BandmasterPeer, Player


class SimulatedPeer(BandmasterPeer):
    """A group on a pool with one node for each host."""

    backend = "simulated"
    n_ranks_of_host: int

    def start(self, n_workers: int) -> None:
        register_backend(self.backend, SimulatedHosts)
        nodes = [self.n_ranks_of_host] * (n_workers // self.n_ranks_of_host)
        self._pool = bm.ResourcePool(nodes, backend=self.backend)
        self._group = bm.WorkerGroup(self._pool, Player)
