"""Finds calls of several workers that wait for each other: each runs alone, so that none of the others can begin.

::

    a worker ── OpenChains: this call has been waited for a second ──► Circles, of the controller
             ◄── the calls that wait for each other ──────────────────┘
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from bandmaster.calls.future import Future
from bandmaster.calls.progress import progress
from bandmaster.contract import Workers
from bandmaster.errors import BandmasterError, UsageError
from bandmaster.worker_process.call_path import Process, Step, path_of_this_call

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
    """The calls that those of this process wait for which run alone; a watch of the thread of callbacks.

    Attributes:
        workers: The controller, whose answers are waited for.
        due: The moment of the next look; None as long as there is nothing to look at.

    Args:
        workers: The controller.
        ask: Tells the controller of a `Wait`; the future's value is the text about the circle that it closes.
    """

    def __init__(self, workers: Workers, ask: Callable[[Wait], Future[str]]) -> None:
        self.workers: Workers = workers
        self._ask = ask
        self.due: float | None = None
        self._waits: dict[Waiting, tuple[Sequence[int], Future[str] | None]] = {}  # and what was asked

    def begin(self, waiting: Waiting) -> None:
        """Look at a call that is waited for from here on, once that takes long."""
        self._waits[waiting] = (), None
        if self.due is None:
            try:
                self.due = time.monotonic() + PATIENCE_S
                progress.add(self)
            except BaseException:
                self.due = None
                raise

    def end(self, waiting: Waiting) -> None:
        """Look no longer at a call, which has ended, or is not waited for any more."""
        _, told = self._waits.pop(waiting, ((), None))
        if told is not None:
            told.cancel()

    def look(self) -> bool:
        """Tell the controller of calls that are waited for long, and end those that wait for themselves."""
        now = time.monotonic()
        for waiting, (told_of, told) in list(self._waits.items()):
            request, ranks = waiting.request, tuple(waiting.wait.ranks or waiting.request.ranks)
            if request.is_done:
                self.end(waiting)
            elif not ranks or waiting.since + PATIENCE_S > now:  # without ranks, it waits for a place, or for rows
                continue
            elif ranks != told_of:  # it may have been sent to others before, which have died
                if told is not None:
                    told.cancel()
                with suppress(BandmasterError):  # there is no descriptor, for example; it is asked at the next look
                    self._waits[waiting] = ranks, self._ask(waiting.wait._replace(ranks=ranks))
                if waiting.is_over:  # since that was looked at
                    self.end(waiting)
            elif told is not None and told.done() and told.exception() is None:
                request.expire(UsageError(told.result()))
                workers: Any = request.workers
                workers.wake()
        self.due = None  # first: `begin` adds this again from here on
        if self._waits:
            self.due = now + PATIENCE_S
        return self.due is None


class Waiting:
    """A block that waits for a call, which is looked at meanwhile, and so are the calls of all ranks that it is behind.

    Attributes:
        wait: What the controller is told of the call.
        request: The call.
        since: When the wait has begun.
        is_over: Whether it has ended.
    """

    def __init__(self, chains: OpenChains, wait: Wait, request: Request) -> None:
        if path := path_of_this_call():  # it may have been made by a call that has ended
            wait = wait._replace(alone=[step for step in path if step.is_alone])
        self._chains, self.wait, self.request = chains, wait, request
        self.since, self.is_over = time.monotonic(), False
        self._before: list[Waiting] = []

    def __enter__(self) -> None:
        self._chains.begin(self)
        if not self.wait.ranks:  # else it waits for all ranks itself, as those before it do
            before = [future._call.waiting(future._call) for future in self.request.parents]
            self._before = [one for one in before if isinstance(one, Waiting)]
        for one in self._before:  # they are waited for step by step, and looked at as a whole
            self._chains.begin(one)

    def __exit__(self, *_: object) -> None:
        for one in (self, *self._before):
            one.is_over = True
            self._chains.end(one)


class Circles:
    """The calls of workers that have waited for a while, in the controller; on its event loop.

    Args:
        targets: Returns the processes of the ranks that have not replied to a call; raises if its group was closed.
    """

    def __init__(self, targets: Callable[[Wait], Set[Process]]) -> None:
        self._targets = targets
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
            try:
                targets = self._targets(self._waits[one])
            except BandmasterError:  # its group is closed, and the call fails
                continue
            for other, wait in self._waits.items():
                if targets.isdisjoint(step.process for step in wait.alone):
                    continue
                if other == number:
                    return behind[one]
                if other < number and other not in behind:
                    behind[other] = [*behind[one], other]
                    todo.append(other)
        return None


def _words(circle: Sequence[Wait]) -> str:
    chain = "; ".join(f"{wait.alone[-1].words} waits for {wait.method}" for wait in circle)
    return (
        f"{circle[0].method} would wait for ever, as calls that run alone wait for each other: {chain}; make them one "
        "after the other, or async requests"
    )
