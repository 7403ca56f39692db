"""The loop in a worker's process: read a message, do what it says, answer. It blocks in the kernel, never spins.

Bodies begin with a kind, one byte, and a number, eight bytes: a message has its own, an answer that of its message, so
that an answer never goes to the wrong call, whatever was interrupted at whatever moment.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

from bandmaster.failure import Failure
from bandmaster.wire.codec import Payload, decode, encode
from bandmaster.wire.desk import Desk
from bandmaster.wire.gpu import can_borrow
from bandmaster.wire.host import WorkerHost
from bandmaster.wire.lane import INLINE_NBYTES, LENGTH_NBYTES, Closed, Lane
from bandmaster.wire.rendezvous import Rendezvous
from bandmaster.wire.segments import OWNER, Segment

__all__ = ["HEADER", "HEADER_NBYTES", "UNANSWERED", "Answer", "message_of", "read_answer", "serve"]

HEADER = struct.Struct("<BQ")  # of a body: kind and number
HEADER_NBYTES = HEADER.size
_START = struct.Struct("<IBQ")  # of what is sent: no control, and the header
UNANSWERED = 0
_log = logging.getLogger(__name__)


class Message:
    """The kind of a message, and what follows its number."""

    OPERATION = 0  # pickled: (operation, *arguments, parts)
    CALL = 1  # the length of the method's name, the name, the pickle stream of its one small part
    CALL_UNCOLLECTED = 2  # the same, when nobody wants the value


class Answer:
    """The kind of an answer, and what follows its number."""

    NOTHING = 0  # nothing: the value is not wanted
    VALUE = 1  # the value's pickle stream
    PART = 2  # pickled: the part that the value's payload is
    FAILURE = 3  # pickled: the part that the payload of a `Failure` is


def serve(
    lane: Lane,
    host: WorkerHost,
    desk: Desk,
    patience_s: float | None = None,
    most_s: float = math.inf,
    most_nbytes: float = math.inf,
) -> bool:
    """Answer messages until the controller is gone or says ``pause``, or it is enough.

    Args:
        lane: To the controller.
        host: Does what the messages say.
        desk: Of this worker.
        patience_s: How long to wait for a message; for ever by default.
        most_s: For how long to begin with new ones; for ever by default.
        most_nbytes: After how many bytes of messages to begin with no new one; never by default.

    Returns:
        Whether there may be more messages: it was enough.
    """
    deadline = math.inf if most_s == math.inf else time.monotonic() + most_s
    lane.wait_at_most(patience_s)
    return _Loop(lane, host, desk, deadline, most_nbytes).run()


class _Loop:
    """Reads messages, has them done, and answers each exactly once, though signal handlers may raise at any moment.

    An exception of a handler fails the call that is being run or answered; between calls it is logged. The body of the
    lane is that of the message which has not been answered, None between calls.
    """

    def __init__(self, lane: Lane, host: WorkerHost, desk: Desk, deadline: float, most_nbytes: float) -> None:
        self._lane, self._host, self._desk = lane, host, desk
        self._deadline, self._most_nbytes = deadline, most_nbytes
        self._error: BaseException | None = None  # raised outside of a method, and not dealt with yet

    def run(self) -> bool:
        """As `serve`."""
        self._lane.body = None
        while True:
            try:
                while True:  # twice, as an exception can also come where a loop goes back to its beginning
                    try:
                        return self._run()
                    except Closed:
                        return False
                    except (Exception, KeyboardInterrupt) as error:
                        self._desk.running = 0  # and no call, in which another exception might come
                        self._error = error
            except (Exception, KeyboardInterrupt) as error:
                self._error = error

    def _run(self) -> bool:
        lane, host, desk, deadline = self._lane, self._host, self._desk, self._deadline
        names: dict[bytes, str] = {}  # so that each is the same object every time, which Python finds sooner
        if self._error is not None:
            self._answer_for_the_error()
        while self._most_nbytes > 0 and (deadline == math.inf or time.monotonic() < deadline):
            message = lane.receive()
            if message is None:
                break
            kind, number = HEADER.unpack_from(message)
            self._most_nbytes -= LENGTH_NBYTES + len(message)
            if number == UNANSWERED:
                return False  # the one such message there is says pause
            desk.begin(number)
            if kind != Message.OPERATION:
                end = HEADER_NBYTES + 1 + message[HEADER_NBYTES]
                name = bytes(message[HEADER_NBYTES + 1 : end])
                method = names.get(name) or names.setdefault(name, name.decode())
                outcome = host.call(method, message[end:], kind == Message.CALL)
            else:
                operation, *arguments = pickle.loads(message[HEADER_NBYTES:])
                outcome = _OPERATIONS[operation](lane, host, *arguments)
            desk.end()
            if type(outcome) is Payload and not outcome.buffers and len(outcome.head) <= INLINE_NBYTES:
                lane.send(_START.pack(0, Answer.VALUE, number) + outcome.head)  # as most are
            else:
                outcomes = [outcome]
                del outcome  # so that the segments in which it lies are given back with the answer
                _answer(lane, number, outcomes)
            lane.body = None
        return True

    def _answer_for_the_error(self) -> None:
        """Fail the call that an error concerns: it was given up, or there is no room for what came with it, say."""
        error, self._error = self._error, None
        assert error is not None, "the caller has looked"
        if self._lane.body is None:
            _log.warning("a signal handler raised while no call was running, which is ignored", exc_info=error)
        else:
            number = HEADER.unpack_from(self._lane.body)[1]
            _answer(self._lane, number, [self._host.failure(error)])
            self._lane.body = None


def _answer(lane: Lane, number: int, outcomes: list[Payload | Failure | None]) -> None:
    """Send the one outcome, and take it out of the list.

    If a signal handler raises as it has been sent, its call is answered again. The controller takes the first answer.
    """
    kind, content, segments = _encode(lane, outcomes.pop())
    lane.lend(segments)
    try:
        lane.send(_START.pack(0, kind, number) + content, segments)
    except OSError as error:  # too many descriptors are on their way, say
        lane.take_back(segments)
        kind, content, _ = _encode(lane, Failure.of(error))
        lane.send(_body(kind, number, content))
    for segment in segments:
        lane.writer.give_back([segment.id], OWNER)


def message_of(number: int, operation: str, arguments: tuple[Any, ...], parts: Sequence[Any]) -> bytes:
    """A message for `Lane.send`; ``parts`` as `Lane.unpack` takes them. `UNANSWERED` is the number of a pause."""
    if operation == "call" and len(parts) == 1 and isinstance(parts[0], tuple) and not parts[0][1]:
        method, is_collected = arguments
        name = method.encode()
        if len(name) < 256:
            kind = Message.CALL if is_collected else Message.CALL_UNCOLLECTED
            return _body(kind, number, len(name).to_bytes(1, "little"), name, parts[0][0])
    return _body(Message.OPERATION, number, pickle.dumps((operation, *arguments, parts), protocol=5))


def read_answer(lane: Lane, kind: int, body: memoryview) -> Payload | Failure | None:
    """The controller's end of it: the outcome, where that is not a value's pickle stream alone."""
    if kind == Answer.NOTHING:
        return None
    payload = lane.unpack(pickle.loads(body[HEADER_NBYTES:]))
    if kind == Answer.PART:
        return payload
    failure: Failure = decode(payload)
    return failure


def _call(lane: Lane, host: WorkerHost, method: str, is_collected: bool, parts: Any) -> Payload | Failure | None:
    return host.call(method, [lane.unpack(part) for part in parts], is_collected)


def _construct(lane: Lane, host: WorkerHost, context: Any, environment: dict[str, str], parts: Any) -> Failure | None:
    os.environ.update(environment)
    return host.construct(context, lane.unpack(parts[0]))


def _update_environment(_: Lane, __: WorkerHost, environment: dict[str, str], parts: Any) -> None:
    os.environ.update(environment)


def _listen(_: Lane, host: WorkerHost, address: str, parts: Any) -> Payload:
    host.rendezvous = Rendezvous(address)
    return encode(host.rendezvous.port)


def _borrow(_: Lane, host: WorkerHost, handle: bytes, offset: int, expected: bytes, parts: Any) -> Payload:
    return encode(can_borrow(handle, offset, expected, host.device))


_OPERATIONS: dict[str, Callable[..., Payload | Failure | None]] = {
    "borrow": _borrow,
    "call": _call,
    "construct": _construct,
    "environment": _update_environment,
    "listen": _listen,
}


def _body(kind: int, number: int, *contents: Any) -> bytes:
    return b"".join((_START.pack(0, kind, number), *contents))


def _encode(lane: Lane, outcome: Payload | Failure | None) -> tuple[int, Any, list[Segment]]:
    """Kind and content of an answer, and the segments that it names. Arguments and outcome are gone when it is sent, so
    that segments in which they lay are given back with it."""
    if outcome is None:
        return Answer.NOTHING, b"", []
    if isinstance(outcome, Payload):
        try:
            part, segments = lane.pack(outcome)
            return Answer.PART, pickle.dumps(part, protocol=5), segments
        except OSError as error:
            outcome = Failure.of(error)
    part, segments = lane.pack(encode(outcome))
    return Answer.FAILURE, pickle.dumps(part, protocol=5), segments
