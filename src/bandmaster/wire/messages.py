"""The format of what a channel carries: messages to a worker, and the worker's replies.

::

    message  = kind (1 byte) │ number (8 bytes) │ what the kind says
    reply    = kind (1 byte) │ number of the message that it replies to │ what the kind says

A reply names its message by number, so that it never goes to the wrong call, whatever was interrupted at whatever
moment. A payload is named by a *part*: its bytes, or the number of the shared segment that they lie in.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from bandmaster.codec import Payload, decode
from bandmaster.contract import TIMES, Kept, RowFacts
from bandmaster.errors.failure import Failure
from bandmaster.wire.kept import NO_ROWS, KeptSegment, RowReader, RowReaders
from bandmaster.wire.segments import Lease

__all__ = [
    "HEADER_NBYTES",
    "TIMES_NBYTES",
    "UNANSWERED",
    "Kind",
    "ReplyKind",
    "Times",
    "Unpacks",
    "call_message",
    "control_message",
    "header_of",
    "read_call",
    "read_reply",
    "reply_message",
]

_HEADER = struct.Struct("<BQ")  # of a body: kind and number
_START = struct.Struct("<IBQ")  # of what is sent: no control, and the header
_SMALL_START = struct.Struct("<IBQBB")
HEADER_NBYTES = _HEADER.size
TIMES_NBYTES = TIMES.size  # behind the rest of a reply, if its kind has `ReplyKind.TIMED` added
_SMALL_NBYTES = HEADER_NBYTES + 2  # kind and number, then reply and length of the method's name
UNANSWERED = 0  # number of messages that no reply is sent to
header_of = _HEADER.unpack_from  # kind and number of a body


class Kind:
    """What a message asks for, and what follows its number."""

    SMALL_CALL = 0  # reply, length of the method's name, the name, the pickle stream of the one small part
    CALL = (
        1  # pickled: method, reply, parts, kept rows by their labels, the part with the numbers of those that are there
    )
    ENVIRONMENT = 2  # pickled: variables that have changed
    PAUSE = 3  # nothing: the worker leaves the channel once it has done what came before
    FENCED = 128  # added to that of a call after whose failure the worker waits, see `contract.Workers.resume`


_SMALL_CALL = Kind.SMALL_CALL


class ReplyKind:
    """What a reply says, and what follows its number."""

    NOTHING = 0  # nothing: the value was dropped
    VALUE = 1  # the value's pickle stream
    PART = 2  # pickled: the part that names the value's payload
    ROWS = 4  # pickled: the number of the kept segment with the value's payload, and its `RowFacts`
    FAILURE = 3  # pickled: the part that names the payload of a `Failure`
    TIMED = 128  # added to the others: the times of the worker are behind what they say


class Unpacks(Protocol):
    """What can turn a part into the payload that it names: a channel."""

    def unpack(self, part: Any) -> Payload:
        """The payload, in memory of this end's own."""

    def claim(self, part: int) -> Lease:
        """The claim on a kept segment."""


def call_message(
    number: int,
    method: str,
    reply: int,
    parts: Sequence[Any],
    rows: Sequence[tuple[int, Any]] = (),
    there: Any = None,
    is_fenced: bool = False,
) -> bytes:
    """A call, as `Lane.send` takes it: with four zero bytes before the body."""
    fence = Kind.FENCED if is_fenced else 0
    if not rows and len(parts) == 1 and type(parts[0]) is tuple and not parts[0][1]:
        name = method.encode()
        if len(name) < 256:
            stream: bytes = parts[0][0]
            return _SMALL_START.pack(0, Kind.SMALL_CALL | fence, number, reply, len(name)) + name + stream
    return _START.pack(0, Kind.CALL | fence, number) + pickle.dumps(
        (method, int(reply), parts, tuple(rows), there), protocol=5
    )


def control_message(kind: int, content: Mapping[str, str] | None = None) -> bytes:
    """A message that no reply is sent to: `Kind.ENVIRONMENT` or `Kind.PAUSE`."""
    return _START.pack(0, kind, UNANSWERED) + (b"" if content is None else pickle.dumps(dict(content)))


_names: dict[bytes, str] = {}  # so that a method's name is the same object every time, which Python finds sooner


def read_call(
    kind: int, body: memoryview, channel: Unpacks
) -> tuple[str, int, Sequence[Payload] | memoryview, RowReaders]:
    """The worker's end of `call_message`: method, reply, the parts' payloads, and what reads kept rows, by label.

    In place of the payloads it is the pickle stream of the only one where that has no buffers.
    """
    if kind == _SMALL_CALL:
        end = _SMALL_NBYTES + body[HEADER_NBYTES + 1]
        name = bytes(body[_SMALL_NBYTES:end])
        return _names.get(name) or _names.setdefault(name, name.decode()), body[HEADER_NBYTES], body[end:], NO_ROWS
    method, reply, parts, rows, there = pickle.loads(body[HEADER_NBYTES:])
    known = {} if there is None else decode(channel.unpack(there))
    readers = {at: _kept(part, channel, known.get(at)) for at, part in rows}
    return method, reply, [channel.unpack(part) for part in parts], readers


def _kept(part: Any, channel: Unpacks, there: Any) -> RowReader:
    if type(part) is tuple:
        return RowReader(Payload(*part).private, there=there)
    return RowReader.of(channel.claim(part), there)


Times = tuple[int, int, int, int] | None  # those of a call that is timed


def reply_message(number: int, kind: int, content: Any, times: Times = None) -> bytes:
    """A reply, as `Lane.send` takes it.

    Args:
        number: Number of the call.
        kind: A `ReplyKind`.
        content: The pickle stream of a value, else what is to be pickled.
        times: Those of a call that was timed.
    """
    if kind == ReplyKind.VALUE:
        said: bytes = content
    else:
        said = b"" if content is None else pickle.dumps(content, protocol=5)
    if times is None:
        return _START.pack(0, kind, number) + said
    return _START.pack(0, kind | ReplyKind.TIMED, number) + said + TIMES.pack(*times)


def read_reply(kind: int, body: memoryview, channel: Unpacks) -> Payload | Kept | Failure | None:
    """The controller's end of `reply_message`, but for a `ReplyKind.VALUE`, whose content is the payload's head.

    Returns:
        The encoded value, the failure, or None for a value that was dropped.
    """
    if kind == ReplyKind.NOTHING:
        return None
    content = pickle.loads(body[HEADER_NBYTES:])
    if kind == ReplyKind.ROWS:
        part, facts = content
        return KeptSegment(channel.claim(part), RowFacts(*facts))
    payload = channel.unpack(content)
    if kind == ReplyKind.PART:
        return payload
    failure: Failure = decode(payload)
    return failure
