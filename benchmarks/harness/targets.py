"""What bandmaster is to reach, and whether it did."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.rows import Row, figure, times

NOOP, SCALING = "1 to each, and back", "controller's processor time per rank and call"


@dataclass(frozen=True)
class Target:
    """One figure, or the ratio of two, and a limit.

    Attributes:
        text: As people read it.
        place: Question, what and number of workers of the rows.
        peer: Whose figure.
        limit: Seconds, MiB... or a ratio.
        over: The peer whose figure it is divided by, if any.
        is_at_least: Whether the limit is the least that is wanted, not the most.
    """

    text: str
    place: tuple[str, str, int]
    peer: str
    limit: float
    over: str = ""
    is_at_least: bool = False

    def measured(self, rows: Sequence[Row]) -> tuple[float, str]:
        """The value among these rows, nan if it is not there, and its unit."""
        found = {row.peer: row for row in rows if row.key == self.place and row.rounds}
        if self.peer not in found or (self.over and self.over not in found):
            return math.nan, ""
        if self.over:
            return found[self.peer].over(found[self.over]), "x"
        return found[self.peer].median, found[self.peer].unit

    def line(self, rows: Sequence[Row]) -> list[str]:
        """Text, goal, what was measured, and the verdict."""
        value, unit = self.measured(rows)
        sign = "≥" if self.is_at_least else "≤"
        if math.isnan(value):
            return [self.text, f"{sign} {self.limit:g}", "-", "not measured"]
        is_met = value >= self.limit if self.is_at_least else value <= self.limit
        shown, goal = (
            (times(value), f"{self.limit:g} x") if self.over else (figure(value, unit), _goal(self.limit, unit))
        )
        return [self.text, f"{sign} {goal}", shown, "met" if is_met else "**missed**"]


def _goal(limit: float, unit: str) -> str:
    return f"{limit:g} {unit}"


def target_table(rows: Sequence[Row], targets: Sequence[Target] | None = None) -> list[list[str]]:
    """A header and a line for every target; those of `run_all.py`, if not others are named."""
    chosen = TARGETS if targets is None else targets
    return [["target", "goal", "measured", ""], *(target.line(rows) for target in chosen)]


def _call(question: str, what: str, name: str, limits: dict[tuple[str, str], float]) -> list[Target]:
    """Targets of one kind of call on 8 workers. Of a pair, ("bandmaster_local", "floor") is to be at most the limit;
    with a peer before bandmaster local, at least."""
    return [
        Target(
            f"{name}: {peer.replace('_', ' ')} over {over.replace('_', ' ')}",
            (question, what, 8),
            peer,
            limit,
            over,
            is_at_least=not peer.startswith("bandmaster"),
        )
        for (peer, over), limit in limits.items()
    ]


LOCAL = "bandmaster_local"
TARGETS = [
    Target("no-op, 2 workers: bandmaster local over floor", ("noop", NOOP, 2), LOCAL, 2.0, "floor"),
    *_call(
        "noop",
        NOOP,
        "no-op, 8 workers",
        {(LOCAL, "floor"): 1.8, ("monarch", LOCAL): 8, ("plain_ray", LOCAL): 16, ("bandmaster_ray", LOCAL): 2},
    ),
    *_call(
        "split_concat",
        "256 MiB",
        "256 MiB split to 8, +1, concatenated",
        {
            (LOCAL, "floor"): 1.3,
            ("plain_ray", LOCAL): 2.5,
            ("monarch", LOCAL): 4,
            ("verl", LOCAL): 10,
            ("bandmaster_ray", LOCAL): 1.3,
        },
    ),
    *_call(
        "broadcast",
        "256 MiB",
        "256 MiB to each of 8",
        {(LOCAL, "floor"): 1.6, ("plain_ray", LOCAL): 3, ("monarch", LOCAL): 50, ("bandmaster_ray", LOCAL): 1.5},
    ),
    Target("start to first result, 8 workers: bandmaster local", ("startup", "first result", 8), LOCAL, 0.8),
    Target("the same with torch in every worker", ("startup", "first result, torch in every worker", 8), LOCAL, 2.5),
    Target(
        "start to first result, 8 workers: bandmaster ray over plain ray",
        ("startup", "first result", 8),
        "bandmaster_ray",
        1.2,
        "plain_ray",
    ),
    Target("import bandmaster", ("import_time", "import", 0), LOCAL, 0.1),
    Target("controller's processor time per rank and call, 256 workers", ("scaling", SCALING, 256), LOCAL, 15),
    Target("100,000 mixed calls: growth of memory", ("many_calls", "growth: memory", 2), LOCAL, 8),
    Target("100,000 mixed calls: growth of descriptors", ("many_calls", "growth: descriptors", 2), LOCAL, 16),
    Target("100,000 mixed calls: growth of threads", ("many_calls", "growth: threads", 2), LOCAL, 0),
    Target("8 workers idle for a minute: processor", ("idle", "60 s of nothing", 8), LOCAL, 0.5),
]
