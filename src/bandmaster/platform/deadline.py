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
        self.timeout_s = timeout_s
        self._moment = None if timeout_s is None else time.monotonic() + float(timeout_s)

    def left(self) -> float | None:
        """The seconds that are left, 0 or more; None for no limit."""
        if self._moment is None:
            return None
        return min(max(0.0, self._moment - time.monotonic()), threading.TIMEOUT_MAX)

    def end(self) -> None:
        """Leave no time from here on. Any thread may call this."""
        self._moment = time.monotonic()
