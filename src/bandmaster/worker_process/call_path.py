"""The calls that wait for the present one, as it travels from worker to worker, so that none waits for itself.

::

    Agent.run, alone on rank 0 ──► Rollout.chat on rank 1 ──► Agent.ping on rank 0: would wait until Agent.run has ended
"""

from __future__ import annotations

import os
from contextvars import ContextVar
from typing import NamedTuple, Protocol

PATH = "bandmaster.path"  # the keyword by which the calls of workers carry it


class Step(NamedTuple):
    """A call that waits for another one.

    Attributes:
        pid: The process of its worker.
        words: The call, for messages.
        is_alone: Whether nothing else begins on that worker until it has ended.
    """

    pid: int
    words: str
    is_alone: bool


class RunningRequest:
    """A request that runs in a task.

    Attributes:
        method: Name of its method.
        is_over: Whether it has ended, so that nothing waits for what the task has left behind.
    """

    def __init__(self, method: str) -> None:
        self.method, self.is_over = method, False


class RunsCalls(Protocol):
    """The executor of this process."""

    def words(self, method: str | None = None) -> str:
        """A method of the worker with its rank; by default that which runs alone, or ""."""


request: ContextVar[RunningRequest | None] = ContextVar("request", default=None)
earlier: ContextVar[tuple[Step, ...]] = ContextVar("earlier", default=())


class _Here:
    executor: RunsCalls | None = None


here = _Here()


def path_of_this_call() -> tuple[Step, ...]:
    """The calls that wait for what the calling code does, the first one first; empty if none does."""
    running, executor = request.get(), here.executor
    if executor is None or (running is not None and running.is_over):
        return ()
    words = executor.words(None if running is None else running.method)
    return (*earlier.get(), Step(os.getpid(), words, running is None)) if words else ()


def conflict(path: tuple[Step, ...], pid: int, is_alone: bool) -> Step | None:
    """The step of a path that a call of a worker would wait for.

    Args:
        path: The path of the call.
        pid: The process of the worker.
        is_alone: Whether the call begins when nothing else runs there.
    """
    return next((step for step in path if step.pid == pid and (step.is_alone or is_alone)), None)


def refusal(path: tuple[Step, ...], step: Step, method: str) -> str:
    """The words of the error for a call that would wait for one of the calls that wait for it."""
    chain = " waits for ".join([each.words for each in path[path.index(step) :]])
    return (
        f"{method} was not sent, as it would wait for ever: {chain}, which calls {method} on the same worker, where it "
        f"cannot begin before {step.words} has ended; call it when that has returned, or make both async requests"
    )
