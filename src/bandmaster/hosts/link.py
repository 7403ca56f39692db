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
from bandmaster.wire.channel import Closed

__all__ = ["Frame", "Link", "LinkStalled", "Place", "Raw", "awaited", "flush", "fresh"]

MAC_NBYTES = 16
DIGEST_NBYTES = 32
MAX_HEAD_NBYTES = 1 << 30
MAX_CHUNKS = 1 << 20
MAX_VIEWS = 64  # of one system call
SMALL_NBYTES = 64 * 1024  # chunks up to this size are copied behind the head
_BUFFER_NBYTES = 256 * 1024
_START = struct.Struct("<II")
_START_NBYTES = _START.size + MAC_NBYTES
_NUMBER = struct.Struct("<Q")
_RAW = 1 << 63  # the bit of a chunk's size that says that the digest is not of it, too

# How the kernel finds out that the other host is gone, although nothing is sent: after 2 + 3 * 2 s.
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))
USER_TIMEOUT_MS = 9_000  # what was sent is acknowledged in this time, or the connection fails: tcp(7)


class LinkStalled(Exception):
    """The other end takes nothing of what is sent."""


class Raw(NamedTuple):
    """A chunk that is the bytes of an array, which are sent without a hash: nobody unpickles them.

    Attributes:
        buffer: The bytes.
    """

    buffer: Any


class Frame(NamedTuple):
    """What has arrived.

    Attributes:
        head: The head, authenticated.
        chunks: The chunks, where the receiver wanted them; authenticated, but for those that were sent as `Raw`.
    """

    head: bytes
    chunks: Sequence[memoryview]


Place = Callable[[bytes, Sequence[int]], Sequence[memoryview]]  # where the chunks of these sizes are to be received


def fresh(_: bytes, sizes: Sequence[int]) -> list[memoryview]:
    """Memory of their own for chunks."""
    return [memoryview(bytearray(size)) for size in sizes]


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

    def __init__(self, sock: socket.socket, keys: Keys, place: Place = fresh) -> None:
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
        self._memory = bytearray(_BUFFER_NBYTES)
        self._view = memoryview(self._memory)
        self._from = self._to = 0  # what is in the buffer and was not looked at
        self._head: bytes | None = None  # of the frame whose chunks are being received
        self._chunks: Sequence[memoryview] = ()
        self._are_raw: list[bool] = []  # of the chunks
        self._digest = b""
        self._open: deque[memoryview] = deque()  # chunks, or the rest of one, that are not there
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

    def receive(self) -> Frame | None:
        """The next frame; None if it is not all there.

        Raises:
            Closed: The other end is gone, or what it has sent is not authentic.
        """
        while True:
            if self._head is None:
                self._begin()
            if self._head is not None and not self._open:
                if self._chunks and not hmac.compare_digest(_digest(self._chunks, self._are_raw), self._digest):
                    raise Closed("what has come is not authentic")
                frame = Frame(self._head, self._chunks)
                self._head, self._chunks = None, ()
                return frame
            if not self._fill():
                return None

    def _fill(self) -> bool:
        """Receive something; False if there is nothing now."""
        if self._open and self._from == self._to:
            into = self._open[0]
        else:
            self._make_room()
            into = self._view[self._to :]
        try:
            n = self._socket.recv_into(into)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        except OSError as error:
            raise Closed(_why(error)) from error
        if not n:
            raise Closed("it hung up")
        self.heard_at = time.monotonic()
        self.received_nbytes += n
        if self._open and self._from == self._to:
            self._filled(n)
        else:
            self._to += n
            self._take_chunks()
        return True

    def _filled(self, n: int) -> None:
        if self._open[0].nbytes == n:
            self._open.popleft()
        else:
            self._open[0] = self._open[0][n:]

    def _take_chunks(self) -> None:
        """Copy what is in the buffer to where it belongs."""
        while self._open and self._from < self._to:
            n = min(self._open[0].nbytes, self._to - self._from)
            self._open[0][:n] = self._view[self._from : self._from + n]
            self._from += n
            self._filled(n)

    def _make_room(self) -> None:
        """Have free space in the buffer."""
        if self._from == self._to:
            self._from = self._to = 0
            if len(self._memory) > _BUFFER_NBYTES:
                self._memory = bytearray(_BUFFER_NBYTES)
                self._view = memoryview(self._memory)
        if self._to == len(self._memory):
            used = self._view[self._from : self._to]
            wanted = max(_BUFFER_NBYTES, 2 * len(used))
            if wanted > len(self._memory) or not self._from:
                self._memory = bytearray(wanted)
            self._memory[: len(used)] = bytes(used)
            self._from, self._to = 0, len(used)
            self._view = memoryview(self._memory)

    def _begin(self) -> None:
        """Begin with the next frame, if its head is there."""
        there = self._to - self._from
        if there < _START_NBYTES:
            return
        n_head, n_chunks = _START.unpack_from(self._view, self._from)
        if n_head > MAX_HEAD_NBYTES or n_chunks > MAX_CHUNKS:
            raise Closed("what has come is not a frame")
        n_sizes = 8 * n_chunks
        n_described = n_sizes + DIGEST_NBYTES if n_chunks else 0
        n_all = _START_NBYTES + n_described + n_head
        if there < n_all:
            self._want(n_all)
            return
        whole = bytes(self._view[self._from : self._from + n_all])
        self._from += n_all
        body = whole[_START_NBYTES:]
        mac = self._mac_in.copy()
        mac.update(_NUMBER.pack(self._n_received) + whole[: _START.size] + body)
        if not hmac.compare_digest(mac.digest(), whole[_START.size : _START_NBYTES]):
            raise Closed("what has come is not authentic")
        self._n_received += 1
        said = struct.unpack_from(f"<{n_chunks}Q", body)
        self._are_raw = [bool(size & _RAW) for size in said]
        self._digest = body[n_sizes:n_described]
        self._head = head = body[n_described:]
        self._chunks = self.place(head, [size & ~_RAW for size in said]) if said else ()
        self._open = deque(chunk for chunk in self._chunks if chunk.nbytes)
        self._take_chunks()

    def _want(self, n_bytes: int) -> None:
        """Have room in the buffer for a head that is larger."""
        if self._from + n_bytes > len(self._memory):
            used = bytes(self._view[self._from : self._to])
            self._memory = bytearray(max(_BUFFER_NBYTES, n_bytes + SMALL_NBYTES))
            self._memory[: len(used)] = used
            self._view = memoryview(self._memory)
            self._from, self._to = 0, len(used)


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


def awaited(link: Link, timeout_s: float) -> Frame:
    """The next frame of a link.

    Raises:
        Closed: The other end is gone.
        LinkStalled: Nothing has come for so long.
    """
    while (frame := link.receive()) is None:
        poll = select.poll()
        poll.register(link.fileno(), select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            raise LinkStalled
    return frame
