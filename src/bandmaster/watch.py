"""Hearing of a worker's death while nothing is called."""

from __future__ import annotations

import contextlib
import logging
import os
import select
from collections.abc import Callable

from bandmaster.backends import Crew
from bandmaster.calls import CallInfo
from bandmaster.errors import WorkerDied
from bandmaster.limits import start_thread

__all__ = ["DeathWatch"]

LOOK_S = 1.0  # how often workers on other hosts are asked after
_log = logging.getLogger(__name__)


class DeathWatch:
    """A thread that calls back when any of a crew's processes has died. It ends then, or with the crew.

    The kernel tells of processes on this host; after the others it asks.

    Raises:
        ResourceError: The system allows no more threads.
    """

    def __init__(self, crew: Crew, call: CallInfo, callback: Callable[[WorkerDied], object]) -> None:
        self._crew, self._call, self._callback = crew, call, callback
        self._is_over = False
        start_thread("bandmaster-death-watch", self._watch)

    def end(self) -> None:
        """Nothing is called back from here on."""
        self._is_over = True

    def again(self, crew: Crew) -> DeathWatch:
        """The same for workers that have taken the place of these."""
        return DeathWatch(crew, self._call, self._callback)

    def _watch(self) -> None:
        with contextlib.ExitStack() as close_all:
            poll = select.poll()
            for pid in self._crew.processes.values():
                with contextlib.suppress(OSError):  # it has ended already, which the crew will see
                    process = os.pidfd_open(pid)
                    close_all.callback(os.close, process)
                    poll.register(process, select.POLLIN)
            while not (self._crew.deaths or self._crew.is_stopped or self._is_over):
                for process, _ in poll.poll(LOOK_S * 1000):
                    poll.unregister(process)  # it has ended; the crew will know in a moment
                if not self._crew.is_stopped:
                    self._crew.look_for_deaths()
        deaths = dict(self._crew.deaths)
        if deaths and not (self._crew.is_stopped or self._is_over):
            where = {rank: self._call.mesh.coordinates(rank) for rank in deaths}
            try:
                self._callback(WorkerDied(self._call.method, deaths, where, self._call.group))
            except Exception:
                _log.exception("what was to be called on a death raised")
