"""`Life`: whether a rank has moved, from its signs of life. Pure."""

from __future__ import annotations

from bandmaster.contract import Signs

BUSY = 0.05  # of one core; below it, a process that waits may wake up now and then
SMOOTHING = 0.3  # the weight of the last interval


class Life:
    """The signs of life of one rank over time.

    Attributes:
        signs: The last ones.
        moved_at: The last moment at which it had moved.

    Args:
        signs: The first ones.
        now: Their moment, in seconds of one clock.
    """

    def __init__(self, signs: Signs, now: float) -> None:
        self.signs, self.moved_at = signs, now
        self._looked_at, self._load = now, 0.0

    def look(self, signs: Signs, now: float) -> None:
        """Take new signs."""
        before, elapsed_s = self.signs, max(now - self._looked_at, 1e-3)
        load = (signs.cpu_s - before.cpu_s) / elapsed_s
        self._load += SMOOTHING * (load - self._load)
        begun_anew = signs.method != before.method or signs.seconds < before.seconds
        is_busy = min(load, self._load) >= BUSY  # now, and not for a moment only
        if signs.state == "R" or is_busy or (begun_anew and signs.method):  # R: it may wait for a processor
            self.moved_at = now
        self.signs, self._looked_at = signs, now
