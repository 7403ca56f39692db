"""A call that is on its way: reading its answers, and letting go of ranks that go on though another has failed.

::

    WorkerGroup ── sends ──► GroupCall ◄── waits ── Future
                                │
                            OpenCalls   those of a group, in the order they were sent

Nothing runs in the background: whoever waits for one call reads its answers, and looks after the calls before it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from bandmaster.backends import Crew
from bandmaster.errors import CallCancelled, CollectError, RemoteError, UsageError, WorkerDied
from bandmaster.failure import Failure, FailureKind
from bandmaster.mesh import Mesh
from bandmaster.options import CallOptions, default_options
from bandmaster.release import Release, Step

__all__ = ["CallInfo", "GroupCall", "OpenCalls"]

LOOK_AROUND_S = 5.0  # a call that is waited for may be given up by another thread meanwhile
MANY = 64  # open calls; from there on, each new one looks whether the oldest is over


class CallInfo(NamedTuple):
    """What is said of a call, and how long it may take.

    Attributes:
        method: ``"Class.method"``.
        mesh: The group's.
        group: The group's name.
        options: How long it may take; None where nobody said so for this call.
        defaults: What the group says about its calls.
    """

    method: str
    mesh: Mesh
    group: str = ""
    options: CallOptions | None = None
    defaults: Mapping[str, float | None] = MappingProxyType({})

    def limits(self) -> CallOptions:
        """How long it may take, by the closest word."""
        if self.options is not None:
            return self.options
        options = default_options()
        return options.but(self.defaults) if self.defaults else options


class GroupCall:
    """What some ranks were asked, and what they have answered.

    Attributes:
        info: Of the call.
        values: By rank, of those that have answered with one.
        failures: By rank, also of ranks that were not asked but have died. Calls that were made as one share them.
        is_over: Whether all that were asked have answered, as far as anybody has looked.
        reading: Held by whoever sends the call, reads its answers or makes its result of them.

    Args:
        crew: Whose ranks.
        tickets: By rank; more may be added while ``reading`` is held.
        info: Of the call.
        others: The calls of the same group.
        failures: To be shared; its own by default.
    """

    __slots__ = (
        "_crew",
        "_given_up_at",
        "_has_failed",
        "_has_to_stop",
        "_others",
        "_release",
        "_tickets",
        "failures",
        "info",
        "is_over",
        "reading",
        "values",
    )

    def __init__(
        self,
        crew: Crew,
        tickets: dict[int, Any],
        info: CallInfo,
        others: OpenCalls | None = None,
        failures: dict[int, Failure] | None = None,
    ) -> None:
        self.info = info
        self.values: dict[int, Any] = {}
        self.failures = {} if failures is None else failures
        self.is_over = self._has_to_stop = False
        self._has_failed = bool(self.failures)  # on a rank that was asked; else it is known to before it is sent
        self.reading = threading.RLock()
        self._crew = crew
        self._tickets = tickets  # of those that have not answered
        self._others = others
        self._release: Release | None = None
        self._given_up_at: float | None = None

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that have not answered."""
        return tuple(self._tickets)

    @property
    def is_given_up(self) -> bool:
        """Whether `give_up` was called."""
        return self._given_up_at is not None

    def stacks(self) -> Mapping[int, str]:
        """Where the ranks are that have not answered."""
        return self._crew.stacks(dict(self._tickets))

    def give_up(self) -> None:
        """Interrupt it where it runs, and have it passed over where it does not run yet. From any thread."""
        before = self._given_up_at
        self._given_up_at = before or time.monotonic()
        try:
            self._crew.give_up(dict(self._tickets))
        except UsageError:
            self._given_up_at = before
            raise

    def read(self, deadline: float | None, is_patient: bool = False) -> bool:
        """Read until all have answered; False when the time is over before.

        Once a rank has failed, the others are let go of; after a death they are not waited for, unless ``is_patient``.
        `reading` is held.
        """
        if self._crew.deaths and self._tickets:
            self._take(0.0)  # what was answered before counts
        while self._tickets:
            until = self._do_what_is_due(deadline)
            if self._has_to_stop and not is_patient:
                break
            self._take(LOOK_AROUND_S if until is None else min(max(0.0, until - time.monotonic()), LOOK_AROUND_S))
            if deadline is not None and self._tickets and time.monotonic() >= deadline:
                return False
        self.is_over = not self._tickets
        return True

    def tend(self) -> float | None:
        """Take what has arrived and let go of who is to be let go, unless somebody reads and does so himself; the
        moment at which there is more to do."""
        if self.is_over or self.reading._is_owned() or not self.reading.acquire(blocking=False):  # type: ignore[attr-defined]
            return None
        try:
            self._take(0.0)
            moment = self._let_go()
            self.is_over = not self._tickets
            return None if self.is_over else moment
        finally:
            self.reading.release()

    def error(self) -> BaseException | None:
        """What is to be raised; None if all that were asked have answered with a value. To be asked when it is over."""
        if self._given_up_at is not None:
            return CallCancelled(f"{self.info.method} was given up; make the call again")
        if not (self._has_failed or self._tickets):
            return None
        failures = dict(self.failures)  # others may share them, and add to them
        kinds = {failure.kind for failure in failures.values()}
        where = {rank: self.info.mesh.coordinates(rank) for rank in failures}
        if FailureKind.DIED in kinds or kinds == {FailureKind.CANCELLED}:
            kind: Callable[..., BaseException] = WorkerDied
        elif kinds <= {FailureKind.RESULT, FailureKind.CANCELLED}:
            kind = CollectError
        else:
            kind = RemoteError
        return kind(self.info.method, failures, where, self.info.group)

    def forget(self) -> None:
        """Its values are needed no longer."""
        self.values = {}

    def _do_what_is_due(self, deadline: float | None) -> float | None:
        """About this call and those before it; the moment at which there is more to do, the deadline at the latest."""
        others = self._others.tend(self) if self._others is not None else None
        ours = self._let_go()
        if ours is None and others is None:
            return deadline
        return min(moment for moment in (deadline, ours, others) if moment is not None)

    def _let_go(self) -> float | None:
        """Do what is due about ranks that go on with a call that failed; the moment at which more is due."""
        deaths = self._crew.deaths
        if not (deaths or self.failures or self._given_up_at is not None):
            return None
        now = time.monotonic()
        self._release = self._release or Release(self.info.limits().grace)
        if self._given_up_at is not None:
            self._release.begin(self._given_up_at, patience_s=0.0)
        if deaths:
            self.failures.update({rank: death for rank, death in deaths.items() if rank not in self.failures})
            self._release.after_a_death(now)
        elif self.failures:
            self._release.begin(now)
        while (step := self._release.due(now)) is not None:
            if step is Step.INTERRUPT:
                self._crew.give_up(dict(self._tickets))
            elif step is Step.END:
                self._end_the_stuck()
            else:
                self._has_to_stop = True
        return self._release.next

    def _end_the_stuck(self) -> None:
        """End ranks that are at this call still; those that have stopped have answered, others have not come to it."""
        assert self._release is not None, "it says that this is due"
        self._take(0.0)
        if self._tickets:
            why = f"ended by the controller, as it had not stopped in time after {self._reason()}"
            self._crew.end(self._tickets, why)
            self._release.put_off_the_end(time.monotonic())

    def _reason(self) -> str:
        if self.is_given_up:
            return f"{self.info.method} was given up"
        return f"{self.info.method} failed on rank {min(self.failures)}"

    def _take(self, timeout_s: float) -> None:
        """Take the answers that come in this time."""
        done = self._crew.wait(list(self._tickets.values()), timeout_s)
        finished = None if len(done) == len(self._tickets) else set(map(id, done))
        still = {}
        for rank, ticket in self._tickets.items():
            if finished is not None and id(ticket) not in finished:
                still[rank] = ticket
                continue
            outcome = self._crew.fetch(ticket)
            if isinstance(outcome, Failure):
                self.failures[rank], self._has_failed = outcome, True
            else:
                self.values[rank] = outcome
        self._tickets = still


