"""The workers of the backend contract, in a module of their own because worker processes import it without pytest."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from bandmaster.plan.transfer import Broadcast, Dispatch, Execute, Gather, TransferProtocol
from bandmaster.registration import register
from bandmaster.worker import Worker, report


class Echo(Worker):
    """Returns its arguments."""

    @register(Dispatch.DP_PROTO)
    def over_dp(self, batch: Any) -> Any:
        """Return the rows of this rank, split over dp."""
        return batch

    @register(Dispatch.THREE_D_PROTO)
    def over_3d(self, batch: Any) -> Any:
        """Return the rows of this rank, on a mesh with pp, dp and tp."""
        return batch

    @register(Dispatch.DP_PROTO)
    def who_has(self, rows: list[Any]) -> list[Any]:
        """Return every row with the rank that received it."""
        return [(row, self.rank) for row in rows]


class Keeps(Worker):
    """Writes to its arguments, and keeps them."""

    @register(Dispatch.ONE_TO_ALL)
    def overwrite(self, array: Any, items: list[str]) -> float:
        """Write to both arguments, and return the sum of the array before that."""
        total = float(array.sum())
        array += 1 + self.rank
        items.append("a worker was here")
        return total

    @register(Dispatch.DP_PROTO)
    def overwrite_rows(self, rows: Any) -> None:
        """Write to the rows of this rank."""
        rows[:] = -1

    @register(Dispatch.ONE_TO_ALL)
    def keep(self, array: Any) -> None:
        """Keep the array without a copy."""
        self.kept = array

    @register(Dispatch.ONE_TO_ALL)
    def show(self) -> Any:
        """Return the kept array without a copy."""
        return self.kept


class Asked(Worker):
    """Answers requests."""

    def __init__(self) -> None:
        self.inside, self.opened, self.n_cancelled = 0, asyncio.Event(), 0

    @register(Dispatch.REQUEST, concurrency=8)
    async def meet(self, n: int, value: Any) -> tuple[int, Any]:
        """Return the rank and the value once n requests, those before included, have come here."""
        self.inside += 1
        while self.inside < n:
            await asyncio.sleep(0)
        return self.rank, value

    @register(Dispatch.REQUEST, concurrency=8)
    async def add(self, rows: dict[str, Any]) -> dict[str, Any]:
        """Add 1 in place to the column ``wide`` of some rows."""
        rows["wide"] += 1
        return rows

    @register(Dispatch.REQUEST, concurrency=8)
    async def hold(self) -> int:
        """Return the rank once `open` was called."""
        try:
            await self.opened.wait()
        except asyncio.CancelledError:
            self.n_cancelled += 1
            raise
        return self.rank

    @register(Dispatch.REQUEST, concurrency=8)
    async def repeat(self, value: Any, n: int) -> AsyncIterator[Any]:
        """Yield a value n times."""
        try:
            for _ in range(n):
                yield value
        finally:
            self.n_cancelled += 1

    @register(Dispatch.REQUEST, concurrency=8)
    async def open(self) -> None:
        """Let the requests of `hold` go on."""
        self.opened.set()

    @register(Dispatch.REQUEST, concurrency=8)
    async def upgrade(self, version: int) -> None:
        """Report a version."""
        report(self, version=version)

    @register(Dispatch.ONE_TO_ALL)
    def upgrade_all(self, version: int) -> None:
        """Report a version."""
        report(self, version=version)

    @register(Dispatch.REQUEST, concurrency=8)
    async def end(self) -> None:
        """End the process."""
        os._exit(3)

    @register(Dispatch.ONE_TO_ALL)
    def count(self) -> tuple[int, int]:
        """Return how many requests have come to `meet`, and how many of `hold` were cancelled or of `repeat` ended."""
        counted, self.inside, self.n_cancelled = (self.inside, self.n_cancelled), 0, 0
        return counted


class Counted:
    """Counts how often it is pickled in this process."""

    n_pickled = 0

    def __reduce__(self) -> tuple[object, ...]:
        Counted.n_pickled += 1
        return Counted, ()


class Notes(Worker):
    """Records its calls in the order in which they run."""

    def __init__(self) -> None:
        self.entries: list[int] = []

    @register(Dispatch.ONE_TO_ALL)
    def note(self, entry: int) -> None:
        """Record a small call."""
        self.entries.append(entry)

    @register(Dispatch.ONE_TO_ALL)
    def note_with(self, entry: int, ballast: Any) -> None:
        """Record a call whose large argument may travel in another way than small ones."""
        self.entries.append(entry)

    @register(Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def note_on_zero(self, entry: int) -> None:
        """Record a call on rank 0 alone."""
        self.entries.append(entry)

    @register(Dispatch.ONE_TO_ALL)
    async def note_later(self, entry: int) -> None:
        """Record an async call."""
        await asyncio.sleep(0)
        self.entries.append(entry)

    @register(Dispatch.ONE_TO_ALL)
    def read(self) -> list[int]:
        """Return all entries."""
        return self.entries


class Behaves(Worker):
    """Fails, waits or computes, depending on the arguments."""

    stopped_at = 0.0  # by `time.time`, when `wait_on` has ended here

    @register(Dispatch.ONE_TO_ALL)
    def echo(self, value: Any) -> Any:
        """Return the argument."""
        return value

    @register(Dispatch.ONE_TO_ALL)
    def knows(self, value: Any) -> bool:
        """Whether the broadcast argument is a `Counted`."""
        return isinstance(value, Counted)

    @register(Dispatch.ALL_TO_ALL)
    def knows_its_own(self, value: Any) -> bool:
        """Whether this rank's own argument is a `Counted`."""
        return isinstance(value, Counted)

    @register(Dispatch.DP_PROTO, arguments={"table": Broadcast()})
    def know(self, rows: list[Any], table: Any) -> list[bool]:
        """For each row of this rank, whether the row and the broadcast table are `Counted`."""
        return [isinstance(row, Counted) and isinstance(table, Counted) for row in rows]

    @register(TransferProtocol(Broadcast(), Gather("dp", tp=0)))
    def only_first_of_tp(self) -> Any:
        """Return a value that can be pickled on the collected ranks (tp = 0), and a generator on the others."""
        return self.rank if self.coordinates["tp"] == 0 else (n for n in range(3))

    @register(Dispatch.ONE_TO_ALL)
    def wait_on(self, ranks: list[int], raising: list[int]) -> int:
        """Wait forever on some ranks, raise on others, and return on the rest."""
        try:
            if self.rank in raising:
                raise ValueError("the first cause")
            while self.rank in ranks:
                time.sleep(0.01)
            return self.rank
        finally:
            self.stopped_at = time.time()

    @register(Dispatch.ONE_TO_ALL)
    def times(self) -> tuple[float, float]:
        """Return the times when `wait_on` ended on this rank and when this call began, both by `time.time`."""
        return self.stopped_at, time.time()

    @register(Dispatch.ONE_TO_ALL)
    def sum_of(self, array: Any) -> float:
        """Return the sum of an array."""
        return float(np.sum(array))

    @register(Dispatch.ONE_TO_ALL)
    def process(self) -> int:
        """Return the pid of the worker's process."""
        return os.getpid()


class FailsToStart(Worker):
    """Raises in the constructor of one rank, while the constructors of the others wait."""

    def __init__(self, rank: int, are_waiting: bool) -> None:
        if self.rank == rank:
            raise KeyError("no such weights")
        while are_waiting:
            time.sleep(0.01)


class Restarts(Worker):
    """A counter that can be restarted and replaced."""

    def __init__(self, start: int) -> None:
        self.count = start
        self.told: list[Any] = []

    @register(Dispatch.ONE_TO_ALL)
    def add(self, n: int) -> int:
        """Add to the count, and return it."""
        self.count += n
        return self.count

    @register(Dispatch.ONE_TO_ALL)
    def heard(self) -> list[Any]:
        """Return the arguments of the calls of `on_restart` and `on_replace`."""
        return self.told

    def on_restart(self, state: Any) -> None:
        """Record a restart."""
        self.told.append(state)

    def on_replace(self, rank: int, state: Any) -> None:
        """Record a replacement."""
        self.told.append((rank, state))
