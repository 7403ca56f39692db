"""Simulated hosts with eight ranks each."""

from peers.on_hosts.simulated import SimulatedPeer


class Peer(SimulatedPeer):
    """Eight on each host."""

    n_ranks_of_host = 8
