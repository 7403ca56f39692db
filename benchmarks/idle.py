"""What do workers cost that nobody calls? Processor time of the controller, its workers and all that comes along."""

from __future__ import annotations

import time

from harness import proc
from harness.cli import Options, run
from harness.rows import Row
from harness.stage import Stage, say, stage

SETTLE_S = 3.0


def watch(peers: Stage, duration_s: float) -> list[Row]:
    """Look at the peers of a stage before and after they were left alone."""
    say(f"idle: {duration_s:g} s, {peers.n_workers} workers")
    time.sleep(min(SETTLE_S, duration_s))
    begun = time.monotonic()
    before = {name: proc.cpu_s(process.tree()) for name, process in peers.running.items()}
    time.sleep(duration_s)
    after = {name: proc.cpu_s(process.tree()) for name, process in peers.running.items()}
    elapsed = time.monotonic() - begun
    what = f"{duration_s:g} s of nothing"
    rows = []
    for name in peers.names:
        why_not = peers.why_not.get(name, "")
        rounds = () if why_not else (((after[name] - before[name]) / elapsed * 100,),)
        n_processes = "" if why_not else f"{len(peers.running[name].tree())} processes"
        rows.append(Row("idle", what, name, peers.n_workers, "% of a core", rounds, why_not, n_processes))
    return rows


def measure(options: Options) -> list[Row]:
    """All peers at the same time."""
    rows = []
    for n_workers in options.n_workers or ((2,) if options.is_smoke else (8,)):
        with stage(options.sparing("verl"), n_workers) as peers:
            rows += watch(peers, 0.5 if options.is_smoke else 60.0)
    return rows


if __name__ == "__main__":
    run(__doc__, measure)
