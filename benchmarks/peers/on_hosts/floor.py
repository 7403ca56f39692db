"""The floor between hosts: one socket to each of two hosts, and one process there. Nothing of it is a library's work.

Both hosts are sent to at the same time, by a thread each. There are no ranks, so each host answers for all of its own.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

HEAD = struct.Struct("!cQ")  # what to do, and how many bytes follow
NUMBER = struct.Struct("!d")
PORT = 47_800
READ, INCREMENT = b"r", b"i"
ADDRESSES = "FLOOR_ADDRESSES"  # the environment variable that names the hosts
CONNECT_TIMEOUT_S = 20.0


class Peer:
    """Connected to `floor_host` on each host."""

    def start(self, n_workers: int) -> None:
        self._n_workers = n_workers
        self._sockets = [_connected(address) for address in os.environ[ADDRESSES].split(",")]
        self._threads = ThreadPoolExecutor(len(self._sockets))

    def noop(self) -> list[int]:
        """1 to each host, and back."""
        numbers = self._on_all(_read, [memoryview(np.ones(1, np.float32)).cast("B")] * len(self._sockets))
        return [int(number) for number in numbers for _ in range(self._n_workers // len(numbers))]

    def broadcast(self, array: np.ndarray) -> list[float]:
        sums = self._on_all(_read, [memoryview(array).cast("B")] * len(self._sockets))
        return [each for each in sums for _ in range(self._n_workers // len(sums))]

    def split_inc_concat(self, array: np.ndarray) -> np.ndarray:
        result = np.empty_like(array)
        n = len(self._sockets)
        pairs = zip(np.array_split(array, n), np.array_split(result, n), strict=True)
        self._on_all(_increment, [(memoryview(part).cast("B"), memoryview(into).cast("B")) for part, into in pairs])
        return result

    def stop(self) -> None:
        self._threads.shutdown()
        for sock in self._sockets:
            sock.close()

    def _on_all(self, do: Callable[[socket.socket, Any], Any], arguments: list[Any]) -> list[Any]:
        return list(self._threads.map(do, self._sockets, arguments))


def _read(sock: socket.socket, sent: memoryview) -> float:
    sock.sendall(HEAD.pack(READ, len(sent)))
    sock.sendall(sent)
    return float(NUMBER.unpack(sock.recv(NUMBER.size, socket.MSG_WAITALL))[0])


def _increment(sock: socket.socket, places: tuple[memoryview, memoryview]) -> None:
    sent, received = places
    sock.sendall(HEAD.pack(INCREMENT, len(sent)))
    sock.sendall(sent)
    receive_into(sock, received)


def receive_into(sock: socket.socket, place: memoryview) -> None:
    """Fill a place with what comes."""
    n_received = 0
    while n_received < len(place):
        n = sock.recv_into(place[n_received:])
        if not n:
            raise EOFError(f"{n_received} of {len(place)} bytes came")
        n_received += n


def _connected(address: str) -> socket.socket:
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        try:
            sock = socket.create_connection((address, PORT))
        except ConnectionRefusedError:  # its process is about to start
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
