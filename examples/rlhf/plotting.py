"""Curves of runs: accuracy, reward, divergence from the reference, and time per stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # draws to files, without a display
from matplotlib import pyplot

__all__ = ["plot"]

Metrics = Sequence[Mapping[str, float]]  # of a run: a line per step
PANELS = {
    "accuracy": "greedy accuracy on held-out problems",
    "reward": "mean reward of the samples",
    "kl": "divergence from the reference, per token",
}
SHARES = ("accuracy", "reward")  # numbers from 0 to 1


def plot(
    path: Path,
    runs: Mapping[str, Metrics],
    title: str = "",
    lines: Mapping[str, float] | None = None,
    panels: Mapping[str, str] = PANELS,
) -> None:
    """Draw runs to a file.

    Args:
        path: The file; its suffix says the format, such as ``.svg``.
        runs: By their names, the metrics of each.
        title: Above the drawing.
        lines: Values of the first metric to draw as horizontal lines, by their names.
        panels: The titles of four drawings, by the metric that each shows; of three, beside one of the stages.
    """
    figure, grid = pyplot.subplots(2, 2, figsize=(10, 7), layout="constrained")
    figure.suptitle(title)
    first, *_, last = grid.flat
    for axes, (key, meaning) in zip(grid.flat, panels.items(), strict=False):
        for name, metrics in runs.items():
            points = [(line["step"], line[key]) for line in metrics if key in line]
            if points:
                axes.plot(*zip(*points, strict=True), label=name, marker="." if key == "accuracy" else "")
        axes.set(title=meaning, xlabel="step", **({"ylim": (-0.02, 1.02)} if key in SHARES else {}))
    for name, value in (lines or {}).items():
        first.axhline(value, linestyle=":", color="grey", label=name)
    first.legend()
    if len(panels) < grid.size:
        _draw_stages(last, next(iter(runs.values())))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def _draw_stages(axes: pyplot.Axes, metrics: Metrics) -> None:
    """The mean seconds of each stage of a step."""
    lines = [line for line in metrics if "seconds" in line]
    names = [name for name in (lines[0] if lines else {}) if name.startswith("seconds/")]
    means = [sum(line.get(name, 0.0) for line in lines) / len(lines) * 1000 for name in names]
    axes.barh([name.removeprefix("seconds/") for name in names], means)
    axes.invert_yaxis()
    axes.set(title="milliseconds per step", xlabel="ms")
