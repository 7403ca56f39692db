"""What does it cost to pass rows from group to group? n ranks make them, n/2 others add 1, the n ranks read them.

Each library passes references where it has them: the caller only gets a sum from each rank.
"""

from __future__ import annotations

from harness.cli import Options, run
from harness.rows import Row
from harness.stage import Cell, MiB, side_by_side

NO_REFERENCES = ("monarch",)
WHY_NOT = "not asked: nobody has written this work for it"


def measure(options: Options) -> list[Row]:
    """For every size."""
    options = options.without(NO_REFERENCES, WHY_NOT)
    if options.is_smoke:
        cells = [Cell("chain", "chain", nbytes, rounds=2, n_max=3, n_warm=1) for nbytes in (1 << 10, 1 << 18)]
    else:
        sizes = (64 << 10, MiB, 16 * MiB, 256 * MiB)
        cells = [Cell("chain", "chain", nbytes, rounds=5, n_max=10, budget_s=1.0) for nbytes in sizes]
    rows = []
    for n_workers in options.n_workers or ((2,) if options.is_smoke else (4,)):
        rows += side_by_side(options, n_workers, cells)
    return rows


if __name__ == "__main__":
    run(__doc__, measure)
