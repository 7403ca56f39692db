"""Steps of programs: rows that ranks keep are passed to other calls."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from simulation.drawn import Sent

if TYPE_CHECKING:
    from simulation.program import Program


def pass_rows(program: Program, draw: random.Random, mine: list[Sent]) -> None:
    """Make rows on the ranks, and pass them to other calls before they are there."""
    parent = program.drawn(draw, asking=0.0)
    parent.method, parent.has_ballast = "rows", False
    family = [parent]
    for _ in range(draw.choice([1, 1, 2, 3])):
        child = program.drawn(draw, asking=0.0)
        child.method, child.parent, child.has_ballast = "take", parent, False
        family.append(child)
    for sent in family:
        program.calls.append(sent)
        program.world.note("submits", sent.method, sent.token)
        if sent is parent or parent.future is not None:
            program.submit_it(sent)
        if sent.future is not None:
            mine.append(sent)
            if draw.random() < 0.3:
                program.add_callback(sent)
