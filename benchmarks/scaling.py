"""What does each more rank cost the controller? Its processor time per rank and call, for up to 256 workers.

A call that does nothing, as in `noop`; what the controller's process used (all its threads), over ranks and calls.
"""

from __future__ import annotations

from dataclasses import replace

from harness.cli import Options, run
from harness.rows import Row
from harness.stage import Cell, side_by_side


def cells(options: Options, n_workers: int) -> list[Cell]:
    """What to measure for one number of workers."""
    if options.is_smoke:
        return [Cell("scaling", "noop", 0, rounds=2, n_min=5, n_max=5, is_controller=True)]
    of_controller = Cell("scaling", "noop", 0, rounds=5, n_min=20, n_max=300, budget_s=0.15, is_controller=True)
    if n_workers <= 32:
        return [of_controller]
    return [of_controller, replace(of_controller, is_controller=False)]  # how long such calls take `noop` does not say


def measure(options: Options, least: int = 2) -> list[Row]:
    """For every number of workers that is not below ``least``."""
    rows = []
    for n_workers in options.n_workers or ((2, 4) if options.is_smoke else (2, 8, 32, 128, 256)):
        if n_workers >= least:
            rows += side_by_side(options, n_workers, cells(options, n_workers))
    return rows


if __name__ == "__main__":
    run(__doc__, measure)
