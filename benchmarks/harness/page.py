"""The dated page of results, with its plots."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.rows import Row, as_markdown, save, table
from harness.targets import target_table


def write(
    folder: Path, facts: Mapping[str, object], docs: Mapping[str, str], rows: Sequence[Row], has_targets: bool
) -> Path:
    """Write ``DATE.md``, ``DATE.json`` and plots to a folder; the page.

    Args:
        folder: Made if it is not there.
        facts: Date, machine, versions.
        docs: What each benchmark asks, by name, in the order of the page.
        rows: All figures.
        has_targets: Whether they are to be held against the targets.
    """
    date = str(facts["date"]).split()[0]
    folder.mkdir(parents=True, exist_ok=True)
    save(folder / f"{date}.json", dict(facts), rows)
    plots = []
    if importlib.util.find_spec("matplotlib"):
        from harness.plots import draw

        plots = draw(folder / date, rows)
    page = folder / f"{date}.md"
    page.write_text("\n\n".join(_sections(date, facts, docs, rows, plots, has_targets)) + "\n")
    return page


def _sections(
    date: str,
    facts: Mapping[str, object],
    docs: Mapping[str, str],
    rows: Sequence[Row],
    plots: Sequence[tuple[str, Path]],
    has_targets: bool,
) -> list[str]:
    sections = [
        f"# Benchmarks, {date}",
        "Made by `make bench`. Ratios count, not times: the peers took turns on this machine, and each ratio is the "
        "median over the rounds. p99 is the largest sample where there are fewer than 100. The floor is what sockets "
        "and shared memory of the standard library can do, with nothing built on them. See also [this](../README.md).",
        as_markdown([["", ""], *([key, str(value)] for key, value in facts.items())]),
        *(["## Targets", as_markdown(target_table(rows))] if has_targets else []),
        *(f"![{title}]({date}/{path.name})" for title, path in plots),
    ]
    if not plots:
        sections.append("No plots: matplotlib was not installed.")
    for question, doc in docs.items():
        of_question = [row for row in rows if row.question == question]
        if of_question:
            sections += [f"## {question}", doc.strip(), as_markdown(table(of_question))]
    return sections
