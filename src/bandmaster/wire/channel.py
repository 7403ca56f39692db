"""The path of messages to a worker and of its replies, one body at a time; `bandmaster.wire.lane` is one kind.

A body travels as it is. Small payloads lie inside the body. Larger ones lie in shared segments that the body names by
number, where a channel can share memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from bandmaster.codec import Payload
from bandmaster.wire.segments import Lease, Segment

__all__ = [
    "INLINE_NBYTES",
    "MAX_MESSAGE_NBYTES",
    "MAX_PARTS_NBYTES",
    "TELL_S",
    "Buffer",
    "Channel",
    "Closed",
    "inline",
]

INLINE_NBYTES = 64 * 1024  # larger payloads go into a segment, which takes longer for smaller ones
MAX_MESSAGE_NBYTES = 160 * 1024
MAX_PARTS_NBYTES = 144 * 1024  # of all parts of one message together
TELL_S = 0.5  # how often each end looks for leases that have ended and that no message has told of


class Closed(Exception):
    """The other end is gone."""


class Buffer:
    """Where a message is received."""

    __slots__ = ("memory", "view")

    def __init__(self) -> None:
        self.memory = [bytearray(MAX_MESSAGE_NBYTES)]  # as `socket.recvmsg_into` takes it
        self.view = memoryview(self.memory[0])


class Channel(Protocol):
    """One end of the path between the controller and one worker.

    Attributes:
        shares_memory: Whether large payloads can lie in segments that both ends map.
        body: The body that was received last.
    """

    shares_memory: bool
    body: memoryview | None

    @property
    def has_leases(self) -> bool:
        """Whether this end has leases that the other one takes for such."""

    def tell(self) -> bool:
        """Tell the other end of leases that have ended, if it reads; False if no lease was left, ended or not."""

    def fileno(self) -> int:
        """The descriptor by which select and its kin tell that something has arrived or can be sent."""

    def send(self, message: bytes, segments: Sequence[Segment] = ()) -> None:
        """Send a message: a body with four zero bytes before it. The segments that it names are leased already.

        Raises:
            Closed: The other end is gone.
            BlockingIOError: The other end does not read, and this one does not wait; the channel is as it was.
            OSError: The message could not be sent; the channel is as it was.
        """

    def receive(self, block: bool = True, buffer: Buffer | None = None) -> memoryview | None:
        """The next body, valid until the next one is received; None when there is none in time, or if not ``block``.

        An exception that a signal handler raises here loses no message: the next call returns it.

        Args:
            block: Whether to wait for it.
            buffer: Where it is to lie; by default in a buffer that this channel keeps.

        Raises:
            Closed: The other end is gone.
            OSError: A segment that came with it cannot be opened here; `body` is there nevertheless.
        """

    def unpack(self, part: Any) -> Payload:
        """The payload that a part of a body names, in memory of this end's own."""

    def claim(self, part: int) -> Lease:
        """The claim on the kept segment that a part of a body names."""

    def close(self) -> None:
        """Close this end. Arrays that came by it stay as they are."""


def inline(payload: Payload) -> tuple[bytes, tuple[bytearray, ...]]:
    """A payload as part of a body. Its buffers arrive as memory of the receiver's own, which may be written to."""
    return payload.head, tuple(map(bytearray, payload.buffers)) if payload.buffers else ()
