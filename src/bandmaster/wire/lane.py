"""A lane: the direct channel between the controller and one worker on the same host.

One Unix socket of sequenced packets; nothing is named and no port is opened. A message is a body, which may be the
same for many workers and is then encoded once, behind a small part for this worker alone::

    message   = length of control (4 bytes) │ control │ body        + descriptors
    control   = (segments new to the reader, ids closed by the writer, ids the sender has nothing left in,
                 ids of which the same is true, but which must not be reused)
    body      = whatever the two ends agree on (see `crew` and `loop`)

Small payloads travel inside the body; larger ones lie in segments, which the body names by number: the head of a
payload is the first chunk, its buffers are the others.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import hmac
import logging
import os
import pickle
import secrets
import select
import socket
import struct
import termios
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from bandmaster.wire.codec import Payload
from bandmaster.wire.segments import Segment, SegmentReader, SegmentWriter

__all__ = [
    "INLINE_NBYTES",
    "LENGTH_NBYTES",
    "MAX_MESSAGE_NBYTES",
    "MAX_PARTS_NBYTES",
    "Buffer",
    "Closed",
    "Lane",
    "LaneListener",
    "connect",
    "lane_pair",
    "peer_pid",
]

INLINE_NBYTES = 64 * 1024  # larger payloads go into a segment, which takes longer for smaller ones
MAX_MESSAGE_NBYTES = 160 * 1024
MAX_PARTS_NBYTES = 144 * 1024  # of all parts of one message together
BUFFER_NBYTES = 208 * 1024  # of a socket: the largest message, and what the kernel adds to it
MAX_DESCRIPTORS = 64  # in one message
MAX_UNKNOWN = 256  # connections of this user's that have not said who they are
LOOK_S = 0.1  # how often to ask for workers that cannot connect
MAX_IDS = 512  # of segments, of each kind, in the control part of one message

_SO_SNDBUFFORCE = 32  # asm-generic/socket.h: as SO_SNDBUF, past the limit, for a process with CAP_NET_ADMIN
_SEND_FLAGS = int(socket.MSG_NOSIGNAL)
_TRUNCATED = int(socket.MSG_CTRUNC)
_DONT_WAIT = int(socket.MSG_DONTWAIT)
_RECEIVE_FLAGS = int(socket.MSG_CMSG_CLOEXEC)
_RECEIVE_NOW_FLAGS = _RECEIVE_FLAGS | _DONT_WAIT
_LENGTH = struct.Struct("<I")
LENGTH_NBYTES = _LENGTH.size  # of a message's control, before that
_log = logging.getLogger(__name__)
_ANCILLARY_NBYTES = (socket.CMSG_SPACE(4 * MAX_DESCRIPTORS),)


class Closed(Exception):
    """The other end is gone."""


def lane_pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of a lane.

    Raises:
        OSError: There is no descriptor for them, or the host's socket buffers are too small.
    """
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        for end in ends:
            _set_buffer(end)
    except OSError:
        for end in ends:
            end.close()
        raise
    return ends


