"""Does anything grow? 100,000 calls of all kinds and sizes in random order, from nothing to 4 MiB.

After every tenth, the memory, descriptors and threads of all processes are counted; growth is from the mean of the
second to fifth count to the mean of the last four. Some results are kept for a while, as programs do.
"""

from __future__ import annotations

import statistics

from harness import proc
from harness.cli import Options, run
from harness.environments import Found
from harness.peer_process import PeerFailed, PeerProcess
from harness.rows import Row
from harness.stage import LIGHT, START_TIMEOUT_S, MiB, say

N_PARTS = 10
N_CALLS = {"floor": 20_000, "bandmaster_local": 100_000}
N_CALLS_OF_OTHERS = 2_000
TIMEOUT_S = 1200.0


def measure(options: Options) -> list[Row]:
    """Each peer alone."""
    rows = []
    for n_workers in options.n_workers or (2,):
        for found in options.peers_for(n_workers):
            n_calls = 200 if options.is_smoke else N_CALLS.get(found.kind.name, N_CALLS_OF_OTHERS)
            rows += _rows(found, n_workers, 100_000 if options.is_full else n_calls)
    order = list(dict.fromkeys(row.what for row in rows))
    return sorted(rows, key=lambda row: (row.n_workers, order.index(row.what)))


def _rows(found: Found, n_workers: int, n_calls: int) -> list[Row]:
    say(f"many_calls: {n_calls:,} calls, {found.kind.title}, {n_workers} workers")
    note = f"{n_calls:,} calls"
    figures = {"call of the mix": (float("nan"), "s"), "growth: memory": (float("nan"), "MiB")}
    figures |= {f"growth: {what}": (float("nan"), what) for what in ("descriptors", "threads")}
    why_not = found.why_not
    if not why_not:
        process = PeerProcess(found, LIGHT)
        try:
            process.ask("start", START_TIMEOUT_S, n_workers=n_workers)
            figures = _run(process, n_calls)
        except PeerFailed as error:
            why_not = f"failed: {error}"
        finally:
            process.close()
    return [
        Row("many_calls", what, found.kind.name, n_workers, unit, () if why_not else ((value,),), why_not, note)
        for what, (value, unit) in figures.items()
    ]


def _run(process: PeerProcess, n_calls: int) -> dict[str, tuple[float, str]]:
    counts = []
    seconds = 0.0
    for _ in range(N_PARTS):
        seconds += process.ask("mixed", TIMEOUT_S, n_calls=n_calls // N_PARTS)["seconds"]
        pids = process.tree()
        counts.append((proc.shared_out_nbytes(pids) / MiB, proc.n_descriptors(pids), proc.n_threads(pids)))
    early, late = (map(statistics.fmean, zip(*part, strict=True)) for part in (counts[1:5], counts[-4:]))
    memory, descriptors, threads = (after - before for before, after in zip(early, late, strict=True))
    return {
        "call of the mix": (seconds / n_calls, "s"),
        "growth: memory": (memory, "MiB"),
        "growth: descriptors": (descriptors, "descriptors"),
        "growth: threads": (threads, "threads"),
    }


if __name__ == "__main__":
    run(__doc__, measure)
