"""A link: the TCP connection between two hosts, in frames.

::

    frame = bytes of head (4), number of chunks (4), mac (16) │ bytes of each chunk (8), digest (32) │ head │ chunks

Whoever receives a frame has the head, which is pickled, only once its *mac* was found right: a keyed hash of the
key of the connection, the number of the frame, and all before the chunks. Chunks are sent from where they lie and
received where they are to lie, by no more copies than the kernel's. The *digest*, which is there if there are chunks,
is a hash of those that are pickled, and the receiver gets the frame only once it was found right. The others are `Raw`,
the bytes of arrays: to hash them would take three times as long as sending them. With encryption, all is authenticated.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import select
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from bandmaster.hosts.handshake import Keys
from bandmaster.wire.messages import Closed

MAC_NBYTES = 16
DIGEST_NBYTES = 32
MAX_HEAD_NBYTES = 1 << 30
MAX_CHUNKS = 1 << 20
MAX_VIEWS = 64  # of one system call
SMALL_NBYTES = 64 * 1024  # chunks up to this size are copied behind the head
_START = struct.Struct("<II")
_START_NBYTES = _START.size + MAC_NBYTES
_NUMBER = struct.Struct("<Q")
_NOT_AUTHENTIC = "frame authentication failed"
_RAW = 1 << 63  # the bit of a chunk's size that says that the digest is not of it, too

# How the kernel finds out that the other host is gone, although nothing is sent: after 2 + 3 * 2 s.
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))
USER_TIMEOUT_MS = 9_000  # what was sent is acknowledged in this time, or the connection fails: tcp(7)


class LinkStalled(Exception):
    """Raised when the other end takes or sends nothing for too long."""


class Raw(NamedTuple):
    """A chunk that is the bytes of an array, which are sent without a hash: nobody unpickles them.

    Attributes:
        buffer: The bytes.
    """

    buffer: Any


Place = Callable[[bytes, Sequence[int]], Sequence[memoryview]]  # where the chunks of these sizes are to be received


class Link:
    """One end of a link. Not thread-safe: its owner holds a lock.

    Attributes:
        heard_at: When something was received last, or the other end took more of what it had not taken at once; by
            `time.monotonic`.
        received_nbytes: Bytes of all that was received.
        place: Where the chunks of a frame are to be received.

    Args:
        sock: The connection; it is owned from here on.
        keys: Its keys.
        place: As the attribute.
    """

    def __init__(self, sock: socket.socket, keys: Keys, place: Place) -> None:
        self._socket = sock
        self._is_encrypted = isinstance(sock, ssl.SSLSocket)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
        self.place = place
        self._mac_out = hashlib.blake2b(key=keys.sends, digest_size=MAC_NBYTES)
        self._mac_in = hashlib.blake2b(key=keys.receives, digest_size=MAC_NBYTES)
        self._n_sent = self._n_received = 0
        self._out: deque[memoryview] = deque()
        self._is_held_up = False  # the other end did not take all at once
        self._start = bytearray(_START_NBYTES)
        self._rest = bytearray()  # of a frame whose start is there, up to its chunks
        self._head = b""
        self._chunks: Sequence[memoryview] = ()
        self._are_raw: list[bool] = []  # of the chunks
        self._open: deque[memoryview] = deque()  # the memory that is to be filled
        self._step: Callable[[], bytes | None]  # what is done once it is full
        self._next([memoryview(self._start)], self._read_start)
        self.heard_at = time.monotonic()
        self.received_nbytes = 0

    def fileno(self) -> int:
        """The descriptor by which select and its kin tell that something has arrived or can be sent."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    # --- sending ---

    @property
    def has_unsent(self) -> bool:
        """Whether something was not sent yet."""
        return bool(self._out)

    def send(self, head: bytes, chunks: Sequence[Any] = ()) -> bool:
        """Send a frame, as far as the kernel takes it now. The chunks must not change until all is sent.

        Args:
            head: The head.
            chunks: The chunks; those that are not `Raw` are hashed.

        Returns:
            Whether all was sent; else `pump` sends more.

        Raises:
            Closed: The other end is gone.
        """
        views, described = self._described(chunks) if chunks else ([], b"")
        start = _START.pack(len(head), len(views))
        mac = self._mac_out.copy()
        mac.update(b"".join((_NUMBER.pack(self._n_sent), start, described, head)))
        self._n_sent += 1
        first = [start, mac.digest(), described, head]
        if not views and not self._out and not self._is_encrypted:
            message = b"".join(first)
            n_sent = self._sent([message])
            if n_sent < len(message):
                self._out.append(memoryview(message)[n_sent:])
            return not self._out
        while views and views[0].nbytes <= SMALL_NBYTES:
            first.append(bytes(views.pop(0)))
        self._out.append(memoryview(b"".join(first)))
        self._out.extend(view for view in views if view.nbytes)
        return self.pump()

    def _described(self, chunks: Sequence[Any]) -> tuple[list[memoryview], bytes]:
        """The bytes of chunks, and what precedes the head: their sizes and the digest."""
        are_raw = [self._is_encrypted or type(chunk) is Raw for chunk in chunks]
        views = [memoryview(chunk.buffer if type(chunk) is Raw else chunk).cast("B") for chunk in chunks]
        sizes = [view.nbytes | _RAW if is_raw else view.nbytes for view, is_raw in zip(views, are_raw, strict=True)]
        return views, struct.pack(f"<{len(sizes)}Q", *sizes) + _digest(views, are_raw)

    def pump(self) -> bool:
        """Send what was not sent yet, as far as the kernel takes it now; whether all was sent.

        Raises:
            Closed: The other end is gone.
        """
        out = self._out
        while out:
            n_sent = self._sent([out[index] for index in range(min(len(out), MAX_VIEWS))])
            if not n_sent:
                self._is_held_up = True
                return False
            if self._is_held_up:
                self.heard_at = time.monotonic()
            while n_sent and out[0].nbytes <= n_sent:
                n_sent -= out.popleft().nbytes
            if n_sent:
                out[0] = out[0][n_sent:]
        self._is_held_up = False
        return True

    def _sent(self, views: Sequence[Any]) -> int:
        try:
            if self._is_encrypted:
                return self._socket.send(views[0])
            return self._socket.sendmsg(views, (), socket.MSG_NOSIGNAL)
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return 0
        except OSError as error:
            raise Closed(_why(error)) from error

    # --- receiving ---

    def receive(self) -> bytes | None:
        """The head of the next frame, whose chunks lie where `place` has put them; None if it is not all there.

        Raises:
            Closed: The other end is gone, or the frame is not authentic.
        """
        while self._fill():
            head = self._step()
            if head is not None:
                return head
        return None

    def _fill(self) -> bool:
        """Fill the memory that is open; False if not all is there."""
        while self._open:
            try:
                n = self._socket.recv_into(self._open[0])
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return False
            except OSError as error:
                raise Closed(_why(error)) from error
            if not n:
                raise Closed("the peer closed the connection")
            self.heard_at = time.monotonic()
            self.received_nbytes += n
            if self._open[0].nbytes == n:
                self._open.popleft()
            else:
                self._open[0] = self._open[0][n:]
        return True

    def _read_start(self) -> None:
        """Open the memory of the part of a frame before its chunks."""
        n_head, n_chunks = _START.unpack_from(self._start)
        if n_head > MAX_HEAD_NBYTES or n_chunks > MAX_CHUNKS:
            raise Closed("invalid frame header")
        self._rest = bytearray(_described_nbytes(n_chunks) + n_head)
        self._next([memoryview(self._rest)], self._read_rest)

    def _read_rest(self) -> None:
        """Authenticate a frame up to its chunks, and open the memory of these."""
        _, n_chunks = _START.unpack_from(self._start)
        mac = self._mac_in.copy()
        mac.update(_NUMBER.pack(self._n_received) + self._start[: _START.size] + self._rest)
        if not hmac.compare_digest(mac.digest(), self._start[_START.size :]):
            raise Closed(_NOT_AUTHENTIC)
        self._n_received += 1
        sizes = struct.unpack_from(f"<{n_chunks}Q", self._rest)
        self._are_raw = [bool(size & _RAW) for size in sizes]
        self._head = bytes(self._rest[_described_nbytes(n_chunks) :])
        self._chunks = self.place(self._head, [size & ~_RAW for size in sizes]) if sizes else ()
        self._next(self._chunks, self._read_chunks)

    def _read_chunks(self) -> bytes:
        """Authenticate the chunks of a frame, and open the memory of the next one; returns the head."""
        n_sizes = 8 * len(self._chunks)
        said = self._rest[n_sizes : n_sizes + DIGEST_NBYTES]
        if self._chunks and not hmac.compare_digest(_digest(self._chunks, self._are_raw), said):
            raise Closed(_NOT_AUTHENTIC)
        self._chunks, self._rest = (), bytearray()
        self._next([memoryview(self._start)], self._read_start)
        return self._head

    def _next(self, views: Sequence[memoryview], step: Callable[[], bytes | None]) -> None:
        """Have memory filled, and something done once it is full."""
        self._open.extend(view for view in views if view.nbytes)
        self._step = step


