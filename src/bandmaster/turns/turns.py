"""Turns: groups that share slots use them one after the other.

::

    with critic.turn():  wait until no other turn has any of the slots ─► rivals yield ─► critic resumes ─► the block

Waits are fair: a turn goes ahead of an earlier one for some of its slots only if it joins one from before it.

The state of a group on its devices::

    RESIDENT ── give_way: on_yield, after its calls ───► BETWEEN ──► YIELDED
        ▲                                                   │           │
        └──────────────────── on_resume ◄───────────────────┴───────────┘

A group stays in BETWEEN if a hook fails or does not end; its calls are refused then.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple

from bandmaster.calls.future import Future
from bandmaster.calls.hooks import OPEN, Gate
from bandmaster.calls.request import CallRequest, CallSite
from bandmaster.calls.submission import Submitter
from bandmaster.errors import CallCancelled, CallTimeout, TurnTimeout, UsageError
from bandmaster.lifecycle.checks import ON_RESUME, ON_YIELD, turn_hooks
from bandmaster.lifecycle.ownership import Ownership
from bandmaster.plan.arguments import CallPlan
from bandmaster.plan.binding import bind, signature_without_self
from bandmaster.platform.deadline import Deadline
from bandmaster.platform.forks import free_in_forks
from bandmaster.platform.limits import run_in_thread

_changed = free_in_forks(threading.Condition())  # held while state here is read or changed; notified of each change
_entered: list[Turn] = []
_waiting: list[Turn] = []  # in the order of arrival
_numbers = itertools.count()
_takers: weakref.WeakKeyDictionary[TurnTaker, None] = weakref.WeakKeyDictionary()  # in the order of their making


class Owner(NamedTuple):
    """The thread that has a turn, or the asyncio task in it."""

    thread: int
    task: Any = None

    @classmethod
    def current(cls) -> Owner:
        """The calling thread, and the task that it runs if there is one."""
        asyncio = sys.modules.get("asyncio")  # a program that has not imported it has no task
        try:
            task = None if asyncio is None else asyncio.current_task()
        except RuntimeError:  # no event loop runs in this thread
            task = None
        return cls(threading.get_ident(), task)


NOBODY = Owner(0)


class Turn:
    """The turn of some groups at once; see `WorkerGroup.turn`. It is entered with ``with`` or ``async with``, once.

    Turns of the same groups, of several threads or within each other, are entered together.

    Attributes:
        takers: The groups.
        owner: The thread or task that enters it; `NOBODY` before.
        number: Its place in the order of arrival.
        has_begun: Whether rivals have yielded, and the groups have resumed.

    Args:
        groups: Objects that live as long as this.
        takers: The groups.
        timeout_s: Most seconds to wait for it; None sets no limit.
        resumes: Whether the groups resume; not if their workers are about to be constructed.
    """

    def __init__(
        self, groups: object, takers: Sequence[TurnTaker], timeout_s: float | None, resumes: bool = True
    ) -> None:
        self.takers = frozenset(takers)
        self.owner = NOBODY
        self.number, self.has_begun = -1, False
        self._groups, self._timeout_s, self._resumes = groups, timeout_s, resumes
        self._deadline = Deadline(None)
        self._blocks_thread = True
        self._why: BaseException | None = None  # it is not waited for any more
        self._is_changing = False  # a hook runs, or is about to

    def __enter__(self) -> None:
        self._ask(blocks_thread=True)
        try:
            self._enter()
        except BaseException:  # Ctrl-C may come as it has entered
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        with _changed:
            if self in _entered:
                _entered.remove(self)
            _changed.notify_all()

    async def __aenter__(self) -> None:
        """Wait in a thread of its own. If the task is cancelled, no further hook begins; one that runs ends first."""
        import asyncio  # here, as it takes a third of the import time of the whole library

        self._ask(blocks_thread=False)
        try:
            await asyncio.wrap_future(run_in_thread("bandmaster-turn", self._enter))
        except BaseException:  # the task is cancelled or collected, or Ctrl-C has come, perhaps in the thread's start
            with _changed:
                self._why = CallCancelled("the task that waited for a turn was cancelled")
                _changed.notify_all()
                if self.has_begun or not self._is_changing:  # else the thread leaves it
                    self._deadline.end()
                    self.__exit__()
            raise

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()

    def _ask(self, blocks_thread: bool) -> None:
        if self.owner is not NOBODY:
            raise UsageError("a turn can be entered once; call group.turn() again")
        self.owner, self._blocks_thread = Owner.current(), blocks_thread
        self._deadline = Deadline(self._timeout_s)

    def _enter(self) -> None:
        """Wait for the turn, and make all rivals yield and its groups resume. After a failure it is left."""
        try:
            self._acquire()
            if not self.has_begun:
                for rival in self._rivals():
                    with _changed:
                        self._check_waited_for()  # perhaps it was given up as a hook ended
                    rival.give_way(self)
                for taker in sorted(self.takers, key=lambda taker: taker.name) if self._resumes else ():
                    taker.resume(self)
                with _changed:
                    self._check_waited_for()
                    self.has_begun = True
                    _changed.notify_all()
        except BaseException:
            self.__exit__()
            raise

    def _rivals(self) -> Sequence[TurnTaker]:
        """Other groups with workers that take turns on its slots, except the roles of its groups; sorted by name."""
        own = {*self.takers, *(role for taker in self.takers for role in taker.roles)}
        with _changed:
            others = [one for one in _takers if one not in own and one.has_workers and one.shares_with_any(self.takers)]
        return sorted(others, key=lambda one: one.name)

    def _acquire(self) -> None:
        with _changed:
            self.number = next(_numbers)
            _waiting.append(self)
            try:
                if not _changed.wait_for(self._is_free, self._deadline.left()):
                    raise self._late()
            finally:
                _waiting.remove(self)
                _changed.notify_all()  # a turn that was asked for later may be free now
            self.has_begun = any(turn.has_begun and self.takers <= turn.takers for turn in _entered)
            _entered.append(self)

    @property
    def _is_abandoned(self) -> bool:
        """Whether it is that of a task that goes on no more."""
        return self.owner.task is not None and bool(self.owner.task.get_loop().is_closed())

    def _check_waited_for(self) -> None:
        if self._is_abandoned:
            self._why = CallCancelled("the event loop of the task that waited for a turn was closed")
        if self._why is not None:
            raise self._why

    def _begin_change(self) -> None:
        with _changed:
            self._check_waited_for()
            self._is_changing = True

    def _is_free(self) -> bool:
        """Whether it can be entered now. Raises UsageError if its owner would wait for itself."""
        for taker in self.takers:
            taker.ownership.check()
        self._check_waited_for()
        for turn in [turn for turn in _entered if turn.has_begun and turn._is_abandoned]:
            _entered.remove(turn)
        others = [turn for turn in _entered if self._shares_slots(turn)]
        own = [turn for turn in others if turn.owner == self.owner and turn._why is None]
        if any(self.takers <= turn.takers for turn in own):
            return True
        joined = [turn for turn in others if turn.takers == self.takers]
        rivals = [turn for turn in others if turn not in joined and not (turn in own and turn.takers < self.takers)]
        for turn in rivals:
            self._check_not_own(turn)
        if rivals or not all(turn.has_begun for turn in joined):
            return False
        if any(self._blocks(turn) for turn in _entered):  # an earlier one may have to wait for this owner
            return True
        since = min((turn.number for turn in joined), default=self.number)
        return not any(turn.number < since and self._shares_slots(turn) for turn in _waiting)

    def expire(self, why: BaseException) -> None:
        """Raise an error in the thread or task that waits for this turn. Any thread may call this."""
        with _changed:
            if not self.has_begun:
                self._why = why
            _changed.notify_all()

    @property
    def site(self) -> CallSite:
        """The names and the limits of the first of its groups."""
        submitter = min(self.takers, key=lambda taker: taker.name)._submitter()
        assert submitter is not None, "who waits for the turn has the group"
        return submitter.site("turn")

    @property
    def work(self) -> list[Any]:
        """The calls and requests of its groups that have not ended."""
        submitters = [taker._submitter() for taker in self.takers]
        return [call for one in submitters if one is not None for call in one.work.unanswered()]

    def _shares_slots(self, other: Turn) -> bool:
        """Whether both use some of the same slots. Closed groups of the other do not count."""
        return any(taker.shares_with_any(self.takers) for taker in other.takers if taker.has_workers)

    def _blocks(self, other: Turn) -> bool:
        """Whether the owner of another turn cannot go on while this one is waited for, and has to."""
        is_in_thread = self._blocks_thread and other.owner.thread == self.owner.thread
        return (other.owner == self.owner or is_in_thread) and other._why is None  # else it ends without its owner

    def _check_not_own(self, other: Turn) -> None:
        """Raise UsageError if the owner of this turn would wait for another one of its own thread or task."""
        if not self._blocks(other):
            return
        if other.owner == self.owner:
            who = "this thread" if self.owner.task is None else "this task"
            raise UsageError(
                f"group {self.names} cannot have its turn: {who} has the turn of group {other.names}, which shares "
                "slots with it; end that turn first, or take both at once with turn(other_group)"
            )
        raise UsageError(
            f"group {self.names} cannot have its turn: another task of this thread has the turn of group "
            f"{other.names}, and could not end it while the thread waits; write async with"
        )

    def _late(self) -> TurnTimeout:
        rivals = [turn for turn in _entered if self._shares_slots(turn) and turn.takers != self.takers]
        names = ", ".join(dict.fromkeys(turn.names for turn in rivals))
        why = f"group {names} has its turn on the same slots" if rivals else "an earlier request goes first"
        timeout_s = self._timeout_s or 0.0
        return TurnTimeout(
            f"group {self.names} did not get its turn within {timeout_s:g} s: {why}; end that turn, take turns in "
            f"the same order everywhere, or wait longer, for example with turn(timeout={2 * (timeout_s or 1):g})"
        )

    @property
    def names(self) -> str:
        """The groups, for messages."""
        return ", ".join(sorted(repr(taker.name) for taker in self.takers))


def _notify() -> None:
    """Have the threads that wait for a change here look again, also if Ctrl-C comes."""
    try:
        with _changed:
            _changed.notify_all()
    except BaseException:
        with _changed:
            _changed.notify_all()
        raise


def waits() -> dict[Turn, list[Turn]]:
    """The turns that threads and tasks wait for, each with the turns on its slots that others have."""
    with _changed:
        return {turn: [other for other in _entered if turn._shares_slots(other)] for turn in _waiting}


class _State(Enum):
    """Whether a group's state is on its devices."""

    RESIDENT = "resident"
    YIELDED = "yielded"
    BETWEEN = "between"  # a hook runs, or has failed


