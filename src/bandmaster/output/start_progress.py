"""A line that shows how far the start of a group is, for those who watch it in a terminal or a notebook."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import ClassVar

from bandmaster.calls.call import Call
from bandmaster.output.terminal import is_seen
from bandmaster.platform.deadline import Deadline
from bandmaster.platform.limits import start_thread

__all__ = ["StartProgress", "shown"]

QUIET_S = 2.0  # shorter starts show nothing
EVERY_S = 0.5
MOST_RANKS = 8  # that are named


class StartProgress:
    """What is known of the start.

    Attributes:
        is_seen: Whether somebody sees it.
        doing: What the ranks do before their constructors run; "" once these do.

    Args:
        group: Name of the group.
        n_ranks: How many ranks are started.
    """

    def __init__(self, group: str, n_ranks: int) -> None:
        self.is_seen = is_seen(sys.stderr)
        self.doing = ""
        self._call: Call | None = None
        self._group, self._n_ranks = group, n_ranks
        self._began = time.monotonic()

    def follow(self, call: Call, timeout_s: float | None) -> bool:
        """Wait for the constructors; False when the time is over before they are done.

        Args:
            call: The call of the constructors.
            timeout_s: How long to wait; None for as long as it takes.
        """
        self._call = call
        deadline = Deadline(timeout_s)
        while self.is_seen:  # who waits reads what has come, once in a while
            left = deadline.left()
            if left is not None and left <= EVERY_S:
                break
            if call.wait(EVERY_S):
                return True
        return call.wait(deadline.left())

    def __str__(self) -> str:
        seconds, who = time.monotonic() - self._began, f"starting {self._group}"
        if self._call is None:
            return f"{who}: waiting for the processes of {self._n_ranks} ranks, {seconds:.0f} s"
        late = self._call.missing
        doing = f", {self.doing}" if self.doing else ""
        return f"{who}{doing}: {self._n_ranks - len(late)} of {self._n_ranks} ranks, {seconds:.0f} s; {_named(late)}"


@contextlib.contextmanager
def shown(group: str, n_ranks: int) -> Iterator[StartProgress]:
    """Show the progress of a start that takes longer than two seconds, if somebody sees it.

    Args:
        group: Name of the group.
        n_ranks: How many ranks are started.
    """
    progress, is_over = StartProgress(group, n_ranks), threading.Event()
    thread = start_thread("bandmaster-start-progress", _show, progress, is_over) if progress.is_seen else None
    try:
        yield progress
    finally:
        is_over.set()
        if thread is not None:
            thread.join()


def _show(progress: StartProgress, is_over: threading.Event) -> None:
    if is_over.wait(QUIET_S):
        return
    _Line.begin(progress)
    while not is_over.wait(EVERY_S):
        _Line.refresh(progress)
    _Line.end(progress)


class _Line:
    """The line in the terminal, which all starts of this process share."""

    lock = threading.Lock()
    starts: ClassVar[list[StartProgress]] = []  # those that are shown, the oldest first: its thread refreshes the line
    width = 0

    @classmethod
    def begin(cls, start: StartProgress) -> None:
        """Show a start."""
        with cls.lock:
            cls.starts.append(start)
            cls._write()

    @classmethod
    def refresh(cls, start: StartProgress) -> None:
        """Write the line anew, if the start is the oldest one."""
        with cls.lock:
            if start is cls.starts[0]:
                cls._write()

    @classmethod
    def end(cls, start: StartProgress) -> None:
        """Show a start no longer; without any, the line is empty."""
        with cls.lock:
            cls.starts.remove(start)
            cls._write()

    @classmethod
    def _write(cls) -> None:
        line = " | ".join(map(str, cls.starts))
        _write(f"\r{line:<{cls.width}}" if line else f"\r{'':<{cls.width}}\r")
        cls.width = max(cls.width, len(line)) if line else 0


def _write(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the terminal is gone, or the stream was closed
        sys.stderr.write(text)
        sys.stderr.flush()


def _named(ranks: Sequence[int]) -> str:
    if not ranks:
        return "all have come"
    more = f" and {len(ranks) - MOST_RANKS} more" if len(ranks) > MOST_RANKS else ""
    return f"late: rank {', '.join(map(str, ranks[:MOST_RANKS]))}{more}"
