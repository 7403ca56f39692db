"""What all backends do to construct workers: ask them, and wait for all or the first that fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from bandmaster.backends import Crew, Launch
from bandmaster.calls import CallInfo, GroupCall
from bandmaster.errors import CallTimeout, ConstructorError, RemoteError
from bandmaster.future import Future
from bandmaster.options import CallOptions

__all__ = ["Mortal", "answers", "await_construction", "replacement", "start_timeout"]

_START_ADVICE = (
    "the workers that were starting have been ended; give them longer with start_timeout_s, or find out what takes "
    "them so long"
)


class Mortal(Protocol):
    """A crew whose ranks can be ended one by one."""

    def kill(self, ranks: Sequence[int], why: str) -> None:
        """End ranks, whatever they do."""

    def bury(self, rank: int) -> None:
        """Note the death of a rank that was ended."""


def answers(crew: Crew, tickets: dict[int, Any], launch: Launch) -> dict[int, Any]:
    """Wait for what ranks answer while the group is made, as long as its construction may take."""
    # Nobody waits for constructors that others have failed to meet.
    options = CallOptions(launch.start_timeout_s, grace=0.0)
    info = CallInfo(_constructor(launch), launch.mesh, launch.group, options)
    try:
        return Future(GroupCall(crew, tickets, info), dict).result()
    except CallTimeout as error:
        raise error.but(_START_ADVICE) from None


def start_timeout(launch: Launch, ranks: Sequence[int], why: str) -> CallTimeout:
    """The error of ranks whose processes were not started in time."""
    assert launch.start_timeout_s is not None, "only a deadline ends the wait early"
    return CallTimeout(_constructor(launch), tuple(ranks), launch.start_timeout_s, None, f"{why}; {_START_ADVICE}")


def _constructor(launch: Launch) -> str:
    return f"{launch.cls.__name__}.__init__"


def await_construction(crew: Crew, tickets: dict[int, Any], launch: Launch) -> None:
    """Wait until every worker is constructed. Once one has failed, the others are let go of.

    Raises:
        ConstructorError: A constructor raised.
        WorkerDied: A process ended before its constructor did.
        CallTimeout: They did not end in time.
    """
    try:
        answers(crew, tickets, launch)
    except RemoteError as error:
        raise ConstructorError(error.method, error.failures, error.coordinates, error.group) from error.__cause__


@contextlib.contextmanager
def replacement(crew: Mortal, rank: int) -> Iterator[None]:
    """End a rank; what takes its place is ended too if it cannot be constructed."""
    crew.kill([rank], "ended by the controller, to be replaced")
    crew.bury(rank)
    try:
        yield
    except BaseException:
        crew.kill([rank], "ended by the controller, as it could not be constructed")
        crew.bury(rank)
        raise
