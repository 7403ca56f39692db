"""A deadline on the monotonic clock, or none."""

from __future__ import annotations

import threading
import time


class Deadline:
    """A deadline on the monotonic clock, or none.

    Attributes:
        timeout_s: Seconds from when this was made; None for no limit.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = None if timeout_s is None else float(timeout_s)  # users pass numbers of other types
        self._moment = None if self.timeout_s is None else time.monotonic() + self.timeout_s

    def left(self, most_s: float | None = None) -> float | None:
        """The seconds that are left, 0 or more, and ``most_s`` at most; None for no limit."""
        if self._moment is None:
            return most_s
        left_s = max(0.0, self._moment - time.monotonic())
        return min(left_s, threading.TIMEOUT_MAX if most_s is None else most_s)

    def end(self) -> None:
        """Leave no time from here on. Any thread may call this."""
        self._moment = time.monotonic()
