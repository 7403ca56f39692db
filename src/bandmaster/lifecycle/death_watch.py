"""Calls back when a worker dies, also while no call is pending."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from bandmaster.calls.pending import CallSite
from bandmaster.calls.progress import progress
from bandmaster.contract import Workers
from bandmaster.errors import WorkerDied

__all__ = ["DeathWatch"]

LOOK_S = 1.0  # how often workers are asked whose deaths do not arrive by themselves
_log = logging.getLogger(__name__)


class DeathWatch:
    """Calls back when any of a group's processes has died; it ends then, or with the workers.

    Args:
        workers: The workers.
        site: What the error says about the group.
        callback: Called with the error, once, from the thread of all callbacks.

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
        """Do not call back from here on."""
        self._is_over = True
        progress.look_at(self)

    def again(self, workers: Workers) -> DeathWatch:
        """Start to watch workers that have taken the place of these."""
        return DeathWatch(workers, self._site, self._callback)

    def look(self) -> bool:
        """Look for deaths; whether there is nothing to watch any more."""
        if self._is_over or not self.workers.check(is_thorough=self.due is None or self.due <= time.monotonic()):
            return True
        deaths = dict(self.workers.deaths)
        if not deaths:
            self.due = time.monotonic() + LOOK_S
            return False
        where = {rank: self._site.mesh.coordinates(rank) for rank in deaths}
        try:
            self._callback(WorkerDied(self._site.method, deaths, where, self._site.group))
        except Exception:
            _log.exception("the callback of on_death raised")
        return True
