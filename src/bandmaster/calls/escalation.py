"""The escalation against ranks that go on with a call that failed on another rank, or that was cancelled. Pure.

::

    a rank failed, or died, or the call was cancelled
      │ patience: the others may end by themselves
      ▼
    interrupt the others ── an exception in their Python code
      │ grace: they may tidy up; code in C cannot be interrupted
      ▼
    end those that have not stopped

Therefore ranks that wait in a collective for a failed rank do not wait forever.
"""

from __future__ import annotations

import math
from enum import Enum

PATIENCE_S = 0.5  # after a rank has failed
DEATH_PATIENCE_S = 0.2  # after a rank has died: the call fails within a second
DEATH_WAIT_S = 0.8  # after a death, the call does not wait for the others any longer
DONE = -math.inf  # in place of the moment of a step that was taken


class Step(Enum):
    """A step of the escalation."""

    INTERRUPT = "interrupt"
    END = "end"
    STOP_WAITING = "stop waiting"


class Escalation:
    """The timetable of the steps for one call. Moments are in seconds of one clock.

    Args:
        grace_s: Seconds between the interruption and the end; None never ends a rank.
    """

    def __init__(self, grace_s: float | None) -> None:
        self._grace_s = grace_s
        self._moments: dict[Step, float] = {}

    def begin(self, now: float, patience_s: float = PATIENCE_S, wait_s: float = math.inf) -> None:
        """Interrupt the ranks after some patience, and stop waiting after some time; sooner moments stay."""
        for step, moment in ((Step.INTERRUPT, now + patience_s), (Step.STOP_WAITING, now + wait_s)):
            self._moments[step] = min(moment, self._moments.get(step, moment))

    def due(self, now: float) -> Step | None:
        """The next step that is due now, each step once; None if no step is due."""
        for step, moment in self._moments.items():
            if DONE < moment <= now:
                self._moments[step] = DONE
                if step is Step.INTERRUPT:
                    self.put_off_the_end(now)  # the grace begins when they are really interrupted
                return step
        return None

    def put_off_the_end(self, now: float) -> None:
        """Begin the grace now, for the first time or again, for example because a rank has not begun the call yet."""
        if self._grace_s is not None:
            self._moments[Step.END] = now + self._grace_s

    @property
    def next(self) -> float | None:
        """The moment of the next step, if there is one."""
        return min((moment for moment in self._moments.values() if moment > DONE), default=None)
