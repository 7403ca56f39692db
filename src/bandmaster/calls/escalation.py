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

from enum import Enum

PATIENCE_S = 0.5  # after a rank has failed
DEATH_PATIENCE_S = 0.2  # after a rank has died: the call fails within a second
DEATH_WAIT_S = 0.8  # after a death, the call does not wait for the others any longer


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
        self._plan: dict[Step, float] = {}
        self._done: set[Step] = set()

    def begin(self, now: float, patience_s: float = PATIENCE_S) -> None:
        """Interrupt the ranks after some patience; a plan for a sooner moment stays."""
        self._by(Step.INTERRUPT, now + patience_s)

    def after_a_death(self, now: float) -> None:
        """Interrupt the ranks sooner, and stop waiting for them soon after, as a rank has died."""
        self.begin(now, DEATH_PATIENCE_S)
        self._by(Step.STOP_WAITING, now + DEATH_WAIT_S)

    def due(self, now: float) -> Step | None:
        """The next step that is due now, each step once; None if no step is due."""
        for step in Step:
            if step in self._plan and step not in self._done and self._plan[step] <= now:
                self._done.add(step)
                if step is Step.INTERRUPT:
                    self.put_off_the_end(now)  # the grace begins when they are really interrupted
                return step
        return None

    def put_off_the_end(self, now: float) -> None:
        """Begin the grace now, for the first time or again, for example because a rank has not begun the call yet."""
        if self._grace_s is not None:
            self._done.discard(Step.END)
            self._plan[Step.END] = now + self._grace_s

    @property
    def next(self) -> float | None:
        """The moment of the next step, if there is one."""
        return min((moment for step, moment in self._plan.items() if step not in self._done), default=None)

    def _by(self, step: Step, moment: float) -> None:
        self._plan[step] = min(moment, self._plan.get(step, moment))
