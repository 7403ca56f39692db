"""bandmaster on Ray: a Ray that was started as `plain_ray` starts its own."""

import ray

from peers.on_bandmaster import BandmasterPeer
from peers.plain_ray import start_ray


class Peer(BandmasterPeer):
    """Backend "ray"."""

    backend = "ray"

    def start(self, n_workers: int) -> None:
        start_ray(n_workers)
        super().start(n_workers)

    def stop(self) -> None:
        super().stop()
        ray.shutdown()
