"""Fetches rows from other hosts, over links that are kept for the next rows."""

from __future__ import annotations

import contextlib
import pickle
import socket
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from bandmaster.codec import Payload
from bandmaster.errors import ResourceError, RowsLost
from bandmaster.hosts.handshake import Refused, Secret, greet
from bandmaster.hosts.link import Link, LinkStalled, awaited, flush
from bandmaster.hosts.messages import FOR_ROWS, dumped
from bandmaster.platform.limits import start_thread
from bandmaster.wire.channel import Closed

__all__ = ["PATIENCE_S", "Fetch", "RowLinks", "in_memory"]

N_ATTEMPTS = 3  # to connect
PATIENCE_S = 10.0  # with a host that sends or takes nothing
MAX_AT_ONCE = 4  # fetches from one host
MAX_IDLE = 16  # links that are kept: the other end has a thread for each

Address = tuple[str, int]
Place = Callable[[Sequence[int]], Payload]  # returns the payload that a head and buffers of these sizes are received in


class Fetch(NamedTuple):
    """Rows that a call needs and that lie on another host.

    Attributes:
        address: Where the agent of that host listens.
        number: The number of the rows on its shelf.
        origin: What messages call them.
        rows: The numbers of the rows that are needed; None for all.
        copy: The number by which they are known on this host from here on.
    """

    address: Address
    number: int
    origin: str
    rows: Any
    copy: int


class _Unreachable(RowsLost):
    """A host cannot be reached, or sends nothing."""


class RowLinks:
    """The links by which this process fetches rows. Any thread may call it.

    Args:
        secret: What both ends know.
    """

    def __init__(self, secret: Secret) -> None:
        self._secret = secret
        self._idle: list[tuple[Address, Link]] = []  # that of the longest rest first
        self._wanted: defaultdict[Address, deque[tuple[Future[Payload], Fetch, Place]]] = defaultdict(deque)
        self._n_fetching: Counter[Address] = Counter()  # threads
        self._lock = threading.Lock()
        self._is_closed = False

    def fetch(self, fetch: Fetch, place: Place) -> Future[Payload]:
        """Fetch rows from the host where they lie. Its exception is a RowsLost if they are gone, or the host is.

        Few threads fetch from one host, which has a thread for each of their links.

        Args:
            fetch: The rows.
            place: Where they are received.
        """
        future: Future[Payload] = Future()
        with self._lock:
            try:
                if self._n_fetching[fetch.address] < MAX_AT_ONCE:
                    start_thread("bandmaster-fetch", self._fetch_all, fetch.address)
                    self._n_fetching[fetch.address] += 1
                self._wanted[fetch.address].append((future, fetch, place))
            except ResourceError as error:
                future.set_exception(error)
        return future

    def _fetch_all(self, address: Address) -> None:
        """Fetch all that is wanted of a host. If it cannot be reached, all that is wanted by then is lost."""
        lost: _Unreachable | None = None
        while (wanted := self._next(address)) is not None:
            future, fetch, place = wanted
            try:
                if lost is not None:
                    raise lost
                future.set_result(self._fetched(fetch, place))
            except BaseException as error:  # there may be no memory
                future.set_exception(error)
                lost = error if isinstance(error, _Unreachable) else None

    def _next(self, address: Address) -> tuple[Future[Payload], Fetch, Place] | None:
        with self._lock:
            if self._wanted[address]:
                return self._wanted[address].popleft()
            self._n_fetching[address] -= 1
        return None

    def _fetched(self, fetch: Fetch, place: Place) -> Payload:
        link = self._taken(fetch.address)
        if link is not None:
            with contextlib.suppress(Closed, LinkStalled):  # the other end has closed it meanwhile
                return self._asked(link, fetch, place)
        try:
            return self._asked(self._greeted(fetch.address), fetch, place)
        except (OSError, Refused, Closed, LinkStalled) as error:
            why = "it sends nothing" if isinstance(error, LinkStalled) else str(error)
            raise _Unreachable(f"{fetch.origin} cannot be fetched from {fetch.address[0]}: {why}") from None

    def close_idle(self, for_s: float) -> None:
        """Close the links that have been idle for so many seconds."""
        latest = time.monotonic() - for_s
        with self._lock:
            old = [idle for idle in self._idle if idle[1].heard_at <= latest]
            self._idle = [idle for idle in self._idle if idle not in old]
        for _, link in old:
            link.close()

    def close(self) -> None:
        """Close the links that are idle, and the others when they become so."""
        self._is_closed = True
        self.close_idle(0.0)

    def _asked(self, link: Link, fetch: Fetch, place: Place) -> Payload:
        """What the other end of a link answers; the link is idle afterwards, unless it has failed."""
        payloads: list[Payload] = []

        def placed(_: bytes, sizes: Sequence[int]) -> Sequence[memoryview]:
            payloads.append(place(sizes))
            return [payloads[0].head, *payloads[0].buffers]

        link.place = placed
        try:
            link.send(dumped((fetch.number, fetch.rows)))
            flush([link], PATIENCE_S)
            (said,) = pickle.loads(awaited(link, PATIENCE_S).head)
        except BaseException:
            link.close()
            raise
        self._put_back(fetch.address, link)
        if not payloads:
            raise RowsLost(f"{fetch.origin} are gone: {said}")
        return payloads[0]

    def _taken(self, address: Address) -> Link | None:
        """A link to a host that nobody uses."""
        with self._lock:
            for idle in reversed(self._idle):
                if idle[0] == address:
                    self._idle.remove(idle)
                    return idle[1]
        return None

    def _put_back(self, address: Address, link: Link) -> None:
        """Keep a link for the next rows, in place of another one if there are many."""
        link.place = _nothing_comes
        with self._lock:
            self._idle.append((address, link))
            surplus = self._idle.pop(0)[1] if self._is_closed or len(self._idle) > MAX_IDLE else None
        if surplus is not None:
            surplus.close()

    def _greeted(self, address: Address) -> Link:
        """A new link to another host. It is tried again: who floods that host with connections may have it closed."""
        for left in range(N_ATTEMPTS - 1, -1, -1):
            sock = None
            try:
                sock = socket.create_connection(address, timeout=PATIENCE_S)
                return Link(*greet(sock, self._secret, FOR_ROWS), _nothing_comes)
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


def _nothing_comes(_: bytes, sizes: Sequence[int]) -> Sequence[memoryview]:
    raise Closed("it has sent what nobody has asked for")
