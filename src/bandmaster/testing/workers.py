"""The workers of the backend contract. A module of its own: workers import it, and they need no pytest."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import numpy as np

from bandmaster.plan.transfer import Broadcast, Dispatch, Execute, Gather, TransferProtocol
from bandmaster.registration import register
from bandmaster.worker import Worker

__all__ = ["Behaves", "Counted", "Echo", "FailsToStart", "Keeps", "Notes", "Restarts"]


class Echo(Worker):
    """Gives back what it gets."""

    @register(Dispatch.DP_PROTO)
    def over_dp(self, batch: Any) -> Any:
        """Rows split over dp."""
        return batch

    @register(Dispatch.THREE_D_PROTO)
    def over_3d(self, batch: Any) -> Any:
        """The same on a mesh with pp and tp."""
        return batch

    @register(Dispatch.DP_PROTO)
    def who_has(self, rows: list[Any]) -> list[Any]:
        """Every row with the rank that got it."""
        return [(row, self.rank) for row in rows]


class Keeps(Worker):
    """Writes to what it gets, and keeps it."""

    @register(Dispatch.ONE_TO_ALL)
    def overwrite(self, array: Any, items: list[str]) -> float:
        """Both of them; the sum of the array before."""
        total = float(array.sum())
        array += 1 + self.rank
        items.append("a worker was here")
        return total

    @register(Dispatch.DP_PROTO)
    def overwrite_rows(self, rows: Any) -> None:
        """Those of this rank."""
        rows[:] = -1

    @register(Dispatch.ONE_TO_ALL)
    def keep(self, array: Any) -> None:
        """As it came."""
        self.kept = array

    @register(Dispatch.ONE_TO_ALL)
    def show(self) -> Any:
        """What is kept, itself."""
        return self.kept


class Counted:
    """Counts how often it is pickled in this process."""

    n_pickled = 0

    def __reduce__(self) -> tuple[object, ...]:
        Counted.n_pickled += 1
        return Counted, ()


class Notes(Worker):
    """Notes its calls in their order."""

    def __init__(self) -> None:
        self.entries: list[int] = []

    @register(Dispatch.ONE_TO_ALL)
    def note(self, entry: int) -> None:
        """A call like any other."""
        self.entries.append(entry)

    @register(Dispatch.ONE_TO_ALL)
    def note_with(self, entry: int, ballast: Any) -> None:
        """One with a large argument, which may travel another way."""
        self.entries.append(entry)

    @register(Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def note_on_zero(self, entry: int) -> None:
        """One on a single rank."""
        self.entries.append(entry)

    @register(Dispatch.ONE_TO_ALL)
    async def note_later(self, entry: int) -> None:
        """An async one."""
        await asyncio.sleep(0)
        self.entries.append(entry)

    @register(Dispatch.ONE_TO_ALL)
    def read(self) -> list[int]:
        """All entries."""
        return self.entries


class Behaves(Worker):
    """Fails, waits or works as it is told."""

    @register(Dispatch.ONE_TO_ALL)
    def echo(self, value: Any) -> Any:
        """What it gets."""
        return value

    @register(Dispatch.ONE_TO_ALL)
    def knows(self, value: Any) -> bool:
        """Whether it gets a `Counted`."""
        return isinstance(value, Counted)

    @register(Dispatch.ALL_TO_ALL)
    def knows_its_own(self, value: Any) -> bool:
        """The same for what only this rank is given."""
        return isinstance(value, Counted)

    @register(Dispatch.DP_PROTO, arguments={"table": Broadcast()})
    def know(self, rows: list[Any], table: Any) -> list[bool]:
        """The same of rows, each of which goes to one rank, and of what goes to all."""
        return [isinstance(row, Counted) and isinstance(table, Counted) for row in rows]

    @register(TransferProtocol(Broadcast(), Gather("dp", tp=0)))
    def only_first_of_tp(self) -> Any:
        """A value that can be pickled where it is collected, and nowhere else."""
        return self.rank if self.coordinates["tp"] == 0 else (n for n in range(3))

    @register(Dispatch.ONE_TO_ALL)
    def wait_on(self, ranks: list[int], raising: list[int]) -> int:
        """Wait on some ranks, and raise on others."""
        if self.rank in raising:
            raise ValueError("the first cause")
        while self.rank in ranks:
            time.sleep(0.01)
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def sum_of(self, array: Any) -> float:
        """Of an array."""
        return float(np.sum(array))

    @register(Dispatch.ONE_TO_ALL)
    def process(self) -> int:
        """Where it runs."""
        return os.getpid()


class FailsToStart(Worker):
    """Raises in the constructor of one rank, while the others wait in theirs."""

    def __init__(self, rank: int, are_waiting: bool) -> None:
        if self.rank == rank:
            raise KeyError("no such weights")
        while are_waiting:
            time.sleep(0.01)


class Restarts(Worker):
    """Counts, and can be restarted and replaced."""

    def __init__(self, start: int) -> None:
        self.count = start
        self.told: list[Any] = []

    @register(Dispatch.ONE_TO_ALL)
    def add(self, n: int) -> int:
        """To the count."""
        self.count += n
        return self.count

    @register(Dispatch.ONE_TO_ALL)
    def heard(self) -> list[Any]:
        """Of restarts and replacements."""
        return self.told

    def on_restart(self, state: Any) -> None:
        """Called after a restart."""
        self.told.append(state)

    def on_replace(self, rank: int, state: Any) -> None:
        """Called after a replacement."""
        self.told.append((rank, state))
