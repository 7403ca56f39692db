"""The controller's own standard output and error, on which the output of all groups is shown.

Complete lines come one below the other. In a terminal or a notebook, one more line shows the first progress bar that
runs, and says how many others there are; it is written again at most every half second. Elsewhere, such as in a file, a
bar is one line when it has ended, and one each minute until then.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from bandmaster.output.terminal import is_seen

__all__ = ["SCREEN", "Screen"]

EVERY_S = 0.5  # how often a bar is shown in a terminal
SELDOM_S = 60.0  # and elsewhere


class Screen:
    """Writes lines of several threads, and the bars that run below them. Errors of the streams are ignored."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bars: dict[object, tuple[str, str]] = {}  # stream and text, by source
        self._told: dict[object, float] = {}  # when a bar was last shown on a stream that nobody sees
        self._drawn: tuple[str, int] | None = None  # stream and width of the bar that is shown
        self._drawn_at = 0.0
        self._is_due = False  # whether bars have changed since

    def write(self, source: object, stream: str, prefix: str, lines: Sequence[str], bar: str) -> None:
        """Write what a source has to say.

        Args:
            source: Whose bar it is.
            stream: ``"stdout"`` or ``"stderr"``.
            prefix: What each line begins with.
            lines: Complete lines.
            bar: The line that the source writes again and again; "" for none.
        """
        with self._lock:
            lines = [*lines, *self._changed(source, stream, prefix, bar)]
            if lines:
                self._erase()
                _put(stream, "".join(f"{prefix}{line}\n" for line in lines))
                self._is_due = self._is_due or bool(self._bars)
            self._draw()

    def refresh(self) -> float | None:
        """Show the bar that is due. Returns in how many seconds to call this again; None if there is no need."""
        with self._lock:
            self._draw()
            return max(0.01, self._drawn_at + EVERY_S - time.monotonic()) if self._is_due else None

    def _changed(self, source: object, stream: str, prefix: str, bar: str) -> list[str]:
        """Note the bar of a source; returns it where it is to be a line of its own."""
        if not bar:
            self._told.pop(source, None)
            if self._bars.pop(source, None) is not None:
                self._is_due = True
                self._erase()
        elif is_seen(getattr(sys, stream)):
            self._is_due = self._is_due or self._bars.get(source) != (stream, prefix + bar)
            self._bars[source] = stream, prefix + bar
        else:
            now = time.monotonic()
            if now - self._told.setdefault(source, now) >= SELDOM_S:
                self._told[source] = now
                return [bar]
        return []

    def _draw(self) -> None:
        if not self._is_due or (self._drawn is not None and time.monotonic() < self._drawn_at + EVERY_S):
            return
        self._is_due, self._drawn_at = False, time.monotonic()
        if not self._bars:
            self._erase()
            return
        stream, text = next(iter(self._bars.values()))
        others = f" (and {len(self._bars) - 1} more)" if len(self._bars) > 1 else ""
        width = max(10, _width(stream) - 1 - len(others))
        text = (text if len(text) <= width else text[: width - 1] + "…") + others
        before = self._drawn
        if before is not None and before[0] != stream:
            self._erase()
            before = None
        _put(stream, f"\r{text:<{before[1] if before else 0}}")
        self._drawn = stream, len(text)

    def _erase(self) -> None:
        if self._drawn is not None:
            stream, width = self._drawn
            _put(stream, f"\r{'':<{width}}\r")
            self._drawn = None


def _put(stream: str, text: str) -> None:
    target: Any = getattr(sys, stream)
    if target is not None:
        with contextlib.suppress(Exception):  # a broken pipe, for example, must not block workers
            target.write(text)
            target.flush()


def _width(stream: str) -> int:
    try:
        return os.get_terminal_size(getattr(sys, stream).fileno()).columns or 80
    except (OSError, ValueError, AttributeError):  # a notebook
        return 120


SCREEN = Screen()  # the one of this process
