"""Waiting for the constructors of a group: all of them, or the first that fails."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bandmaster.backends import Crew, Launch
from bandmaster.errors import ConstructorError, RemoteError
from bandmaster.future import Future

__all__ = ["await_construction"]


def await_construction(crew: Crew, tickets: Mapping[int, Any], launch: Launch) -> None:
    """Wait until every worker is constructed.

    Raises:
        ConstructorError: A constructor raised.
        WorkerDied: A process ended before its constructor did.
    """
    try:
        Future(crew, tickets, dict, f"{launch.cls.__name__}.__init__", launch.mesh).result()
    except RemoteError as error:
        raise ConstructorError(error.method, error.failures, error.coordinates) from error.__cause__
