"""`Participant`: a group that may take turns, what it holds on its devices, and which calls of it may be sent.

::

    RESIDENT ── give_way: on_yield, behind its calls ──► BETWEEN ──► YIELDED
        ▲                                                   │           │
        └──────────────────── on_resume ◄───────────────────┴───────────┘

A group stays between the two if a hook fails or does not end; its calls are refused then.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterator
from enum import Enum
from typing import Any

from bandmaster.calls.future import Future
from bandmaster.calls.request import CallRequest
from bandmaster.calls.submission import Submitter
from bandmaster.errors import CallTimeout, TurnTimeout, UsageError
from bandmaster.lifecycle.ownership import Ownership
from bandmaster.plan.arguments import CallPlan
from bandmaster.plan.binding import bind, signature_without_self
from bandmaster.platform.deadline import Deadline
from bandmaster.turns.order import ORDER, Claim

__all__ = ["TURN_HOOKS", "Participant"]

TURN_HOOKS = ON_YIELD, ON_RESUME = "on_yield", "on_resume"
PASS = "_end_of_turn"


class _State(Enum):
    """What a group holds on its devices."""

    RESIDENT = "resident"
    YIELDED = "yielded"
    BETWEEN = "between"  # a hook runs, or has failed


class Participant(Claim):
    """A group that may take turns on its slots.

    Attributes:
        roles: Those of the roles, if it is that of a colocated group, which acts on all of them.

    Args:
        cls: The worker class.
        name: The group's name.
        places: Its slots.
        submitter: Sends its calls.
        ownership: Its workers.
        roles_have_hooks: Whether it is that of a colocated group with a role whose class has hooks.

    Raises:
        ArgumentError: A hook takes arguments.
    """

    def __init__(
        self,
        cls: type,
        name: str,
        places: frozenset[Hashable],
        submitter: Submitter,
        ownership: Ownership,
        roles_have_hooks: bool = False,
    ) -> None:
        super().__init__(name, places)
        self.roles: list[Participant] = []
        self._cls = cls
        hooks = [hook for hook in TURN_HOOKS if self._has(hook)]
        for hook in hooks:
            bind(f"{cls.__name__}.{hook}", signature_without_self(cls, hook), (), {})
        self._has_hooks, self._roles_have_hooks = bool(hooks), roles_have_hooks
        self._submitter = weakref.ref(submitter)  # which refers to this
        self._ownership = ownership
        self._state = _State.RESIDENT
        self._hook: tuple[str, Future[Any]] | None = None  # whose wait has ended before it did
        self._is_moving = False  # a thread makes it yield or resume
        self._n_sending = 0
        self._is_used = False  # calls were sent since it has yielded
        if self._has_hooks:
            submitter.gate = self
        ORDER.add(self)

    def _has(self, hook: str) -> bool:
        return callable(getattr(self._cls, hook, None))

    @property
    def is_open(self) -> bool:
        """Whether the group is not closed."""
        return self._ownership.is_open

    def check(self) -> None:
        """Raise ClosedError if the group was closed, UsageError in a fork of the controller."""
        self._ownership.check()

    @property
    def takes_turns(self) -> bool:
        """Whether the class has a hook, or `begin_taking_turns` was called."""
        submitter = self._submitter()
        is_checked = submitter is not None and submitter.gate is self
        return is_checked or self._roles_have_hooks or any(role.takes_turns for role in self.roles)

    def begin_taking_turns(self) -> None:
        """From now on its calls are checked."""
        submitter = self._submitter()
        if submitter is not None and submitter.gate is None:
            self._is_used = True  # calls that were sent before this were not counted
            submitter.gate = self

    def is_closed(self) -> None:
        """Its group was closed, and nobody waits for it any more."""
        ORDER.wake()

    @property
    def note(self) -> str:
        """What a repr adds: whether it has its turn, or has yielded."""
        if self.owners:
            return ", in its turn"
        return "" if self._state is _State.RESIDENT else ", yielded"

    # --- its calls ---

    def admitted(self, label: str) -> _Sending:
        """The context in which a call is sent. A rival's turn begins when it is sent, and all ranks have replied.

        Entering it raises UsageError if a rival has its turn, or the group has yielded.
        """
        return _Sending(self, label)

    def _begin_sending(self, label: str) -> None:
        self.check()
        with ORDER.changed:
            why = self._refusal()
            if why is not None:
                raise UsageError(f"cannot call {label}: {why}")
            self._n_sending += 1
            self._is_used = True

    def _end_sending(self) -> None:
        with ORDER.changed:
            self._n_sending -= 1
            if not self._n_sending:
                ORDER.changed.notify_all()

    def _refusal(self) -> str | None:
        """Why no call can be sent now; None if one can."""
        remedy = "call it in its own turn: with group.turn(): ..."
        if self._state is _State.RESIDENT and self.owners:
            return None if self.has_begun else f"the turn of group {self.name!r} is about to begin; {remedy}"
        holders = ORDER.holders(self)
        if holders:
            names = ", ".join(repr(holder.name) for holder in holders)
            return f"group {names} has its turn on slots of group {self.name!r}; end that turn, and {remedy}"
        if self._state is _State.YIELDED:
            return f"group {self.name!r} has yielded its slots to another group; {remedy}"
        if self._state is _State.BETWEEN:
            return f"a hook of group {self.name!r} has failed or not ended; {remedy}"
        return None

    # --- between turns ---

    def give_way(self, deadline: Deadline) -> None:
        """Wait for its calls, and have it yield its slots.

        Raises:
            TurnTimeout, CallTimeout: That took too long.
            RemoteError, WorkerDied: `on_yield` has failed.
        """
        with self._moving(deadline):
            self._wait_until(lambda: not self._n_sending, deadline, "its calls were being sent")
            self._settle(deadline)
            if self._state is _State.YIELDED or not (self._has_hooks or self._is_used) or self._is_gone:
                return
            self._run(ON_YIELD if self._has(ON_YIELD) else PASS, deadline)
            self._state = _State.YIELDED if self._has_hooks else _State.RESIDENT
            self._is_used = False

    def resume(self, deadline: Deadline) -> None:
        """Have it resume, if it has yielded.

        Raises:
            TurnTimeout, CallTimeout: That took too long.
            RemoteError, WorkerDied: `on_resume` has failed.
        """
        with self._moving(deadline):
            self._settle(deadline)
            if self._state is not _State.RESIDENT:
                if self._has(ON_RESUME):
                    self._run(ON_RESUME, deadline)
                self._state = _State.RESIDENT

    def is_new(self) -> None:
        """Its workers were constructed again, and so are those of its roles: new workers are resident."""
        for one in (self, *self.roles):
            one._hook, one._state = None, _State.RESIDENT

    def has_new(self, rank: int) -> None:
        """The worker of one rank was constructed again; have the others resume.

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
        """Whether no worker is left that could hold anything."""
        if not self.is_open:
            return True
        workers = self._ownership.workers()
        return len(workers.deaths) == len(workers.records)

    def _settle(self, deadline: Deadline) -> None:
        """Wait for a hook that an earlier turn has not waited for to the end. Its error was not meant for this turn."""
        if self._hook is None:
            return
        hook, future = self._hook
        if future.exception(deadline.left()) is None and hook != PASS:
            self._state = _State.YIELDED if hook == ON_YIELD else _State.RESIDENT
        self._hook = None

    def _run(self, hook: str, deadline: Deadline, but: int | None = None) -> None:
        """Run a hook on all ranks, behind the calls that were submitted before, and wait for it."""
        submitter = self._submitter()
        if submitter is None:  # the group was collected, and so are its workers
            return
        if hook != PASS:
            self._state = _State.BETWEEN
        ranks = tuple(rank for rank in submitter.ranks if rank != but)
        future = submitter.submit_anyway(CallRequest(hook, CallPlan(()), ranks))
        try:
            self._hook = hook, future
            error = future.exception(deadline.left())
        except CallTimeout:
            raise  # it goes on
        except BaseException:  # Ctrl-C
            self._hook = None
            future.cancel()
            raise
        self._hook = None
        if error is not None and self.is_open:
            raise error

    @contextlib.contextmanager
    def _moving(self, deadline: Deadline) -> Iterator[None]:
        """One thread at a time makes the group yield or resume: it may share slots with two that have no common one."""
        with ORDER.changed:
            self._wait_until(lambda: not self._is_moving, deadline, "it yielded or resumed")
            self._is_moving = True
        try:
            yield
        finally:
            with ORDER.changed:
                self._is_moving = False
                ORDER.changed.notify_all()

    def _wait_until(self, is_so: Callable[[], bool], deadline: Deadline, why: str) -> None:
        with ORDER.changed:
            if not ORDER.changed.wait_for(is_so, deadline.left()):
                raise TurnTimeout(
                    f"group {self.name!r} did not yield its slots in time: {why}; give turn() a larger timeout"
                )


class _Sending:
    """The context in which a call is sent; made by hand, as it is entered for every call."""

    __slots__ = ("_label", "_participant")

    def __init__(self, participant: Participant, label: str) -> None:
        self._participant, self._label = participant, label

    def __enter__(self) -> None:
        self._participant._begin_sending(self._label)

    def __exit__(self, *_: object) -> None:
        self._participant._end_sending()
