"""Rows that stay on the host where they were made, and copies of them on other hosts.

::

    RowStore ── has what calls leave on this host, and copies
      ▲
    serve_rows ◄── links ── RowLinks: of agents of other hosts, and of the controller, which fetch rows

Rows are known by their key on all hosts: the number of the call that has made them, and the rank. Those that a call
needs and that lie on another host are fetched once for all ranks of a host, straight from where they were made.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, NamedTuple

from bandmaster.codec import Payload, decode, encode
from bandmaster.contract import Kept
from bandmaster.errors import ResourceError, RowsLost
from bandmaster.hosts.handshake import Secret
from bandmaster.hosts.link import NO_ANSWER, Address, Allocate, FrameKind, Link, Purpose, connect, in_memory
from bandmaster.plan.batch import required_batch
from bandmaster.platform.limits import start_thread
from bandmaster.platform.settings import host_timeout_s
from bandmaster.wire.messages import Closed

IDLE_S = 3.0  # after which, or half of the time that a host may be silent, a connection for rows is closed
MAX_AT_ONCE = 4  # fetches from one host, which has a thread for each of their connections

RowKey = tuple[int, int]
PendingFetch = Future[Payload]  # rows that are being fetched from another host


class StoredRows(NamedTuple):
    """Rows on a host.

    Attributes:
        rows: The rows.
        numbers: The numbers of those of another host's that they are a copy of; None for all.
        n_fetched: The number of all that were fetched for this copy, and for those before it.
    """

    rows: Kept | PendingFetch
    numbers: Any = None
    n_fetched: int = 0

    @property
    def has_failed(self) -> bool:
        """Whether they could not be fetched."""
        return isinstance(self.rows, Future) and self.rows.done() and self.rows.exception() is not None


RowStore = dict[RowKey, StoredRows]  # by their key, until they are released


class Fetch(NamedTuple):
    """Rows that a call needs and that lie on another host.

    Attributes:
        address: The address of the agent of that host.
        key: The key of the rows.
        origin: The name of the rows in messages.
        rows: The numbers of the rows that are needed.
        n_rows: The number of all that there are.
    """

    address: Address
    key: RowKey
    origin: str
    rows: Any
    n_rows: int

    @property
    def numbers(self) -> Any:
        """The numbers of the rows that are needed; None for all."""
        return None if len(self.rows) == self.n_rows else self.rows


def serve_rows(link: Link, store: RowStore) -> None:
    """Send rows to an agent of another host, or to the controller, until the link ends."""
    with contextlib.suppress(Closed), contextlib.closing(link), ThreadPoolExecutor(1, "bandmaster-cut") as cutter:
        while (message := link.receive()) is not None:
            key, numbers = message.content
            try:
                cut = cutter.submit(_of_this_host, store, key, numbers)  # whose type may have to be imported first
                while not wait([cut], host_timeout_s() / 4).done:
                    link.send(FrameKind.PONG)
                payload = cut.result()
            except Exception as error:  # they are gone, or cannot be read here
                link.send(FrameKind.ROWS, str(error))
            else:
                _send(link, payload)


def _send(link: Link, payload: Payload) -> None:
    """Send rows to a process that may be suspended as they come: as long as its host acknowledges, it is there."""
    send: Callable[[], object] = partial(link.send, FrameKind.ROWS, "", large={0: payload})
    while True:
        try:
            send()
            return
        except Closed as error:
            if str(error) != NO_ANSWER or link.is_cut:
                raise
            send = link.pump


def _of_this_host(store: RowStore, key: RowKey, numbers: Any) -> Payload:
    """The rows with these numbers, or all, in a payload of their own."""
    found = store.get(key)
    if found is None:
        raise RowsLost("rows were released on the host that had made them")
    assert not isinstance(found.rows, Future), "rows are fetched from where they were made"
    payload = found.rows.payload()
    return payload if numbers is None else encode(required_batch(decode(payload)).rows(numbers))


class _Wanted(NamedTuple):
    """Rows that are to be fetched.

    Attributes:
        future: Gets them.
        fetch: The rows.
        place: Makes the memory that they are received in.
    """

    future: PendingFetch
    fetch: Fetch
    place: Allocate


class _Fetchers:
    """The threads that fetch rows from one host. Each has a connection, and ends when there is nothing to do for long.

    Args:
        address: The address of its agent.
        secret: The secret that both ends know.
    """

    def __init__(self, address: Address, secret: Secret) -> None:
        self._address, self._secret = address, secret
        self._wanted: deque[_Wanted] = deque()
        self._n_threads = self._n_idle = 0
        self._is_closed = False
        self._changed = threading.Condition()

    def add(self, wanted: _Wanted) -> None:
        """Fetch rows, by a new thread if all are busy and there are few."""
        with self._changed:
            if len(self._wanted) >= self._n_idle and self._n_threads < MAX_AT_ONCE:
                start_thread("bandmaster-fetch", self._run)
                self._n_threads += 1
            self._wanted.append(wanted)
            self._changed.notify()

    def close(self) -> None:
        """End the threads that are idle, and the others when they become so."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        connection: Link | None = None
        with contextlib.ExitStack() as closing:
            while (wanted := self._next()) is not None:
                fetch, future = wanted.fetch, wanted.future
                try:
                    if connection is None:
                        connection = connect(self._address, self._secret, Purpose.ROWS, timeout_s=host_timeout_s())
                        closing.callback(connection.close)
                    connection.place = wanted.place
                    connection.send(FrameKind.FETCH, fetch.key, fetch.numbers)
                    while (answer := connection.receive()) is None or answer.kind == FrameKind.PONG:
                        pass
                except BaseException as error:  # there may be no memory
                    if connection is None or isinstance(error, Closed):
                        why = f"{fetch.origin} cannot be fetched from {fetch.address[0]}: {error}"
                        self._fail_all(future, RowsLost(why))
                    else:
                        future.set_exception(error)
                    closing.close()
                    connection = None
                    continue
                if answer.large:
                    future.set_result(answer.large[0])
                else:
                    future.set_exception(RowsLost(f"{fetch.origin} are gone: {answer.content[0]}"))
                del answer  # the rows are the reader's

    def _next(self) -> _Wanted | None:
        """The rows that are to be fetched next; None if this thread is to end."""
        with self._changed:
            self._n_idle += 1
            self._changed.wait_for(lambda: self._wanted or self._is_closed, min(IDLE_S, host_timeout_s() / 2))
            self._n_idle -= 1
            if self._wanted:
                return self._wanted.popleft()
            self._n_threads -= 1
            return None

    def _fail_all(self, first: PendingFetch, error: RowsLost) -> None:
        """If the host cannot be reached, all that is wanted by now is lost."""
        with self._changed:
            lost = [first, *[wanted.future for wanted in self._wanted]]
            self._wanted.clear()
        for future in lost:
            future.set_exception(error)


class RowLinks:
    """The connections by which this process fetches rows. Any thread may call it.

    Args:
        secret: The secret that both ends know.
    """

    def __init__(self, secret: Secret) -> None:
        self._secret = secret
        self._hosts: dict[Address, _Fetchers] = {}
        self._lock = threading.Lock()

    def fetch(self, fetch: Fetch, place: Allocate = in_memory) -> PendingFetch:
        """Fetch rows from the host where they lie. Its exception is a RowsLost if they are gone, or the host is.

        Args:
            fetch: The rows.
            place: Makes the memory that they are received in.
        """
        future: PendingFetch = Future()
        with self._lock:
            host = self._hosts.get(fetch.address)
            if host is None:
                host = self._hosts[fetch.address] = _Fetchers(fetch.address, self._secret)
        try:
            host.add(_Wanted(future, fetch, place))
        except ResourceError as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        """Close the connections that are idle, and the others when they become so."""
        with self._lock:
            hosts, self._hosts = self._hosts, {}
        for host in hosts.values():
            host.close()
