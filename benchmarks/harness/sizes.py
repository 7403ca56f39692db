"""Questions that are asked for sizes from 1 KiB to 1 GiB."""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness.cli import Options
from harness.rows import Row
from harness.stage import Cell, MiB, side_by_side

SIZES = (1 << 10, 64 << 10, MiB, 16 * MiB, 256 * MiB, 1 << 30)
FEWER_SIZES = (MiB, 256 * MiB)


@dataclass(frozen=True)
class SizedQuestion:
    """A call on data of some size.

    Attributes:
        name: The benchmark.
        op: A key of `harness.work.WORKS`.
        also: Another one, asked at 256 MiB for 8 workers only.
    """

    name: str
    op: str
    also: str = ""

    def cells(self, options: Options, n_workers: int) -> list[Cell]:
        """What to measure for one number of workers."""
        if options.is_smoke:
            cells = [Cell(self.name, self.op, nbytes, rounds=2, n_max=3, n_warm=1) for nbytes in (1 << 10, 1 << 18)]
            return cells + ([Cell(self.name, self.also, 1 << 18, rounds=1, n_max=1, n_warm=1)] if self.also else [])
        sizes = SIZES if options.is_full or n_workers == 8 else FEWER_SIZES
        cells = [self._cell(self.op, nbytes, n_workers) for nbytes in sizes]
        if self.also and n_workers == 8:
            cells.insert(-1, replace(self._cell(self.op, 256 * MiB, n_workers), op=self.also, rounds=2))
        return cells

    def measure(self, options: Options) -> list[Row]:
        """All of it."""
        rows = []
        for n_workers in options.n_workers or ((2,) if options.is_smoke else (2, 8, 32)):
            rows += side_by_side(options, n_workers, self.cells(options, n_workers))
        return rows

    def _cell(self, op: str, nbytes: int, n_workers: int) -> Cell:
        if nbytes <= 16 * MiB:
            return Cell(self.name, op, nbytes, rounds=3, n_max=200, budget_s=0.06)
        if nbytes <= 256 * MiB:
            return Cell(self.name, op, nbytes, rounds=5 if n_workers == 8 else 3, n_max=3, budget_s=0.2)
        return Cell(self.name, op, nbytes, rounds=2, n_max=1, n_warm=1)
