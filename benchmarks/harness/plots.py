"""Plots of the results page: small SVG files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from harness.environments import KINDS
from harness.rows import Row
from harness.targets import NOOP, SCALING

COLORS = dict(zip(KINDS, ("#888888", "#0b6e4f", "#1f9e89", "#d1495b", "#edae49", "#00798c"), strict=True))
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def draw(folder: Path, rows: Sequence[Row]) -> list[tuple[str, Path]]:
    """Draw what there is; titles and files."""
    plt.rcParams.update({"svg.hashsalt": "bandmaster", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3})
    folder.mkdir(parents=True, exist_ok=True)
    plots = [
        _by_workers(folder, rows, "noop", NOOP, "no-op call", "ms", 1e3),
        _by_workers(folder, rows, "scaling", SCALING, "controller's time per rank and call", "µs", 1.0),
        *(_by_size(folder, rows, name) for name in ("broadcast", "split_concat", "gather")),
        _bars(folder, rows, "startup", "start to first result, 8 workers", "s", lambda row: row.what == "first result"),
        _bars(
            folder,
            rows,
            "memory",
            "highest memory of all processes, split and concatenate",
            "MiB",
            lambda row: row.what.startswith("split") and row.what.endswith("all processes"),
        ),
    ]
    return [plot for plot in plots if plot is not None]


def _by_workers(
    folder: Path, rows: Sequence[Row], question: str, what: str, title: str, unit: str, factor: float
) -> tuple[str, Path] | None:
    chosen = [row for row in rows if (row.question, row.what) == (question, what) and row.rounds]
    lines = {name: [(row.n_workers, row.median * factor) for row in chosen if row.peer == name] for name in KINDS}
    return _lines(folder / f"{question}.svg", title, "workers", unit, lines)


def _by_size(folder: Path, rows: Sequence[Row], question: str) -> tuple[str, Path] | None:
    chosen = [row for row in rows if row.question == question and row.n_workers == 8 and row.rounds]
    sized = [(row, _nbytes(row.what)) for row in chosen if "," not in row.what]
    lines = {name: [(nbytes, row.median * 1e3) for row, nbytes in sized if row.peer == name] for name in KINDS}
    return _lines(folder / f"{question}.svg", f"{question}, 8 workers", "bytes", "ms", lines)


def _lines(
    path: Path, title: str, xlabel: str, ylabel: str, lines: dict[str, list[tuple[float, float]]]
) -> tuple[str, Path] | None:
    if not any(lines.values()):
        return None
    figure, axes = plt.subplots(figsize=(5, 3))
    for name, points in lines.items():
        if points:
            axes.plot(*zip(*sorted(points), strict=True), marker="o", ms=3, color=COLORS[name], label=KINDS[name].title)
    axes.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel, title=title)
    if xlabel == "workers":
        ticks = sorted({x for points in lines.values() for x, _ in points})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
        axes.set_xticks([], minor=True)
    axes.legend(fontsize=7)
    return title, _save(figure, path)


def _bars(
    folder: Path, rows: Sequence[Row], question: str, title: str, unit: str, is_chosen: Callable[[Row], bool]
) -> tuple[str, Path] | None:
    chosen = [row for row in rows if row.question == question and row.n_workers == 8 and row.rounds and is_chosen(row)]
    if not chosen:
        return None
    figure, axes = plt.subplots(figsize=(5, 2.2))
    axes.barh(
        [KINDS[row.peer].title for row in chosen],
        [row.median for row in chosen],
        color=[COLORS[row.peer] for row in chosen],
    )
    axes.invert_yaxis()
    axes.set(xlabel=unit, title=title)
    return title, _save(figure, folder / f"{question}.svg")


def _save(figure: plt.Figure, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path


def _nbytes(what: str) -> float:
    number, unit = what.split()
    return float(number) * UNITS[unit]
