"""The calls that wait for the present one, as it travels from worker to worker, so that none waits for itself.

::

    Agent.run, alone on rank 0 ──► Rollout.chat on rank 1 ──► Agent.ping on rank 0: would wait until Agent.run has ended
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextvars import ContextVar
from socket import gethostname
from threading import get_ident, main_thread
from typing import NamedTuple

PATH = "bandmaster.path"  # the keyword by which the calls of workers carry it


Process = tuple[str, int]  # the name of its host, and its number there


class Step(NamedTuple):
    """A call that waits for another one.

    Attributes:
        process: The process of its worker.
        words: The call, for messages.
        is_alone: Whether nothing else begins on that worker until it has ended.
    """

    process: Process
    words: str
    is_alone: bool


class RunningCall:
    """An async call that runs in a task.

    Attributes:
        request: The method, if it is a request; "" if it runs alone.
        is_over: Whether it has ended, so that nothing waits for what its task has left behind.
    """

    def __init__(self, request: str = "") -> None:
        self.request, self.is_over = request, False


running: ContextVar[RunningCall | None] = ContextVar("running", default=None)  # of tasks
earlier: ContextVar[tuple[Step, ...]] = ContextVar("earlier", default=())


class _Here:
    """The state of this process that calls ask for.

    Attributes:
        words: Returns a method of its worker with the rank, or for "" that which runs alone; "" if there is none.
        told_of_calls: Tells which calls to other groups it waits for; see `bandmaster.callers.called`.
    """

    words: Callable[[str], str] = staticmethod(lambda method: "")
    told_of_calls: Callable[[], str] = str


here = _Here()


def path_of_this_call() -> tuple[Step, ...]:
    """The calls that wait for what the calling code does, the first one first; empty if none does.

    Threads that a method has started are not known to be waited for.
    """
    call = running.get()
    request = call.request if call is not None and not call.is_over else ""
    is_alone = not request and (get_ident() == main_thread().ident or (call is not None and not call.is_over))
    words = here.words(request) if request or is_alone else ""
    return (*earlier.get(), Step((gethostname(), os.getpid()), words, is_alone)) if words else ()


def conflict(path: tuple[Step, ...], process: Process, is_alone: bool) -> Step | None:
    """The step of a path that a call of a worker would wait for.

    Args:
        path: The path of the call.
        process: The process of the worker.
        is_alone: Whether the call begins when nothing else runs there.
    """
    return next((step for step in path if step.process == process and (step.is_alone or is_alone)), None)


def refusal(path: tuple[Step, ...], step: Step, method: str) -> str:
    """The words of the error for a call that may wait for one of the calls that wait for it."""
    chain = " waits for ".join([each.words for each in path[path.index(step) :]])
    return (
        f"{method} was not sent, as it may wait for ever: {chain}, which calls {method}, which cannot begin before "
        f"{step.words} has ended; call it when that has returned, or make both async requests"
    )
