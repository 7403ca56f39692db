"""Waiting for the constructors of a group: all of them, or the first that fails."""

from __future__ import annotations

from typing import Any

from bandmaster.backends import Crew, Launch
from bandmaster.errors import ConstructorError, RemoteError
from bandmaster.future import CallInfo, Future
from bandmaster.options import CallOptions

__all__ = ["await_construction", "construction"]


def await_construction(crew: Crew, tickets: dict[int, Any], launch: Launch) -> None:
    """Wait until every worker is constructed. Once one has failed, the others are let go of.

    Raises:
        ConstructorError: A constructor raised.
        WorkerDied: A process ended before its constructor did.
        CallTimeout: They did not end in time.
    """
    call = construction(launch)
    try:
        Future(crew, tickets, dict, call).result()
    except RemoteError as error:
        raise ConstructorError(error.method, error.failures, error.coordinates, error.group) from error.__cause__


def construction(launch: Launch) -> CallInfo:
    """The construction of a group as a call. Nobody waits for constructors that others have failed to meet."""
    options = CallOptions(launch.start_timeout_s, grace=0.0)
    return CallInfo(f"{launch.cls.__name__}.__init__", launch.mesh, launch.group, options)
