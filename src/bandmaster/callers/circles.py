"""Finds calls of several workers that wait for each other: each runs alone, so that none of the others can begin.

::

    a worker ── OpenChains: this call has waited for a second ──► Circles, of the controller
             ◄── the calls that wait for each other ─────────────┘
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from bandmaster.calls.future import Future
from bandmaster.calls.progress import progress
from bandmaster.contract import Workers
from bandmaster.errors import BandmasterError
from bandmaster.worker_process.call_path import Process, Step

if TYPE_CHECKING:
    from bandmaster.requests.request import Request

PATIENCE_S = 1.0  # after which a call is looked at; and a circle must have been there for as long


class Wait(NamedTuple):
    """A call that waits for another one.

    Attributes:
        alone: The calls that wait for it, and that run alone.
        method: The call that is waited for, for messages.
        group: The key of its group.
        ranks: The ranks that it goes to; none as long as its replica is not chosen.
    """

    alone: Sequence[Step]
    method: str
    group: str
    ranks: Sequence[int]


class OpenChains:
    """The open calls of this process that calls wait for which run alone; a watch of the thread of callbacks.

    Attributes:
        workers: The controller, whose answers are waited for.
        due: The moment of the next look.

    Args:
        workers: The controller.
        ask: Tells the controller of a `Wait`; the future's value is the text about the circle that it closes.
    """

    def __init__(self, workers: Workers, ask: Callable[[Wait], Future[str]]) -> None:
        self.workers: Workers = workers
        self._ask = ask
        self.due: float | None = None
        self._new: deque[tuple[weakref.ref[Request], Wait, float]] = deque()
        self._asked: dict[Request, Future[str]] = {}
        self._lock = threading.Lock()
        self._is_watched = False

    def add(self, request: Request, wait: Wait) -> None:
        """Look at a call that is about to be sent, once it has waited for a while."""
        now = time.monotonic()
        with self._lock:
            self._new.append((weakref.ref(request), wait, now + PATIENCE_S))
            was_watched, self._is_watched = self._is_watched, True
        if not was_watched:
            self.due = now + PATIENCE_S
            progress.add(self)

    def look(self) -> bool:
        """Tell the controller of calls that have waited, and end those that wait for themselves."""
        now = time.monotonic()
        while self._new and self._new[0][2] <= now:
            made, wait, _ = self._new.popleft()
            request = made()
            if request is None or request.is_done:
                continue
            if request.tickets:
                self._asked[request] = self._ask(wait._replace(ranks=wait.ranks or request.ranks))
            else:  # it waits for a place, or for its rows
                self._new.append((made, wait, now + PATIENCE_S))
        for request, told in list(self._asked.items()):
            if request.is_done or told.done():
                del self._asked[request]
                if request.is_done:
                    told.cancel()
                elif told.exception() is None:
                    workers: Any = request.workers
                    workers.give_up(request.tickets, told.result())
        self.due = now + PATIENCE_S
        with self._lock:
            self._is_watched = bool(self._new or self._asked)
            return not self._is_watched


class Circles:
    """The calls of workers that have waited for a while, in the controller; on its event loop.

    Args:
        processes_of: Returns the processes of the ranks of a group, by its key; raises if it was closed.
    """

    def __init__(self, processes_of: Callable[[str], Mapping[int, Process]]) -> None:
        self._processes_of = processes_of
        self._numbers = itertools.count()
        self._waits: dict[int, Wait] = {}

    async def closed_by(self, wait: Wait) -> str:
        """Wait until a call is in a circle of which it is the last, for long enough; returns the text about it."""
        number, before = next(self._numbers), None
        self._waits[number] = wait
        try:
            while True:
                found = self._circle(number)
                if found is not None and found == before:
                    return _words([self._waits[one] for one in found])
                before = found
                await asyncio.sleep(PATIENCE_S)
        finally:
            del self._waits[number]

    def _circle(self, number: int) -> list[int] | None:
        """The numbers of the calls of a circle that begins with one, which was told of last; None if there is none."""
        behind = {number: [number]}  # the calls on the way to each
        todo = deque([number])
        while todo:
            one = todo.popleft()
            targets = self._targets(self._waits[one])
            for other, wait in self._waits.items():
                if targets.isdisjoint(step.process for step in wait.alone):
                    continue
                if other == number:
                    return behind[one]
                if other < number and other not in behind:
                    behind[other] = [*behind[one], other]
                    todo.append(other)
        return None

    def _targets(self, wait: Wait) -> set[Process]:
        """The processes of the ranks that a call was sent to."""
        try:
            processes = self._processes_of(wait.group)
        except BandmasterError:  # it is closed, and the call fails
            return set()
        return {processes[rank] for rank in wait.ranks}


def _words(circle: Sequence[Wait]) -> str:
    chain = "; ".join(f"{wait.alone[-1].words} waits for {wait.method}" for wait in circle)
    return (
        f"{circle[0].method} would wait for ever, as calls that run alone wait for each other: {chain}; make them one "
        "after the other, or async requests"
    )
