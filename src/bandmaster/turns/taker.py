"""`TurnTaker`: a group that takes turns: its state on its devices, and the check whether a call may be sent.

::

    RESIDENT ── give_way: on_yield, after its calls ───► BETWEEN ──► YIELDED
        ▲                                                   │           │
        └──────────────────── on_resume ◄───────────────────┴───────────┘

A group stays in BETWEEN if a hook fails or does not end; its calls are refused then.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any

from bandmaster.calls.future import Future
from bandmaster.calls.request import CallRequest
from bandmaster.calls.submission import Submitter
from bandmaster.errors import CallTimeout, TurnTimeout, UsageError
from bandmaster.lifecycle.checks import ON_RESUME, ON_YIELD, TURN_HOOKS
from bandmaster.lifecycle.ownership import Ownership
from bandmaster.plan.arguments import CallPlan
from bandmaster.plan.binding import bind, signature_without_self
from bandmaster.platform.deadline import Deadline
from bandmaster.turns.turns import TURNS, Request, entered

_takers: weakref.WeakSet[TurnTaker] = weakref.WeakSet()


class _State(Enum):
    """Whether a group's state is on its devices."""

    RESIDENT = "resident"
    YIELDED = "yielded"
    BETWEEN = "between"  # a hook runs, or has failed


