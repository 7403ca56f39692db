"""bandmaster's own path to other hosts: links to agents."""

from peers.on_hosts.on_bandmaster import OnTwoHosts


class Peer(OnTwoHosts):
    """As it is without settings."""

    channel = "link"
