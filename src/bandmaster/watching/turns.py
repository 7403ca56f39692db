"""`WatchedTurns`: turns that threads wait for in vain: one is never given back, or threads wait for each other's.

A turn that is waited for has stalled if the threads and tasks that have the slots stay at the same place without using
the processor, while no call of their groups is open: those are looked after themselves. Threads that wait for each
other's turns are told of at once.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from bandmaster.turns.turns import Turn, waits
from bandmaster.watching.calls import BUSY
from bandmaster.watching.notice import where
from bandmaster.watching.stall import Policies, Stall

USUAL_S = 60.0


class _Place(NamedTuple):
    """The place of the thread or task that has a turn, and the processor time of that thread, in seconds."""

    frames: tuple[tuple[int, int], ...]
    cpu_s: float


class WatchedTurns:
    """The turns that threads and tasks of this process wait for.

    Args:
        tell: Called with each notice.
    """

    def __init__(self, tell: Callable[[Stall], object]) -> None:
        self._tell, self._policies = tell, Policies()
        self._since: dict[Turn, tuple[float, Sequence[_Place]]] = {}  # the last moment at which something moved
        self._told: set[Turn] = set()
        self._looked_at = 0.0

    def look(self) -> None:
        """Look at the turns that are waited for."""
        waiting, now = waits(), time.monotonic()
        before, self._since = self._since, {}
        elapsed_s, self._looked_at = now - self._looked_at, now
        self._told &= waiting.keys()
        for turn, others in waiting.items():
            places = [_place(other) for other in others]
            since, were = before.get(turn, (now, places))
            if any(other.work for other in others) or _has_moved(were, places, elapsed_s):
                since = now
            self._since[turn] = since, places
            limit = turn.site.limits().stall_after
            after = USUAL_S if isinstance(limit, str) else limit
            if after is None or turn in self._told or not others:
                continue
            if circle := _circle(turn, waiting):
                self._told.update(circle)
                self._say(_words_of_circle(circle, waiting), turn, now - since)
            elif now - since >= after:
                self._told.add(turn)
                self._say(_words(turn, others, now - since), turn, now - since)

    def _say(self, text: str, turn: Turn, seconds: float) -> None:
        name = min(taker.name for taker in turn.takers)
        stall = Stall(name, turn.site.method, (), seconds, text, time.time())
        self._tell(stall)
        self._policies.act({turn: stall}, None, None)


def _has_moved(before: Sequence[_Place], places: Sequence[_Place], elapsed_s: float) -> bool:
    if len(before) != len(places):
        return True
    pairs = list(zip(before, places, strict=True))
    return any(old.frames != new.frames or new.cpu_s - old.cpu_s >= BUSY * elapsed_s for old, new in pairs)


def _circle(turn: Turn, waiting: Mapping[Turn, Sequence[Turn]]) -> list[Turn]:
    """Turns that wait for each other, the given one first; none if it is in no circle."""
    by_owner = {other.owner: other for other in waiting}
    way_to = {turn: [turn]}
    todo = [turn]
    while todo:
        one = todo.pop(0)
        for other in waiting[one]:
            following = by_owner.get(other.owner)
            if following is turn:
                return way_to[one] if one is not turn else []
            if following is not None and following not in way_to:
                way_to[following] = [*way_to[one], following]
                todo.append(following)
    return []


def _words(turn: Turn, others: Sequence[Turn], seconds: float) -> str:
    return "\n".join(
        [
            f"the turn of group {turn.names} has been waited for in vain for {seconds:.0f} s:",
            *(f"  {_who(other)} has the turn of group {other.names}: {_at(other)}" for other in others),
            f"  {_who(turn)} waits for it: {_at(turn)}",
            "  give the turn back by leaving its with block; turn(timeout=...) ends such a wait, and the option "
            "stall_after=None of the group this notice",
        ]
    )


def _words_of_circle(circle: Sequence[Turn], waiting: Mapping[Turn, Sequence[Turn]]) -> str:
    has = {one.owner: one for turn in circle for one in waiting[turn]}
    lines = [
        f"  {_who(turn)} has the turn of group {has[turn.owner].names}, and waits for that of {turn.names}: {_at(turn)}"
        for turn in circle
    ]
    head = "turns wait for each other, so that none of them ever begins:"
    advice = "  take turns in the same order everywhere, or those of several groups at once: group.turn(other)"
    return "\n".join([head, *lines, advice])


def _who(turn: Turn) -> str:
    """The thread or task that waits for a turn, or has it, in words."""
    if turn.owner.task is not None:
        return f"task {turn.owner.task.get_name()!r}"
    thread = _thread_of(turn)
    return "a thread that has ended" if thread is None else f"thread {thread.name!r}"


def _at(turn: Turn) -> str:
    """The place of that thread or task in words."""
    frames = _frames(turn)
    if not frames:
        return "it has ended"
    stack = traceback.StackSummary.extract((frame, frame.f_lineno) for frame in frames)
    return f"in {where(''.join(stack.format()))}"


def _frames(turn: Turn) -> list[FrameType]:
    """The frames of the thread or task, innermost last."""
    if turn.owner.task is not None:
        return list(turn.owner.task.get_stack())
    innermost = sys._current_frames().get(turn.owner.thread)
    return [frame for frame, _ in traceback.walk_stack(innermost)][::-1] if innermost is not None else []


def _place(turn: Turn) -> _Place:
    frames, cpu_s = tuple((id(frame), frame.f_lasti) for frame in _frames(turn)), 0.0
    if turn.owner.task is None and (thread := _thread_of(turn)) is not None:
        with suppress(OSError, ValueError):
            cpu_s = int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]) / 1e9
    return _Place(frames, cpu_s)


def _thread_of(turn: Turn) -> threading.Thread | None:
    """The thread that waits for a turn, or has it; None if it has ended."""
    return next((thread for thread in threading.enumerate() if thread.ident == turn.owner.thread), None)
