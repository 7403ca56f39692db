"""A connection between a controller, agents and the agents of other hosts: a link whose frames are messages.

The head of each frame is a pickled tuple: its `Kind`, the numbers of the large payloads, and its content. The head and
the buffers of a large payload are chunks of the frame. Small payloads lie in the head of the frame.
"""

from __future__ import annotations

import pickle
import socket
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from bandmaster.codec import Payload
from bandmaster.hosts.handshake import Keys
from bandmaster.hosts.link import Link, Raw

FOR_MESSAGES, FOR_ROWS, FOR_RELAY = 1, 2, 3  # purposes of connections: of the controller, for rows, of another agent
_NOTHING: Mapping[int, Payload] = MappingProxyType({})


class Kind(IntEnum):
    """The kind of a message, and its content."""

    CALLS = 1  # group, (ranks, message) for each call, rows to fetch, whether it is for all hosts below as well
    INTERRUPT = 2  # group, {rank: number or None}
    RELEASE = 3  # keys of rows
    ASK = 4  # number, name of the question, arguments
    PING = 5  # nothing
    REPLIES = 6  # group, (ranks, reply) for each reply that differs
    DEATHS = 7  # group, {rank: pickled failure}
    ANSWER = 8  # number, whether it is an error, the pickled answer
    PONG = 9  # nothing
    FORWARD = 10  # address of one of the agents below, kind and content of the message for it
    RESUME = 11  # group, {rank: number of a call that has failed there}
    OUTPUT = 12  # a `Written`
    FETCH = 13  # key of rows, the numbers of the rows that are needed, or None for all
    ROWS = 14  # why there are none; "" if payload 0 has them


class Message(NamedTuple):
    """One message that has arrived.

    Attributes:
        kind: Its kind.
        content: The content of that kind.
        large: The large payloads, by number.
    """

    kind: int
    content: tuple[Any, ...]
    large: Mapping[int, Payload]

    def unpack(self, part: Any) -> Payload:
        """The payload that a part names."""
        return self.large[part] if type(part) is int else Payload(*part)


Place = Callable[[int, tuple[Any, ...], Sequence[int]], Payload]  # the memory for a payload of a kind and content


def in_memory(kind: int, content: tuple[Any, ...], sizes: Sequence[int]) -> Payload:
    """A payload in memory of this process, whose head and buffers of these sizes are still to be written."""
    head, *buffers = [np.empty(size, np.uint8).data for size in sizes]
    return Payload(head, tuple(buffers))


class Connection(Link):
    """One end of a connection. Not thread-safe: its owner holds a lock.

    Args:
        sock: The socket; it is owned from here on.
        keys: Its keys.
        place: Makes the memory that a large payload is received in.
    """

    def __init__(self, sock: socket.socket, keys: Keys, place: Place = in_memory) -> None:
        super().__init__(sock, keys, self._views)
        self.place_payload = place
        self._begun: tuple[Any, ...] = ()  # the head of the frame whose chunks are being received
        self._large: dict[int, Payload] = {}

    def send_message(self, kind: Kind, *content: Any, large: Mapping[int, Payload] = _NOTHING) -> bool:
        """Send a message, as far as the kernel takes it now; see `Link.send`."""
        counts = tuple([(number, 1 + len(payload.buffers)) for number, payload in large.items()])
        chunks = [chunk for payload in large.values() for chunk in (payload.head, *map(Raw, payload.buffers))]
        return self.send(pickle.dumps((kind, counts, *content), protocol=5), chunks)

    def receive_message(self) -> Message | None:
        """The next message; None if it is not all there.

        Raises:
            Closed: The other end is gone, or the frame is not authentic.
        """
        head = self.receive()
        if head is None:
            return None
        (kind, _, *content), large = self._begun or pickle.loads(head), self._large
        self._begun, self._large = (), {}
        return Message(kind, tuple(content), large)

    def _views(self, head: bytes, sizes: Sequence[int]) -> Sequence[memoryview]:
        self._begun, at = pickle.loads(head), 0
        kind, counts, *content = self._begun
        for number, n_chunks in counts:
            self._large[number] = self.place_payload(kind, tuple(content), sizes[at : at + n_chunks])
            at += n_chunks
        return [view for payload in self._large.values() for view in (payload.head, *payload.buffers)]
