"""A link: the TCP connection between two hosts, whose frames are messages.

::

    frame = bytes of head (4), number of chunks (4), mac (16) │ bytes of each chunk (8), digest (32) │ head │ chunks

The head is a pickled tuple: a `FrameKind`, the numbers of the large payloads, and the message's content. The head and
the buffers of a large payload are chunks of the frame; small payloads lie in the head of the frame. The receiver
unpickles a head only once its *mac* was found right: a keyed hash of the key of the connection, the number of the
frame, and all before the chunks. Chunks are sent from where they lie and received where they are to lie, by no more
copies than the kernel's. The *digest*, which is there if there are chunks, is a hash of the heads of payloads, which
are unpickled; the receiver gets the message only once it was found right. The buffers are bytes of arrays: to hash them
would take three times as long as sending them. With encryption, all is authenticated.

TCP's keep-alive ends an idle link to a host that is gone, and `Link.is_cut` tells of one that acknowledges nothing.
TCP_USER_TIMEOUT would do both, but also end the link to a process that does not read, as Ctrl-Z has stopped it.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import itertools
import pickle
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from bandmaster.codec import Payload
from bandmaster.errors import ResourceError
from bandmaster.hosts.handshake import HANDSHAKE_TIMEOUT_S, Keys, Refused, Secret, greet
from bandmaster.platform.deadline import Deadline
from bandmaster.platform.forks import in_forks
from bandmaster.platform.settings import host_timeout_s
from bandmaster.wire.messages import Closed
from bandmaster.wire.poller import HAS_ROOM, Poller

N_ATTEMPTS = 3  # to connect
MAC_NBYTES = 16
DIGEST_NBYTES = 32
MAX_HEAD_NBYTES = 1 << 30  # with the sizes of the chunks
MAX_VIEWS = 64  # of one system call
SMALL_NBYTES = 64 * 1024  # chunks up to this size are copied behind the head
_START = struct.Struct("<II")
_START_NBYTES = _START.size + MAC_NBYTES
_NUMBER = struct.Struct("<Q")
_NOT_AUTHENTIC = "frame authentication failed"
NO_ANSWER = "the host does not answer any more"
_NOTHING: Mapping[int, Payload] = MappingProxyType({})

# Of `struct tcp_info` in linux/tcp.h: packets that are not acknowledged, milliseconds since the last data and the last
# acknowledgement came, and the bytes that the other end has room for, which Linux tells since 5.4.
TCP_INFO = struct.Struct("=24xI24xII168xI")

Address = tuple[str, int]
Allocate = Callable[[int, tuple[Any, ...], Sequence[int]], Payload]  # the memory for a payload of a kind and content


class Purpose(IntEnum):
    """The purpose of a link: whose it is."""

    MESSAGES = 1  # of the controller
    ROWS = 2  # of whoever fetches rows
    RELAY = 3  # of another agent, which passes calls on
    CALLERS = 4  # of a worker that was given a group


class FrameKind(IntEnum):
    """The kind of a message, and its content."""

    CALLS = 1  # group, (ranks, message) for each call, rows to fetch, whether it is for all hosts below as well
    INTERRUPT = 2  # group, {rank: number or None}
    RELEASE = 3  # keys of rows
    ASK = 4  # number, method of `AgentServer`, arguments
    PING = 5  # nothing
    REPLIES = 6  # group, (ranks, reply) for each reply that differs
    DEATHS = 7  # group, {rank: failure}
    ANSWER = 8  # number, what the method has returned, or a failure
    PONG = 9  # nothing
    FORWARD = 10  # address of one of the agents below, kind and content of the message for it
    RESUME = 11  # group, {rank: number of a call that has failed there}
    OUTPUT = 12  # a `Written`
    FETCH = 13  # key of rows, the numbers of the rows that are needed, or None for all
    ROWS = 14  # why there are none; "" if payload 0 has them
    RELAY = 15  # number, method and parts of a call that the controller is to make; no method if it is cancelled
    RELAYED = 16  # number of that call, a `ReplyKind` (FAILURE, ITEM, else VALUE), and the part of what came
    CUT = 17  # address of an agent that calls cannot be passed on to any more, and why


class Message(NamedTuple):
    """One message that has arrived.

    Attributes:
        kind: Its kind.
        content: The content of that kind.
        large: The large payloads, by number.
    """

    kind: int
    content: tuple[Any, ...]
    large: Mapping[int, Payload]

    def unpack(self, part: Any) -> Payload:
        """The payload that a part names."""
        return self.large[part] if type(part) is int else Payload(*part)


def in_memory(kind: int, content: tuple[Any, ...], sizes: Sequence[int]) -> Payload:
    """A payload in memory of this process, whose head and buffers of these sizes are still to be written."""
    head, *buffers = [np.empty(size, np.uint8).data for size in sizes]
    return Payload(head, tuple(buffers))


class Link:
    """One end of a link. Not thread-safe: its owner holds a lock.

    Attributes:
        place: Makes the memory that a large payload is received in.
        heard_at: When something was received last, or the other end took more of what it had not taken at once; by
            `time.monotonic`.

    Args:
        sock: The connection; it is owned from here on.
        keys: Its keys.
        place: As the attribute.
        timeout_s: Seconds for which `send` and `receive` wait for the other end before they take it for gone; by
            default they do not wait.
    """

    def __init__(self, sock: socket.socket, keys: Keys, place: Allocate = in_memory, timeout_s: float = 0.0) -> None:
        self._socket = sock
        self._is_encrypted = isinstance(sock, ssl.SSLSocket)
        sock.settimeout(timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        silent_s = int(min(host_timeout_s(), 32_767))  # Linux takes no more
        each_s = max(1, silent_s // 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, silent_s - 1 - 3 * each_s))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, each_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        self.place = place
        self._mac_out = hashlib.blake2b(key=keys.sends, digest_size=MAC_NBYTES)
        self._mac_in = hashlib.blake2b(key=keys.receives, digest_size=MAC_NBYTES)
        self._n_sent = 0
        self._out: deque[tuple[memoryview, object]] = deque()  # what is to be sent, and the owner of its memory
        self._is_held_up = False  # the other end did not take all at once
        self._arriving = self._messages()
        self.heard_at = time.monotonic()
        self._poller: Poller
        self._take: Callable[[Message], object]
        self._end: Callable[[str], object]
        in_forks(self, Link.close)

    def fileno(self) -> int:
        """The descriptor by which select and its kin tell that something has arrived or can be sent."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close this end, and let go of the memory of a message that has not come to its end."""
        self._socket.close()
        self._arriving = iter(())

    @property
    def is_cut(self) -> bool:
        """Whether the other host acknowledges nothing of what was sent, and was silent as long as a host may be.

        The kernel alone would go on for a quarter of an hour. A stopped process has a kernel that acknowledges.
        """
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO.size)
        n_sent, data_ms, acknowledged_ms, room = TCP_INFO.unpack(info.ljust(TCP_INFO.size, b"\1"))
        limit_ms = max(1500, 900 * host_timeout_s())  # keep-alive is answered each second, or more rarely
        return bool(n_sent and room and min(data_ms, acknowledged_ms) >= limit_ms)

    # --- with a poller, whose lock is held ---

    def serve(self, poller: Poller, take: Callable[[Message], object], end: Callable[[str], object]) -> None:
        """Have a poller wait for this link from here on.

        Args:
            poller: The poller.
            take: Called with each message that arrives.
            end: Called with the reason when the link has ended; it closes the link.
        """
        self._poller, self._take, self._end = poller, take, end
        poller.watch(self.fileno(), self._ready)

    def _ready(self, events: int) -> None:
        try:
            if events & HAS_ROOM and self.pump():
                self._poller.ask_for_room(self.fileno(), False)
            while self.fileno() >= 0 and (message := self.receive()) is not None:
                self._take(message)
        except Closed as error:
            self._end(str(error))

    def post(self, kind: FrameKind, *content: Any, large: Mapping[int, Payload] = _NOTHING) -> None:
        """Send a message, as `send`; the poller has the rest sent. When the link has ended, this does nothing."""
        if self.fileno() >= 0:
            try:
                if not self.send(kind, *content, large=large):
                    self._poller.ask_for_room(self.fileno(), True)
            except Closed as error:
                self._end(str(error))

    # --- sending ---

    @property
    def has_unsent(self) -> bool:
        """Whether something was not sent yet."""
        return bool(self._out)

    def send(self, kind: FrameKind, *content: Any, large: Mapping[int, Payload] = _NOTHING) -> bool:
        """Send a message, as far as the kernel takes it now.

        Args:
            kind: Its kind.
            *content: The content of that kind.
            large: The large payloads, by number, which must not change until all is sent.

        Returns:
            Whether all was sent; else `pump` sends more.

        Raises:
            Closed: The other end is gone.
            ResourceError: The message is too large. Nothing of it was sent.
        """
        counts = tuple([(number, 1 + len(payload.buffers)) for number, payload in large.items()])
        head = pickle.dumps((kind, counts, *content), protocol=5)
        views = _views(large.values()) if large else []
        sizes = struct.pack(f"<{len(views)}Q", *[view.nbytes for view in views])
        described = sizes + self._digest(large.values()) if views else b""
        if (n := len(described) + len(head)) > MAX_HEAD_NBYTES:
            raise ResourceError(
                f"a message to another host has {n} bytes beside its large arrays, at most {MAX_HEAD_NBYTES} fit; pass "
                "less at a time, or have the workers read it from a file"
            )
        start = _START.pack(len(head), len(views))
        mac = self._mac_out.copy()
        mac.update(b"".join((_NUMBER.pack(self._n_sent), start, described, head)))
        self._n_sent += 1
        n_small = 0
        while n_small < len(views) and views[n_small].nbytes <= SMALL_NBYTES:
            n_small += 1
        first = b"".join([start, mac.digest(), described, head, *views[:n_small]])
        self._out.append((memoryview(first), None))
        self._out.extend((view, large) for view in views[n_small:] if view.nbytes)
        return self.pump()

    def pump(self) -> bool:
        """Send what was not sent yet, as far as the kernel takes it now; whether all was sent.

        Raises:
            Closed: The other end is gone.
        """
        out = self._out
        while out:
            n_sent = self._sent([out[index][0] for index in range(min(len(out), MAX_VIEWS))])
            if not n_sent:
                self._is_held_up = True
                return False
            if self._is_held_up:
                self.heard_at = time.monotonic()
            while n_sent and out[0][0].nbytes <= n_sent:
                n_sent -= out.popleft()[0].nbytes
            if n_sent:
                view, owner = out[0]
                out[0] = view[n_sent:], owner
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

    def receive(self) -> Message | None:
        """The next message; None if it is not all there.

        Raises:
            Closed: The other end is gone, or the frame is not authentic.
        """
        return next(self._arriving)

    def _messages(self) -> Iterator[Message | None]:
        """Every message that arrives, in order, and None as often as the rest of one is not there yet."""
        for number in itertools.count():
            yield (yield from self._message(number))  # and keep nothing of it: the memory is the receiver's

    def _message(self, number: int) -> Generator[None, None, Message]:
        """The message in the frame with this number; yields as often as not all is there yet."""
        start = bytearray(_START_NBYTES)
        yield from self._fill(start)
        n_head, n_chunks = _START.unpack_from(start)
        n_described = 8 * n_chunks + DIGEST_NBYTES if n_chunks else 0  # bytes of the sizes and the digest of chunks
        if n_described + n_head > MAX_HEAD_NBYTES:
            raise Closed("invalid frame header")
        rest = bytearray(n_described + n_head)
        yield from self._fill(rest)
        mac = self._mac_in.copy()
        mac.update(_NUMBER.pack(number) + start[: _START.size] + rest)
        if not hmac.compare_digest(mac.digest(), start[_START.size :]):
            raise Closed(_NOT_AUTHENTIC)
        kind, counts, *content = pickle.loads(memoryview(rest)[n_described:])
        sizes = iter(struct.unpack_from(f"<{n_chunks}Q", rest))
        large = {key: self.place(kind, tuple(content), tuple(itertools.islice(sizes, n))) for key, n in counts}
        for view in _views(large.values()):
            yield from self._fill(view)
        digest = rest[n_described - DIGEST_NBYTES : n_described]
        if large and not hmac.compare_digest(self._digest(large.values()), digest):
            raise Closed(_NOT_AUTHENTIC)
        return Message(kind, tuple(content), large)

    def _fill(self, memory: bytearray | memoryview) -> Iterator[None]:
        """Fill memory with what arrives; yields as often as not all is there yet."""
        left = memoryview(memory)
        while left:
            try:
                n = self._socket.recv_into(left)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                yield
                continue
            except OSError as error:
                raise Closed(_why(error)) from error
            if not n:
                raise Closed("the peer closed the connection")
            self.heard_at = time.monotonic()
            left = left[n:]

    def _digest(self, payloads: Iterable[Payload]) -> bytes:
        """The hash of the heads of payloads. Their sizes are authenticated beside it, so that they can be joined."""
        digest = hashlib.blake2b(digest_size=DIGEST_NBYTES)
        for payload in payloads if not self._is_encrypted else ():
            digest.update(payload.head)
        return digest.digest()


