"""The format of calls and replies, over lanes and inside of the frames of links.

::

    message  = kind (1 byte) │ number (8 bytes) │ what the kind says
    reply    = kind (1 byte) │ number of the message that it replies to │ what the kind says

A reply names its message by number, so that it never goes to the wrong call, whatever was interrupted at whatever
moment. A payload is named by a *part*: its bytes, or a number: over a lane, that of the shared segment that they lie
in; over a link, that of the chunks of the frame. Kept rows are named in the same way, or over a link by their key: the
number of the call that has made them, and the rank.

A worker is reached in three other ways: by the status page and a signal, to be interrupted or asked for its stacks
(`bandmaster.wire.status_page`); by a method whose name is reserved (`bandmaster.contract`); and on other hosts by a
question to the agent (`FrameKind.ASK`).
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Protocol, TypeVar

from bandmaster.codec import Payload, decode, encode
from bandmaster.contract import TIMES, Kept, RowFacts, WorkerCall
from bandmaster.errors.failure import Failure, FailureKind

T = TypeVar("T")

INLINE_NBYTES = 64 * 1024  # larger payloads go into a segment, which takes longer for smaller ones
MAX_MESSAGE_NBYTES = 160 * 1024
MAX_PARTS_NBYTES = 144 * 1024  # of all parts of one message together
REQUEST_NBYTES = 64  # of a request in a message, without its parts and the name of its method
PART_NBYTES = 32  # of a part or of rows in a message, without their bytes

_HEADER = struct.Struct("<BQ")  # of a body: kind and number
_START = struct.Struct("<IBQ")  # of what is sent: no control, and the header
_SMALL_START = struct.Struct("<IBQBB")
HEADER_NBYTES = _HEADER.size
TIMES_NBYTES = TIMES.size  # behind the rest of a reply, if its kind has `ReplyKind.TIMED` added
_SMALL_NBYTES = HEADER_NBYTES + 2  # kind and number, then reply and length of the method's name
_UNANSWERED = 0  # number of messages that no reply is sent to
header_of = _HEADER.unpack_from  # kind and number of a body


# The content of a message with a call: name of the method, what happens to its value, parts of its arguments, the parts
# of kept rows by label, and the part of the numbers of the rows that are present, by label.
CallContent = tuple[str, int, Sequence[Any], Sequence[tuple[int, Any]], Any]
APART = -1  # label of the first rows: their part has, pickled, further parts, rows, and the part of the numbers


SmallReply = tuple[int, int, Any, bytes | None]  # of `ReplyKind.SEVERAL`


class Closed(Exception):
    """Raised when the other end is gone."""


class MessageKind:
    """The request of a message, and what follows its number.

    A call is 0 or 1, with `TIMED` and `FENCED` added, so that readers look at `CALL` as a bit; they compare all other
    kinds before that.
    """

    SMALL_CALL = 0  # reply, length of the method's name, the name, the pickle stream of the one small part
    CALL = 1  # pickled: method, reply, parts, kept rows by their labels, the part with the numbers of those present
    ENVIRONMENT = 2  # pickled: variables that have changed
    PAUSE = 3  # nothing: the worker leaves the lane once it has done what came before
    REQUESTS = 4  # pickled: number of each request, what `CALL` says, is it timed; the message itself has no reply
    CALLER = 5  # nothing: with it comes the descriptor of a lane to a further caller
    CANCEL = 6  # pickled: the numbers of requests
    TIMED = 64  # added to that of a call whose reply is to have times
    FENCED = 128  # added to that of a call after whose failure the worker waits, see `contract.Workers.resume`


class ReplyKind:
    """The kind of a reply, and what follows its number."""

    NOTHING = 0  # nothing: the value was dropped
    VALUE = 1  # the value's pickle stream
    PART = 2  # pickled: the part that names the value's payload
    ROWS = 4  # pickled: the part that names the value's payload, which is kept, and that of its `RowFacts`
    FAILURE = 3  # pickled: the part that names the payload of a `Failure`
    SEVERAL = 5  # pickled: number, kind, what the kind says, and times or None of several small replies; its own is 0
    REPORT = 6  # pickled: what the worker has reported of itself, `Worker` says how; its own number is 0
    ITEM = 64  # added to `VALUE`, `PART` or `FAILURE`: an item of a request that runs an async generator; it is pickled
    TIMED = 128  # added to the others: the times of the worker are behind what they say


class Receiver(Protocol):
    """The end of a lane or link that has received a message, and knows what its parts name."""

    def unpack(self, part: Any) -> Payload:
        """The payload that a part names, in memory of this end's own.

        Raises:
            OSError: The segment that it lies in cannot be opened here.
        """

    def kept(self, part: Any, described: Payload) -> Kept:
        """The kept rows that a part names, and whose facts are these.

        Raises:
            OSError: The segment that they lie in cannot be opened here.
        """


class KeptElsewhere:
    """The base of rows that lie in another process or in shared memory; see `Kept`.

    Attributes:
        described: The facts about the rows, encoded: only the process that asks for them needs the classes of the names
            of columns.
    """

    origin: object = "rows"

    def __init__(self, described: Payload) -> None:
        self.described = described

    @cached_property
    def facts(self) -> RowFacts:
        """The facts about the rows."""
        return RowFacts.of_plain(decode(self.described))


def inline(payload: Payload) -> tuple[bytes, tuple[bytearray, ...]]:
    """A payload as part of a body. Its buffers arrive as memory of the receiver's own, which may be written to."""
    return bytes(payload.head), tuple(map(bytearray, payload.buffers)) if payload.buffers else ()


