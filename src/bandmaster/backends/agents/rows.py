"""Rows that stay on the host where they were made, and how agents of other hosts fetch them: straight from there."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from bandmaster.backends.agents.messages import FOR_ROWS, dumped
from bandmaster.codec import Payload
from bandmaster.contract import Kept
from bandmaster.errors import RowsLost
from bandmaster.failure import Failure, FailureKind
from bandmaster.platform.limits import start_thread
from bandmaster.transport.channel import Closed
from bandmaster.transport.handshake import Keys, Refused, Secret, greet
from bandmaster.transport.link import Link, LinkStalled, awaited, flush

__all__ = ["Fetch", "RowServer", "Rows", "Shelf", "fetched", "gather", "in_memory"]

PATIENCE_S = 10.0  # with a host that sends or takes nothing

Rows = Mapping[Any, Any]  # kept rows, or payloads, by the places that entries name


class Fetch(NamedTuple):
    """Rows that a call needs and that lie on another host.

    Attributes:
        address: Where the agent of that host listens.
        number: The number of the rows on its shelf.
        origin: What messages call them.
    """

    address: tuple[str, int]
    number: int
    origin: str


class Shelf:
    """The rows that calls have left on this host, by number. Any thread may call it."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._rows: dict[int, Kept] = {}

    def keep(self, rows: Kept) -> int:
        """Keep rows until they are released; returns their number."""
        number = next(self._numbers)
        self._rows[number] = rows
        return number

    def release(self, numbers: Iterable[int]) -> None:
        """Let go of rows."""
        for number in numbers:
            self._rows.pop(number, None)

    def rows(self, number: int) -> Kept:
        """Rows that are kept.

        Raises:
            RowsLost: They are not.
        """
        try:
            return self._rows[number]
        except KeyError:
            raise RowsLost("rows were released on the host that had made them") from None


class RowServer:
    """Sends rows of a shelf to agents of other hosts.

    Args:
        shelf: The shelf.
    """

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    def serve(self, sock: socket.socket, keys: Keys) -> None:
        """Serve one connection, until it ends."""
        link = Link(sock, keys)
        with contextlib.suppress(Closed, LinkStalled), contextlib.closing(link):
            while True:
                self._answer(link, *pickle.loads(awaited(link, 1e6).head))

    def _answer(self, link: Link, number: int) -> None:
        try:
            payload = self._shelf.rows(number).payload()
        except RowsLost as error:
            link.send(dumped((str(error),)))
        else:
            link.send(dumped((None,)), [payload.head, *payload.buffers])
        flush([link], PATIENCE_S)


def fetched(fetch: Fetch, secret: Secret, place: Callable[[Sequence[int]], Payload]) -> Payload:
    """Fetch rows from the host where they lie.

    Args:
        fetch: The rows.
        secret: What both hosts know.
        place: Returns the payload that a head and buffers of these sizes are received in.

    Raises:
        RowsLost: They are gone, or the host is.
    """
    payloads: list[Payload] = []

    def placed(_: bytes, sizes: Sequence[int]) -> Sequence[memoryview]:
        payloads.append(place(sizes))
        return [payloads[0].head, *payloads[0].buffers]

    try:
        with contextlib.ExitStack() as stack:
            sock = stack.enter_context(socket.create_connection(fetch.address, timeout=PATIENCE_S))
            trusted, keys = greet(sock, secret, FOR_ROWS)
            link = Link(stack.enter_context(trusted), keys, placed)
            link.send(dumped((fetch.number,)))
            (said,) = pickle.loads(awaited(link, PATIENCE_S).head)
    except (OSError, Refused, Closed, LinkStalled) as error:
        why = "it sends nothing" if isinstance(error, LinkStalled) else str(error)
        raise RowsLost(f"{fetch.origin} cannot be fetched from {fetch.address[0]}: {why}") from None
    if not payloads:
        raise RowsLost(f"{fetch.origin} are gone: {said}")
    return payloads[0]


def in_memory(sizes: Sequence[int]) -> Payload:
    """A payload in memory of its own, whose head and buffers of these sizes are still to be written."""
    head, *buffers = [memoryview(bytearray(size)) for size in sizes]
    return Payload(head, tuple(buffers))


def gather(
    fetches: Sequence[Fetch],
    secret: Secret,
    place: Callable[[Sequence[int]], Payload],
    done: Callable[[list[Payload] | Failure], object],
) -> None:
    """Fetch rows from several hosts at the same time, in the background.

    Args:
        fetches: The rows.
        secret: What all hosts know.
        place: Returns the payload that a head and buffers of these sizes are received in.
        done: Called with the payloads, or with the failure of the first that could not be fetched.
    """
    found: dict[int, Payload] = {}
    failures: list[Failure] = []
    left = len(fetches)
    lock = threading.Lock()

    def run(index: int) -> None:
        nonlocal left
        try:
            found[index] = fetched(fetches[index], secret, place)
        except RowsLost as error:
            failures.append(Failure(FailureKind.LOST, str(error)))
        except Exception as error:  # there is no memory
            failures.append(Failure.of(error))
        with lock:
            left -= 1
            is_last = not left
        if is_last:
            done(failures[0] if failures else [found[number] for number in range(len(fetches))])

    for index in range(len(fetches)):
        start_thread("bandmaster-fetch", run, index)
