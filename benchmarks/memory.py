"""How much memory does a call take at its highest? Of the controller, the largest other process, and all of them.

What the call's own input takes is not counted, so a copy of 256 MiB shows as 256 MiB; what the ranks return is. "All
processes" counts memory that several have mapped once, and is sampled; the other two are the kernel's own peaks, which
count shared memory in every process that has touched it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from harness import proc
from harness.cli import Options, run
from harness.environments import Found
from harness.peer_process import PeerFailed, PeerProcess
from harness.rows import Row
from harness.stage import LIGHT, START_TIMEOUT_S, MiB, say, size_name

OPS = {"broadcast": "broadcast", "split_inc_concat": "split, add 1, concatenate", "gather": "gather"}
PARTS = ("controller", "largest other process", "all processes")
SAMPLE_EVERY_S = 0.02


def measure(options: Options) -> list[Row]:
    """Each peer alone, freshly started for every kind of call."""
    nbytes = MiB if options.is_smoke else 256 * MiB
    rows = []
    for n_workers in options.n_workers or ((2,) if options.is_smoke else (8,)):
        for op in OPS:
            asked = options if op == "split_inc_concat" else options.sparing("verl")
            for found in asked.peers_for(n_workers):
                rows += _rows(found, n_workers, op, nbytes)
    order = {name: place for place, name in enumerate(PARTS)}
    return sorted(rows, key=lambda row: (row.n_workers, row.what.split(":")[0], order[row.what.split(": ")[1]]))


def _rows(found: Found, n_workers: int, op: str, nbytes: int) -> list[Row]:
    what = f"{OPS[op]} {size_name(nbytes)}"
    say(f"memory: {what}, {found.kind.title}, {n_workers} workers")
    why_not, peaks = found.why_not, (0.0,) * len(PARTS)
    if not why_not:
        process = PeerProcess(found, LIGHT)
        try:
            peaks = _peaks(process, n_workers, op, nbytes)
        except PeerFailed as error:
            why_not = f"failed: {error}"
        finally:
            process.close()
    return [
        Row(
            "memory", f"{what}: {part}", found.kind.name, n_workers, "MiB", () if why_not else ((peak / MiB,),), why_not
        )
        for part, peak in zip(PARTS, peaks, strict=True)
    ]


def _peaks(process: PeerProcess, n_workers: int, op: str, nbytes: int) -> tuple[float, float, float]:
    """How far three calls rise above what was there before."""
    process.ask("start", START_TIMEOUT_S, n_workers=n_workers)
    process.ask("prepare", op=op, nbytes=nbytes)
    controller, *others = process.tree()
    before = {pid: proc.resident_nbytes(pid) for pid in (controller, *others)}
    for pid in before:
        proc.forget_peak(pid)
    with Sampler([controller, *others]) as sampler:
        process.ask("measure", op=op, nbytes=nbytes, n_min=3, n_max=3, budget_s=0.0)
    rises = {pid: proc.peak_nbytes(pid) - before[pid] for pid in before}
    return rises[controller], max(rises[pid] for pid in others), sampler.peak_nbytes - sampler.first_nbytes


class Sampler:
    """Looks at the memory of processes all the time, from a thread of its own."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.first_nbytes = self.peak_nbytes = proc.shared_out_nbytes(pids)

    def _run(self) -> None:
        while not self._is_over.is_set():
            self.peak_nbytes = max(self.peak_nbytes, proc.shared_out_nbytes(self._pids))
            time.sleep(SAMPLE_EVERY_S)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


if __name__ == "__main__":
    run(__doc__, measure)