class TurnTaker(Gate):
    """A group that takes turns on its slots: its state on its devices, and the check whether a call may be sent.

    Attributes:
        name: The group's name.
        ownership: Its workers.
        roles: The turn takers of the roles, if this one belongs to a colocated group.

    Args:
        cls: The worker class.
        name: The group's name.
        places: Its slots.
        submitter: Sends its calls.
        ownership: See above.

    Raises:
        ArgumentError: A hook takes arguments.
    """

    def __init__(
        self, cls: type, name: str, places: frozenset[Hashable], submitter: Submitter, ownership: Ownership
    ) -> None:
        self.name, self._places = name, places
        self.roles: list[TurnTaker] = []
        self._hooks = turn_hooks(cls)
        for hook in self._hooks:
            bind(f"{cls.__name__}.{hook}", signature_without_self(cls, hook), (), {})
        self._submitter = weakref.ref(submitter)  # weak, as the submitter refers to this
        self.ownership = ownership
        self._state = _State.RESIDENT
        self._hook: tuple[_State, Future[Any]] | None = None  # a hook that outlasted the wait for it
        self._is_moving = False  # a thread makes it yield or resume
        self._sending: set[object] = set()  # an object for each thread that sends a call
        ownership.when_closed(self._has_ended)
        with _changed:
            _takers[self] = None

    @property
    def has_workers(self) -> bool:
        """Whether it was not closed, or its workers have not ended yet."""
        return self.ownership.is_open or self.ownership.is_ending

    def shares_with_any(self, takers: Iterable[TurnTaker]) -> bool:
        """Whether it shares a slot with one of some groups."""
        return any(not self._places.isdisjoint(other._places) for other in takers)

    def renewal(self) -> Turn:
        """The turn in which the group's workers are constructed: rivals yield, and the group itself does not resume."""
        return Turn(None, [self], None, resumes=False)

    def _has_ended(self) -> None:
        """Wake waiting turns, because the group was closed and its workers have ended."""
        _notify()

    @property
    def note(self) -> str:
        """The part of the group's repr that says whether it has its turn, or has yielded."""
        if self._turns():
            return ", in its turn"
        return "" if self._state is _State.RESIDENT else ", yielded"

    def _turns(self) -> list[Turn]:
        with _changed:
            return [turn for turn in _entered if self in turn.takers]

    # --- its calls ---

    @contextlib.contextmanager
    def admitted(self, label: str) -> Iterator[None]:
        """The context in which a call is sent. A rival's turn begins only when the call is sent and all have replied.

        Raises:
            UsageError: A rival has its turn, or the group has yielded.
        """
        self.ownership.check()
        one = object()
        try:
            with _changed:
                why = self._refusal()
                if why is not None:
                    raise UsageError(
                        f"cannot call {label}: {why}; call it in its own turn: with group.turn(): ..., or take the "
                        "turns of both groups at once, if both are called: with group.turn(other_group): ..."
                    )
                self._sending.add(one)
            yield
        finally:
            self._sending.discard(one)  # first: Ctrl-C may come before this thread has the lock
            _notify()

    def _refusal(self) -> str | None:
        """The reason why no call may be sent now; None if one may."""
        turns = self._turns()
        if self._state is _State.RESIDENT and turns:
            is_begun = any(turn.has_begun for turn in turns)
            return None if is_begun else f"the turn of group {self.name!r} is about to begin"
        others = [turn for turn in _entered if self not in turn.takers]
        rivals = [turn for turn in others if self.shares_with_any(one for one in turn.takers if one.has_workers)]
        if rivals:
            names = ", ".join(sorted({repr(taker.name) for turn in rivals for taker in turn.takers}))
            return f"group {names} has its turn on slots of group {self.name!r}; end that turn"
        if self._state is _State.YIELDED:
            return f"group {self.name!r} has yielded its slots to another group"
        if self._state is _State.BETWEEN:
            return f"a hook of group {self.name!r} has failed or not ended"
        return None

    # --- between turns ---

    def give_way(self, turn: Turn) -> None:
        """Wait for its calls, and make it yield its slots.

        Raises:
            TurnTimeout, CallTimeout: The calls or the hook took too long.
            RemoteError, WorkerDied: `on_yield` has failed.
            CallCancelled: The turn is not waited for any more.
        """
        deadline = turn._deadline
        with self._moving(deadline):  # its calls are sent then
            submitter = self._submitter()
            if self._state is _State.YIELDED or submitter is None or self._is_gone:
                return
        submitter.work.wait_until_over(deadline)  # not in that block, which would hold up others if this turn is left
        with self._moving(deadline):
            if self._hooks and not self._is_gone:
                self._move(_State.YIELDED, ON_YIELD, turn)

    def resume(self, turn: Turn) -> None:
        """Make it resume, if it has yielded.

        Raises:
            TurnTimeout, CallTimeout: The hook took too long.
            RemoteError, WorkerDied: `on_resume` has failed.
            CallCancelled: The turn is not waited for any more.
        """
        with self._moving(turn._deadline):
            self._move(_State.RESIDENT, ON_RESUME, turn)

    def is_new(self) -> None:
        """Reset the state to resident, also of its roles, because all workers were constructed again."""
        for one in (self, *self.roles):
            one._hook, one._state = None, _State.RESIDENT

    def has_new(self, rank: int) -> None:
        """Make the other ranks resume, because the worker of one rank was constructed again and is resident.

        Raises:
            RemoteError, WorkerDied: `on_resume` has failed.
        """
        for one in (self, *self.roles):
            one._hook = None
            one._move(_State.RESIDENT, ON_RESUME, one.renewal(), but=rank)

    @property
    def _is_gone(self) -> bool:
        """Whether it has no living workers: it is closed or not constructed yet, or all have died."""
        workers = self.ownership.constructed
        return workers is None or len(workers.deaths) == len(workers.records)

    @property
    def _is_busy(self) -> bool:
        """Whether calls are being sent, or it yields, resumes or ends."""
        return bool(self._sending) or self._is_moving or self.ownership.is_ending

    @contextlib.contextmanager
    def _moving(self, deadline: Deadline) -> Iterator[None]:
        """Let one thread at a time make the group yield or resume; two groups without common slots may both want to."""
        is_mine = False
        try:
            with _changed:
                if not _changed.wait_for(lambda: not self._is_busy, deadline.left()):
                    raise TurnTimeout(
                        f"group {self.name!r} did not yield its slots in time: its calls were being sent, another "
                        "turn made it yield or resume, or it was being closed; give turn() a larger timeout"
                    )
                self._is_moving = is_mine = True
            self._settle(deadline)
            yield
        finally:
            if is_mine:
                self._is_moving = False  # first, as in `admitted`
            _notify()

    def _move(self, state: _State, hook: str, turn: Turn, but: int | None = None) -> None:
        """Change its state by a hook on all ranks but one, after the calls that were submitted before."""
        submitter = self._submitter()
        if self._state is state or submitter is None:  # None: the group was collected, and so are its workers
            return
        turn._begin_change()
        try:
            if hook not in self._hooks:
                self._state = state
                return
            self._state = _State.BETWEEN
            ranks = tuple(rank for rank in submitter.ranks if rank != but)
            self._hook = state, submitter.submit_anyway(CallRequest(hook, CallPlan(()), ranks))
            error = self._settle(turn._deadline)
        finally:
            turn._is_changing = False
        if error is not None and self.ownership.is_open:
            raise error

    def _settle(self, deadline: Deadline) -> BaseException | None:
        """Wait for the hook that runs, perhaps since an earlier turn, and note the new state. Returns its error."""
        if self._hook is None:
            return None
        state, future = self._hook
        try:
            error = future.exception(deadline.left())
        except CallTimeout:
            raise  # the hook still runs
        except BaseException:  # Ctrl-C
            self._hook = None
            future.cancel()
            raise
        self._hook = None
        if error is None:
            self._state = state
        return error


def turn_taker(
    cls: type, name: str, places: Iterable[Hashable], submitter: Submitter, ownership: Ownership
) -> TurnTaker:
    """The `TurnTaker` of a group; the first call makes it, and installs it as the gate of the group's calls."""
    if submitter.gate is OPEN:
        submitter.gate = TurnTaker(cls, name, frozenset(places), submitter, ownership)
    assert isinstance(submitter.gate, TurnTaker), "there is no other gate"
    return submitter.gate
