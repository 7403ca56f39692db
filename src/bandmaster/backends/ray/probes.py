"""Finds out which addresses take connections, of all of them at the same time."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Sequence

Address = tuple[str, int]


def answering(addresses: Sequence[Address], timeout_s: float) -> set[Address]:
    """Return the addresses that take a connection within so many seconds."""
    deadline, poll = time.monotonic() + timeout_s, select.poll()
    waiting: dict[int, tuple[socket.socket, Address]] = {}
    answers = set()
    try:
        for address in addresses:
            sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
            waiting[sock.fileno()] = sock, address
            sock.setblocking(False)
            sock.connect_ex(address)
            poll.register(sock, select.POLLOUT)
        while waiting and (left := deadline - time.monotonic()) > 0:
            for fd, _ in poll.poll(left * 1000):
                sock, address = waiting.pop(fd)
                poll.unregister(fd)
                if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    answers.add(address)
                sock.close()
    finally:
        for sock, _ in waiting.values():
            sock.close()
    return answers
