"""How a worker that the controller did not fork gets a lane: it connects to an abstract Unix socket."""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import select
import socket
import struct
import time
import uuid
from collections.abc import Callable, Collection, Iterator

from bandmaster.transport.lane import set_buffer

__all__ = ["LaneListener", "connect", "peer_pid"]

MAX_UNKNOWN = 256  # connections of this user's that have not said who they are
LOOK_S = 0.1  # how often to ask for workers that cannot connect
_log = logging.getLogger(__name__)


class LaneListener:
    """Where workers that the controller did not fork connect: an abstract Unix socket, which exists as long as this.

    Only processes of the same user that were given an introduction are let in.
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
        """What a worker says first."""
        return self._secret + rank.to_bytes(4, "little")

    def accept(
        self, ranks: Collection[int], timeout_s: float, refusing: Callable[[], Collection[int]] = tuple
    ) -> dict[int, socket.socket]:
        """The controller's ends of the lanes of workers, by rank, as they connect.

        Args:
            ranks: Those that are to connect.
            timeout_s: How long to wait for them.
            refusing: Asked every now and then for ranks that have turned out not to be able to.

        Raises:
            TimeoutError: They have not all connected in time.
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
        """Connections that have said by now which rank they are; others are waited for without holding these up."""
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
        """Take a connection of this user's in."""
        sock, _ = self._socket.accept()
        if _peer(sock)[1] != os.geteuid():
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
            _log.warning("%d connections of other users to the lanes of this process were closed", self._n_others)


def connect(name: str, introduction: bytes) -> socket.socket | None:
    """A worker's end of a lane to the listener of that name; None if it cannot be reached from here."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        set_buffer(sock)
        sock.connect(f"\0{name}")
        if _peer(sock)[1] != os.geteuid():
            raise PermissionError("another user has taken the name of a listener that is gone")
        sock.send(introduction)
    except OSError as error:
        _log.warning("there is no lane to the controller: %s", error)
        sock.close()
        return None
    return sock


def peer_pid(sock: socket.socket) -> int:
    """The process that connected to a Unix socket, or that listened for this one; 0 if it cannot be seen from here."""
    return _peer(sock)[0]


def _peer(sock: socket.socket) -> tuple[int, int]:
    """Pid and user of the process at the other end."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid
