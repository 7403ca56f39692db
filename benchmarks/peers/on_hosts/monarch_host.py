"""Monarch on another host: ``python -m peers.on_hosts.monarch_host ADDRESS`` starts actors when it is asked to."""

from __future__ import annotations

import sys

from monarch.actor import run_worker_loop_forever

from peers.on_hosts.monarch import url

if __name__ == "__main__":
    run_worker_loop_forever(ca="trust_all_connections", address=url(sys.argv[1]))
