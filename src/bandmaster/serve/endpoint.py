"""`Endpoint`: the server, in a thread of the process that has the group."""

from __future__ import annotations

import asyncio
import atexit
import ipaddress
import logging
import socket
import threading
import weakref
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from bandmaster import UsageError
from bandmaster.serve.app import application
from bandmaster.serve.episodes import Episode
from bandmaster.serve.limits import Connections
from bandmaster.serve.options import Options
from bandmaster.serve.service import Service

logger = logging.getLogger(__name__)
GRACE_S = 5  # seconds that open requests have to end when the endpoint is closed
LAST_S = 4  # seconds that clients then have to take what was written to them
POLL_S = 0.1  # seconds after which a server sees that it is to end, as in uvicorn
BACKLOG = 2048


class Endpoint:
    """An OpenAI-compatible HTTP server over a group of engines.

    It runs in a thread with an event loop of its own, until `close`, the end of the ``with`` block, or of the program.
    Requests go from that thread to the replicas; the thread that made the endpoint is free.

    Args:
        group: A group of `bandmaster.rl.Engine`s, in the controller or as a worker has it.
        host: The address to listen on. One that others can reach needs ``api_key``.
        port: The port; 0 chooses a free one.
        **options: As for `bandmaster.serve.Options`.

    Attributes:
        url: The base URL for clients, such as ``"http://127.0.0.1:8000/v1"``.
        model: The name of the model.
        options: The options.

    Raises:
        UsageError: An option is invalid; or others could reach the address without a key; or the group is not one of
            engines.
        OSError: The address cannot be listened on.

    Example::

        with Endpoint(rollout, api_key="secret", record=True) as endpoint:
            client = openai.OpenAI(base_url=endpoint.url, api_key="secret", default_headers={"X-Session-ID": "7"})
            client.chat.completions.create(model=endpoint.model, messages=[{"role": "user", "content": "2 + 2"}])
            (episode,) = endpoint.take("7")
    """

    def __init__(self, group: Any, host: str = "127.0.0.1", port: int = 0, **options: Any) -> None:
        self.options = Options(**options)
        check_host(host, self.options)
        self._service = Service(group, self.options)
        self._server = _server(self._service)
        self._thread = threading.Thread(
            target=_serve, args=(self._server, host, port), name="bandmaster endpoint", daemon=True
        )
        self._close = weakref.finalize(self, _close, self._server, self._thread)  # also at exit
        atexit.register(self._close)
        try:
            self._thread.start()
            while not self._server.has_begun.wait(1):  # so that signals are handled
                pass
            if self._server.error is not None:
                raise self._server.error
            address = self._server.address
            name = f"[{address[0]}]" if ":" in address[0] else address[0]
            self.url = f"http://{name}:{address[1]}/v1"
            self.model = self._service.model
        except BaseException:  # such as Ctrl-C
            self.close()
            raise

    def take(self, session: str | None = None) -> list[Episode]:
        """Take what was recorded of a session, which the endpoint then forgets.

        Args:
            session: The name that the client gave, in the header ``X-Session-ID``; None takes all sessions. Take a
                session when its agent has ended, else its later turns make an episode of their own.

        Returns:
            An episode for each sequence of tokens; one, if each turn has gone on with the one before.

        Raises:
            UsageError: The endpoint does not record, or the name is no text.
        """
        self._check_records()
        if session is not None and not isinstance(session, str):
            raise UsageError(f"take needs the name of a session, a text, or None for all, got {session!r}")
        return self._service.recorder.take(session)

    def sessions(self) -> list[str]:
        """The sessions that have been recorded and not taken, the one with the newest turn last.

        Raises:
            UsageError: The endpoint does not record.
        """
        self._check_records()
        return self._service.recorder.sessions()

    def _check_records(self) -> None:
        if not self.options.record:
            raise UsageError("this endpoint does not record turns; make it with record=True")

    def close(self) -> None:
        """End the server. Open requests have a few seconds to end; then they are given up in the engines."""
        _close(self._server, self._thread)  # again if Ctrl-C has come in it
        self._close.detach()
        atexit.unregister(self._close)

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Endpoint {self.model!r} at {self.url}{'' if self._thread.is_alive() else ', closed'}>"


class _Server(uvicorn.Server):
    """uvicorn's server, which tells when it has begun, or why it has not."""

    def __init__(self, config: uvicorn.Config, service: Service, connections: Connections) -> None:
        super().__init__(config)
        self.service, self._connections = service, connections
        self.has_begun = threading.Event()
        self.error: BaseException | None = None
        self.address: Any = None  # that of the socket that it listens on

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.has_begun.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(GRACE_S, self.service.give_up)
        loop.call_later(GRACE_S + LAST_S, self._connections.abort)
        await super().shutdown(sockets)


def _server(service: Service) -> _Server:
    connections = Connections(service.options.stall_timeout)
    config = uvicorn.Config(
        connections.watched(application(service)),
        http=connections.protocol(AutoHTTPProtocol),
        ws="none",
        lifespan="off",  # _serve starts the service, whose errors uvicorn would only log
        log_config=None,
        access_log=False,
        proxy_headers=False,  # which would change the addresses by which connections are known
        server_header=False,
        timeout_graceful_shutdown=GRACE_S + LAST_S + 1,  # by then, all requests and connections have ended
    )
    return _Server(config, service, connections)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on a port. Raises OSError, which names the address, if it cannot."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
        0
    ]
    listening = socket.socket(family, kind, proto)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise OSError(error.errno, f"the endpoint cannot listen on {host}:{port}: {error.strerror}") from None
    return listening


def _serve(server: _Server, host: str, port: int) -> None:
    """The thread of a server, which has the socket from its beginning: no Ctrl-C comes here."""

    async def main() -> None:
        with listen(host, port) as listening:
            server.address = listening.getsockname()
            starting = asyncio.ensure_future(server.service.start())
            while not starting.done() and not server.should_exit:
                await asyncio.wait({starting}, timeout=POLL_S)
            if starting.done():
                await starting
                await server.serve(sockets=[listening])

    loop: asyncio.AbstractEventLoop = (server.config.get_loop_factory() or asyncio.new_event_loop)()
    try:
        loop.run_until_complete(main())
    except BaseException as error:
        server.error = error
        if server.has_begun.is_set():
            logger.exception("the endpoint has failed")
    finally:
        _end(loop)
        server.has_begun.set()


def _end(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel what runs in a loop, such as requests that did not end in time, and close it."""

    async def cancel_all() -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    loop.run_until_complete(cancel_all())
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


def _close(server: _Server, thread: threading.Thread) -> None:
    server.should_exit = True
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join()


def check_host(host: str, options: Options) -> None:
    """Check that others can reach an address only with a key.

    Raises:
        UsageError: They can without one.
    """
    if options.api_key is None and not _is_loopback(host):
        raise UsageError(
            f"host={host!r} can be reached by others, and there is no api_key; give one, such as "
            "secrets.token_urlsafe(), or listen on 127.0.0.1"
        )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
