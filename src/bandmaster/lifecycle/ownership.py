"""Owns a group's workers and slots, and releases both on close, garbage collection or interpreter exit; open groups.

A name that the user gives belongs to one open group at most: a new group of that name closes the former one, so that a
cell of a notebook can be run again. By default, a group is named by its class, with a number if that name is taken.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

from bandmaster.contract import CLOSED, Workers
from bandmaster.errors import ClosedError, UsageError
from bandmaster.platform.forks import free_in_forks, in_forks, n_forks, of_parent

MOST_NAME_NBYTES = 120  # which the kernel shows beside the numbers of a worker, see `bandmaster.wire.status_page`
_log = logging.getLogger(__name__)
_groups: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()  # in this order
_lock = free_in_forks(threading.RLock())  # re-entrant, as a finalizer may construct a group at any point


class Ownership:
    """Owns the workers and slots of one group until they are released.

    They are released by `close`, when the group is garbage-collected, or when the interpreter exits.

    Attributes:
        name: The group's name, for messages.
        why_closed: The reason why the group was closed, or the next step, for messages.
        why_stopped: What the workers' death is put down to once they are released.

    Args:
        group: The group; only a weak reference to it is kept.
        name: The group's name, for messages.
    """

    def __init__(self, group: object, name: str) -> None:
        self.name = name
        self.why_closed, self.why_stopped = "; make a new WorkerGroup", CLOSED
        self._n_forks = n_forks()
        self._workers: Workers | None = None  # those that can be called
        self._started: Workers | None = None  # those that run; at first, and in a restart, they are being constructed
        self._when_closed: list[Callable[[], object]] = []
        self._is_over = False  # it was tried to stop the workers for good
        self._end = weakref.finalize(group, self._release)
        in_forks(self, Ownership._end_in_fork)

    @property
    def is_open(self) -> bool:
        """Whether the workers and slots are not released yet."""
        return self._end.alive

    @property
    def is_ending(self) -> bool:
        """Whether the workers are being stopped for good; no longer if they cannot be stopped."""
        return not (self.is_open or self._is_over)

    @property
    def constructed(self) -> Workers | None:
        """The workers that can be called; None before they are constructed for the first time, and once released."""
        return self._workers if self.is_open else None

    def when_closed(self, step: Callable[[], object]) -> None:
        """Call a function, such as one that releases the group's slots, when the workers were stopped for good."""
        self._when_closed.append(step)

    def own(self, workers: Workers) -> None:
        """Take ownership of running workers. The caller has stopped any earlier ones.

        Raises:
            ClosedError: The group was closed meanwhile; the workers were stopped.
        """
        self._started = workers
        if not self.is_open:
            self._stop()
            self.check()

    def set_workers(self, workers: Workers) -> None:
        """Take ownership of running workers as `own` does, and have them called from here on: they are constructed."""
        self._workers = workers
        self.own(workers)

    def check(self) -> None:
        """Raise if the workers cannot be used by this process.

        Raises:
            ClosedError: The workers were released.
            UsageError: This process was forked from the controller.
        """
        if self._n_forks != n_forks():
            raise of_parent(f"group {self.name!r}")
        if not self._end.alive:
            raise ClosedError(f"group {self.name!r} was closed{self.why_closed}")

    def workers(self) -> Workers:
        """Return the running workers.

        Raises:
            ClosedError: The workers were released.
            UsageError: This process was forked from the controller.
        """
        workers = self._workers
        if workers is None:
            self.check()
        assert workers is not None, "a group's constructor returns only with running workers"
        return workers

    def open_workers(self) -> Workers:
        """Return the running workers; raises ClosedError also while they are being stopped for good."""
        self.check()
        return self.workers()

    def close(self) -> None:
        """Stop the workers and release the slots. Does nothing if they are released, or in a fork of the controller.

        Raises:
            UsageError: A signal handler called this during an operation of the group; nothing was done.
        """
        try:
            armed = self._end.detach()
            if armed is not None:
                self._release()
        except UsageError:
            self._end = weakref.finalize(armed[0], self._release)  # type: ignore[index]  # it was refused to release
            raise
        except BaseException:  # Ctrl-C may have come between two steps: each may be taken again
            if not self._end.alive:
                self._release()
            raise

    def _release(self) -> None:
        try:
            self._stop()
            self.tell_of_end()
        except UsageError:
            raise  # it was refused, and nothing was done
        except BaseException:  # Ctrl-C: each step may be taken again
            try:
                self._stop()
            finally:
                self.tell_of_end()
            raise

    def _end_in_fork(self) -> None:
        self._end.detach()  # to stop the workers is for the parent
        self._workers, self._is_over = None, True

    def _stop(self) -> None:
        workers = self._started
        if workers is not None:
            workers.stop(self.why_stopped)
            self._started = self._workers = None

    def tell_of_end(self) -> None:
        """Take the steps that `when_closed` was given; each may be taken again."""
        self._is_over = True
        for step in self._when_closed:
            step()


def add_group(group: Any, name: str, is_numbered: bool) -> None:
    """Add a group that is being constructed, and set its name.

    Args:
        group: The group; only a weak reference to it is kept.
        name: Its name.
        is_numbered: Whether a number is added to the name if an open group has it.

    Raises:
        UsageError: The name is too long.
    """
    if (nbytes := len(name.encode())) > MOST_NAME_NBYTES:
        hint = "; give it a shorter one with name=" if is_numbered else ""
        raise UsageError(
            f"the name of a {type(group).__name__} must have at most {MOST_NAME_NBYTES} bytes, "
            f"got {nbytes}: {name!r}{hint}"
        )
    with _lock:
        taken, n, base = {other._name for other in open_groups()}, 1, name
        while is_numbered and name in taken:
            n += 1
            name = f"{base}-{n}"
        group._name = group._ownership.name = name
        _groups[group] = None


def open_groups() -> list[Any]:
    """The groups that are open."""
    with _lock:
        return [group for group in list(_groups) if group._ownership.is_open]


def close_former(group: Any) -> list[Any]:
    """Close the open groups that got the name of a new one before it. Returns them."""
    former = itertools.takewhile(lambda other: other is not group, open_groups())
    closed = [other for other in former if other._name == group._name]
    for other in closed:
        _log.info("group %r is closed, because a new group of that name replaces it", group._name)
        why = "because a new group of that name replaced it; use that one, or create it again if its start has failed"
        other._ownership.why_closed = f", {why}"
        other.close()
    return closed
