"""Owns a group's workers and slots, and releases both on close, garbage collection or interpreter exit."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

from bandmaster.contract import Workers
from bandmaster.errors import ClosedError, UsageError
from bandmaster.platform.forks import n_forks

__all__ = ["Ownership"]


@dataclass
class _Held:
    workers: Workers | None = None
    free_slots: Callable[[], object] | None = None


class Ownership:
    """The workers and slots of one group, until they are released.

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
        """Whether the workers and slots were not released."""
        return self._end.alive

    def set_slots(self, free_slots: Callable[[], object]) -> None:
        """Own slots from here on; ``free_slots`` gives them back."""
        self._held.free_slots = free_slots

    def set_workers(self, workers: Workers) -> None:
        """Own these workers from here on; those before have been stopped.

        Raises:
            ClosedError: It was closed meanwhile; the workers were stopped.
        """
        self._held.workers = workers
        if not self.is_open:
            self._held.workers = None
            workers.stop()
            self.check()

    def check(self) -> None:
        """Make sure that the workers may be used here.

        Raises:
            ClosedError: They were released.
            UsageError: This process was forked from the group's.
        """
        if not self._end.alive:
            raise ClosedError(f"group {self._name!r} was closed; make a new WorkerGroup")
        if self._n_forks != n_forks():
            raise UsageError(
                f"group {self._name!r} belongs to the process that this one was forked from; "
                "call it there, or make a group here in a process that was started afresh"
            )

    def workers(self) -> Workers:
        """The workers; raises what `check` does."""
        workers = self._held.workers
        if workers is None or self._n_forks != n_forks():
            self.check()
        assert workers is not None, "the group is made when its workers stand"
        return workers

    def close(self) -> None:
        """Stop the workers and give the slots back, unless that was done, or is for another process to do.

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
        if held.workers is not None:
            _stop(held.workers)
    except UsageError:
        is_refused = True
        raise
    finally:
        if not is_refused:
            held.workers = None
            if held.free_slots is not None:
                held.free_slots()


def _stop(workers: Workers) -> None:
    try:
        workers.stop()
    except BaseException:  # Ctrl-C: what it left undone is done now
        workers.stop()
        raise