def _views(payloads: Iterable[Payload]) -> list[memoryview]:
    """The memory of the chunks of payloads."""
    return [memoryview(chunk).cast("B") for payload in payloads for chunk in (payload.head, *payload.buffers)]


def connect(
    address: Address, secret: Secret, purpose: Purpose, place: Allocate = in_memory, timeout_s: float = 0.0
) -> Link:
    """Connect to an agent. This is tried again: a flood of connections may have the agent close some, or it is slow.

    Args:
        address: Where it listens.
        secret: The secret that both ends know.
        purpose: What it is for.
        place: Makes the memory that large payloads are received in.
        timeout_s: As that of a `Link`.

    Raises:
        Refused: It does not know the secret.
        OSError: It cannot be reached, or has not answered as long as a host may be silent.
    """
    patience, n_left = Deadline(host_timeout_s()), N_ATTEMPTS
    while True:
        try:
            return _connected(address, secret, purpose, place, timeout_s)
        except (Refused, ConnectionError, TimeoutError):
            n_left -= 1
            if not (n_left and patience.left()):
                raise


def _connected(address: Address, secret: Secret, purpose: Purpose, place: Allocate, timeout_s: float) -> Link:
    sock = socket.create_connection(address, timeout=HANDSHAKE_TIMEOUT_S)
    try:
        return Link(*greet(sock, secret, purpose), place, timeout_s)
    except BaseException:
        sock.close()
        raise


def _why(error: OSError) -> str:
    if error.errno == errno.ETIMEDOUT or isinstance(error, TimeoutError):
        return NO_ANSWER
    return f"{type(error).__name__}: {error}"
