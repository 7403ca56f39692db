"""The loop in a worker's process: read a message, do what it says, answer. It blocks in the kernel, never spins.

Messages are ``(operation, *arguments)``; an answer is ``(part or None, is_failure)``.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

from bandmaster.failure import Failure
from bandmaster.wire.codec import Payload, encode
from bandmaster.wire.host import WorkerHost
from bandmaster.wire.lane import Closed, Lane
from bandmaster.wire.rendezvous import Rendezvous
from bandmaster.wire.segments import OWNER, Segment

__all__ = ["serve"]


def serve(lane: Lane, host: WorkerHost) -> None:
    """Answer messages until the controller is gone or says ``pause``."""
    while True:
        try:
            operation, *arguments = lane.receive()
            if operation == "pause":
                return
            body, segments = _encode(lane, _OPERATIONS[operation](lane, host, *arguments))
            lane.send(body, segments)
            lane.writer.give_back([segment.id for segment in segments], OWNER)
        except Closed:
            return


def _call(lane: Lane, host: WorkerHost, method: str, is_collected: bool, parts: Any) -> Payload | Failure | None:
    return host.call(method, [lane.unpack(part) for part in parts], is_collected)


def _construct(lane: Lane, host: WorkerHost, context: Any, environment: dict[str, str], parts: Any) -> Failure | None:
    os.environ.update(environment)
    return host.construct(context, lane.unpack(parts[0]))


def _listen(_: Lane, host: WorkerHost, address: str) -> Payload:
    host.rendezvous = Rendezvous(address)
    return encode(host.rendezvous.port)


_OPERATIONS: dict[str, Callable[..., Payload | Failure | None]] = {
    "call": _call,
    "construct": _construct,
    "listen": _listen,
}


def _encode(lane: Lane, outcome: Payload | Failure | None) -> tuple[bytes, list[Segment]]:
    """The body of an answer, and the segments that it names. Arguments and outcome are gone when it is sent, so that
    segments in which they lay are given back with it."""
    if outcome is None:
        return _NOTHING, []
    try:
        part, segments = lane.pack(encode(outcome) if isinstance(outcome, Failure) else outcome)
    except OSError as error:
        outcome = Failure.of(error)
        part, segments = lane.pack(encode(outcome))
    return pickle.dumps((part, isinstance(outcome, Failure)), protocol=5), segments


_NOTHING = pickle.dumps((None, False), protocol=5)
