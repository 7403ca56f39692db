"""What does a mini-batch cost of rows that the ranks hold, in shuffled order? Ten of 10,000 rows go to all ranks.

Each library has the rows where it keeps them best: one object per rank, or one per row.
"""

from __future__ import annotations

from harness.cli import Options, run
from harness.rows import Row
from harness.stage import Cell, MiB, side_by_side

NO_REFERENCES = ("monarch", "verl")
WHY_NOT = "not asked: nobody has written this work for it"
GiB = 1 << 30


def measure(options: Options) -> list[Row]:
    """For rows of 100 bytes and of 100 KB; and a call that does nothing, to compare with."""
    options = options.without(NO_REFERENCES, WHY_NOT)
    if options.is_smoke:
        cells = [Cell("minibatches", op, 1 << 18, rounds=2, n_max=3, n_warm=1) for op in ("mini_batch", "noop")]
    else:
        works = [("noop", 0), ("mini_batch", MiB), ("mini_batch", GiB), ("mini_batch_of_objects", GiB)]
        cells = [Cell("minibatches", op, nbytes, rounds=5, n_max=200, budget_s=0.5, n_warm=20) for op, nbytes in works]
    rows = []
    for n_workers in options.n_workers or ((2,) if options.is_smoke else (4,)):
        rows += side_by_side(options, n_workers, cells)
    return rows


if __name__ == "__main__":
    run(__doc__, measure)
