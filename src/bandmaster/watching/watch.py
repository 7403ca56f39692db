"""`Watcher`: the thread that looks for calls that make no progress, and tells of them."""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import weakref
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple

from bandmaster.calls.open_work import OpenWork
from bandmaster.contract import Workers
from bandmaster.errors import BandmasterError
from bandmaster.lifecycle.construction import WATCHERS, Start
from bandmaster.lifecycle.ownership import Ownership
from bandmaster.platform.limits import start_thread
from bandmaster.watching.calls import WatchedCalls
from bandmaster.watching.stall import Stall as Stall

LOOK_S = 1.0
MOST_KEPT = 100
_log = logging.getLogger(__name__)


class _Group(NamedTuple):
    """An open group, of which nothing is kept alive: its owner, its calls, and the group itself."""

    ownership: weakref.ref[Ownership]
    work: weakref.ref[OpenWork]
    group: weakref.ref[Any]

    @property
    def is_open(self) -> bool:
        ownership = self.ownership()
        return ownership is not None and ownership.is_open

    def known(self) -> tuple[Workers, OpenWork] | None:
        """Its workers and calls; None if it is gone."""
        ownership, work = self.ownership(), self.work()
        return None if ownership is None or work is None else (ownership.open_workers(), work)


class Watcher:
    """Looks for stalled calls of all open groups of this process, in a thread that runs as long as there are any.

    Attributes:
        stalls: The last notices, oldest first.
        soon: Anything put in has the thread look at once, and end if there are no groups any more.
    """

    def __init__(self) -> None:
        self.stalls: list[Stall] = []
        self._lock = threading.Lock()
        self._is_running = False
        self.soon: queue.SimpleQueue[None] = queue.SimpleQueue()  # no Event: finalizers put something in, in any thread
        # No group itself, which is closed when it is dropped, nor the owner of its slots, which are free then.
        self._groups: list[_Group] = []
        self._watched: weakref.WeakKeyDictionary[Workers, WatchedCalls] = weakref.WeakKeyDictionary()
        self._turns: Any = None

    def begin(self, ownership: Ownership, work: OpenWork, group: Any) -> None:
        """Look after the calls of a group, which was opened. Raises ResourceError if there can be no more threads."""
        with self._lock:
            self._groups = [*self._groups, _Group(weakref.ref(ownership), weakref.ref(work), weakref.ref(group))]
            if not self._is_running:
                start_thread("bandmaster-watch", self._run)
                self._is_running = True

    def tell(self, stall: Stall) -> None:
        """Log a notice, and keep it."""
        self.stalls = [*self.stalls, stall][-MOST_KEPT:]
        _log.warning("%s", stall.text)

    def find(self, name: str) -> tuple[Workers, OpenWork] | None:
        """The workers and the calls of an open group, or of that of a role; None if there is none of that name."""
        groups = {owner.name: group for group in self._groups if (owner := group.ownership()) is not None}
        found = max((owner for owner in groups if f"{name}.".startswith(f"{owner}.")), key=len, default=None)
        return None if found is None else groups[found].known()

    def _run(self) -> None:
        while self._look():
            with suppress(queue.Empty):
                self.soon.get(timeout=LOOK_S)
                while True:  # one look is enough for all
                    self.soon.get_nowait()

    def _look(self) -> bool:
        """Look at all groups; False if there are none, and the thread has to end."""
        gone = [group for group in self._groups if not group.is_open]  # not under the lock: it may release slots
        with self._lock:
            self._groups = groups = [group for group in self._groups if group not in gone]
            self._is_running = bool(groups)
        for group in groups:
            try:
                known = group.known()
                if known is not None:
                    workers, work = known
                    if workers not in self._watched:
                        self._watched[workers] = WatchedCalls(self.tell, self.find)
                    self._watched[workers].look(workers, work.unanswered(), group.group)
            except BandmasterError:  # it is being closed or restarted
                continue
            except Exception:
                _log.exception("cannot look whether the calls of a group make progress")
        self._look_at_turns()
        return bool(groups)

    def _look_at_turns(self) -> None:
        """Look at turns, if the program has imported that feature."""
        if "bandmaster.turns.turns" in sys.modules:
            from bandmaster.watching.turns import WatchedTurns

            self._turns = self._turns or WatchedTurns(self.tell)
            try:
                self._turns.look()
            except Exception:
                _log.exception("cannot look whether turns are waited for in vain")


watch = Watcher()


def watched(start: Start) -> AbstractContextManager[object]:
    """Have the thread that waits for the constructors of a group look for such as make no progress."""
    calls = WatchedCalls(watch.tell, watch.find)

    def look() -> None:
        if start.call is not None:
            calls.look(start.call.workers, [start.call], lambda: None)

    start.looks.append(look)
    return nullcontext()


def stalls() -> list[Stall]:
    """The calls of this process that were noticed to make no progress, oldest first; the last hundred."""
    return list(watch.stalls)


def _begin_anew() -> None:
    """Reset the state in a forked process, which has no such thread."""
    watch.__init__()  # type: ignore[misc]  # resets all of it


WATCHERS.append(watched)
os.register_at_fork(after_in_child=_begin_anew)
