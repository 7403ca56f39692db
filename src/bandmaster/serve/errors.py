"""Errors in OpenAI's form, and which error of a request to an engine becomes which of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from bandmaster import CallCancelled, CallTimeout, ClosedError, RemoteError, UsageError, WorkerDied
from bandmaster.rl import PromptTooLong
from bandmaster.rl.engine_weights.target import EngineDied, NotUsable

logger = logging.getLogger(__name__)
INVALID, AUTHENTICATION, LIMIT, SERVER = (
    "invalid_request_error",
    "authentication_error",
    "rate_limit_error",
    "api_error",
)


class APIError(Exception):
    """An error that a client gets.

    Attributes:
        status: The HTTP status.
        kind: OpenAI's ``type``.
        param: The field of the request that is wrong.
        code: OpenAI's ``code``.
        headers: Further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code, self.headers = status, kind, param, code, headers

    def body(self) -> dict[str, Any]:
        """The error as OpenAI's JSON."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The error as a response."""
        return JSONResponse(self.body(), self.status, self.headers)


class HungUp(Exception):
    """The client has closed the connection, so that nobody reads an answer."""


def invalid(message: str, param: str | None = None, code: str | None = None) -> APIError:
    """The error of a request that is wrong itself: status 400."""
    return APIError(400, message, INVALID, param, code)


def unavailable(message: str) -> APIError:
    """The error of a request that no replica can answer now: status 503."""
    return APIError(503, message, SERVER, code="no_replica", headers={"Retry-After": "1"})


def too_late(timeout_s: float) -> APIError:
    """The error of a request that took longer than it may: status 504."""
    return APIError(
        504, f"the request was not answered within {timeout_s:g} s and was given up", SERVER, code="timeout"
    )


def api_error(error: BaseException, prompt: str = "messages") -> APIError:
    """The error that a client gets for one of the engines. Causes that are not its own are logged.

    Args:
        error: That of the engines.
        prompt: The field of the request that has its prompt.
    """
    if isinstance(error, APIError):
        return error
    cause = error.__cause__ if isinstance(error, RemoteError) else None
    if isinstance(cause, PromptTooLong):
        return invalid(str(cause), prompt, "context_length_exceeded")
    if isinstance(cause, NotUsable | EngineDied):
        logger.warning("a replica is not usable: %s", error)
        what = "has lost its weights" if isinstance(cause, NotUsable) else "has died"
        return unavailable(f"the engine that had the request {what}; send it again")
    if isinstance(cause, UsageError) or (isinstance(error, UsageError) and not isinstance(error, ClosedError)):
        return invalid(str(cause or error).replace(" of Sampling", ""))
    if isinstance(error, CallTimeout):
        return APIError(504, "no replica has answered in time", SERVER, code="timeout")
    if isinstance(error, WorkerDied):
        logger.warning("a replica died: %s", error)
        return unavailable("the replica that had the request has died; send it again")
    if isinstance(error, ClosedError | CallCancelled | asyncio.CancelledError):
        return unavailable("the engines are being closed, or their requests cancelled")
    logger.error("a request failed", exc_info=error)
    return APIError(
        500, f"the engine failed: {type(cause or error).__name__}; its log says why", SERVER, code="engine_failed"
    )
