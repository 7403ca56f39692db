"""bandmaster by Ray's own calls, as it is where no link can be made."""

import os

from peers.on_hosts.on_bandmaster import OnTwoHosts


class Peer(OnTwoHosts):
    """Without agents."""

    channel = "ray"

    def start(self, n_workers: int) -> None:
        os.environ["BANDMASTER_AGENTS"] = "0"
        super().start(n_workers)
