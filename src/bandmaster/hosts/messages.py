"""The format of what links carry: the head of each frame is a pickled tuple, whose first item is its `Kind`.

Payloads that are small lie in the head; the head and the buffers of larger ones are chunks of the frame.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

from bandmaster.codec import Payload
from bandmaster.hosts.link import Raw
from bandmaster.wire.channel import INLINE_NBYTES, inline

__all__ = ["FOR_MESSAGES", "FOR_RELAY", "FOR_ROWS", "Kind", "Packed", "chunks_of", "dumped", "unpacked"]

FOR_MESSAGES, FOR_ROWS, FOR_RELAY = 1, 2, 3  # purposes of connections: of the controller, for rows, of another agent


class Kind(IntEnum):
    """What a frame says, and what follows in its head."""

    CALL = 1  # group, entries, table of payloads, what is fetched, whether it is for all hosts below as well
    INTERRUPT = 2  # group, {rank: number or None}
    RELEASE = 3  # numbers of rows
    ASK = 4  # number, name of what is asked for, arguments
    PING = 5  # nothing
    REPLIES = 6  # group, entries, table of payloads
    DEATHS = 7  # group, {rank: pickled failure}
    ANSWER = 8  # number, whether it is an error, what is pickled
    PONG = 9  # nothing
    FORWARD = 10  # group, which of the hosts below, the head of the frame for it, whose chunks are these
    OUTPUT = 12  # a `Written`
    RESUME = 11  # group, {rank: number of a call that has failed there}


def dumped(content: tuple[Any, ...]) -> bytes:
    """The head of a frame."""
    return pickle.dumps(content, protocol=5)


def chunks_of(*payloads: Payload) -> list[Any]:
    """The chunks that large payloads are sent as: heads, which are unpickled and so are authenticated, and buffers."""
    return [chunk for payload in payloads for chunk in (payload.head, *map(Raw, payload.buffers))]


class Packed:
    """The payloads of one frame.

    Attributes:
        table: What the head says of each: itself, or the number of its chunks.
        chunks: The chunks of the frame.
    """

    def __init__(self) -> None:
        self.table: list[Any] = []
        self.chunks: list[Any] = []
        self._places: dict[int, int] = {}

    def add(self, payload: Payload) -> int:
        """The place of a payload in the table; each is sent once."""
        known = self._places.get(id(payload))
        if known is not None:
            return known
        if payload.nbytes <= INLINE_NBYTES:
            self.table.append(inline(payload))
        else:
            self.table.append(1 + len(payload.buffers))
            self.chunks += chunks_of(payload)
        self._places[id(payload)] = len(self.table) - 1
        return len(self.table) - 1


def unpacked(
    table: Sequence[Any], chunks: Sequence[Any], large: Callable[[Sequence[Any]], Payload] | None = None
) -> list[Payload]:
    """The payloads of a frame.

    Args:
        table: As `Packed` has made it.
        chunks: The chunks of the frame.
        large: Makes a payload of its chunks.
    """
    payloads, at = [], 0
    for said in table:
        if type(said) is not int:
            payloads.append(Payload(*said))
            continue
        mine = chunks[at : at + said]
        payloads.append(Payload(mine[0], tuple(mine[1:])) if large is None else large(mine))
        at += said
    return payloads
