"""`WatchedCalls`: the calls to the same workers that have not ended, and whether they make progress."""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from bandmaster.calls.call import Call
from bandmaster.calls.options import WARN
from bandmaster.contract import Signs, Workers
from bandmaster.errors import BandmasterError
from bandmaster.errors.failure import is_in_collective, is_in_debugger
from bandmaster.watching.notice import (
    Find,
    Ranks,
    chain,
    facts_of,
    guilty,
    mismatches,
    named,
    notice,
    words_of,
)
from bandmaster.watching.stall import Policies, Renewed, Stall

YOUNG_S = 0.5  # ranks of younger calls are not looked at
USUAL_TIMES, LEAST_S, MOST_S, UNKNOWN_S = 10.0, 30.0, 300.0, 60.0  # see `CallOptions.stall_after`
OFTEN = 0.1  # of that time, between two looks at ranks
BUSY = 0.05  # of one core; below it, a process that waits may wake up now and then
SMOOTHING = 0.3  # the weight of the last interval
AGAIN = 4.0  # a notice is repeated after so many times the time that it told of
FindGroup = Callable[[], Renewed | None]
_log = logging.getLogger(__name__)


class Seen(NamedTuple):
    """A call that was seen before it ended: the moment at which it was seen first, and its method."""

    since: float
    method: str


class Told(NamedTuple):
    """A notice that was not withdrawn: its call, the words for that, and the moment of the next notice."""

    call: weakref.ref[Any]
    words: str
    again_at: float


class Life:
    """The signs of life of one rank over time.

    Attributes:
        signs: The last ones.
        moved_at: The last moment at which it had moved.

    Args:
        signs: The first ones.
        now: Their moment, in seconds of one clock.
    """

    def __init__(self, signs: Signs, now: float) -> None:
        self.signs, self.moved_at = signs, now
        self._looked_at, self._load = now, 0.0

    def look(self, signs: Signs, now: float) -> None:
        """Take new signs."""
        before, elapsed_s = self.signs, max(now - self._looked_at, 1e-3)
        load = max(0.0, signs.cpu_s - before.cpu_s) / elapsed_s  # of a rank that was replaced, it begins at 0
        self._load += SMOOTHING * (load - self._load)
        begun_anew = signs.method != before.method or signs.seconds < before.seconds
        is_busy = min(load, self._load) >= BUSY  # now, and not for a moment only
        if signs.state == "R" or is_busy or (begun_anew and signs.method):  # R: it may wait for a processor
            self.moved_at = now
        self.signs, self._looked_at = signs, now


