"""bandmaster with processes on this machine."""

from peers.on_bandmaster import BandmasterPeer


class Peer(BandmasterPeer):
    """Backend "local"."""

    backend = "local"
