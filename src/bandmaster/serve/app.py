"""The application: which path is answered by what, with the limits of an endpoint around it.

::

    POST /v1/chat/completions ─┐
    POST /v1/completions ──────┴─ Answers: key, places, body ── fields ── Service ── JSON, or events as they come
    GET  /v1/models, /health, /metrics
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager, aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from bandmaster.serve import limits
from bandmaster.serve.errors import LIMIT, APIError, HungUp, api_error, invalid, unavailable
from bandmaster.serve.fields import Asked, chat_of, check_model, completion_of
from bandmaster.serve.options import Options
from bandmaster.serve.responses import DONE, Form, as_json, event
from bandmaster.serve.service import Service

T = TypeVar("T")
SESSION = "X-Session-ID"  # the header that vLLM's router reads as well
MOST_NAME = 256  # characters of it
NOT_ANSWERED = 499  # in the metrics: the client hung up


def app(group: Any, **options: Any) -> Starlette:
    """Make an ASGI application that answers OpenAI's API by a group of engines, for a server of your own.

    It can be mounted in another application. Unlike `bandmaster.serve.Endpoint`, it does not look after connections:
    have your server limit the time for headers.

    Args:
        group: A group of `bandmaster.rl.Engine`s, in the controller or as a worker has it.
        **options: As for `bandmaster.serve.Options`.

    Raises:
        UsageError: An option is invalid, or the group is not one of engines.
    """
    return application(Service(group, Options(**options)))


def application(service: Service) -> Starlette:
    """The application of a service, which it starts."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await service.start()
        yield

    routes = [
        Route("/v1/chat/completions", Answers(service, "chat", chat_of), methods=["POST"]),
        Route("/v1/completions", Answers(service, "completions", completion_of), methods=["POST"]),
        Route("/v1/models", _guarded(service, _models), methods=["GET"]),
        Route("/v1/models/{name:path}", _guarded(service, _model), methods=["GET"]),
        Route("/health", _guarded(service, _health, is_open=True), methods=["GET"]),
        Route("/metrics", _guarded(service, _metrics), methods=["GET"]),
    ]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _http_error})


class Answers:
    """Answers the requests of one route. An ASGI application.

    Args:
        service: Answers them.
        route: Its name in the metrics.
        parse: Makes an `Asked` of a body.
    """

    def __init__(self, service: Service, route: str, parse: Callable[..., Asked]) -> None:
        self._service, self._options, self._metrics = service, service.options, service.metrics
        self._route, self._parse, self._is_chat = route, parse, route == "chat"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request, start = Request(scope, receive), time.monotonic()
        reply = Reply(scope, receive, send, start, self._options)
        try:
            limits.check_key(request, self._options.api_key)
            with self._place():
                await self._answer(request, reply)
        except HungUp:
            self._metrics.hang_ups.inc()
            reply.status = NOT_ANSWERED
            limits.abort(scope)
        except asyncio.CancelledError:  # the endpoint is being closed; this task ends here, as it should
            await reply.fail(unavailable("the endpoint is being closed"))
        except Exception as error:
            await reply.fail(api_error(error, "messages" if self._is_chat else "prompt"))
        finally:
            self._metrics.requests.labels(self._route, str(reply.status)).inc()
            self._metrics.seconds.labels(self._route).observe(time.monotonic() - start)

    def _place(self) -> AbstractContextManager[None]:
        if self._service.n_open >= self._options.max_open:
            raise APIError(
                429,
                f"{self._service.n_open} requests are open, the most that this endpoint takes; try again later",
                LIMIT,
                code="too_many_requests",
                headers={"Retry-After": "1"},
            )
        return self._service.place()

    async def _answer(self, request: Request, reply: Reply) -> None:
        body = await limits.json_body(request, self._options)
        if not self._service.has_started:  # no server runs the lifespan of an application that is mounted in another
            await reply.until_end(self._service.start())
        check_model(body.get("model"), self._service.model)
        facts = self._service.facts
        asked = self._parse(body, self._options.defaults, facts.max_model_len, self._options.is_recorded)
        asked = _with_session(asked, request)
        form = Form(asked, self._service.model, self._is_chat)
        if asked.is_stream:
            await reply.until_end(self._stream(asked, form, reply))
            return
        made = await reply.until_end(self._service.whole(asked, form))
        await reply.whole(as_json(made))

    async def _stream(self, asked: Asked, form: Form, reply: Reply) -> None:
        async with aclosing(self._service.events(asked, form)) as events:
            async for made in events:
                if not reply.has_begun:
                    self._metrics.first.observe(time.monotonic() - reply.start)
                await reply.event(event(made))
        await reply.event(DONE, is_last=True)


