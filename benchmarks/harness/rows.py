"""Figures, and tables of them."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.environments import KINDS

REFERENCES = ("floor", "bandmaster_local")


@dataclass(frozen=True)
class Row:
    """One figure of one peer.

    Attributes:
        question: The benchmark.
        what: What was measured, as people read it: "256 MiB".
        peer: Name of the peer.
        n_workers: Ranks.
        unit: Of the figures; "s" is shown in µs, ms or s.
        rounds: The samples of each round; round k of one peer was taken next to round k of the others.
        why_not: Why there are none.
        note: What a reader has to know about this figure.
        beside: Rounds of the floor and of bandmaster local that this peer took turns with, by name, if not all theirs.
    """

    question: str
    what: str
    peer: str
    n_workers: int
    unit: str
    rounds: tuple[tuple[float, ...], ...] = ()
    why_not: str = ""
    note: str = ""
    beside: Mapping[str, tuple[tuple[float, ...], ...]] = field(default_factory=dict)

    @property
    def samples(self) -> list[float]:
        """Of all rounds, sorted."""
        return sorted(sample for samples in self.rounds for sample in samples)

    @property
    def median(self) -> float:
        """Of all samples; nan if there are none."""
        return statistics.median(self.samples) if self.rounds else math.nan

    @property
    def p99(self) -> float:
        """The sample that 99 of 100 are not above: the largest, if there are fewer than 100."""
        return self.samples[math.ceil(0.99 * len(self.samples)) - 1] if self.rounds else math.nan

    @property
    def key(self) -> tuple[str, str, int]:
        """What the same figure of another peer has in common with this one."""
        return self.question, self.what, self.n_workers

    def over(self, other: Row) -> float:
        """How many times ``other`` this is: the median of the ratios of rounds that were taken side by side."""
        pairs = zip(self.rounds, self.beside.get(other.peer, other.rounds), strict=False)
        medians = [tuple(map(statistics.median, pair)) for pair in pairs]
        ratios = [mine / its for mine, its in medians if its > 0]
        return statistics.median(ratios) if ratios else math.nan


def figure(value: float, unit: str) -> str:
    """A value as people read it."""
    if math.isnan(value):
        return "-"
    if unit != "s":
        return f"{value:,.3g} {unit}" if abs(value) < 1000 else f"{value:,.0f} {unit}"
    for factor, name in ((1.0, "s"), (1e3, "ms")):
        if value * factor >= 1.0:
            return f"{value * factor:.3g} {name}"
    return f"{value * 1e6:.3g} µs"


def times(value: float) -> str:
    """A ratio as people read it."""
    return "-" if math.isnan(value) else f"{value:.2f}" if value < 10 else f"{value:,.0f}"


def table(rows: Sequence[Row]) -> list[list[str]]:
    """A header and a line for every row, with ratios to the floor and to bandmaster local."""
    by_place = {(*row.key, row.peer): row for row in rows}
    lines = [["what", "workers", "peer", "n", "median", "p99", "x floor", "x local", ""]]
    for row in rows:
        references = [by_place.get((*row.key, name)) for name in REFERENCES]
        ratios = [times(row.over(other)) if other is not None else "-" for other in references]
        figures = [figure(row.median, row.unit), figure(row.p99, row.unit)]
        remark = f"not measured: {row.why_not}" if row.why_not else row.note
        n = str(len(row.samples))
        lines.append([row.what, str(row.n_workers), KINDS[row.peer].title, n, *figures, *ratios, remark])
    return lines


def as_text(lines: Sequence[Sequence[str]]) -> str:
    """Columns for a terminal."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    padded = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join(line.rstrip() for line in padded)


def as_markdown(lines: Sequence[Sequence[str]]) -> str:
    """The same as a Markdown table."""
    header, *rest = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *rest])


def save(path: Path, facts: dict[str, object], rows: Iterable[Row]) -> None:
    """Write all figures as JSON, of each round its median."""
    figures = [
        {name: getattr(row, name) for name in ("question", "what", "peer", "n_workers", "unit", "why_not", "note")}
        | {"n": len(row.samples), "median": _number(row.median), "p99": _number(row.p99)}
        | {"rounds": _medians(row.rounds), "beside": {name: _medians(rounds) for name, rounds in row.beside.items()}}
        for row in rows
    ]
    path.write_text(json.dumps({**facts, "rows": figures}, indent=1) + "\n")


def _medians(rounds: Iterable[tuple[float, ...]]) -> list[float]:
    return [statistics.median(samples) for samples in rounds]


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
