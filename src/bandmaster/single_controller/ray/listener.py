"""Gives lanes to workers that the controller did not fork: they connect to an abstract Unix socket."""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import select
import socket
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from bandmaster.platform.proc import peer_of
from bandmaster.wire.lane import set_buffer

__all__ = ["LaneListener", "connect", "host_identity"]

MAX_UNKNOWN = 256  # connections of this user's that have not said who they are
LOOK_S = 0.1  # how often to ask for workers that cannot connect
_log = logging.getLogger(__name__)


def host_identity() -> str:
    """A text that is equal for all processes of one machine. Containers of one machine may share it."""
    return f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"


class LaneListener:
    """An abstract Unix socket that workers connect to. It exists as long as this object.

    A connection becomes a lane if its process belongs to the same user and knows the listener's secret.
    """

    def __init__(self) -> None:
        self.name = f"bandmaster-{uuid.uuid4().hex}"
        self._secret = secrets.token_bytes(16)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(f"\0{self.name}")
        self._socket.listen(1024)
        self._unknown: dict[int, socket.socket] = {}  # by descriptor, in the order in which they came
        self._n_others = 0

    def introduction(self, rank: int) -> bytes:
        """The bytes that the worker of a rank sends first: the secret and the rank."""
        return self._secret + rank.to_bytes(4, "little")

    def accept(
        self, ranks: Collection[int], timeout_s: float, refusing: Callable[[], Collection[int]] = tuple
    ) -> dict[int, socket.socket]:
        """Wait until workers have connected; returns the controller's end of each lane, by rank.

        Args:
            ranks: The ranks that are to connect.
            timeout_s: Seconds to wait for them.
            refusing: Returns the ranks that have found that they cannot connect. It is called ten times a second, and
                once all missing ranks are among them, the wait ends.

        Raises:
            TimeoutError: Some rank has not connected in time.
        """
        lanes: dict[int, socket.socket] = {}
        look_at, deadline = time.monotonic() + LOOK_S, time.monotonic() + timeout_s
        with contextlib.ExitStack() as if_it_fails:
            while missing := set(ranks).difference(lanes):
                now = time.monotonic()
                if now >= look_at:
                    look_at = now + LOOK_S
                    if missing.issubset(refusing()):
                        break
                if now >= deadline:
                    raise TimeoutError(f"{len(missing)} of {len(ranks)} workers have not connected in {timeout_s:g} s")
                for rank, sock in self._introduced(min(look_at, deadline) - now):
                    if_it_fails.enter_context(sock)
                    if rank in missing:
                        missing.remove(rank)
                        set_buffer(sock)
                        lanes[rank] = sock
                    else:
                        sock.close()
            if_it_fails.pop_all()
        return lanes

    def _introduced(self, timeout_s: float) -> Iterator[tuple[int, socket.socket]]:
        """Yield the connections that have sent their introduction; silent connections do not hold them up."""
        poll = select.poll()
        for fd in (self._socket.fileno(), *self._unknown):
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(max(0.0, timeout_s) * 1000):
            if fd == self._socket.fileno():
                self._let_in()
                continue
            sock, said = self._unknown.pop(fd), b""
            with contextlib.suppress(OSError):
                said = sock.recv(64, socket.MSG_DONTWAIT)
            if hmac.compare_digest(said[:-4], self._secret):
                yield int.from_bytes(said[-4:], "little"), sock
            else:
                sock.close()

    def _let_in(self) -> None:
        """Accept a connection, and close it if its process belongs to another user."""
        sock, _ = self._socket.accept()
        if peer_of(sock)[1] != os.geteuid():
            self._n_others += 1
            sock.close()
            return
        self._unknown[sock.fileno()] = sock
        if len(self._unknown) > MAX_UNKNOWN:
            self._unknown.pop(next(iter(self._unknown))).close()  # a worker introduces itself at once

    def __enter__(self) -> LaneListener:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        for sock in self._unknown.values():
            sock.close()
        if self._n_others:
            _log.warning("closed %d connections of other users to the worker sockets of this process", self._n_others)


def connect(name: str, introduction: bytes) -> socket.socket | None:
    """Connect to a listener; returns the worker's end of the lane, or None if the listener cannot be reached."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        set_buffer(sock)
        sock.connect(f"\0{name}")
        if peer_of(sock)[1] != os.geteuid():
            raise PermissionError("another user now owns the name of the controller's socket")
        sock.send(introduction)
    except OSError as error:
        _log.warning("this worker has no direct socket to the controller, so Ray carries its calls: %s", error)
        sock.close()
        return None
    return sock
