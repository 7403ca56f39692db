"""Simulated hosts with one rank each."""

from peers.on_hosts.simulated import SimulatedPeer


class Peer(SimulatedPeer):
    """One on each host."""

    n_ranks_of_host = 1
