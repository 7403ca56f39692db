"""The table of `bandmaster top` as rows of text; ranks in the same state share a row if lines are scarce. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bandmaster.cli.names import ranges
from bandmaster.cli.usage import GroupUsage, Moment, RankUsage

HEADER = ("group", "rank", "pid", "runs", "for", "cpu", "memory", "rows held", "device")
IDLE = "idle"
LEAST_FIRST = ("pid", "rows held", "device", "memory", "cpu")
Row = tuple[str, ...]


def rows_of(moment: Moment, most_rows: int | None = None) -> list[Row]:
    """Return the rows of the table, in the columns of `HEADER`.

    Args:
        moment: The state of the ranks.
        most_rows: Most rows to return; None for any number. If there are more ranks than that, ranks of a group that
            run the same method share a row. If that does not suffice either, the last row says how many rows are
            missing.
    """
    rows = [row for group in moment.groups for row in _rows(group, [[rank] for rank in group.ranks])]
    if most_rows is None or len(rows) <= most_rows:
        return rows
    rows = [row for group in moment.groups for row in _rows(group, _same_state(group.ranks))]
    if len(rows) <= most_rows:
        return rows
    left_out = len(rows) - most_rows + 1
    return [*rows[: most_rows - 1], (f"and {left_out} more rows", *[""] * (len(HEADER) - 1))]


def columns_that_fit(rows: Sequence[Row], width: int) -> list[int]:
    """Return the numbers of the columns that fit on lines of ``width`` characters, two of which separate columns.

    Columns without any value are dropped first, then the columns in the order of `LEAST_FIRST`.
    """
    widths = [max(len(row[column]) for row in [HEADER, *rows]) for column in range(len(HEADER))]
    columns = list(range(len(HEADER)))
    empty = [n for n in columns if rows and all(row[n] in ("-", "") for row in rows)]
    for column in [*empty, *map(HEADER.index, LEAST_FIRST)]:
        if sum(widths[n] + 2 for n in columns) - 2 <= width:
            break
        if column in columns:
            columns.remove(column)
    return columns


def _same_state(ranks: Sequence[RankUsage]) -> list[list[RankUsage]]:
    """Group the ranks that run the same method, or none, in the order of the lowest rank of each group."""
    together: dict[str, list[RankUsage]] = {}
    for rank in ranks:
        together.setdefault(_runs(rank), []).append(rank)
    return list(together.values())


def _rows(group: GroupUsage, parts: Sequence[Sequence[RankUsage]]) -> list[Row]:
    names = [f"{group.name} ({group.note})" if group.note else group.name, *[""] * (len(parts) - 1)]
    return [(name, *_cells(part)) for name, part in zip(names, parts, strict=True)]


def _cells(ranks: Sequence[RankUsage]) -> Row:
    first, n = ranks[0], len(ranks)
    seconds = [rank.activity.seconds for rank in ranks if rank.activity is not None and rank.activity.method]
    cpus = [rank.cpu_percent for rank in ranks if rank.cpu_percent is not None]
    held = sum(rank.held_nbytes for rank in ranks)
    devices = list(dict.fromkeys(rank.device for rank in ranks if rank.device))
    return (
        ranges([rank.rank for rank in ranks]),
        str(first.pid) if n == 1 else f"{n} processes",
        f"{_runs(first)}{_tasks(ranks)}",
        _from_to(seconds, _duration),
        _from_to(cpus, lambda percent: f"{percent:.0f}%"),
        _from_to([rank.rss_nbytes for rank in ranks], _size),
        _size(held) if held else "-",
        (devices[0] if len(devices) == 1 else f"{len(devices)} GPUs") if devices else "-",
    )


def _runs(rank: RankUsage) -> str:
    debugger = " (in a debugger)" if rank.is_in_debugger else ""
    if rank.activity is None:
        return f"unknown{debugger}"
    more = f" (+{rank.activity.n_more})" if rank.activity.n_more else ""
    return f"{rank.activity.method or IDLE}{more}{debugger}"


def _tasks(ranks: Sequence[RankUsage]) -> str:
    """The number of tasks, if there are more than the task of a running async method."""
    shown = [rank.activity for rank in ranks if rank.activity is not None]
    counts = _from_to([one.n_tasks for one in shown], "{:.0f}".format)
    return f" (tasks: {counts})" if any(one.n_tasks > bool(one.method) for one in shown) else ""


def _from_to(values: Sequence[float], shown: Callable[[float], str]) -> str:
    """The minimum and maximum of some values, or one text if both look alike; "-" if there are none."""
    if not values:
        return "-"
    least, most = shown(min(values)), shown(max(values))
    if least == most:
        return least
    unit = most.lstrip("0123456789.,")
    return f"{least.removesuffix(unit)}-{most}" if unit else f"{least}-{most}"


def _duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m {rest:02}s" if minutes < 60 else f"{minutes // 60}h {minutes % 60:02}m"


def _size(nbytes: float) -> str:
    return f"{nbytes / (1 << 20):,.0f} MiB" if nbytes < 10 << 30 else f"{nbytes / (1 << 30):,.1f} GiB"
