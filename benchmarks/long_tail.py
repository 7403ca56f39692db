"""What do rows cost of which a few take much longer than most? 128 rows, 12 ms in the mean, Pareto-distributed (1.5).

They go one by one to the ranks that are free, in the order of the batch; or they are split into equal parts. The floor
is the same for both: it knows beforehand how long each takes, and does the longest first, which is nearly the best
schedule that there is.
"""

from __future__ import annotations

from harness.cli import Options, run
from harness.rows import Row
from harness.stage import Cell, side_by_side

NO_PULLING = ("monarch", "verl")
WHY_NOT = "not asked: nobody has written this work for it"
DRAWS = (1, 2, 3)


def measure(options: Options) -> list[Row]:
    """For three draws."""
    options = options.without(NO_PULLING, WHY_NOT)
    draws, rounds, n_warm = (DRAWS[:1], 1, 1) if options.is_smoke else (DRAWS, 3, 1)
    ops = ("long_tail", "long_tail_split")
    cells = [Cell("long_tail", op, draw, rounds, n_max=1, n_warm=n_warm) for draw in draws for op in ops]
    rows = []
    for n_workers in options.n_workers or ((2,) if options.is_smoke else (4,)):
        rows += side_by_side(options, n_workers, cells)
    return rows


if __name__ == "__main__":
    run(__doc__, measure)
