"""Calls back when a worker dies, also while no call is pending."""

from __future__ import annotations

import contextlib
import logging
import os
import select
from collections.abc import Callable

from bandmaster.calls.pending import CallSite
from bandmaster.contract import Workers
from bandmaster.errors import WorkerDied
from bandmaster.platform.limits import start_thread

__all__ = ["DeathWatch"]

LOOK_S = 1.0  # how often workers on other hosts are asked after
_log = logging.getLogger(__name__)


class DeathWatch:
    """A thread that calls back when any of a group's processes has died. It ends then, or with the workers.

    The kernel tells of processes on this host; the backend is asked about the others.

    Args:
        workers: The workers.
        site: What the error says about the group.
        callback: Called with the error, once.

    Raises:
        ResourceError: The system allows no more threads.
    """

    def __init__(self, workers: Workers, site: CallSite, callback: Callable[[WorkerDied], object]) -> None:
        self._workers, self._site, self._callback = workers, site, callback
        self._is_over = False
        start_thread("bandmaster-death-watch", self._watch)

    def end(self) -> None:
        """Do not call back from here on."""
        self._is_over = True

    def again(self, workers: Workers) -> DeathWatch:
        """Start to watch workers that have taken the place of these."""
        return DeathWatch(workers, self._site, self._callback)

    def _watch(self) -> None:
        is_running = True
        with contextlib.ExitStack() as close_all:
            poll = select.poll()
            for record in self._workers.records:
                with contextlib.suppress(OSError):  # it has ended already, which the backend will see
                    if record.channel == "lane":
                        process = os.pidfd_open(record.pid)
                        close_all.callback(os.close, process)
                        poll.register(process, select.POLLIN)
            while is_running and not (self._workers.deaths or self._is_over):
                for process, _ in poll.poll(LOOK_S * 1000):
                    poll.unregister(process)  # it has ended; the backend will know in a moment
                is_running = self._workers.check()
        deaths = dict(self._workers.deaths)
        if deaths and self._workers.check() and not self._is_over:
            where = {rank: self._site.mesh.coordinates(rank) for rank in deaths}
            try:
                self._callback(WorkerDied(self._site.method, deaths, where, self._site.group))
            except Exception:
                _log.exception("the callback of on_death raised")
