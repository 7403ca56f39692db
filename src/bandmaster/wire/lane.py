"""A lane: the direct channel between the controller and one worker on the same host.

One Unix socket of sequenced packets; nothing is named and no port is opened. A message is a fixed part that may be
the same for many workers, encoded once, and a small part for this worker alone::

    message   = length of control (4 bytes) │ control │ body        + descriptors
    control   = (segments new to the reader, ids closed by the writer, ids the sender has nothing left in)
    body      = a pickled tuple of the protocol above it (see `crew` and `loop`)

Small payloads travel inside the body; larger ones lie in segments, which the body names by number.
"""

from __future__ import annotations

import array
import errno
import pickle
import select
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bandmaster.wire.codec import Payload
from bandmaster.wire.segments import Segment, SegmentReader, SegmentWriter

__all__ = ["INLINE_NBYTES", "Closed", "Lane", "SegmentPart", "lane_pair"]

INLINE_NBYTES = 16 * 1024  # larger payloads go into a segment
MAX_MESSAGE_NBYTES = 160 * 1024  # fits the kernel's default socket buffer; far more than any message has
MAX_DESCRIPTORS = 64  # in one message

_NO_CONTROL = (0).to_bytes(4, "little")


class Closed(Exception):
    """The other end is gone."""


@dataclass(frozen=True)
class SegmentPart:
    """A payload that lies in a segment of the sender's: its head is the first chunk, its buffers the others."""

    number: int


def lane_pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of a lane."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Lane:
    """One end of a lane.

    Args:
        sock: The socket; it is owned from here on.
        writer: The segments of this side, which other lanes may share.
        reader_id: How the other end is known to ``writer``.
        while_full: Called while a message cannot be sent because the other end does not read: it should receive,
            and returns at once. Without it, sending blocks.
    """

    def __init__(
        self,
        sock: socket.socket,
        writer: SegmentWriter,
        reader_id: int = 0,
        while_full: Callable[[], None] | None = None,
    ) -> None:
        self.socket = sock
        self.reader = SegmentReader()
        self.writer = writer
        self._reader_id = reader_id
        self._while_full = while_full
        self._attached: set[int] = set()
        self._closed_ids: list[int] = []
        self._buffer = bytearray(MAX_MESSAGE_NBYTES)
        self._view = memoryview(self._buffer)

    def fileno(self) -> int:
        """For select and its kin."""
        return self.socket.fileno()

    def send(self, body: bytes, segments: Sequence[Segment] = ()) -> None:
        """Send a body, and lend the segments that it names to the other end.

        Raises:
            Closed: The other end is gone.
            OSError: The message could not be sent; the lane is as it was.
        """
        for segment in segments:
            self.writer.lend(segment, self._reader_id)
        new = [segment for segment in segments if segment.id not in self._attached]
        returned = self.reader.returned()
        if not (new or returned or self._closed_ids):
            self._send([_NO_CONTROL, body], [])
        else:
            control = pickle.dumps(([(s.id, s.nbytes) for s in new], self._closed_ids, returned), protocol=5)
            self._send([len(control).to_bytes(4, "little"), control, body], [segment.fd for segment in new])
            self._closed_ids = []
            self._attached.update(segment.id for segment in new)

    def closed_segments(self, ids: Sequence[int]) -> None:
        """The writer has closed these; the other end is told with the next message."""
        known = [number for number in ids if number in self._attached]
        self._attached.difference_update(known)
        self._closed_ids = self._closed_ids + known

    def receive(self, block: bool = True) -> Any:
        """The next body, unpickled; None when there is none and ``block`` is False.

        Raises:
            Closed: The other end is gone.
        """
        flags = 0 if block else socket.MSG_DONTWAIT
        try:
            n, ancillary, message_flags, _ = self.socket.recvmsg_into(
                [self._buffer], socket.CMSG_SPACE(4 * MAX_DESCRIPTORS), flags | socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        except ConnectionError:
            raise Closed from None
        if not n:
            raise Closed
        start = 4 + int.from_bytes(self._view[:4], "little")
        if start > 4:
            self._take_control(pickle.loads(self._view[4:start]), _descriptors(ancillary), message_flags)
        return pickle.loads(self._view[start:n])

    def pack(self, payload: Payload) -> tuple[Any, list[Segment]]:
        """What a body says of a payload: the payload itself, or the segment that it was written to.

        Raises:
            OSError: There is no memory or no descriptor for it.
        """
        if payload.nbytes <= INLINE_NBYTES:
            return inline(payload), []
        segment = self.writer.write([payload.head, *payload.buffers])
        return SegmentPart(segment.id), [segment]

    def unpack(self, part: Any) -> Payload:
        """The payload that a part of a body stands for, in memory of this end's own."""
        if isinstance(part, SegmentPart):
            head, *buffers = self.reader.chunks(part.number)
            return Payload(head, tuple(buffers))  # type: ignore[arg-type]  # pickle reads from any buffer
        return Payload(*part)

    def close(self) -> None:
        """Close this end."""
        self.socket.close()
        self.writer.forget_reader(self._reader_id)

    def _send(self, buffers: list[bytes], descriptors: list[int]) -> None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        flags = socket.MSG_NOSIGNAL | (socket.MSG_DONTWAIT if self._while_full else 0)
        while True:
            try:
                self.socket.sendmsg(buffers, ancillary, flags)
                return
            except BlockingIOError:
                assert self._while_full is not None, "a lane without it blocks"
                poll = select.poll()
                poll.register(self.socket, select.POLLIN | select.POLLOUT)
                poll.poll()
                self._while_full()
            except ConnectionError:
                raise Closed from None
            except OSError as error:
                if error.errno == errno.ETOOMANYREFS:
                    raise OSError(error.errno, "too many descriptors are on their way to workers") from error
                raise

    def _take_control(self, control: Any, descriptors: list[int], message_flags: int) -> None:
        new, closed, returned = control
        if message_flags & socket.MSG_CTRUNC or len(descriptors) != len(new):
            raise OSError(errno.EMFILE, "no descriptor is left for a segment: raise the limit (ulimit -n)")
        for (number, nbytes), fd in zip(new, descriptors, strict=True):
            self.reader.attach(number, fd, nbytes)
        self.reader.forget(closed)
        self.writer.give_back(returned, self._reader_id)


def inline(payload: Payload) -> tuple[bytes, tuple[bytearray, ...]]:
    """A payload as part of a body. Its buffers arrive as memory of the receiver's own, which may be written to."""
    return payload.head, tuple(bytearray(buffer) for buffer in payload.buffers)


def _descriptors(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)