class Reply:
    """The response to one request, whole or as a stream.

    Args:
        scope: Of the request.
        receive: Of the request.
        send: Of the request.
        start: When it came.
        options: Those of the endpoint.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, start: float, options: Options) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self.start, self._options = start, options
        self.status, self.has_begun = 200, False

    async def until_end(self, work: Coroutine[Any, Any, T]) -> T:
        """The value of a coroutine, which is cancelled when the client hangs up or it is too late.

        Raises:
            HungUp: The client has closed the connection, or does not take the answer.
            APIError: It is too late.
        """
        left = self._options.timeout - (time.monotonic() - self.start)
        return await limits.unless_hung_up(work, self._receive, left, self._options.timeout)

    async def whole(self, body: bytes) -> None:
        """Send a whole response.

        Raises:
            HungUp: The client does not take it.
        """
        response = Response(body, media_type="application/json")
        await self._unless_stalled(response(self._scope, self._receive, self._send))

    async def event(self, data: bytes, is_last: bool = False) -> None:
        """Send a part of a stream.

        Raises:
            HungUp: The client does not take it, or has closed the connection.
        """
        if limits.is_closed(self._scope):
            raise HungUp
        if not self.has_begun:
            self.has_begun = True
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            await self._unless_stalled(self._send({"type": "http.response.start", "status": 200, "headers": headers}))
        message = {"type": "http.response.body", "body": data, "more_body": not is_last}
        await self._unless_stalled(self._send(message))

    async def fail(self, error: APIError) -> None:
        """Send an error: as a response, or as the last event of a stream."""
        self.status = error.status
        try:
            if self.has_begun:
                await self.event(event(error.body()), is_last=True)
            else:
                await self._unless_stalled(error.response()(self._scope, self._receive, self._send))
        except HungUp:
            limits.abort(self._scope)

    async def _unless_stalled(self, sending: Awaitable[None]) -> None:
        await limits.unless_stalled(sending, self._scope, self._options.stall_timeout)


def _with_session(asked: Asked, request: Request) -> Asked:
    header = request.headers.get(SESSION)
    session, field = (asked.session, asked.session_field) if header is None else (_utf8(header), SESSION)
    if session is not None and not 0 < len(session) <= MOST_NAME:
        raise invalid(f"{field} must be a text of 1 to {MOST_NAME} characters, got {len(session)}", field)
    return asked if session == asked.session else replace(asked, session=session)


def _utf8(header: str) -> str:
    """A header, which starlette has decoded as latin-1, decoded as UTF-8 if it is that."""
    try:
        return header.encode("latin-1").decode()
    except UnicodeDecodeError:
        return header


def _guarded(
    service: Service, handler: Callable[[Service, Request], Awaitable[Response]], is_open: bool = False
) -> Callable[[Request], Awaitable[Response]]:
    """A handler for those who have the key, or for all."""

    async def guarded(request: Request) -> Response:
        try:
            if not is_open:
                limits.check_key(request, service.options.api_key)
            return await handler(service, request)
        except Exception as error:
            return api_error(error).response()

    return guarded


def _described(service: Service) -> dict[str, Any]:
    return {
        "id": service.model,
        "object": "model",
        "created": service.created,
        "owned_by": "bandmaster",
        "max_model_len": service.facts.max_model_len,
    }


async def _models(service: Service, _: Request) -> Response:
    await service.start()
    return JSONResponse({"object": "list", "data": [_described(service)]})


async def _model(service: Service, request: Request) -> Response:
    await service.start()
    check_model(request.path_params["name"], service.model)
    return JSONResponse(_described(service))


async def _health(service: Service, _: Request) -> Response:
    replicas = await service.replicas()
    lives = any(replica.state not in ("unusable", "dead") for replica in replicas)
    states = [{"replica": number, **replica._asdict()} for number, replica in enumerate(replicas)]
    return JSONResponse({"status": "ok" if lives else "dead", "replicas": states}, 200 if lives else 503)


async def _metrics(service: Service, _: Request) -> Response:
    return Response(service.metrics.text(await service.figures()), media_type=CONTENT_TYPE_LATEST)


async def _http_error(request: Request, error: Exception) -> Response:
    """The response to an unknown path, or a method that a path does not have, which starlette refuses."""
    assert isinstance(error, HTTPException), "it is registered for these"
    what = f"{request.method} {request.url.path}"
    return APIError(error.status_code, f"{what}: {error.detail}", code="not_found", headers=error.headers).response()
