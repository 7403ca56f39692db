"""Peers side by side: started, measured in rounds that alternate between them, and stopped."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from harness.cli import Options
from harness.environments import Found
from harness.machine import available_nbytes
from harness.peer_process import PeerFailed, PeerProcess
from harness.rows import REFERENCES, Row, figure

START_TIMEOUT_S = 240.0
CALL_TIMEOUT_S = 180.0
LIGHT = {"BANDMASTER_PRELOAD": "numpy"}  # workers without torch: only starts are asked about it
MiB = 1 << 20
LARGE_NBYTES = 16 * MiB
_BEGUN = time.perf_counter()
MOST_NBYTES = {"bandmaster_ray": 256 * MiB, "monarch": 256 * MiB, "verl": 256 * MiB}  # without --full


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
        is_controller: Count the processor time of the controller, per rank and call, and not how long calls take.
    """

    question: str
    op: str
    nbytes: int
    rounds: int = 5
    n_min: int = 1
    n_max: int = 1000
    budget_s: float = 0.1
    n_warm: int = 2
    is_controller: bool = False

    @property
    def what(self) -> str:
        """As people read it."""
        size = size_name(self.nbytes)
        if self.is_controller:
            return "controller's processor time per rank and call"
        said = {
            "noop": "1 to each, and back",
            "broadcast_read_all": f"{size}, all of it read",
            "mini_batch": f"10 rows out of {size}",
            "mini_batch_of_objects": f"10 rows out of {size}, an object each",
            "long_tail": f"draw {self.nbytes}, one by one",
            "long_tail_split": f"draw {self.nbytes}, in equal parts",
        }
        return said.get(self.op, size)


class Stage:
    """Running peers with ``n_workers`` each. Those that cannot run keep a reason.

    Args:
        options: Which peers, and how much may be asked of them.
        n_workers: Of each.

    Attributes:
        running: By name, in the order they were asked for.
        why_not: By name.
    """

    def __init__(self, options: Options, n_workers: int) -> None:
        peers = options.peers_for(n_workers)
        self.n_workers = n_workers
        self.is_full = options.is_full
        self.names = [found.kind.name for found in peers]
        self.running: dict[str, PeerProcess] = {}
        self.why_not = {found.kind.name: found.why_not for found in peers if found.why_not}
        self._titles = {found.kind.name: found.kind.title for found in peers}
        for found in peers:
            if not found.why_not:
                self._start(found)
        self._free_nbytes = available_nbytes()

    def run(self, cells: Iterable[Cell]) -> Iterator[tuple[Cell, list[Row]]]:
        """Measure cells, one after the other; in each, the peers take turns."""
        for cell in cells:
            say(f"{cell.question}: {cell.what}, {self.n_workers} workers")
            yield cell, self._run(cell)

    def fail(self, name: str, error: PeerFailed) -> None:
        """Note that a peer is of no more use."""
        say(f"  {self._titles[name]} failed: {error}")
        self.why_not[name] = f"failed: {error}"
        self.running.pop(name).close()

    def close(self) -> None:
        """Stop all peers."""
        while self.running:
            self.running.popitem()[1].close()

    def process(self, found: Found) -> PeerProcess:
        """The process of a peer."""
        return PeerProcess(found, LIGHT)

    def n_workers_of(self, name: str) -> int:
        """How many workers a peer starts."""
        return self.n_workers

    def _start(self, found: Found) -> None:
        name = found.kind.name
        n_workers = self.n_workers_of(name)
        process = self.running[name] = self.process(found)
        try:
            answer = process.ask("start", START_TIMEOUT_S, n_workers=n_workers)
            say(f"  {found.kind.title} started with {n_workers} workers in {answer['seconds']:.1f} s")
        except PeerFailed as error:
            self.fail(name, error)

    def _run(self, cell: Cell) -> list[Row]:
        results: dict[str, list[tuple[float, ...]]] = {name: [] for name in self.running}
        firsts: dict[str, float] = {}
        refused = {name: reason for name in self.running if (reason := self.too_big(name, cell))}
        if refused and refused.keys() == self.running.keys() - set(REFERENCES):
            refused |= {name: "nobody to compare with" for name in self.running if name not in refused}
        for turn in range(cell.rounds + 1):
            in_turn = [name for name in self.names if name in self.running and name not in refused]
            for name in random.Random(turn).sample(in_turn, len(in_turn)):  # lest one always comes after another
                try:
                    seconds, cpu_s = self.measure(cell, name, is_warm_up=not turn)
                except PeerFailed as error:
                    self.fail(name, error)
                    continue
                if not turn:
                    firsts[name] = seconds[0]
                elif cell.is_controller:
                    results[name].append((cpu_s / len(seconds) / self.n_workers * 1e6,))
                else:
                    results[name].append(seconds)
        rows = [self._row(cell, name, results.get(name, []), refused.get(name, "")) for name in self.names]
        is_large = cell.nbytes >= LARGE_NBYTES
        return [replace(row, note=_note(row, firsts)) if is_large and row.rounds else row for row in rows]

    def measure(self, cell: Cell, name: str, is_warm_up: bool) -> tuple[tuple[float, ...], float]:
        """One peer's turn: seconds of each call, and the controller's processor time for all."""
        if is_warm_up:
            limits = {"n_min": cell.n_warm, "n_max": 20 * cell.n_warm, "budget_s": cell.budget_s / 2}
        else:
            limits = {"n_min": cell.n_min, "n_max": cell.n_max, "budget_s": cell.budget_s}
        answer = self.running[name].ask("measure", CALL_TIMEOUT_S, op=cell.op, nbytes=cell.nbytes, **limits)
        return tuple(answer["seconds"]), answer["cpu_s"]

    def too_big(self, name: str, cell: Cell) -> str:
        """Why a peer had better not try this, for the time or the memory it takes; "" if it may."""
        if cell.nbytes > MOST_NBYTES.get(name, cell.nbytes) and not self.is_full:
            return f"more than {size_name(MOST_NBYTES[name])} only with --full"
        kept = sum(_kept_nbytes(other, self.n_workers, cell) for other in {name, *REFERENCES} & self.running.keys())
        needed = kept + 3 * cell.nbytes
        if needed < 0.8 * self._free_nbytes:
            return ""
        return f"takes about {needed / (1 << 30):.0f} GiB, {self._free_nbytes / (1 << 30):.0f} are free"

    def _row(self, cell: Cell, name: str, rounds: Sequence[tuple[float, ...]], refused: str) -> Row:
        why_not = self.why_not.get(name, refused)
        return Row(
            cell.question,
            cell.what,
            name,
            self.n_workers,
            "µs" if cell.is_controller else "s",
            () if why_not else tuple(rounds),
            why_not,
        )


