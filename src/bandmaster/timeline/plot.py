"""The picture of a run by matplotlib, as SVG or PNG; on a light ground of its own, so that any page can show it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bandmaster.timeline.lanes import Lane, lanes_of
from bandmaster.timeline.run import Run

COLOURS = (
    "#3b78d8", "#e0752d", "#2f9e6e", "#a45bd1", "#c2477f", "#2a9fb5",
    "#7a8b2f", "#8d6e63", "#5f62c8", "#b0566a", "#4d8a5b", "#a06a1f",
)  # fmt: skip
MOVING, WAITING, STALL, VERSION, SOFT = "#8a94a6", "#e09a00", "#d92d20", "#0f766e", "#647084"
WIDTH_IN, LANE_IN, DPI = 10.0, 0.26, 160
LABEL = {"boxstyle": "square,pad=0.15", "facecolor": VERSION, "edgecolor": "none"}
MOST_ROWS = 12  # of a lane; requests in further rows are drawn over others
WRAPPED = 110  # characters of the sentence in a line


def plot(run: Run, sentence: str, path: Path) -> None:
    """Draw the run into a file whose suffix is ``.svg`` or ``.png``.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"a timeline as {path.suffix} needs {error.name}: pip install 'bandmaster[timeline]'; as .html it needs "
            "nothing"
        ) from error
    import matplotlib

    lanes = lanes_of(run)
    heights = [min(MOST_ROWS, max(1, len(lane.rows))) ** 0.5 for lane in lanes]
    height = LANE_IN * (sum(heights) + len({lane.group for lane in lanes})) + 1.3
    settings: Any = {"svg.hashsalt": "timeline", "svg.fonttype": "none", "font.size": 8, "text.parse_math": False}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(WIDTH_IN, height), facecolor="white", layout="constrained")
        FigureCanvasAgg(figure)
        axes: Any = figure.add_subplot()
        _draw(axes, run, lanes, heights)
        axes.set_title(textwrap.fill(sentence, WRAPPED), loc="left", fontsize=9, fontweight="bold")
        figure.savefig(path, dpi=DPI, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def _draw(axes: Any, run: Run, lanes: Sequence[Lane], heights: Sequence[float]) -> None:
    colours = {method: COLOURS[n % len(COLOURS)] for n, method in enumerate(run.methods)}
    y, group, ticks = 0.0, None, dict[float, str]()
    for lane, height in zip(lanes, heights, strict=True):
        if lane.group != group:
            group = lane.group
            axes.text(0, y + 0.62, group, fontweight="bold", transform=axes.get_yaxis_transform())
            axes.axhspan(y + 0.1, y + 0.9, color="#f4f6f9", zorder=0)
            y += 1.0
        if lane.rank >= 0:
            ticks[y + height / 2] = f"rank {lane.rank}"
        _draw_lane(axes, run, lane, y, height, colours)
        for stall in run.stalls:
            if stall.group == lane.group and lane.rank in stall.ranks:
                at = stall.at - run.began
                strength = 0.45 if lane.rank in stall.guilty else 0.15
                axes.broken_barh([(at - stall.seconds, stall.seconds)], (y, height), color=STALL, alpha=strength, lw=0)
        y += height
    axes.set_ylim(y + 0.1, 0)
    axes.set_xlim(run.begin - 0.01 * (run.end - run.begin), run.end + 0.01 * (run.end - run.begin) + 1e-6)
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.set_xlabel("seconds", color=SOFT)
    axes.tick_params(length=0, colors=SOFT)
    axes.grid(axis="x", color="#dfe3ea", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    _legend(axes, colours, lanes, run)


def _draw_lane(axes: Any, run: Run, lane: Lane, y: float, height: float, colours: dict[tuple[str, str], str]) -> None:
    shown = min(MOST_ROWS, max(1, len(lane.rows)))
    each, strip = (height - 0.16) / shown, 0.1
    waiting: list[tuple[float, float]] = []
    for number, row in enumerate(lane.rows):
        top = y + strip + each * (number * shown // max(1, len(lane.rows)))
        moving: list[tuple[float, float]] = []
        work: dict[str, list[tuple[float, float]]] = {}
        for item in row:
            call = run.calls[item.call]
            begun = item.begun + item.decoded
            work.setdefault(colours[call.group, call.method], []).append((begun, item.ran))
            moving += [(item.begun, item.decoded), (begun + item.ran, item.encoded)]
            if item.queued > 0:
                waiting.append((item.begun - item.queued, item.queued))
        axes.broken_barh(moving, (top, 0.92 * each), color=MOVING, lw=0)
        for colour, spans in work.items():
            axes.broken_barh(spans, (top, 0.92 * each), color=colour, edgecolor="white", lw=0.25)
    axes.broken_barh(waiting, (y + 0.01, strip - 0.03), color=WAITING, lw=0, alpha=0.7)
    for moment, version in lane.versions:
        axes.plot([moment, moment], [y, y + height - 0.08], color=VERSION, lw=1.2)
        axes.text(moment, y + 0.34, f"v{version}", color="white", fontsize=6, clip_on=True, bbox=LABEL)


def _legend(axes: Any, colours: dict[tuple[str, str], str], lanes: Sequence[Lane], run: Run) -> None:
    from matplotlib.patches import Patch

    several = len({group for group, _ in colours}) > 1
    entries = [
        (colour, f"{group}: {method}" if several and group.lower() != method.partition(".")[0].lower() else method)
        for (group, method), colour in colours.items()
    ]
    entries += [(MOVING, "decode, encode"), (WAITING, "waiting")]
    entries += [(VERSION, "version of weights")] * any(lane.versions for lane in lanes)
    entries += [(STALL, "no progress")] * bool(run.stalls)
    handles = [Patch(color=colour, label=label) for colour, label in entries]
    axes.figure.legend(handles=handles, loc="outside lower left", ncols=5, frameon=False, fontsize=8, handlelength=0.9)
