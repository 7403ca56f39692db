"""Calls a callback when a worker dies, also while no call is pending."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from bandmaster.calls.progress import progress
from bandmaster.calls.request import CallSite
from bandmaster.contract import Workers
from bandmaster.errors import WorkerDied

LOOK_S = 1.0  # polling interval for backends that do not report deaths by themselves
_log = logging.getLogger(__name__)


class DeathWatch:
    """Calls a callback once when any of a group's processes dies. The watch ends then, or when the workers stop.

    Args:
        workers: The workers to watch.
        site: The group's name and mesh, for the error.
        callback: Called with a `WorkerDied`, once, from the thread that runs all callbacks.

    Attributes:
        workers: The workers to watch.
        due: The moment of the next thorough check of the workers, by `time.monotonic`; None before the first one.

    Raises:
        ResourceError: The system allows no more threads or descriptors.
    """

    def __init__(self, workers: Workers, site: CallSite, callback: Callable[[WorkerDied], object]) -> None:
        self.workers = workers
        self.due: float | None = None
        self._site, self._callback = site, callback
        self._is_over = False
        progress.add(self)

    def end(self) -> None:
        """Stop watching: the callback does not run any more."""
        self._is_over = True
        progress.look_at(self)

    def again(self, workers: Workers) -> DeathWatch:
        """Return a new watch with the same callback, for the workers that replaced these."""
        return DeathWatch(workers, self._site, self._callback)

    def look(self) -> bool:
        """Look for deaths, and run the callback if there is one. Returns whether the watch is over."""
        is_due = self.due is None or self.due <= time.monotonic()
        if self._is_over or not self.workers.check(is_thorough=is_due):
            return True
        deaths = dict(self.workers.deaths)
        if not deaths:
            if is_due:  # the more frequent checks that are not thorough must not postpone it
                self.due = time.monotonic() + LOOK_S
            return False
        if self._is_over or not self.workers.check(is_thorough=False):
            return True  # they were stopped, or a rank was ended to be replaced, during the check
        where = {rank: self._site.mesh.coordinates(rank) for rank in deaths}
        try:
            self._callback(WorkerDied(self._site.method, deaths, where, self._site.group, self._site.mesh.shown_axes))
        except Exception:
            _log.exception("a callback passed to on_death raised an exception")
        return True
