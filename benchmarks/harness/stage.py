"""Peers side by side: started, measured in rounds that alternate between them, and stopped."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from harness.environments import KINDS, Found
from harness.machine import available_nbytes
from harness.peer_process import PeerFailed, PeerProcess
from harness.rows import Row

START_TIMEOUT_S = 240.0
CALL_TIMEOUT_S = 180.0
LIGHT = {"BANDMASTER_PRELOAD": "numpy"}  # workers without torch: only starts are asked about it
MiB = 1 << 20


@dataclass(frozen=True)
class Cell:
    """One thing to measure.

    Attributes:
        question: The benchmark that asks.
        op: A key of `harness.work.WORKS`.
        nbytes: Size of the work.
        rounds: How often each peer's turn comes.
        n_min: Calls in a round, at least.
        n_max: At most.
        budget_s: A round ends when its calls took this long together.
        n_warm: Calls before the first round, which do not count.
        note: For the table.
    """

    question: str
    op: str
    nbytes: int
    rounds: int = 5
    n_min: int = 1
    n_max: int = 1000
    budget_s: float = 0.1
    n_warm: int = 2
    note: str = ""

    @property
    def what(self) -> str:
        """As people read it."""
        size = size_name(self.nbytes)
        return {"noop": "1 to each, and back", "broadcast_read_all": f"{size}, all of it read"}.get(self.op, size)


class Stage:
    """Running peers with ``n_workers`` each. Those that cannot run keep a reason.

    Attributes:
        running: By name, in the order they were asked for.
        why_not: By name.
    """

    def __init__(self, peers: Sequence[Found], n_workers: int) -> None:
        self.n_workers = n_workers
        self.names = [found.kind.name for found in peers]
        self.running: dict[str, PeerProcess] = {}
        self.why_not = {found.kind.name: found.why_not for found in peers if found.why_not}
        for found in peers:
            if not found.why_not:
                self._start(found)

    def run(self, cells: Iterable[Cell]) -> list[Row]:
        """Measure cells, one after the other; in each, the peers take turns."""
        rows = []
        for cell in cells:
            say(f"{cell.question}: {cell.what}, {self.n_workers} workers")
            rows += self._run(cell)
        return rows

    def fail(self, name: str, error: PeerFailed) -> None:
        """Note that a peer is of no more use."""
        say(f"  {KINDS[name].title} failed: {error}")
        self.why_not[name] = f"failed: {error}"
        self.running.pop(name).close()

    def close(self) -> None:
        """Stop all peers."""
        while self.running:
            self.running.popitem()[1].close()

    def _start(self, found: Found) -> None:
        name = found.kind.name
        process = self.running[name] = PeerProcess(found, LIGHT)
        try:
            answer = process.ask("start", START_TIMEOUT_S, n_workers=self.n_workers)
            say(f"  {found.kind.title} started with {self.n_workers} workers in {answer['seconds']:.1f} s")
        except PeerFailed as error:
            self.fail(name, error)

    def _run(self, cell: Cell) -> list[Row]:
        results: dict[str, list[tuple[float, ...]]] = {name: [] for name in self.running}
        refused = {name: reason for name in self.running if (reason := too_big(name, self.n_workers, cell))}
        calls = {"op": cell.op, "nbytes": cell.nbytes}
        for turn in range(cell.rounds + 1):
            for name in [name for name in self.names if name in self.running and name not in refused]:
                n_min, n_max, budget_s = cell.n_min, cell.n_max, cell.budget_s
                if turn == 0:
                    n_min, n_max, budget_s = cell.n_warm, 20 * cell.n_warm, cell.budget_s / 2
                try:
                    answer = self.running[name].ask(
                        "measure", CALL_TIMEOUT_S, **calls, n_min=n_min, n_max=n_max, budget_s=budget_s
                    )
                except PeerFailed as error:
                    self.fail(name, error)
                    continue
                if turn:
                    results[name].append(tuple(answer["seconds"]))
        return [self._row(cell, name, results.get(name, []), refused.get(name, "")) for name in self.names]

    def _row(self, cell: Cell, name: str, rounds: Sequence[tuple[float, ...]], refused: str) -> Row:
        why_not = self.why_not.get(name, refused)
        return Row(
            cell.question,
            cell.what,
            name,
            self.n_workers,
            "s",
            () if why_not else tuple(rounds),
            why_not,
            "" if why_not else cell.note,
        )


@contextmanager
def stage(peers: Sequence[Found], n_workers: int) -> Iterator[Stage]:
    """A stage that is closed whatever happens."""
    opened = Stage(peers, n_workers)
    try:
        yield opened
    finally:
        opened.close()


def one_by_one(peers: Sequence[Found], n_workers: int, cells: Sequence[Cell]) -> list[Row]:
    """The same cells, but each peer alone on the machine, started and stopped."""
    rows: list[Row] = []
    for found in peers:
        with stage([found], n_workers) as alone:
            rows += alone.run(cells)
    order = {cell.what: place for place, cell in enumerate(cells)}
    return sorted(rows, key=lambda row: order[row.what])


def too_big(name: str, n_workers: int, cell: Cell) -> str:
    """Why a peer had better not try this on a machine with so much free memory; "" if it may."""
    copies = 6.0
    if cell.op.startswith("broadcast"):
        copies = {"floor": 2, "bandmaster_local": 2, "plain_ray": 3, "monarch": 3 + 2 * n_workers}.get(
            name, 3 + n_workers
        )
    needed, available = cell.nbytes * copies, available_nbytes()
    if needed < 0.8 * available:
        return ""
    return f"takes about {needed / (1 << 30):.0f} GiB, {available / (1 << 30):.0f} are free"


def size_name(nbytes: int) -> str:
    """A size as people read it."""
    for factor, name in ((1 << 30, "GiB"), (MiB, "MiB"), (1 << 10, "KiB")):
        if nbytes >= factor:
            return f"{nbytes / factor:g} {name}"
    return f"{nbytes} B"


def say(line: str) -> None:
    """Tell whoever waits what is going on."""
    print(line, file=sys.stderr, flush=True)
