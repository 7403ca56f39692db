"""A lane: the direct channel between the controller and one worker on the same host.

One Unix socket of sequenced packets; nothing is named and no port is opened. A message is a body, which may be the
same for many workers and is then encoded once, behind a small part for this worker alone::

    message   = length of control (4 bytes) │ control │ body        + descriptors
    control   = (ids that the body names, segments new to the reader, ids closed by the writer,
                 ids that the sender has nothing left in, ids that it must not be sent again)
    body      = whatever the two ends agree on (see `bandmaster.wire.messages`)

Small payloads travel inside the body; larger ones lie in segments, which the body names by number: the head of a
payload is the first chunk, its buffers are the others.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import pickle
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from bandmaster.codec import Payload
from bandmaster.platform.forks import in_forks
from bandmaster.wire.messages import INLINE_NBYTES, MAX_MESSAGE_NBYTES, MAX_PARTS_NBYTES, Closed, inline
from bandmaster.wire.segment_reader import KeptSegment, SegmentReader
from bandmaster.wire.segments import Segment, SegmentWriter, SharedPayload

BUFFER_NBYTES = 208 * 1024  # of a socket: the largest message, and what the kernel adds to it
TELL_S = 0.5  # how often each end looks for leases that have ended and that no message has told of
MAX_DESCRIPTORS = 64  # in one message
MAX_IDS = 512  # of segments, of each kind, in the control part of one message

_SO_SNDBUFFORCE = 32  # asm-generic/socket.h: as SO_SNDBUF, past the limit, for a process with CAP_NET_ADMIN
_SEND_FLAGS = int(socket.MSG_NOSIGNAL)
_TRUNCATED = int(socket.MSG_CTRUNC)
_CUT = int(socket.MSG_TRUNC)
_DONT_WAIT = int(socket.MSG_DONTWAIT)
_RECEIVE_FLAGS = int(socket.MSG_CMSG_CLOEXEC)
_RECEIVE_NOW_FLAGS = _RECEIVE_FLAGS | _DONT_WAIT
CALLER_FREE_NBYTES = 32 << 20  # of the segments that are kept for reuse for one of many callers
_LENGTH = struct.Struct("<I")
_NO_BODY = _LENGTH.pack(0)  # a message that carries descriptors for the next one, or tells of ended leases
LENGTH_NBYTES = _LENGTH.size  # of a message's control, before that
_ANCILLARY_NBYTES = (socket.CMSG_SPACE(4 * MAX_DESCRIPTORS),)


def lane_pair() -> tuple[socket.socket, socket.socket]:
    """Make the two ends of a lane.

    Raises:
        OSError: There is no descriptor for them, or the host's socket buffers are too small.
    """
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        for end in ends:
            set_buffer(end)
    except OSError:
        for end in ends:
            end.close()
        raise
    return ends


def set_buffer(sock: socket.socket) -> None:
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


class Lane:
    """One end of a lane: the worker's, or the controller's, which has more lanes.

    The worker's end waits while the other end does not read, and closes the descriptor of a segment once it was sent.

    Args:
        sock: The socket; it is owned from here on.
        writer: The segments of this side; the lanes of a controller share them.
        rank: The rank of the worker at the other end, at the controller's end; None at the worker's.
        buffer: The memory that messages are received in, which lanes of one thread may share; by default its own.

    Attributes:
        body: The body that was received last.
        reported: In a worker, the reports of it that the other end has.
    """

    def __init__(
        self, sock: socket.socket, writer: SegmentWriter, rank: int | None = None, buffer: bytearray | None = None
    ) -> None:
        self.socket = sock
        in_forks(sock, type(sock).close)
        self.reader = SegmentReader()
        self.writer = writer
        self._is_worker, self._reader_id = rank is None, rank or 0
        self._attached: set[int] = set()
        writer.on_close.add(self._segment_closed)
        self._closed_ids: list[int] = []
        self._returned: list[int] = []  # segments in which nothing lies any more, as the other end is to be told
        self._forked: list[int] = []  # the same, but forks of this process may read them
        self._unusable: list[int] = []  # segments of the other end's that could not be opened
        self._news = self._closed_ids, self._returned, self._forked, self._unusable
        self._claims: dict[int, Any] = {}  # on segments that the last body names, until they are taken
        self._descriptors: list[int] = []  # that came with the last message, and are no segments
        self._why_unopened = ""  # why a segment could not be opened
        self.body: memoryview | None = None
        self.reported: Mapping[str, Any] = {}
        self._received: list[Any] = []  # at most one message, which lies in the buffer
        self._patience_s: float | None = None
        self._send_flags = _SEND_FLAGS | (0 if self._is_worker else _DONT_WAIT)
        self._memory = [buffer or bytearray(MAX_MESSAGE_NBYTES)]  # as `socket.recvmsg_into` takes it
        self._view = memoryview(self._memory[0])

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self.socket.fileno()

    def wait_at_most(self, seconds: float | None) -> None:
        """Set how long `receive` blocks, in seconds; None, as at first, for ever."""
        if seconds != self._patience_s:
            whole, rest = divmod(seconds or 0.0, 1.0)  # zero is what the kernel takes for ever to be
            self.socket.setsockopt(
                socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(whole), int(rest * 1e6))
            )
            self._patience_s = seconds

    # --- sending ---

    def send(self, message: bytes, segments: Sequence[Segment] = ()) -> None:
        """Send a message: a body with four zero bytes before it. The segments that it names are leased already.

        Raises:
            Closed: The other end is gone.
            BlockingIOError: The other end does not read, and this one does not wait; the lane is as it was.
            OSError: The message could not be sent, as it is too large, for example; the lane is as it was.
        """
        if not (segments or self._claims or self.reader.leases.has_records or any(self._news)):
            _check_size(len(message))
            try:
                self.socket.send(message, self._send_flags)
            except ConnectionError:
                raise Closed from None
            return
        self._claims = {}  # this end is done with what it has received
        self._note_returned()
        new = [segment for segment in segments if segment.id not in self._attached]
        is_large = len(message) > MAX_PARTS_NBYTES  # so that there may be no room for what there is to tell
        while len(new) > MAX_DESCRIPTORS or (is_large and any(self._news)):
            self._send_with_control(_NO_BODY, new[:MAX_DESCRIPTORS])
            new = new[MAX_DESCRIPTORS:]
        self._send_with_control(message, new, [segment.id for segment in segments])

    def _send_with_control(self, message: bytes, new: Sequence[Segment], named: Sequence[int] = ()) -> None:
        """Send a message, with what there is to tell of segments; no more of them are new than fit."""
        about_new = [(segment.id, segment.nbytes, segment.is_kept) for segment in new]
        about_old = [ids[:MAX_IDS] for ids in self._news]
        control = pickle.dumps((named, about_new, *about_old), protocol=5)
        parts: list[bytes | memoryview] = [_LENGTH.pack(len(control)), control, memoryview(message)[LENGTH_NBYTES:]]
        self._send_parts(parts, [segment.fd for segment in new])
        for ids in self._news:
            del ids[:MAX_IDS]
        self._attached.update([segment.id for segment in new])
        if self._is_worker:
            for segment in new:
                segment.close_descriptor()

    def _send_parts(self, parts: Sequence[bytes | memoryview], descriptors: Sequence[int]) -> None:
        _check_size(sum(map(len, parts)))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        try:
            self.socket.sendmsg(parts, rights, self._send_flags)
        except ConnectionError:
            raise Closed from None

    def pack(self, payload: Payload, is_kept: bool = False) -> tuple[Any, SharedPayload | None]:
        """Make the part of a body that names a payload: its bytes, or the number of the segment that it is written to.

        Args:
            payload: The payload.
            is_kept: Whether the other end is to hold the segment, rather than to map it.

        Returns:
            The part, and the owner of its segment, which has to exist until the message was sent.

        Raises:
            OSError: There is no memory or no descriptor for it.
        """
        if payload.nbytes <= INLINE_NBYTES:
            return inline(payload), None
        shared = self.writer.put(payload, is_kept)
        return shared.segment.id, shared

    def lease(self, segments: Sequence[Segment]) -> None:
        """Note the other end's leases on segments that it is about to be sent."""
        for segment in segments:
            self.writer.lease(segment, self._reader_id)

    def end_leases(self, segments: Sequence[Segment]) -> None:
        """End leases of the other end on segments that it was not sent."""
        self.writer.end_leases([segment.id for segment in segments], self._reader_id)

    # --- receiving ---

    def receive(self, block: bool = True) -> memoryview | None:
        """The next body, valid until the next one is received; None when there is none in time, or if not ``block``.

        An exception that a signal handler raises here loses no message: the next call returns it.

        Raises:
            Closed: The other end is gone.
        """
        flags, memory, view = _RECEIVE_FLAGS if block else _RECEIVE_NOW_FLAGS, self._memory, self._view
        while True:
            while not self._received:
                try:  # one call of C code reads and stores, so that an exception of a handler loses no message
                    self._received.extend(map(self.socket.recvmsg_into, (memory,), _ANCILLARY_NBYTES, (flags,)))
                except BlockingIOError:
                    return None
                except ConnectionResetError:  # once, if the other end left messages unread; what it sent is behind that
                    continue
            n, ancillary, message_flags, _ = self._received[0]
            if not n or message_flags & _CUT:  # no lane sends what is cut: nothing that comes can be relied on any more
                raise Closed
            (n_control,) = _LENGTH.unpack_from(view)
            body = view[LENGTH_NBYTES + n_control : n]
            self.body = body or self.body
            self._received.clear()
            self._claims = {}
            if ancillary and not n_control:
                self._descriptors = _descriptors(ancillary)
            if n_control:
                self._take_control(view[LENGTH_NBYTES : LENGTH_NBYTES + n_control], ancillary, message_flags)
            if len(body):
                return body
            self.tell()  # which segments were closed because of that

    def set_aside(self) -> tuple[memoryview, dict[int, Any]]:
        """The last message, to be taken up again after others were received: its body, and its claims on segments."""
        assert self.body is not None, "it was received"
        aside = memoryview(bytes(self.body)), self._claims
        self.body, self._claims = None, {}
        return aside

    def take_up(self, aside: tuple[memoryview, dict[int, Any]]) -> memoryview:
        """Take a message up again that was set aside. Returns its body."""
        self.body, self._claims = aside
        return aside[0]

    def send_beside(self, message: bytes) -> None:
        """Send a message that names no segment, from another thread than the one that receives; it does not wait.

        Raises:
            BlockingIOError: The other end does not read.
            OSError: The other end is gone, or the message is too large.
        """
        _check_size(len(message))
        self.socket.send(message, self._send_flags | _DONT_WAIT)

    def send_socket(self, message: bytes, sock: socket.socket) -> None:
        """Send a message with a socket, of which the other end makes a lane of its own by `new_caller`.

        Raises:
            Closed: The other end is gone.
            OSError: The other end does not read, or the socket cannot be sent; the lane is as it was.
        """
        self._send_parts([message], [sock.fileno()])

    def new_caller(self) -> Lane | None:
        """A lane over the socket that came with the last message; None if there was no descriptor for it."""
        descriptors, self._descriptors = self._descriptors, []
        if not descriptors:
            return None
        return Lane(socket.socket(fileno=descriptors[0]), SegmentWriter(self.writer.kept_name, CALLER_FREE_NBYTES))

    def unpack(self, part: Any) -> Payload:
        """The payload that a part of the last body names, in memory of this end's own.

        Raises:
            OSError: Its segment cannot be opened here.
        """
        return self.reader.payload(part, self.claim(part)) if type(part) is int else Payload(*part)

    def claim(self, part: int) -> Any:
        """The claim on the segment that a part of the last body names: its memory, or the `SegmentLease` on a kept one.

        Raises:
            OSError: The segment cannot be opened here.
        """
        claim = self._claims.pop(part)
        if claim is None:
            raise OSError(errno.EMFILE, f"a segment of shared memory cannot be opened: {self._why_unopened}")
        return claim

    def kept(self, part: int, described: Payload) -> KeptSegment:
        """The kept rows in the segment that a part of the last body names, and whose facts are these.

        Raises:
            OSError: The segment cannot be opened here.
        """
        return KeptSegment(self.claim(part), described)

    def _take_control(self, control: memoryview, ancillary: Sequence[tuple[int, int, bytes]], flags: int) -> None:
        """Take what a message tells of segments, the new ones, and the claims on those that it names."""
        named, new, closed, returned, forked, unusable = pickle.loads(control)
        self.writer.end_leases(returned, self._reader_id)
        self._attached.difference_update(unusable)  # the other end is not told of the end of those
        self.writer.end_leases([*forked, *unusable], self._reader_id, is_spoiled=True)
        self.reader.forget(closed)
        if new:
            self._attach(new, ancillary, flags)
        for number in named:
            self._claims[number] = claim = self.reader.lease(number)
            if claim is None:
                self._unusable.append(number)

    def _attach(
        self, new: Sequence[tuple[int, int, bool]], ancillary: Sequence[tuple[int, int, bytes]], flags: int
    ) -> None:
        """Take segments that are new, all or none of them, or note why they cannot be opened."""
        descriptors = _descriptors(ancillary)
        is_truncated = flags & _TRUNCATED or len(descriptors) != len(new)
        reason = "no descriptor is left for it; raise the limit on open files (ulimit -n)" if is_truncated else ""
        for fd, (number, nbytes, is_kept) in zip(descriptors, new, strict=False):
            try:
                if reason:
                    os.close(fd)
                else:
                    self.reader.attach(number, fd, nbytes, is_kept)
            except OSError as error:
                reason = f"{error}; keep fewer arrays, or raise the limit on mappings (sysctl vm.max_map_count)"
        if reason:
            self.reader.forget([number for number, _, _ in new])
            self._why_unopened = reason

    # --- leases ---

    def _note_returned(self) -> None:
        """Note ended leases; segments that a fork of this process may read must not be used again."""
        for number in self.reader.leases.drain():
            (self._forked if self.reader.was_forked(number) else self._returned).append(number)

    @property
    def has_leases(self) -> bool:
        """Whether this end has leases that the other one takes for such."""
        return bool(self.reader.leases)

    def tell(self) -> bool:
        """Tell the other end of leases that have ended, if it reads; False if no lease was left, ended or not."""
        has_leases = self.has_leases or any(self._news)
        with contextlib.suppress(Closed, OSError):
            while self.reader.leases.has_records or any(self._news):
                self.send(_NO_BODY)
        return has_leases

    def _segment_closed(self, number: int) -> None:
        """Have the other end unmap a closed segment; the next message tells it."""
        if number in self._attached:
            self._attached.remove(number)
            self._closed_ids.append(number)

    def hang_up(self) -> None:
        """Close this end, also where forks of this process have it."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.close()

    def close(self) -> None:
        """Close this end. Arrays that came by it stay as they are."""
        self.socket.close()
        self.reader.close()
        self.writer.on_close.discard(self._segment_closed)
        self.writer.forget_reader(self._reader_id)


def _check_size(nbytes: int) -> None:
    """Raise OSError for a message that the other end would receive cut."""
    if nbytes > MAX_MESSAGE_NBYTES:
        raise OSError(
            errno.EMSGSIZE,
            f"cannot send a message of {nbytes:,} bytes to a process of this host (at most {MAX_MESSAGE_NBYTES:,}): it "
            "refers to too many arrays or kept rows; join them, or pass fewer at a time",
        )


def _descriptors(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)
