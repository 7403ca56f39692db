"""The loop in a worker's process: read a message, do what it says, answer. It blocks in the kernel, never spins.

Bodies begin with one byte: that of a message with one of `Message`, that of an answer with one of `Answer`.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

from bandmaster.failure import Failure
from bandmaster.wire.codec import Payload, decode, encode
from bandmaster.wire.desk import Desk
from bandmaster.wire.host import WorkerHost
from bandmaster.wire.lane import INLINE_NBYTES, NO_CONTROL, Closed, Lane
from bandmaster.wire.rendezvous import Rendezvous
from bandmaster.wire.segments import OWNER, Segment

__all__ = ["message_of", "read_answer", "serve"]


class Message:
    """The first byte of a message, and what follows it."""

    OPERATION = 0  # pickled: (operation, *arguments, parts)
    CALL = 1  # the length of the method's name, the name, the pickle stream of its one small part
    CALL_UNCOLLECTED = 2  # the same, when nobody wants the value


class Answer:
    """The first byte of an answer, and what follows it."""

    NOTHING = 0  # nothing: the value is not wanted
    VALUE = 1  # the value's pickle stream
    PART = 2  # pickled: the part that the value's payload is
    FAILURE = 3  # pickled: the part that the payload of a `Failure` is


def serve(lane: Lane, host: WorkerHost, desk: Desk) -> None:
    """Answer messages until the controller is gone or says ``pause``. They are numbered from 1 as they come, so that
    one of them can be given up at the desk."""
    while True:
        try:
            message = lane.receive()
            assert message is not None, "this end blocks"
            desk.begin(lane.n_received)
            if message[0] != Message.OPERATION:
                end = 2 + message[1]
                part = Payload(message[end:])
                outcome = host.call(str(message[2:end], "utf-8"), [part], message[0] == Message.CALL)
            else:
                operation, *arguments = pickle.loads(message[1:])
                if operation == "pause":
                    lane.n_received -= 1  # it is not answered, so the controller does not count it
                    desk.end()
                    return
                outcome = _OPERATIONS[operation](lane, host, *arguments)
            desk.end()
        except Closed:
            return
        except KeyboardInterrupt as error:  # given up, or raised by the method: nobody presses keys here
            desk.end()
            outcome = host.failure(error)
        except OSError as error:  # no descriptor or no memory for a segment that came with the message
            outcome = Failure.of(error)
        try:
            body, segments = _encode(lane, outcome)
            del outcome
            lane.lend(segments)
            try:
                lane.send(NO_CONTROL + body, segments)
            except OSError as error:  # too many descriptors are on their way, say
                lane.take_back(segments)
                lane.send(NO_CONTROL + _encode(lane, Failure.of(error))[0])
            for segment in segments:
                lane.writer.give_back([segment.id], OWNER)
        except Closed:
            return


def message_of(operation: str, arguments: tuple[Any, ...], parts: tuple[Any, ...]) -> bytes:
    """The body of a message; ``parts`` as `Lane.unpack` takes them."""
    if operation == "call" and len(parts) == 1 and isinstance(parts[0], tuple) and not parts[0][1]:
        method, is_collected = arguments
        name = method.encode()
        if len(name) < 256:
            kind = Message.CALL if is_collected else Message.CALL_UNCOLLECTED
            return b"".join((bytes((kind, len(name))), name, parts[0][0]))
    return _OPERATION + pickle.dumps((operation, *arguments, parts), protocol=5)


def read_answer(lane: Lane, body: memoryview) -> tuple[Payload | Failure | None, bool]:
    """The controller's end of it: the outcome, and whether it is a failure."""
    kind = body[0]
    if kind == Answer.VALUE:
        return Payload(bytes(body[1:])), False
    if kind == Answer.NOTHING:
        return None, False
    payload = lane.unpack(pickle.loads(body[1:]))
    return (decode(payload), True) if kind == Answer.FAILURE else (payload, False)


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


_OPERATIONS: dict[str, Callable[..., Payload | Failure | None]] = {
    "call": _call,
    "construct": _construct,
    "environment": _update_environment,
    "listen": _listen,
}


def _encode(lane: Lane, outcome: Payload | Failure | None) -> tuple[bytes, list[Segment]]:
    """The body of an answer, and the segments that it names. Arguments and outcome are gone when it is sent, so that
    segments in which they lay are given back with it."""
    if outcome is None:
        return _NOTHING, []
    if isinstance(outcome, Payload):
        if not outcome.buffers and len(outcome.head) <= INLINE_NBYTES:
            return _VALUE + outcome.head, []
        try:
            part, segments = lane.pack(outcome)
            return _PART + pickle.dumps(part, protocol=5), segments
        except OSError as error:
            outcome = Failure.of(error)
    part, segments = lane.pack(encode(outcome))
    return _FAILURE + pickle.dumps(part, protocol=5), segments


_OPERATION = bytes([Message.OPERATION])
_NOTHING, _VALUE, _PART, _FAILURE = (bytes([n]) for n in (Answer.NOTHING, Answer.VALUE, Answer.PART, Answer.FAILURE))
