"""The tables, and the dated page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from harness.rows import Row, as_markdown, as_text, figure, save, times
from harness.targets import target_table

from on_hosts.goals import GOALS
from on_hosts.parts import PARTS, RATES, SIZES, row_name
from on_hosts.peers import AGENTS, FLOOR, LOCAL, PLAIN, TITLES

REFERENCES = {"x plain Ray": PLAIN, "x floor": FLOOR, "x local": LOCAL}
N_FOR_P99 = 100
INTRODUCTION = (
    "Made by `make bench-hosts`: three hosts, which are namespaces of one machine with networks of their own between "
    "them, and a Ray cluster on them. The controller is on the first, all ranks are on the two others, and all share "
    "the machine's cores. Ratios count, not times: the peers took turns in random order, and each ratio is the median "
    "over the rounds of the ratio of medians within a round. There is a p99 where there are 100 samples or more. "
    "Results are compared with what they have to be, in every call; this is not timed. Arrays are of float32 and were "
    "written before they are sent. See also [this](../README.md)."
)


def write(folder: Path, facts: Mapping[str, object], rows: Sequence[Row], has_goals: bool) -> Path:
    """Write ``DATE-hosts.md`` and ``DATE-hosts.json`` to a folder; the page.

    Args:
        folder: Made if it is not there.
        facts: Date, machine, versions.
        rows: All figures.
        has_goals: Whether they are to be held against the goals.
    """
    date = str(facts["date"]).split()[0]
    folder.mkdir(parents=True, exist_ok=True)
    save(folder / f"{date}-hosts.json", dict(facts), rows)
    sections = [f"# Calls and rows to other hosts, {date}", INTRODUCTION]
    sections.append(as_markdown([["", ""], *([key, str(value)] for key, value in facts.items())]))
    if has_goals:
        sections += ["## Goals", as_markdown(target_table(rows, GOALS))]
    for name, part in PARTS.items():
        of_part = [row for row in rows if row.question == name]
        if of_part:
            doc = " ".join((part.__doc__ or "").split())
            sections += [f"## {name}", doc, as_markdown(table_of(name)(of_part))]
    page = folder / f"{date}-hosts.md"
    page.write_text("\n\n".join(sections) + "\n")
    return page


def text(rows: Sequence[Row]) -> str:
    """The table of one part, for a terminal."""
    return as_text(table_of(rows[0].question)(rows))


def table_of(question: str) -> Callable[[Sequence[Row]], list[list[str]]]:
    """How the rows of a question become a table."""
    return wide_table if question == "rows" else table


def table(rows: Sequence[Row]) -> list[list[str]]:
    """A header and a line for every row, with ratios to those references that are among them."""
    by_place = {(*row.key, row.peer): row for row in rows}
    references = {title: name for title, name in REFERENCES.items() if any(row.peer == name for row in rows)}
    lines = [["what", "on", "n", "median", "p99", *references, ""]]
    for row in rows:
        others = [by_place.get((*row.key, name)) for name in references.values()]
        ratios = [times(row.over(other)) if other is not None else "-" for other in others]
        p99 = figure(row.p99, row.unit) if len(row.samples) >= N_FOR_P99 else "-"
        remark = f"not measured: {row.why_not}" if row.why_not else row.note
        n = str(len(row.samples))
        lines.append([row.what, TITLES[row.peer], n, _figure(row), p99, *ratios, remark])
    return lines


def wide_table(rows: Sequence[Row]) -> list[list[str]]:
    """A line for every size and network, with all peers side by side."""
    by_place = {(row.what, row.peer): row for row in rows}
    names = (AGENTS, PLAIN)
    lines = [
        ["rows", "network", *(TITLES[name] for name in names), *(f"{TITLES[name]} over agents" for name in names[1:])]
    ]
    for rate in RATES:
        for nbytes in SIZES:
            found = [by_place.get((row_name(nbytes, rate), name)) for name in names]
            if any(found):
                size = row_name(nbytes, rate).partition(",")[0]
                ratios = [times(row.over(found[0])) if row and found[0] else "-" for row in found[1:]]
                lines.append([size, rate, *(_figure(row) if row else "-" for row in found), *ratios])
    return lines


def _figure(row: Row) -> str:
    """The median; times all in milliseconds."""
    if row.unit != "s" or not row.rounds:
        return figure(row.median, row.unit)
    return f"{row.median * 1e3:.3g} ms" if row.median < 1 else f"{row.median * 1e3:,.0f} ms"
