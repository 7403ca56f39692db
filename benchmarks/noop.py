"""What does a call cost that does nothing? The number 1 goes to every rank, and every rank gives it back."""

from __future__ import annotations

from harness.cli import Options, run
from harness.rows import Row
from harness.stage import Cell, side_by_side


def cells(options: Options) -> list[Cell]:
    """What to measure for one number of workers."""
    if options.is_smoke:
        return [Cell("noop", "noop", 0, rounds=2, n_min=5, n_max=5)]
    return [Cell("noop", "noop", 0, rounds=6, n_min=20, n_max=1000, budget_s=0.12, n_warm=20)]


def measure(options: Options) -> list[Row]:
    """For every number of workers."""
    rows = []
    for n_workers in options.n_workers or ((2,) if options.is_smoke else (2, 8, 32)):
        rows += side_by_side(options, n_workers, cells(options))
    return rows


if __name__ == "__main__":
    run(__doc__, measure)
