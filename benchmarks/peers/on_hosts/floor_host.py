"""The floor's process on another host: ``python -m peers.on_hosts.floor_host`` serves one connection."""

from __future__ import annotations

import mmap
import socket

import numpy as np

from peers.desk import sample_sum
from peers.on_hosts.floor import HEAD, NUMBER, PORT, READ, receive_into


def serve(sock: socket.socket) -> None:
    """Receive arrays into shared memory, which other processes could map; reply to each."""
    segments: dict[int, mmap.mmap] = {}
    while head := sock.recv(HEAD.size, socket.MSG_WAITALL):
        what, nbytes = HEAD.unpack(head)
        if nbytes not in segments:
            segments[nbytes] = mmap.mmap(-1, nbytes)
        place = memoryview(segments[nbytes])
        receive_into(sock, place)
        array = np.frombuffer(place, np.float32)
        if what == READ:
            sock.sendall(NUMBER.pack(sample_sum(array)))
        else:
            array += 1
            sock.sendall(place)


def main() -> None:
    """Wait for the connection, and end with it."""
    with socket.create_server(("", PORT)) as listener:
        sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with sock:
        serve(sock)


if __name__ == "__main__":
    main()
