"""Limits of an endpoint: keys, bodies, connections, and clients that are slow or hang up."""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import hmac
import json
import math
import termios
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, NoReturn, TypeVar

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from bandmaster.serve.errors import AUTHENTICATION, APIError, HungUp, invalid, too_late
from bandmaster.serve.options import Options

T = TypeVar("T")
Client = tuple[str, int]
TRANSPORT = "bandmaster.transport"  # of the connection of a request, in its scope
MOST_HEAD = 1 << 20  # bytes that may come before a request has begun: its head, and what is read along with that
READ_ON = 4  # times the most bytes of a body are read, and dropped, so that its client gets to read the refusal


def check_key(request: Request, api_key: str | None) -> None:
    """Check the key of a request.

    Raises:
        APIError: It is not the endpoint's.
    """
    if api_key is None:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    same = hmac.compare_digest(given.strip().encode(), api_key.encode())
    if scheme.lower() != "bearer" or not same:
        what = "the API key is wrong" if given else "the request has no API key"
        raise APIError(401, f"{what}; send it as 'Authorization: Bearer KEY'", AUTHENTICATION, code="invalid_api_key")


async def json_body(request: Request, options: Options) -> Mapping[str, Any]:
    """The body of a request, a JSON object.

    Raises:
        APIError: It is too long, too slow, or not a JSON object.
        HungUp: The client has closed the connection.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a page in a browser can send other types to a loopback address unasked
        raise APIError(415, f"the body must be application/json, got {kind or 'no content-type'}")
    try:
        body = await asyncio.wait_for(_body(request, options.max_body_nbytes), options.stall_timeout)
    except asyncio.TimeoutError:
        raise APIError(
            408,
            f"the body did not arrive within {options.stall_timeout:g} s",
            headers={"Connection": "close"},
        ) from None
    try:
        found = json.loads(body, parse_constant=_refuse_constant)
        if b"\\ud" in body.lower() or b"\xed" in body:  # as half of a surrogate pair has, and some characters
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise invalid(f"the body is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise invalid(f"the body must be a JSON object, got {type(found).__name__}")
    return found


async def _body(request: Request, most: int) -> bytes:
    parts: list[bytes] = []
    n_bytes, is_more = 0, True
    while is_more:
        event = await request.receive()
        if event["type"] == "http.disconnect":
            raise HungUp
        n_bytes += len(event.get("body", b""))
        if n_bytes > READ_ON * most:
            break
        parts.append(event.get("body", b"") if n_bytes <= most else b"")
        is_more = event.get("more_body", False)
    if n_bytes > most:
        raise APIError(413, f"the body is longer than {most} bytes", headers={"Connection": "close"})
    return b"".join(parts)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


async def unless_hung_up(work: Coroutine[Any, Any, T], receive: Receive, left_s: float, timeout_s: float) -> T:
    """The value of a coroutine, which is cancelled when the client hangs up, or when it is too late.

    Args:
        work: The coroutine.
        receive: Of the request, whose body has been read.
        left_s: Seconds that are left.
        timeout_s: Seconds that there were, for the message.

    Raises:
        HungUp: The client has closed the connection.
        APIError: It is too late.
    """
    task, end = asyncio.ensure_future(work), asyncio.ensure_future(_hang_up(receive))
    try:
        await asyncio.wait({task, end}, timeout=max(left_s, 0), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
    finally:
        for one in (task, end):
            one.cancel()
        await asyncio.gather(task, end, return_exceptions=True)
    if task.done() and not task.cancelled() and task.exception() is None:
        return task.result()  # it ended as it was cancelled
    if end.done() and not end.cancelled():
        raise HungUp
    raise too_late(timeout_s)


async def unless_stalled(sending: Awaitable[None], scope: Scope, timeout_s: float) -> None:
    """Send something, unless its client takes nothing for so many seconds.

    `asyncio.wait_for` would cost a task for each part of an answer.

    Raises:
        HungUp: The client does not take it.
    """
    task, is_stalled, left = asyncio.current_task(), False, math.inf
    assert task is not None, "a coroutine runs in one"
    transport, loop = scope.get(TRANSPORT), asyncio.get_running_loop()
    timer: asyncio.Handle

    def check() -> None:
        nonlocal is_stalled, left, timer
        now = 0 if transport is None else _left(transport)
        if now < left:
            left, timer = now, loop.call_later(timeout_s, check)
        else:
            is_stalled = True
            task.cancel()

    timer = loop.call_soon(check)  # once it waits for the client
    try:
        await sending
    except asyncio.CancelledError:
        if not is_stalled:
            raise
        raise HungUp from None
    finally:
        timer.cancel()


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Connections:
    """The connections of a server: closes those that do not send a request in time, and those that take no answer.

    uvicorn waits for a request without limit, with httptools takes heads of any length, and closes a connection only
    when what it has written was taken.

    Args:
        timeout_s: Seconds in which a client must send the head of a request.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._open: dict[Client, asyncio.Transport] = {}
        self._timers: dict[Client, asyncio.TimerHandle] = {}  # of those that are to send the head of a request
        self._n_bytes: dict[Client, int] = {}  # and how much of it they have sent
        self._n_requests: Counter[Client] = Counter()  # a request may begin before the task of the one before it ends

    def protocol(self, base: type[asyncio.Protocol]) -> type[asyncio.Protocol]:
        """A subclass of uvicorn's protocol that tells of its connections."""
        connections = self

        class Watched(base):  # type: ignore[valid-type, misc]
            def connection_made(self, transport: Any) -> None:
                connections._add(transport)
                super().connection_made(transport)

            def data_received(self, data: bytes) -> None:
                if connections._may_send(self.transport, len(data)):
                    super().data_received(data)

            def connection_lost(self, exc: Exception | None) -> None:
                connections._drop(self.transport)
                super().connection_lost(exc)

        return Watched

    def watched(
        self, inner: Callable[[Scope, Receive, Send], Awaitable[None]]
    ) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
        """An application whose requests stop the clock of their connection."""

        async def outer(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope.get("client") is None:
                await inner(scope, receive, send)
                return
            client = tuple(scope["client"])
            self._n_requests[client] += 1
            self._stop(client)
            scope[TRANSPORT] = self._open.get(client)
            try:
                await inner(scope, receive, send)
            finally:
                self._request_ended(client)

        return outer

    def abort(self) -> None:
        """Close all connections at once."""
        for transport in list(self._open.values()):
            transport.abort()

    def _may_send(self, transport: asyncio.Transport, n_bytes: int) -> bool:
        """Count bytes that come before a request has begun; too many of them close the connection."""
        client = _client(transport)
        if client not in self._timers:
            return True
        self._n_bytes[client] = self._n_bytes.get(client, 0) + n_bytes
        if self._n_bytes[client] <= MOST_HEAD:
            return True
        transport.abort()
        return False

    def _add(self, transport: asyncio.Transport) -> None:
        client = _client(transport)
        if client is not None:
            self._open[client] = transport
            self._start(client)

    def _drop(self, transport: asyncio.Transport) -> None:
        client = _client(transport)
        if client is not None:
            self._open.pop(client, None)
            self._stop(client)

    def _request_ended(self, client: Client) -> None:
        self._n_requests[client] -= 1
        if not self._n_requests[client]:
            del self._n_requests[client]
            self._start(client)

    def _start(self, client: Client) -> None:
        self._stop(client)
        self._wait_for_more(client)

    def _wait_for_more(self, client: Client) -> None:
        transport = self._open.get(client)
        if transport is not None:
            left = _left(transport)  # of the answer to the request before
            self._timers[client] = asyncio.get_running_loop().call_later(self._timeout_s, self._late, client, left)

    def _late(self, client: Client, left: int) -> None:
        """Close a connection, whether or not what was written to it was taken, unless it has taken some of that."""
        transport = self._open[client]
        if _left(transport) < left:
            self._wait_for_more(client)
        else:
            transport.abort()

    def _stop(self, client: Client) -> None:
        self._n_bytes.pop(client, None)
        timer = self._timers.pop(client, None)
        if timer is not None:
            timer.cancel()


def _client(transport: asyncio.Transport) -> Client | None:
    name = transport.get_extra_info("peername")
    return (str(name[0]), int(name[1])) if isinstance(name, tuple | list) else None


def _left(transport: asyncio.Transport) -> int:
    """The bytes that were written to a client, and that it has yet to take: here, and in the buffer of the system."""
    in_system = array.array("i", [0])
    with contextlib.suppress(OSError, ValueError, AttributeError):  # it was closed, or is no socket
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, in_system)
    return transport.get_write_buffer_size() + in_system[0]


def abort(scope: Scope) -> None:
    """Close the connection of a request at once, if the server can."""
    transport = scope.get(TRANSPORT)
    if transport is not None:
        transport.abort()


def is_closed(scope: Scope) -> bool:
    """Whether the connection of a request is closed, though its end may not have been told yet."""
    transport = scope.get(TRANSPORT)
    return transport is not None and transport.is_closing()