def _set_buffer(sock: socket.socket) -> None:
    """Give a socket the buffer that messages need, whatever the host's default is.

    Raises:
        OSError: The host does not allow one of that size.

    Source: socket(7): the kernel doubles the size that is set, and ``net.core.wmem_max`` bounds it before that.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_NBYTES // 2)
    if sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < BUFFER_NBYTES:
        with contextlib.suppress(PermissionError):
            sock.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, BUFFER_NBYTES // 2)
    given = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    if given < BUFFER_NBYTES:
        raise OSError(
            errno.ENOBUFS,
            f"a socket needs a send buffer of {BUFFER_NBYTES:,} bytes, and this host allows {given:,}; raise the "
            f"limit: sysctl -w net.core.wmem_max={BUFFER_NBYTES // 2}",
        )


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
                        _set_buffer(sock)
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
        _set_buffer(sock)
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


class Buffer:
    """Where a message is received."""

    __slots__ = ("memory", "view")

    def __init__(self) -> None:
        self.memory = [bytearray(MAX_MESSAGE_NBYTES)]  # as `socket.recvmsg_into` takes it
        self.view = memoryview(self.memory[0])


class Lane:
    """One end of a lane.

    Args:
        sock: The socket; it is owned from here on.
        writer: The segments of this side, which other lanes may share.
        reader_id: How the other end is known to ``writer``.
        blocks: Whether sending waits while the other end does not read.
        is_only_reader: Whether no other lane shares ``writer``: then a segment's descriptor is closed once the other
            end has it.
    """

    def __init__(
        self,
        sock: socket.socket,
        writer: SegmentWriter,
        reader_id: int = 0,
        blocks: bool = True,
        is_only_reader: bool = False,
    ) -> None:
        self.socket = sock
        self.reader = SegmentReader()
        self.writer = writer
        self._reader_id = reader_id
        self._attached: set[int] = set()
        writer.on_close.append(self._segment_closed)
        self._closed_ids: list[int] = []
        self._returned: list[int] = []  # segments in which nothing lies any more, as the other end is to be told
        self._unusable: list[int] = []  # segments of the other end's that it must not use again
        self._is_only_reader = is_only_reader
        self.body: memoryview | None = None  # what was received last
        self._received: list[Any] = []  # at most one message, which lies in the buffer
        self._patience_s: float | None = None
        self._send_flags = _SEND_FLAGS | (0 if blocks else _DONT_WAIT)
        self._buffer: Buffer | None = None

    def fileno(self) -> int:
        """For select and its kin."""
        return self.socket.fileno()

    def wait_at_most(self, seconds: float | None) -> None:
        """How long `receive` blocks: for ever at first."""
        if seconds != self._patience_s:
            whole, rest = divmod(seconds or 0.0, 1.0)  # zero is what the kernel takes for ever to be
            self.socket.setsockopt(
                socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(whole), int(rest * 1e6))
            )
            self._patience_s = seconds

    def waiting_nbytes(self) -> int:
        """How much has been sent to this end that it has not received."""
        answer = fcntl.ioctl(self.socket, termios.FIONREAD, bytes(4))
        return int.from_bytes(answer, "little")

    def send(self, message: bytes, segments: Sequence[Segment] = ()) -> None:
        """Send a message: a body with four zero bytes before it. The segments that it names have been lent already.

        Raises:
            Closed: The other end is gone.
            BlockingIOError: The other end does not read, and this one does not wait; the lane is as it was.
            OSError: The message could not be sent; the lane is as it was.
        """
        new = [segment for segment in segments if segment.id not in self._attached] if segments else segments
        if not (new or self.reader.loans.ended or self._returned or self._closed_ids or self._unusable):
            try:
                self.socket.send(message, self._send_flags)
            except ConnectionError:
                raise Closed from None
            return
        self._note_returned()
        about_new = [(segment.id, segment.nbytes) for segment in new]
        about_old = [ids[:MAX_IDS] for ids in (self._closed_ids, self._returned, self._unusable)]
        control = pickle.dumps((about_new, *about_old), protocol=5)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [s.fd for s in new]))] if new else []
        parts: list[bytes | memoryview] = [_LENGTH.pack(len(control)), control, memoryview(message)[LENGTH_NBYTES:]]
        try:
            self.socket.sendmsg(parts, rights, self._send_flags)
        except ConnectionError:
            raise Closed from None
        for ids in (self._closed_ids, self._returned, self._unusable):
            del ids[:MAX_IDS]
        self._attached.update([segment.id for segment in new])
        if self._is_only_reader:
            for segment in new:
                segment.close_descriptor()

    def _note_returned(self) -> None:
        """Sort the segments in which nothing lies any more: those that a fork of this process may read are unusable."""
        for loan in self.reader.loans.take_ended():
            if self.reader.was_forked(loan.of):
                self._unusable.append(loan.of)
                self.reader.forget([loan.of])
            else:
                self._returned.append(loan.of)

    def lend(self, segments: Sequence[Segment]) -> None:
        """The other end is about to be told of these segments."""
        for segment in segments:
            self.writer.lend(segment, self._reader_id)

    def take_back(self, segments: Sequence[Segment]) -> None:
        """It was not told."""
        self.writer.give_back([segment.id for segment in segments], self._reader_id)

    def _segment_closed(self, number: int) -> None:
        """The other end is told with the next message, if it knows the segment."""
        if number in self._attached:
            self._attached.remove(number)
            self._closed_ids.append(number)

    def receive(self, block: bool = True, buffer: Buffer | None = None) -> memoryview | None:
        """The next body, valid until the next one is received; None when there is none in time, or if not ``block``.

        An exception that a signal handler raises here loses no message: the next call returns it.

        Args:
            block: Whether to wait for it.
            buffer: Where it is to lie; by default in one that this lane keeps.

        Raises:
            Closed: The other end is gone.
            OSError: A segment that came with it cannot be opened here; `body` is there nevertheless.
        """
        flags = _RECEIVE_FLAGS if block else _RECEIVE_NOW_FLAGS
        if buffer is None:
            buffer = self._buffer = self._buffer or Buffer()
        if not self._received:
            try:  # one call of C code reads and stores, so that an exception of a signal handler loses no message
                self._received.extend(map(self.socket.recvmsg_into, (buffer.memory,), _ANCILLARY_NBYTES, (flags,)))
            except BlockingIOError:
                return None
            except ConnectionError:
                raise Closed from None
        n, ancillary, message_flags, _ = self._received[0]
        if not n:
            raise Closed
        (n_control,) = _LENGTH.unpack_from(buffer.view)
        body = self.body = buffer.view[LENGTH_NBYTES + n_control : n]
        self._received.clear()
        if n_control:
            new, closed, returned, unusable = pickle.loads(buffer.view[LENGTH_NBYTES : LENGTH_NBYTES + n_control])
            self.writer.give_back(returned, self._reader_id)
            if new or closed or unusable:
                self._take_control(new, closed, unusable, _descriptors(ancillary), message_flags)
        return body

    def pack(self, payload: Payload) -> tuple[Any, list[Segment]]:
        """What a body says of a payload: the payload itself, or the number of the segment that it was written to.

        Raises:
            OSError: There is no memory or no descriptor for it.
        """
        if payload.nbytes <= INLINE_NBYTES:
            return inline(payload), []
        segment = self.writer.write([payload.head, *payload.buffers])
        return segment.id, [segment]

    def unpack(self, part: Any) -> Payload:
        """The payload that a part of a body stands for, in memory of this end's own."""
        if type(part) is int:
            head, *buffers = self.reader.chunks(part)
            return Payload(head, tuple(buffers))
        return Payload(*part)

    def close(self) -> None:
        """Close this end. Arrays that came by it stay as they are."""
        self.socket.close()
        self.reader.close()
        if self._segment_closed in self.writer.on_close:
            self.writer.on_close.remove(self._segment_closed)
        self.writer.forget_reader(self._reader_id)

    def _take_control(
        self,
        new: Sequence[tuple[int, int]],
        closed: Sequence[int],
        unusable: Sequence[int],
        descriptors: list[int],
        message_flags: int,
    ) -> None:
        self.reader.forget(closed)
        self._attached.difference_update(unusable)
        self.writer.discard(unusable, self._reader_id)
        is_truncated = message_flags & _TRUNCATED or len(descriptors) != len(new)
        reason = "no descriptor is left for it; raise the limit on open files (ulimit -n)" if is_truncated else ""
        while descriptors:
            fd = descriptors.pop(0)
            try:
                if reason:
                    os.close(fd)
                else:
                    number, nbytes = new[-1 - len(descriptors)]
                    self.reader.attach(number, fd, nbytes)
            except OSError as error:
                reason = f"{error}; keep fewer arrays, or raise the limit on mappings (sysctl vm.max_map_count)"
        if reason:
            self._unusable += [number for number, _ in new]
            self.reader.forget(self._unusable)
            raise OSError(errno.EMFILE, f"a segment of shared memory cannot be opened: {reason}")


def inline(payload: Payload) -> tuple[bytes, tuple[bytearray, ...]]:
    """A payload as part of a body. Its buffers arrive as memory of the receiver's own, which may be written to."""
    return payload.head, tuple(map(bytearray, payload.buffers)) if payload.buffers else ()


def _descriptors(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)