@contextmanager
def stage(options: Options, n_workers: int) -> Iterator[Stage]:
    """A stage that is closed whatever happens."""
    opened = Stage(options, n_workers)
    try:
        yield opened
    finally:
        opened.close()


def side_by_side(options: Options, n_workers: int, cells: Sequence[Cell]) -> list[Row]:
    """Measure each peer in turns with the floor and bandmaster local, and with no other peer.

    More would not fit into memory together, and would disturb one another: Ray is never quite idle.
    """
    merged: dict[tuple[Cell, str], Row] = {}
    for group in _groups(options, n_workers):
        with stage(group, n_workers) as peers:
            for cell, rows in peers.run(cells):
                beside = {row.peer: row.rounds for row in rows if row.peer in REFERENCES and row.rounds}
                for row in rows:
                    earlier = merged.get((cell, row.peer))
                    if row.peer not in REFERENCES:
                        row = replace(row, beside=beside)
                    elif earlier is not None and not row.why_not.startswith("failed"):
                        row = replace(earlier if earlier.rounds else row, rounds=earlier.rounds + row.rounds)
                    merged[cell, row.peer] = row
    names = [found.kind.name for found in options.peers]
    return [merged[cell, name] for cell in cells for name in names]


def _groups(options: Options, n_workers: int) -> list[Options]:
    references = [found for found in options.peers if found.kind.name in REFERENCES]
    others = [found for found in options.peers_for(n_workers) if found.kind.name not in REFERENCES]
    absent = [found for found in others if found.why_not]
    groups = [[*references, found] for found in others if not found.why_not] or [references]
    groups[0] += absent
    return [replace(options, peers=tuple(group)) for group in groups]


def _note(row: Row, firsts: dict[str, float]) -> str:
    """The very first call, which has to have memory that later ones have already."""
    return f"first call {figure(firsts[row.peer], 's')}"


def _kept_nbytes(name: str, n_workers: int, cell: Cell) -> int:
    """About how much memory a peer holds once it has done this."""
    if cell.op.startswith("mini_batch"):
        return cell.nbytes
    per_worker = {"monarch": 2, "verl": 1}.get(name, 0) if cell.op.startswith("broadcast") else 0
    return cell.nbytes * (3 + per_worker * n_workers)


def size_name(nbytes: int) -> str:
    """A size as people read it."""
    for factor, name in ((1 << 30, "GiB"), (MiB, "MiB"), (1 << 10, "KiB")):
        if nbytes >= factor:
            return f"{nbytes / factor:g} {name}"
    return f"{nbytes} B"


def say(line: str) -> None:
    """Tell whoever waits what is going on."""
    print(f"{time.perf_counter() - _BEGUN:6.1f} s  {line}", file=sys.stderr, flush=True)
