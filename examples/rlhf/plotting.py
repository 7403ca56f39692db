"""Curves of runs: accuracy, reward, divergence from the reference, and time per stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # draws to files, without a display
from matplotlib import pyplot

__all__ = ["plot"]

Metrics = Sequence[Mapping[str, float]]  # of a run: a line per step


def plot(path: Path, runs: Mapping[str, Metrics], title: str = "", lines: Mapping[str, float] | None = None) -> None:
    """Draw runs to a file.

    Args:
        path: The file; its suffix says the format, such as ``.svg``.
        runs: By their names, the metrics of each.
        title: Above the drawing.
        lines: Accuracies to draw as horizontal lines, by their names.
    """
    figure, ((accuracy, reward), (kl, stages)) = pyplot.subplots(2, 2, figsize=(10, 7), layout="constrained")
    figure.suptitle(title)
    for name, metrics in runs.items():
        for axes, key in ((accuracy, "accuracy"), (reward, "reward"), (kl, "kl")):
            points = [(line["step"], line[key]) for line in metrics if key in line]
            axes.plot(
                *zip(*points, strict=True), label=name, marker="." if key == "accuracy" else ""
            ) if points else None
    for name, value in (lines or {}).items():
        accuracy.axhline(value, linestyle=":", color="grey", label=name)
    accuracy.set(title="greedy accuracy on held-out problems", ylim=(-0.02, 1.02), xlabel="step")
    reward.set(title="mean reward of the samples", ylim=(-0.02, 1.02), xlabel="step")
    kl.set(title="divergence from the reference, per token", xlabel="step")
    accuracy.legend()
    _draw_stages(stages, next(iter(runs.values())))
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
