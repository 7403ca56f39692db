"""A group's hold on its workers and their places: until it is closed, collected as garbage, or Python ends."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

from bandmaster.backends import Crew
from bandmaster.errors import ClosedError, UsageError
from bandmaster.forks import n_forks

__all__ = ["Tenancy"]


@dataclass
class _Held:
    crew: Crew | None = None
    vacate: Callable[[], object] | None = None


class Tenancy:
    """What a group has, for as long as it has it.

    Args:
        group: The group; it is not kept alive.
        name: The group's.
    """

    def __init__(self, group: object, name: str) -> None:
        self._name = name
        self._n_forks = n_forks()
        self._held = _Held()
        self._end = weakref.finalize(group, _end, self._held)

    @property
    def is_open(self) -> bool:
        """Whether it has not ended."""
        return self._end.alive

    def take(self, vacate: Callable[[], object]) -> None:
        """The places are the group's from here on; ``vacate`` gives them back."""
        self._held.vacate = vacate

    def move_in(self, crew: Crew) -> None:
        """These are the workers from here on; those before have been stopped.

        Raises:
            ClosedError: It was closed meanwhile; the workers were stopped.
        """
        self._held.crew = crew
        if not self.is_open:
            self._held.crew = None
            crew.stop()
            self.check()

    def check(self) -> None:
        """Make sure that it may be used here.

        Raises:
            ClosedError: It has ended.
            UsageError: This process was forked from the group's.
        """
        if not self._end.alive:
            raise ClosedError(f"group {self._name!r} was closed; make a new WorkerGroup")
        if self._n_forks != n_forks():
            raise UsageError(
                f"group {self._name!r} belongs to the process that this one was forked from; "
                "call it there, or make a group here in a process that was started afresh"
            )

    @property
    def crew(self) -> Crew:
        """The workers; raises what `check` does."""
        crew = self._held.crew
        if crew is None or self._n_forks != n_forks():
            self.check()
        assert crew is not None, "the group is made when its workers stand"
        return crew

    def close(self) -> None:
        """Stop the workers and give the places back, unless that was done, or is for another process to do.

        Raises:
            UsageError: A signal handler closes it in the middle of an operation; nothing was done.
        """
        armed = self._end.detach() if self._n_forks == n_forks() else None
        if armed is None:
            return
        try:
            _end(self._held)
        except UsageError:
            self._end = weakref.finalize(armed[0], _end, self._held)
            raise


def _end(held: _Held) -> None:
    is_refused = False
    try:
        if held.crew is not None:
            _stop(held.crew)
    except UsageError:
        is_refused = True
        raise
    finally:
        if not is_refused:
            held.crew = None
            if held.vacate is not None:
                held.vacate()


def _stop(crew: Crew) -> None:
    try:
        crew.stop()
    except BaseException:  # Ctrl-C: what it left undone is done now
        crew.stop()
        raise
