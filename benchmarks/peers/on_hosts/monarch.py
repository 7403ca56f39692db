"""Monarch on two hosts: a mesh of hosts over TCP, to each of which its own worker loop belongs (`monarch_host`)."""

from __future__ import annotations

import os
import socket
import time

from monarch.actor import attach_to_workers, enable_transport

from peers import monarch

PORT = 47_900
ADDRESSES = "MONARCH_ADDRESSES"  # the environment variable that names the controller's host and the others
CONNECT_TIMEOUT_S = 60.0


def url(address: str) -> str:
    """How Monarch calls the place where a host listens."""
    return f"tcp://{address}:{PORT}"


class Peer(monarch.Peer):
    """The same actors, half of them on each host."""

    def start(self, n_workers: int) -> None:
        controller, *others = os.environ[ADDRESSES].split(",")
        enable_transport(url(controller))
        for address in others:
            _await(address)
        self._hosts = attach_to_workers(ca="trust_all_connections", workers=[url(address) for address in others])
        self._hosts.initialized.get()
        self._processes = self._hosts.spawn_procs({"ranks": n_workers // len(others)})
        self._actors = self._processes.spawn("player", monarch.Player)
        here = range(n_workers // len(others))
        self._each = [self._actors.slice(hosts=host, ranks=rank) for host in range(len(others)) for rank in here]

    def stop(self) -> None:
        self._hosts.shutdown().get()


def _await(address: str) -> None:
    """Wait until a host listens: its process has to import Monarch first."""
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        try:
            socket.create_connection((address, PORT)).close()
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return
