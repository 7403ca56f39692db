"""Rows that stay on the host where they were made, and copies of them on other hosts.

::

    RowStore ── keeps what calls leave on this host, and copies
      ▲
    RowServer ◄── connections ── RowLinks: of agents of other hosts, and of the controller, which fetch rows

Rows are known by their key on all hosts: the number of the call that has made them, and the rank. Those that a call
needs and that lie on another host are fetched once for all ranks of a host, straight from where they were made.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, NamedTuple

from bandmaster.codec import Payload, decode, encode
from bandmaster.contract import Kept
from bandmaster.errors import ResourceError, RowsLost
from bandmaster.hosts.connection import FOR_ROWS, Connection, Kind, Message, Place, in_memory
from bandmaster.hosts.handshake import Keys, Refused, Secret, greet
from bandmaster.hosts.link import LinkStalled, await_frame, flush
from bandmaster.plan.batch import required_batch
from bandmaster.platform.limits import start_thread
from bandmaster.wire.messages import Closed

N_ATTEMPTS = 3  # to connect
PATIENCE_S = 10.0  # with a host that sends or takes nothing
IDLE_S = 3.0  # after which a connection is closed by which rows were fetched
MAX_AT_ONCE = 4  # fetches from one host, which has a thread for each of their connections

Address = tuple[str, int]
RowKey = tuple[int, int]
PendingFetch = Future[Payload]  # rows that are being fetched from another host


class Fetch(NamedTuple):
    """Rows that a call needs and that lie on another host.

    Attributes:
        address: The address of the agent of that host.
        key: The key of the rows.
        origin: The name of the rows in messages.
        rows: The numbers of the rows that are needed; None for all.
    """

    address: Address
    key: RowKey
    origin: str
    rows: Any


class RowStore:
    """The rows on this host, by key. Any thread may call it."""

    def __init__(self) -> None:
        self._rows: dict[RowKey, tuple[Kept | PendingFetch, Any]] = {}

    def keep(self, key: RowKey, rows: Kept | PendingFetch, present: Any = None) -> None:
        """Keep rows, or a copy of rows of another host, until they are released.

        Args:
            key: Their key.
            rows: The rows.
            present: The numbers of those that a copy has; None for all.
        """
        self._rows[key] = rows, present

    def release(self, keys: Iterable[RowKey]) -> None:
        """Release rows."""
        for key in keys:
            self._rows.pop(key, None)

    def get(self, key: RowKey) -> tuple[Kept | PendingFetch, Any] | None:
        """The rows, and the numbers of those that are present; None if they are not on this host."""
        return self._rows.get(key)


class RowServer:
    """Sends rows to agents of other hosts, and to the controller.

    Args:
        store: The rows.
    """

    def __init__(self, store: RowStore) -> None:
        self._store = store

    def serve(self, sock: socket.socket, keys: Keys) -> None:
        """Serve one connection, until it ends."""
        connection = Connection(sock, keys)
        with contextlib.suppress(Closed, LinkStalled), contextlib.closing(connection):
            while True:
                key, rows = _received(connection, 1e6).content
                self._answer(connection, key, rows)

    def _answer(self, connection: Connection, key: RowKey, rows: Any) -> None:
        try:
            found = self._store.get(key)
            if found is None:
                raise RowsLost("rows were released on the host that had made them")
            assert not isinstance(found[0], Future), "rows are fetched from where they were made"
            payload = found[0].payload()
            if rows is not None:
                payload = encode(required_batch(decode(payload)).rows(rows))
        except Exception as error:  # they are gone, or cannot be read here
            connection.send_message(Kind.ROWS, str(error))
        else:
            connection.send_message(Kind.ROWS, "", large={0: payload})
        flush([connection], PATIENCE_S)


class _Wanted(NamedTuple):
    """Rows that are to be fetched.

    Attributes:
        future: Gets them.
        fetch: The rows.
        place: Makes the memory that they are received in.
    """

    future: PendingFetch
    fetch: Fetch
    place: Place


class _Unreachable(RowsLost):
    """A host cannot be reached, or sends nothing."""


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
        with contextlib.ExitStack() as close_at_end:
            connection: Connection | None = None
            while (wanted := self._next()) is not None:
                try:
                    if connection is None or connection.fileno() < 0:
                        connection = close_at_end.enter_context(contextlib.closing(self._connected(wanted.fetch)))
                    wanted.future.set_result(_fetched(connection, wanted))
                except BaseException as error:  # there may be no memory
                    wanted.future.set_exception(error)
                    if isinstance(error, _Unreachable):
                        self._fail_all(error)

    def _next(self) -> _Wanted | None:
        """The rows that are to be fetched next; None if this thread is to end."""
        with self._changed:
            self._n_idle += 1
            self._changed.wait_for(lambda: self._wanted or self._is_closed, IDLE_S)
            self._n_idle -= 1
            if self._wanted:
                return self._wanted.popleft()
            self._n_threads -= 1
            return None

    def _fail_all(self, error: _Unreachable) -> None:
        """If the host cannot be reached, all that is wanted by now is lost."""
        with self._changed:
            lost = list(self._wanted)
            self._wanted.clear()
        for wanted in lost:
            wanted.future.set_exception(error)

    def _connected(self, fetch: Fetch) -> Connection:
        """A new connection. It is tried again: a flood of connections to that host may have it closed."""
        for left in range(N_ATTEMPTS - 1, -1, -1):
            sock = None
            try:
                sock = socket.create_connection(self._address, timeout=PATIENCE_S)
                return Connection(*greet(sock, self._secret, FOR_ROWS))
            except (OSError, Refused) as error:
                if sock is not None:
                    sock.close()
                if not left:
                    raise _unreachable(fetch, error) from None
        raise AssertionError("the last attempt returns or raises")


class RowLinks:
    """The connections by which this process fetches rows. Any thread may call it.

    Args:
        secret: The secret that both ends know.
    """

    def __init__(self, secret: Secret) -> None:
        self._secret = secret
        self._hosts: dict[Address, _Fetchers] = {}
        self._lock = threading.Lock()

    def fetch(self, fetch: Fetch, place: Place = in_memory) -> PendingFetch:
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


def _fetched(connection: Connection, wanted: _Wanted) -> Payload:
    """The rows that the other end of a connection sends. If that fails, the connection is closed."""
    connection.place_payload = wanted.place
    try:
        connection.send_message(Kind.FETCH, wanted.fetch.key, wanted.fetch.rows)
        flush([connection], PATIENCE_S)
        answer = _received(connection, PATIENCE_S)
    except BaseException as error:
        connection.close()
        if isinstance(error, Closed | LinkStalled):
            raise _unreachable(wanted.fetch, error) from None
        raise
    (why,) = answer.content
    if not answer.large:
        raise RowsLost(f"{wanted.fetch.origin} are gone: {why}")
    return answer.large[0]


def _received(connection: Connection, timeout_s: float) -> Message:
    """The next message of a connection.

    Raises:
        Closed: The other end is gone.
        LinkStalled: Nothing has come for so long.
    """
    while (message := connection.receive_message()) is None:
        await_frame(connection, timeout_s)
    return message


def _unreachable(fetch: Fetch, error: Exception) -> _Unreachable:
    why = "it sends nothing" if isinstance(error, LinkStalled) else str(error)
    return _Unreachable(f"{fetch.origin} cannot be fetched from {fetch.address[0]}: {why}")