class OpenCalls:
    """The calls of a group that may not be over, in the order they were sent.

    A rank can only begin with a call when it has ended those before. So who waits for one also looks after the ones
    before it: one that failed, and that nobody waits for or even knows any more, must not hold up the others for ever.
    """

    def __init__(self) -> None:
        self._calls: deque[GroupCall] = deque()

    def add(self, call: GroupCall) -> None:
        """A call is about to be sent."""
        self._calls.append(call)
        self._forget_over()
        if len(self._calls) > MANY:
            self._calls[0].tend()  # nobody may be waiting for it

    def tend(self, waiting: GroupCall) -> float | None:
        """Look after those sent before one, and those sent as one with it; the moment at which there is more to do."""
        calls = list(self._calls)
        if calls == [waiting]:
            return None
        self._forget_over()
        moments, is_behind = [], False
        for call in calls:
            if call is waiting:
                is_behind = True
            elif is_behind and call.failures is not waiting.failures:
                break
            else:
                moments.append(call.tend())
        return min((moment for moment in moments if moment is not None), default=None)

    def give_up_all(self) -> None:
        """Give up whatever is not over, and wait until it is: at most for the grace of each."""
        calls = list(self._calls)
        for call in calls:
            call.tend()  # what has been answered counts
        open_calls = [call for call in calls if not call.is_over]
        for call in open_calls:
            call.give_up()
        for call in open_calls:
            with call.reading:
                call.read(None, is_patient=True)

    def _forget_over(self) -> None:
        try:
            while (first := self._calls[0]).is_over:
                self._calls.remove(first)
        except (IndexError, ValueError):  # it is empty, or somebody else was faster
            pass