class TurnTaker:
    """A group that takes turns on its slots.

    Attributes:
        name: The group's name.
        places: Its slots.
        roles: The turn takers of the roles, if this one belongs to a colocated group.

    Args:
        cls: The worker class.
        name: The group's name.
        places: Its slots.
        submitter: Sends its calls.
        ownership: Its workers.

    Raises:
        ArgumentError: A hook takes arguments.
    """

    def __init__(
        self, cls: type, name: str, places: frozenset[Hashable], submitter: Submitter, ownership: Ownership
    ) -> None:
        self.name, self.places = name, places
        self.roles: list[TurnTaker] = []
        self._cls = cls
        hooks = [hook for hook in TURN_HOOKS if self._has(hook)]
        for hook in hooks:
            bind(f"{cls.__name__}.{hook}", signature_without_self(cls, hook), (), {})
        self._has_hooks = bool(hooks)
        self._submitter = weakref.ref(submitter)  # weak, as the submitter refers to this
        self._ownership = ownership
        self._state = _State.RESIDENT
        self._hook: tuple[str, Future[Any]] | None = None  # a hook that outlasted the wait for it
        self._is_moving = False  # a thread makes it yield or resume
        self._n_sending = 0
        self._is_used = True  # calls may have been sent since it has yielded
        with TURNS.changed:
            _takers.add(self)

    def _has(self, hook: str) -> bool:
        return callable(getattr(self._cls, hook, None))

    @property
    def is_open(self) -> bool:
        """Whether the group is not closed."""
        return self._ownership.is_open

    def check(self) -> None:
        """Raise ClosedError if the group was closed, UsageError in a fork of the controller."""
        self._ownership.check()

    def shares_with_any(self, takers: Iterable[TurnTaker]) -> bool:
        """Whether it shares a slot with one of some groups."""
        return any(not self.places.isdisjoint(other.places) for other in takers)

    def rivals(self) -> Sequence[TurnTaker]:
        """Its rivals, sorted by name: other open groups that take turns on one of its slots, except its own roles."""
        with TURNS.changed:
            found = [one for one in _takers if one is not self and one.is_open and self.shares_with_any([one])]
        return sorted([one for one in found if one not in self.roles], key=lambda one: one.name)

    def renewal(self) -> AbstractContextManager[None]:
        """The turn in which the group's workers are constructed: rivals yield, and the group itself does not resume."""
        return entered(Request([self]), resumes=False)

    @staticmethod
    def is_closed() -> None:
        """Wake waiting requests, because the group was closed."""
        TURNS.wake()

    @property
    def note(self) -> str:
        """The part of the group's repr that says whether it has its turn, or has yielded."""
        if TURNS.of(self):
            return ", in its turn"
        return "" if self._state is _State.RESIDENT else ", yielded"

    # --- its calls ---

    def admitted(self, label: str) -> _Sending:
        """The context in which a call is sent. A rival's turn begins only when the call is sent and all have replied.

        Entering it raises UsageError if a rival has its turn, or the group has yielded.
        """
        return _Sending(self, label)

    def begin_sending(self, label: str) -> None:
        """Count a call that is about to be sent. Raises UsageError if no call may be sent now."""
        self.check()
        with TURNS.changed:
            why = self._refusal()
            if why is not None:
                raise UsageError(f"cannot call {label}: {why}; call it in its own turn: with group.turn(): ...")
            self._n_sending += 1
            self._is_used = True

    def end_sending(self) -> None:
        """End the sending of a call, whether or not it was sent."""
        with TURNS.changed:
            self._n_sending -= 1
            if not self._n_sending:
                TURNS.changed.notify_all()

    def _refusal(self) -> str | None:
        """The reason why no call may be sent now; None if one may."""
        turns = TURNS.of(self)
        if self._state is _State.RESIDENT and turns:
            has_begun = any(turn.has_begun for turn in turns)
            return None if has_begun else f"the turn of group {self.name!r} is about to begin"
        if holders := TURNS.rivals_of(self):
            names = ", ".join(sorted({repr(taker.name) for turn in holders for taker in turn.takers}))
            return f"group {names} has its turn on slots of group {self.name!r}; end that turn"
        if self._state is _State.YIELDED:
            return f"group {self.name!r} has yielded its slots to another group"
        if self._state is _State.BETWEEN:
            return f"a hook of group {self.name!r} has failed or not ended"
        return None

    # --- between turns ---

    def give_way(self, deadline: Deadline) -> None:
        """Wait for its calls, and make it yield its slots.

        Raises:
            TurnTimeout, CallTimeout: The calls or the hook took too long.
            RemoteError, WorkerDied: `on_yield` has failed.
        """
        with self._moving(deadline):
            self._wait_until(lambda: not self._n_sending, deadline, "its calls were being sent")
            self._settle(deadline)
            if self._state is _State.YIELDED or not (self._has_hooks or self._is_used) or self._is_gone:
                return
            if self._has(ON_YIELD):
                self._run(ON_YIELD, deadline)
            else:
                self._wait_for_calls(deadline)
            self._state = _State.YIELDED if self._has_hooks else _State.RESIDENT
            self._is_used = False

    def resume(self, deadline: Deadline) -> None:
        """Make it resume, if it has yielded.

        Raises:
            TurnTimeout, CallTimeout: The hook took too long.
            RemoteError, WorkerDied: `on_resume` has failed.
        """
        with self._moving(deadline):
            self._settle(deadline)
            if self._state is not _State.RESIDENT:
                if self._has(ON_RESUME):
                    self._run(ON_RESUME, deadline)
                self._state = _State.RESIDENT

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
            if one._state is not _State.RESIDENT:
                if one._has(ON_RESUME):
                    one._run(ON_RESUME, Deadline(None), but=rank)
                one._state = _State.RESIDENT

    @property
    def _is_gone(self) -> bool:
        """Whether the group is closed or all its workers have died."""
        if not self.is_open:
            return True
        workers = self._ownership.workers()
        return len(workers.deaths) == len(workers.records)

    def _wait_for_calls(self, deadline: Deadline) -> None:
        submitter = self._submitter()
        if submitter is not None:
            submitter.work.wait_until_over(deadline)

    def _settle(self, deadline: Deadline) -> None:
        """Wait for a hook whose wait an earlier turn has given up. Ignores its error, which belongs to that turn."""
        if self._hook is None:
            return
        hook, future = self._hook
        if future.exception(deadline.left()) is None:
            self._state = _State.YIELDED if hook == ON_YIELD else _State.RESIDENT
        self._hook = None

    def _run(self, hook: str, deadline: Deadline, but: int | None = None) -> None:
        """Run a hook on all ranks, after the calls that were submitted before, and wait for it."""
        submitter = self._submitter()
        if submitter is None:  # the group was collected, and so are its workers
            return
        self._state = _State.BETWEEN
        ranks = tuple(rank for rank in submitter.ranks if rank != but)
        future = submitter.submit_anyway(CallRequest(hook, CallPlan(()), ranks))
        try:
            self._hook = hook, future
            error = future.exception(deadline.left())
        except CallTimeout:
            raise  # the hook still runs
        except BaseException:  # Ctrl-C
            self._hook = None
            future.cancel()
            raise
        self._hook = None
        if error is not None and self.is_open:
            raise error

    @contextlib.contextmanager
    def _moving(self, deadline: Deadline) -> Iterator[None]:
        """Let one thread at a time make the group yield or resume; two groups without common slots may both want to."""
        with TURNS.changed:
            self._wait_until(lambda: not self._is_moving, deadline, "it yielded or resumed")
            self._is_moving = True
        try:
            yield
        finally:
            with TURNS.changed:
                self._is_moving = False
                TURNS.changed.notify_all()

    def _wait_until(self, is_so: Callable[[], bool], deadline: Deadline, why: str) -> None:
        with TURNS.changed:
            if not TURNS.changed.wait_for(is_so, deadline.left()):
                raise TurnTimeout(
                    f"group {self.name!r} did not yield its slots in time: {why}; give turn() a larger timeout"
                )


def turn_taker(
    cls: type, name: str, places: Iterable[Hashable], submitter: Submitter, ownership: Ownership
) -> TurnTaker:
    """The `TurnTaker` of a group; the first call makes it, and installs it as the gate of the group's calls."""
    if submitter.gate is None:
        submitter.gate = TurnTaker(cls, name, frozenset(places), submitter, ownership)
    assert isinstance(submitter.gate, TurnTaker), "there is no other gate"
    return submitter.gate


class _Sending:
    """The context in which a call is sent; a class, because `contextlib` is slower and every call enters one."""

    __slots__ = ("_label", "_taker")

    def __init__(self, taker: TurnTaker, label: str) -> None:
        self._taker, self._label = taker, label

    def __enter__(self) -> None:
        self._taker.begin_sending(self._label)

    def __exit__(self, *_: object) -> None:
        self._taker.end_sending()
