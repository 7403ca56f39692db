"""`Watch`: the thread that looks for calls that make no progress, and tells of them."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bandmaster.calls.open_work import OpenWork
from bandmaster.calls.options import USUAL
from bandmaster.contract import Workers
from bandmaster.errors import BandmasterError
from bandmaster.errors.failure import is_in_debugger
from bandmaster.lifecycle.ownership import Ownership
from bandmaster.platform.limits import start_thread
from bandmaster.watching.life import Life
from bandmaster.watching.notice import RankFacts, is_in_collective, notice

LOOK_S = 1.0
YOUNG_S = 0.5  # ranks of younger calls are not looked at
USUAL_TIMES, LEAST_S, MOST_S, UNKNOWN_S = 10.0, 30.0, 300.0, 60.0  # see `CallOptions.stall_after`
OFTEN = 0.1  # of that time, between two looks at ranks
AGAIN = 4.0  # a notice is repeated after so many times the time that it told of
MOST_KEPT = 100
_log = logging.getLogger(__name__)


class Stall(NamedTuple):
    """A call that made no progress.

    Attributes:
        group: The name of its group.
        method: ``"Class.method"``.
        ranks: The ranks that owed a reply.
        seconds: Seconds without progress, when it was noticed.
        text: The notice.
        at: When it was noticed, in seconds since the epoch.
    """

    group: str
    method: str
    ranks: tuple[int, ...]
    seconds: float
    text: str
    at: float


class _Told(NamedTuple):
    """A notice that was not withdrawn: its call, the words for that, and the moment of the next notice."""

    call: weakref.ref[Any]
    words: str
    again_at: float


class Watch:
    """Looks for stalled calls of all open groups of this process, in a thread that runs as long as there are any.

    Attributes:
        stalls: The last notices, oldest first.
    """

    def __init__(self) -> None:
        self.stalls: list[Stall] = []
        self._lock = threading.Lock()
        self._is_running = False
        self._soon = threading.Event()
        self._groups: dict[Ownership, weakref.ref[OpenWork]] = {}  # no group itself, which is closed when it is dropped
        self._watched: weakref.WeakKeyDictionary[Workers, _Watched] = weakref.WeakKeyDictionary()

    def begin(self, ownership: Ownership, work: OpenWork) -> None:
        """Look after the calls of a group, which was opened. Raises ResourceError if there can be no more threads."""
        with self._lock:
            self._groups[ownership] = weakref.ref(work)
            if not self._is_running:
                start_thread("bandmaster-watch", self._run)
                self._is_running = True

    def look_soon(self) -> None:
        """Have the thread look at once, and end if there are no groups any more."""
        self._soon.set()

    def tell(self, stall: Stall) -> None:
        """Log a notice, and keep it."""
        self.stalls = [*self.stalls, stall][-MOST_KEPT:]
        _log.warning("%s", stall.text)

    def _run(self) -> None:
        while self._look():
            self._soon.wait(LOOK_S)
            self._soon.clear()

    def _look(self) -> bool:
        """Look at all groups; False if there are none, and the thread has to end."""
        with self._lock:
            self._groups = {owner: work for owner, work in self._groups.items() if owner.is_open}
            groups = list(self._groups.items())
            self._is_running = bool(groups)
        for ownership, known in groups:
            try:
                workers, work = ownership.open_workers(), known()
                if work is not None:
                    if workers not in self._watched:
                        self._watched[workers] = _Watched()
                    self._watched[workers].look(workers, work.unanswered(), self.tell)
            except BandmasterError:  # it is being closed or restarted
                continue
            except Exception:
                _log.exception("cannot look whether the calls of a group make progress")
        return bool(groups)


class _Watched:
    """The calls of the same workers that have not ended, and the lives of the ranks that owe replies."""

    def __init__(self) -> None:
        self._since: dict[int, tuple[weakref.ref[Any], float, str]] = {}  # by id: when it was seen first; the method
        self._took: dict[str, float] = {}  # the longest that calls were seen to take, by method
        self._lives: dict[int, Life] = {}
        self._told: _Told | None = None
        self._spins_at = self._looks_at = 0.0  # the moments before which this is not done again

    def look(self, workers: Workers, calls: Sequence[Any], tell: Any) -> None:
        """Look at the calls that have not ended."""
        now = time.monotonic()
        self._note(calls, now)
        limits = {id(call): limit for call in calls if (limit := self._after(call)) is not None}
        new = [OFTEN * limit for number, limit in limits.items() if self._since[number][1] == now]
        self._looks_at = min(self._looks_at, now + min(new, default=math.inf))
        old = [call for call in calls if id(call) in limits and now - self._since[id(call)][1] >= YOUNG_S]
        if self._told is not None and not any(call is self._told.call() for call in old):
            self._withdraw(self._told)
        if not old or now < self._looks_at:
            return
        workers.check(is_thorough=False)
        self._look_at_ranks(workers, old, now)
        left = [OFTEN * min(limits.values())]  # seconds until the next look
        for call in old:
            quiet, limit = self._quiet_s(call, now), limits[id(call)]
            is_long = max(quiet, default=-1.0) >= limit
            if is_long and (min(quiet) >= limit or self._waits_in_vain(workers, call, limit, now)):
                self._tell(workers, call, (max(quiet), len(old) - 1), tell)
                return
            left.append(limit - min(quiet, default=0.0))
        self._looks_at = now + min(left)
        if self._told is not None:
            self._withdraw(self._told)

    def _quiet_s(self, call: Any, now: float) -> list[float]:
        """Seconds without progress of each rank that owes a reply; none if there is one of which nothing is known."""
        ranks, since = _owing(call), self._since[id(call)][1]
        known = [self._lives[rank].moved_at for rank in ranks if rank in self._lives]
        return [now - max(moved_at, since) for moved_at in known] if len(known) == len(ranks) else []

    def _note(self, calls: Sequence[Any], now: float) -> None:
        """Note when calls were seen first, and how long those took that have ended since the last look."""
        before = self._since
        self._since = {}
        for call in calls:
            known = before.pop(id(call), None)
            is_same = known is not None and known[0]() is call
            self._since[id(call)] = known if known and is_same else (weakref.ref(call), now, call.site.method)
        for _, since, method in before.values():
            self._took[method] = max(now - since, self._took.get(method, 0.0))

    def _after(self, call: Any) -> float | None:
        """Seconds without progress after which a call has stalled; None for never."""
        limit: float | str | None = call.site.limits().stall_after
        if limit != USUAL:
            assert not isinstance(limit, str), "the options were checked"
            return limit
        took = self._took.get(call.site.method)
        return UNKNOWN_S if took is None else min(max(USUAL_TIMES * took, LEAST_S), MOST_S)

    def _look_at_ranks(self, workers: Workers, calls: Sequence[Any], now: float) -> None:
        before, self._lives = self._lives, {}
        for rank, signs in workers.signs(sorted({rank for call in calls for rank in _owing(call)})).items():
            self._lives[rank] = before.get(rank) or Life(signs, now)
            self._lives[rank].look(signs, now)

    def _waits_in_vain(self, workers: Workers, call: Any, limit: float, now: float) -> bool:
        """Whether the ranks that move all are in a collective, and a rank that does not is in none."""
        if now < self._spins_at:
            return False
        self._spins_at = now + limit / 2
        stacks = workers.stacks(_owing(call))
        still = {rank for rank in stacks if now - self._lives[rank].moved_at >= limit}
        return all(is_in_collective(stacks[rank]) != (rank in still) for rank in stacks)

    def _tell(self, workers: Workers, call: Any, known: tuple[float, int], tell: Any) -> None:
        """Tell of a stalled call, unless this was done lately; ``known`` is for how long, and how many are with it."""
        told, now = self._told, time.monotonic()
        if told is not None and told.call() is call and now < told.again_at:
            return
        (seconds, n_more), tickets = known, _owing(call)
        stacks = dict(workers.stacks(tickets))
        stacks.update(workers.stacks({rank: ticket for rank, ticket in tickets.items() if rank not in stacks}))
        if any(map(is_in_debugger, stacks.values())):
            self._lives = {}  # they begin anew
            return
        facts = {
            rank: RankFacts(life.signs, stacks.get(rank, ""), *workers.records[rank][:2])
            for rank, life in self._lives.items()
            if rank in tickets
        }
        site = call.site
        text = notice(site, seconds, facts, n_more)
        self._told = _Told(weakref.ref(call), f"{site.method} of group {site.group!r}", now + AGAIN * seconds)
        tell(Stall(site.group, site.method, tuple(tickets), seconds, text, time.time()))

    def _withdraw(self, told: _Told) -> None:
        """Tell that the call goes on that was told of, or has ended."""
        self._told = None
        _log.warning("%s goes on", told.words)


def _owing(call: Any) -> Mapping[int, Any]:
    """The tickets of the ranks that owe a reply to a call."""
    return {rank: ticket for rank, ticket in dict(call.tickets).items() if not ticket.is_done}


watch = Watch()


def stalls() -> list[Stall]:
    """The calls of this process that were noticed to make no progress, oldest first; the last hundred."""
    return list(watch.stalls)


def _begin_anew() -> None:
    """Reset the state in a forked process, which has no such thread."""
    watch.__init__()  # type: ignore[misc]  # resets all of it


os.register_at_fork(after_in_child=_begin_anew)