class WatchedCalls:
    """The calls of the same workers that have not ended, and the lives of the ranks that owe replies.

    Args:
        tell: Called with each notice.
        find: Finds the groups that ranks of these workers wait for.
    """

    def __init__(self, tell: Callable[[Stall], object], find: Find) -> None:
        self._tell, self._find = tell, find
        self._seen: dict[weakref.ref[Any], Seen] = {}  # the calls that had not ended at the last look
        self._took: dict[str, float] = {}  # the longest that calls were seen to take, by method
        self._lives: dict[int, Life] = {}
        self._told: Told | None = None
        self._open: set[weakref.ref[Any]] = set()  # the calls that ranks have, and when this has changed
        self._changed_at = 0.0
        self._spins_at = self._looks_at = 0.0  # the moments before which this is not done again
        self._policies = Policies()
        self._acted: weakref.WeakSet[Any] = weakref.WeakSet()  # the calls whose policies were followed

    def look(self, workers: Workers, calls: Sequence[Any], group: FindGroup) -> None:
        """Look at the calls that have not ended. Those that were cancelled are ended by others.

        Args:
            workers: The workers.
            calls: The calls and requests.
            group: Returns their group, for policies; None if there is none, or none any more.
        """
        now = time.monotonic()
        self._note(calls, now)
        is_renewing = self._policies.is_renewing  # what has no place then waits for that
        calls = [call for call in calls if not call.is_cancelled and (call.tickets or not is_renewing)]
        limits = {call: limit for call in calls if (limit := self._after(call)) is not None}
        new = [OFTEN * limit for call, limit in limits.items() if self._since(call) == now]
        self._looks_at = min(self._looks_at, now + min(new, default=math.inf))
        old = [call for call in limits if now - self._since(call) >= YOUNG_S]
        if (open_now := {weakref.ref(call) for call in old if call.tickets}) != self._open:
            self._open, self._changed_at = open_now, now
        if self._told is not None and self._told.call() not in old:
            self._withdraw(self._told)
        if not old or now < self._looks_at:
            return
        workers.check(is_thorough=False)
        self._look_at_ranks(workers, old, now)
        stalled, left = dict[Any, float](), [OFTEN * min(limits.values())]  # seconds until the next look
        for call in old:
            quiet, limit = self._quiet_s(call, now), limits[call]
            is_long = max(quiet, default=-1.0) >= limit
            if not call.tickets:  # it waits for its rows, or for a place, which others have that stand still
                is_quiet = now - max(self._changed_at, self._since(call)) >= limit
                is_vain = is_quiet and not (isinstance(call, Call) or call.waits_for)
                if is_vain and (not open_now or stalled):
                    stalled[call] = now - self._since(call)
            elif is_long and (min(quiet) >= limit or self._waits_in_vain(workers, call, limit, now)):
                stalled[call] = max(quiet)
            else:
                left.append(limit - min(quiet, default=0.0))
        first = next((call for call in stalled if not call.is_unread), None)
        if first is not None:
            self._say(workers, stalled, first, len(old) - 1, group)
        else:
            self._looks_at = now + min(left)
            if self._told is not None:
                self._withdraw(self._told)

    def _quiet_s(self, call: Any, now: float) -> list[float]:
        """Seconds without progress of each rank that owes a reply; none if there is one of which nothing is known."""
        ranks, since = call.unanswered, self._since(call)
        known = [self._lives[rank].moved_at for rank in ranks if rank in self._lives]
        return [now - max(moved_at, since) for moved_at in known] if len(known) == len(ranks) else []

    def _note(self, calls: Sequence[Any], now: float) -> None:
        """Note when calls were seen first, and how long those took that have ended since the last look."""
        before = self._seen
        seen = {weakref.ref(call): Seen(now, call.site.method) for call in calls}
        self._seen = {call: before.pop(call, found) for call, found in seen.items()}
        for since, method in before.values():
            self._took[method] = max(now - since, self._took.get(method, 0.0))

    def _since(self, call: Any) -> float:
        """The moment at which a call was seen first."""
        return self._seen[weakref.ref(call)].since

    def _after(self, call: Any) -> float | None:
        """Seconds without progress after which a call has stalled; None for never."""
        limit: float | str | None = call.site.limits().stall_after
        if not isinstance(limit, str):  # `USUAL`
            return limit
        took = self._took.get(call.site.method)
        return UNKNOWN_S if took is None else min(max(USUAL_TIMES * took, LEAST_S), MOST_S)

    def _look_at_ranks(self, workers: Workers, calls: Sequence[Any], now: float) -> None:
        before, self._lives = self._lives, {}
        for rank, signs in workers.signs(sorted({rank for call in calls for rank in call.unanswered})).items():
            self._lives[rank] = before.get(rank) or Life(signs, now)
            self._lives[rank].look(signs, now)

    def _waits_in_vain(self, workers: Workers, call: Any, limit: float, now: float) -> bool:
        """Whether the ranks that move all are in a collective, and a rank that does not is in none."""
        if now < self._spins_at:
            return False
        self._spins_at = now + limit / 2
        stacks = workers.stacks(call.unanswered)
        still = {rank for rank in stacks if now - self._lives[rank].moved_at >= limit}
        return all(is_in_collective(stacks[rank]) != (rank in still) for rank in stacks)

    def _say(self, workers: Workers, stalled: Mapping[Any, float], first: Any, n_more: int, group: FindGroup) -> None:
        """Tell of the first call that has stalled, unless this was done lately; and do what policies say, once a call.

        Calls behind one that runs alone may go on when it has ended, so that their policies have to wait.
        """
        now, told = time.monotonic(), self._told
        acting: list[Any] = []
        for call in stalled:
            if not call.is_unread and call.site.limits().on_stall != WARN and call not in self._acted:
                acting.append(call)
                if isinstance(call, Call):
                    break
        is_told = told is not None and told.call() is first and now < told.again_at
        if is_told and not acting:
            return
        stacks: dict[tuple[int, ...], Mapping[int, str]] = {}
        said = dict[Any, Stall]()
        for call in dict.fromkeys(acting if is_told else [first, *acting]):
            tickets = call.unanswered
            if not tickets:
                tickets = {rank: ticket for other in stalled for rank, ticket in other.unanswered.items()}
            key = tuple(tickets)
            if key not in stacks:
                stacks[key] = self._stacks(workers, tickets)
            if any(map(is_in_debugger, stacks[key].values())):
                self._lives = {}  # they begin anew
                return
            signs = {rank: life.signs for rank, life in self._lives.items() if rank in tickets}
            facts = facts_of(workers, signs, stacks[key])
            unread = [other for other in stalled if other.is_unread and not tickets.keys().isdisjoint(other.unanswered)]
            said[call] = self._stall(call, stalled[call], facts, n_more, unread, group)
        if not is_told:
            self._told = Told(weakref.ref(first), words_of(first.site), now + AGAIN * stalled[first])
            self._tell(said[first])
        # A stack may take a second, in which calls end.
        acting = [call for call in acting if call.done is None and (call.unanswered or not call.is_sent)]
        self._acted.update(acting)
        self._policies.act({call: said[call] for call in acting}, group(), workers)
        if any(call.is_cancelled for call in acting):
            self._lives = {}  # the others have all of their time from here on
        if first.is_cancelled:
            self._told = None

    def _stacks(self, workers: Workers, tickets: Mapping[int, Any]) -> Mapping[int, str]:
        """The stacks of ranks; of those that give none at first, such as they are at the second attempt."""
        found = dict(workers.stacks(tickets))
        found.update(workers.stacks({rank: ticket for rank, ticket in tickets.items() if rank not in found}))
        return found

    def _stall(
        self, call: Any, seconds: float, facts: Ranks, n_more: int, unread: Sequence[Any], group: FindGroup
    ) -> Stall:
        site = call.site
        lines, late = mismatches({rank: one.stack for rank, one in facts.items()})
        if facts and isinstance(call, Call) and all(is_in_collective(one.stack) for one in facts.values()):
            ended = [*call.answered, *(rank for rank, ticket in call.tickets.items() if ticket.is_done)]
            lines += [f"  {named(ended)} ended the call without them"] if ended else []
        for other in unread:
            lines.append(
                f"  {words_of(other.site)}, on {named(list(other.unanswered))}, goes on when its items are taken, and "
                "nobody waits for one; iterate over the stream, or close it"
            )
        if call.is_awaited:
            lines.append(
                "  the turn of another group on these slots waits until the stream has ended; read it to its end, or "
                "close it"
            )
        with suppress(BandmasterError):  # a group is being closed
            lines += chain(facts, self._find)
        has_begun = call.tickets or isinstance(call, Call)  # a call that has ended meanwhile has no tickets either
        waits = "" if has_begun else call.router.why_waiting(call.target)
        text = notice(site, seconds, facts, n_more, lines, waits, getattr(group(), "name", ""))
        found = tuple(late) or guilty(facts)
        return Stall(site.group, site.method, tuple(call.unanswered), seconds, text, time.time(), found)

    def _withdraw(self, told: Told) -> None:
        """Tell that the call goes on that was told of, or has ended, unless it was cancelled."""
        call, self._told = told.call(), None
        if call is None or not call.is_cancelled:
            _log.warning("%s goes on", told.words)
