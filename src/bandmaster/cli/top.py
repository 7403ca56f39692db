"""``bandmaster top``: the activity and resource use of the user's ranks on this machine, live or once."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from typing import Any

from bandmaster.cli.discovery import no_groups
from bandmaster.cli.top_view import HEADER, IDLE, columns_that_fit, rows_of
from bandmaster.cli.usage import Moment, Sampler
from bandmaster.errors import UsageError
from bandmaster.plan.render import text_table

FIRST_LOOK_S = 0.2  # between the two moments whose difference is the processor time of a snapshot
SHORTEST_INTERVAL_S = 0.1
LINES_AROUND = 4  # the title, the header and its line, and the line below


def top(is_once: bool, interval_s: float, controller: int | None = None) -> int:
    """Show each rank of this user's groups on this machine: pid, running method, processor, memory, rows, device.

    Args:
        is_once: Print one snapshot as plain text; also if standard output is not a terminal.
        interval_s: Seconds between two moments of the live view.
        controller: Pid of the only controller whose groups are shown.

    Returns:
        The exit status: 0, or 1 if the live view needs a package that is not installed.

    Raises:
        UsageError: The interval is too short.
    """
    if not interval_s >= SHORTEST_INTERVAL_S:
        raise UsageError(f"--interval must be at least {SHORTEST_INTERVAL_S:g} seconds, got {interval_s:g}")
    sampler = Sampler(controller)
    sampler.sample()
    if is_once or not (sys.stdout and sys.stdout.isatty()):
        time.sleep(FIRST_LOOK_S)
        print(_text(sampler.sample()))
        return 0
    if importlib.util.find_spec("rich") is None:
        print(
            "bandmaster top: the live view needs rich, which is not installed; install it with: pip install "
            "'bandmaster[top]'; or print one snapshot with: bandmaster top --once",
            file=sys.stderr,
        )
        return 1
    with contextlib.suppress(KeyboardInterrupt):
        _run_live(sampler, interval_s)
    return 0


def _text(moment: Moment) -> str:
    return (
        text_table("ranks on this machine", HEADER, rows_of(moment)) if moment.groups else no_groups(moment.controller)
    )


def _run_live(sampler: Sampler, interval_s: float) -> None:
    """Show one moment after the other on the whole terminal, until the user types q."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    with _keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        wait_s = FIRST_LOOK_S
        while not _is_quit(keys, wait_s):
            live.update(_table(sampler.sample(), *console.size, interval_s), refresh=True)
            wait_s = interval_s


def _table(moment: Moment, width: int, height: int, interval_s: float) -> Any:
    """The table for a terminal of ``width`` characters and ``height`` lines; no line is broken."""
    from rich.table import Table
    from rich.text import Text

    rows = rows_of(moment, max(1, height - LINES_AROUND))
    columns = columns_that_fit(rows, width)
    here = f"groups on {os.uname().nodename}, every {interval_s:g} s" if moment.groups else no_groups(moment.controller)
    table = Table(title=f"{here}; q ends", title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in [HEADER[n] for n in columns]:
        is_number = name in ("pid", "for", "cpu", "memory", "rows held")
        table.add_column(name, no_wrap=True, overflow="ellipsis", justify="right" if is_number else "left")
    for row in rows:
        table.add_row(*[Text(row[n]) for n in columns], style="dim" if row[3] == IDLE else None)
    return table


@contextlib.contextmanager
def _keys() -> Iterator[int | None]:
    """The descriptor of a terminal that passes each key at once, without echo; None if input is not a terminal."""
    if not (sys.stdin and sys.stdin.isatty()):
        yield None
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield fd
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _is_quit(keys: int | None, wait_s: float) -> bool:
    """Wait ``wait_s`` seconds. Returns True as soon as the user types q or the terminal is closed."""
    if keys is None:
        time.sleep(wait_s)
        return False
    deadline = time.monotonic() + wait_s
    while (left_s := deadline - time.monotonic()) > 0:
        if select.select([keys], [], [], left_s)[0]:
            typed = os.read(keys, 64)
            if not typed or b"q" in typed.lower():  # an empty read: the terminal was closed
                return True
    return False