def call_message(number: int, content: CallContent, is_timed: bool, is_fenced: bool) -> bytes:
    """A call, as `Lane.send` takes it: with four zero bytes before the body.

    Args:
        number: Number of the call.
        content: The call.
        is_timed: Whether its reply is to have times.
        is_fenced: Whether the worker waits after its failure.
    """
    flags = (MessageKind.TIMED if is_timed else 0) | (MessageKind.FENCED if is_fenced else 0)
    method, reply, parts, rows, _ = content
    if not rows and (not parts or (len(parts) == 1 and type(parts[0]) is tuple and not parts[0][1])):
        name = method.encode()
        if len(name) < 256:
            stream: bytes = parts[0][0] if parts else _NO_ARGUMENTS
            return _SMALL_START.pack(0, MessageKind.SMALL_CALL | flags, number, reply, len(name)) + name + stream
    return _START.pack(0, MessageKind.CALL | flags, number) + pickle.dumps(content, protocol=5)


def control_message(kind: int, content: Any = None) -> bytes:
    """A message that has no number, as no reply is sent to it: `MessageKind` says which, and its content."""
    return _START.pack(0, kind, _UNANSWERED) + (b"" if content is None else pickle.dumps(content, protocol=5))


_NO_ARGUMENTS = pickle.dumps((), protocol=5)
_names: dict[bytes, str] = {}  # so that a method's name is the same object every time, which Python finds sooner


def read_small_call(body: memoryview) -> tuple[str, int, memoryview]:
    """Read the content of a `MessageKind.SMALL_CALL`: method, reply, and the pickle stream of its part."""
    end = _SMALL_NBYTES + body[HEADER_NBYTES + 1]
    name = bytes(body[_SMALL_NBYTES:end])
    return _names.get(name) or _names.setdefault(name, name.decode()), body[HEADER_NBYTES], body[end:]


def reply_message(number: int, kind: int, content: Any, times: bytes | None = None) -> bytes:
    """A reply, as `Lane.send` takes it.

    Args:
        number: Number of the call.
        kind: A `ReplyKind`.
        content: The pickle stream of a value, else what is to be pickled.
        times: The times of a call that was timed, packed as `bandmaster.contract.TIMES`.
    """
    if kind == ReplyKind.VALUE:
        said: bytes = content
    else:
        said = b"" if content is None else pickle.dumps(content, protocol=5)
    if times is None:
        return _START.pack(0, kind, number) + said
    return _START.pack(0, kind | ReplyKind.TIMED, number) + said + times


def small_reply(outcome: Any) -> tuple[int, Any] | None:
    """The kind and content of the reply with an outcome that needs no segment or chunks; None for any other one."""
    if outcome is None:
        return ReplyKind.NOTHING, None
    is_failure = isinstance(outcome, Failure)
    payload = encode(outcome) if is_failure else outcome
    if not isinstance(payload, Payload) or payload.nbytes > INLINE_NBYTES:
        return None
    if is_failure:
        return ReplyKind.FAILURE, inline(payload)
    return (ReplyKind.PART, inline(payload)) if payload.buffers else (ReplyKind.VALUE, bytes(payload.head))


def nbytes_of(call: WorkerCall) -> int:
    """The size of a call or request in a message, at most."""
    nbytes = REQUEST_NBYTES + len(call.method)
    if not call.rows and len(call.parts) == 1 and type(call.parts[0]) is tuple and not call.parts[0][1]:  # as most are
        return nbytes + len(call.parts[0][0])
    parts = [*call.parts, *[part for _, part in call.rows]]
    nbytes += sum([REQUEST_NBYTES + getattr(numbers, "nbytes", 0) for numbers in call.present.values()])
    sizes = [len(part[0]) + sum(map(len, part[1])) for part in parts if type(part) is tuple]
    return nbytes + PART_NBYTES * len(parts) + sum(sizes)


def as_fit(items: Sequence[T], nbytes_of: Callable[[T], int]) -> Iterator[Sequence[T]]:
    """Yield items, as many at a time as fit into a message, in order; one alone fits."""
    start = nbytes = 0
    for at, more in enumerate(map(nbytes_of, items)):
        if nbytes and nbytes + more > MAX_PARTS_NBYTES:
            yield items[start:at]
            start, nbytes = at, 0
        nbytes += more
    if items:
        yield items[start:]


def read_content(body: memoryview) -> Any:
    """The pickled content of a message or reply."""
    return pickle.loads(body[HEADER_NBYTES:])


def outcome_of(kind: int, content: Any, receiver: Receiver) -> Payload | Kept | Failure | None:
    """The outcome in a reply that is no `ReplyKind.VALUE`, from its unpickled content; None for a dropped value."""
    if kind == ReplyKind.NOTHING:
        return None
    try:
        if kind == ReplyKind.ROWS:
            return receiver.kept(content[0], Payload(*inline(receiver.unpack(content[1]))))
        payload = receiver.unpack(content)
    except OSError as error:  # the reply came, but there was no descriptor left for what it is in
        return Failure.of(error, FailureKind.UNRECEIVED)
    if kind == ReplyKind.PART:
        return payload
    try:
        failure: Failure = decode(payload)
    except BaseException as error:  # the user's exceptions may do anything when they are unpickled
        return Failure.of(error)
    return failure
