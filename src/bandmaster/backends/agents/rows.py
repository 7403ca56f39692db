"""Rows that stay on the host where they were made, and how agents of other hosts fetch them: straight from there."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from bandmaster.backends.agents.messages import FOR_ROWS, dumped
from bandmaster.codec import Payload, decode, encode
from bandmaster.contract import Kept
from bandmaster.errors import RowsLost
from bandmaster.failure import Failure, FailureKind
from bandmaster.plan.batch import join_rows, required_batch
from bandmaster.transport.channel import Closed
from bandmaster.transport.handshake import Keys, Refused, Secret, greet
from bandmaster.transport.link import Link, LinkStalled, Place, awaited, flush

__all__ = ["Coming", "Fetch", "RowServer", "Shelf", "fetched", "in_memory"]

N_ATTEMPTS = 3  # to connect
PATIENCE_S = 10.0  # with a host that sends or takes nothing


class Fetch(NamedTuple):
    """Rows that a call needs and that lie on another host.

    Attributes:
        address: Where the agent of that host listens.
        number: The number of the rows on its shelf.
        origin: What messages call them.
        rows: The numbers of the rows that are needed; None for all.
        copy: The number by which they are known on this host from here on.
    """

    address: tuple[str, int]
    number: int
    origin: str
    rows: Any
    copy: int


class Shelf:
    """The rows that calls have left on this host, by number. Any thread may call it."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._rows: dict[int, Kept | Coming] = {}

    def keep(self, rows: Kept) -> int:
        """Keep rows until they are released; returns their number."""
        number = next(self._numbers)
        self._rows[number] = rows
        return number

    def await_copy(self, number: int) -> Coming:
        """Keep a copy of rows of another host, once it is there, by a number that the controller has given it."""
        coming = self._rows[number] = Coming()
        return coming

    def release(self, numbers: Iterable[int]) -> None:
        """Let go of rows."""
        for number in numbers:
            self._rows.pop(number, None)

    def rows(self, number: int) -> Kept | Coming:
        """Rows that are kept, or will be.

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

    def _answer(self, link: Link, number: int, rows: Any) -> None:
        try:
            kept = self._shelf.rows(number)
            assert not isinstance(kept, Coming), "rows are fetched from where they were made"
            payload = kept.payload()
            if rows is not None:
                payload = encode(join_rows([(required_batch(decode(payload)), rows)]))
        except Exception as error:  # they are gone, or cannot be read here
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
        with contextlib.closing(_greeted(fetch.address, secret, placed)) as link:
            link.send(dumped((fetch.number, fetch.rows)))
            flush([link], PATIENCE_S)
            (said,) = pickle.loads(awaited(link, PATIENCE_S).head)
    except (OSError, Refused, Closed, LinkStalled) as error:
        why = "it sends nothing" if isinstance(error, LinkStalled) else str(error)
        raise RowsLost(f"{fetch.origin} cannot be fetched from {fetch.address[0]}: {why}") from None
    if not payloads:
        raise RowsLost(f"{fetch.origin} are gone: {said}")
    return payloads[0]


def _greeted(address: tuple[str, int], secret: Secret, place: Place) -> Link:
    """A new link to another host. It is tried again: whoever floods that host with connections may have it closed."""
    for left in range(N_ATTEMPTS - 1, -1, -1):
        sock = None
        try:
            sock = socket.create_connection(address, timeout=PATIENCE_S)
            return Link(*greet(sock, secret, FOR_ROWS), place)
        except (OSError, Refused):
            if sock is not None:
                sock.close()
            if not left:
                raise
    raise AssertionError("the last attempt returns or raises")


def in_memory(sizes: Sequence[int]) -> Payload:
    """A payload in memory of its own, whose head and buffers of these sizes are still to be written."""
    head, *buffers = [memoryview(bytearray(size)) for size in sizes]
    return Payload(head, tuple(buffers))


class Coming:
    """Rows that are being fetched from another host.

    Attributes:
        outcome: The payload, or the failure; None as long as it is not there.
    """

    def __init__(self) -> None:
        self.outcome: Payload | Failure | None = None

    def fetch(
        self, fetch: Fetch, secret: Secret, place: Callable[[Sequence[int]], Payload], done: Callable[[], object]
    ) -> None:
        """Fetch the rows. Called in a thread of its own.

        Args:
            fetch: The rows.
            secret: What both hosts know.
            place: Returns the payload that a head and buffers of these sizes are received in.
            done: Called when the outcome is there.
        """
        try:
            self.outcome = fetched(fetch, secret, place)
        except RowsLost as error:
            self.outcome = Failure(FailureKind.LOST, str(error))
        except Exception as error:  # there is no memory, or the group was closed
            self.outcome = Failure.of(error)
        done()