def _described_nbytes(n_chunks: int) -> int:
    """Bytes of the sizes and the digest of chunks."""
    return 8 * n_chunks + DIGEST_NBYTES if n_chunks else 0


def _digest(chunks: Sequence[memoryview], are_raw: Sequence[bool]) -> bytes:
    """The hash of the chunks that are not raw. Their sizes are authenticated beside it, so that they can be joined."""
    digest = hashlib.blake2b(digest_size=DIGEST_NBYTES)
    for chunk, is_raw in zip(chunks, are_raw, strict=True):
        if not is_raw:
            digest.update(chunk)
    return digest.digest()


def flush(links: Sequence[Link], timeout_s: float) -> None:
    """Send all that was not sent yet over some links, to all of them at the same time.

    Raises:
        Closed: An end is gone.
        LinkStalled: One has taken nothing for so long.
    """
    waiting = [link for link in links if not link.pump()]
    while waiting:
        poll = select.poll()
        for link in waiting:
            poll.register(link.fileno(), select.POLLOUT)
        if not poll.poll(timeout_s * 1000):
            raise LinkStalled
        waiting = [link for link in waiting if not link.pump()]


def _why(error: OSError) -> str:
    if error.errno == errno.ETIMEDOUT:
        return "the host does not answer any more"
    return f"{type(error).__name__}: {error}"


def await_frame(link: Link, timeout_s: float) -> None:
    """Wait until something has come over a link.

    Raises:
        LinkStalled: Nothing has come for so long.
    """
    poll = select.poll()
    poll.register(link.fileno(), select.POLLIN)
    if not poll.poll(timeout_s * 1000):
        raise LinkStalled
