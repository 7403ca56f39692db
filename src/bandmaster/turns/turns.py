"""Turns in use and waiting requests: one condition for all turns of this process, and `Turn`, which a user enters.

::

    with critic.turn():  wait until no other turn has any of the slots ─► rivals yield ─► critic resumes ─► the block
                                                                          (taker.py)

Waits are fair: a request goes ahead of an earlier one for some of its slots only if it joins a turn that began before.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from bandmaster.errors import CallCancelled, TurnTimeout, UsageError
from bandmaster.platform.deadline import Deadline
from bandmaster.platform.limits import start_thread


class _Taker(Protocol):
    """A group that takes turns; see `bandmaster.turns.taker.TurnTaker`.

    Attributes:
        name: The group's name.
    """

    name: str

    @property
    def is_open(self) -> bool: ...
    def check(self) -> None: ...
    def shares_with_any(self, takers: Iterable[Any]) -> bool: ...
    def rivals(self) -> Sequence[_Taker]: ...
    def give_way(self, deadline: Deadline) -> None: ...
    def resume(self, deadline: Deadline) -> None: ...


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


class Request:
    """A request for the turn of some groups at once.

    Attributes:
        takers: The groups.
        owner: The requesting thread or task.
        deadline: The end of the wait.
        is_cancelled: Whether the waiting task was cancelled.
        is_entered: Whether its turn has begun.

    Args:
        takers: The groups.
        timeout_s: Most seconds to wait; None sets no limit.
        blocks_thread: Whether the owner's whole thread waits, with all of its tasks.
    """

    def __init__(self, takers: Sequence[_Taker], timeout_s: float | None = None, blocks_thread: bool = True) -> None:
        self.takers, self.owner, self.deadline = frozenset(takers), Owner.current(), Deadline(timeout_s)
        self.is_cancelled = self.is_entered = False
        self._blocks_thread = blocks_thread

    @property
    def names(self) -> str:
        """The groups, for messages."""
        return _names(self.takers)

    def shares_with(self, other: Request | InUse) -> bool:
        """Whether both use some of the same slots. Closed groups of the other do not count."""
        return any(taker.shares_with_any(self.takers) for taker in other.takers if taker.is_open)

    def blocks(self, owner: Owner) -> bool:
        """Whether an owner cannot go on while this request waits."""
        return owner == self.owner or (self._blocks_thread and owner.thread == self.owner.thread)


class InUse:
    """A turn that has owners.

    Attributes:
        takers: The groups that have it.
        owners: The numbers of the requests by which each thread or task has entered the turn.
        has_begun: Whether rivals have yielded, and the groups have resumed.
    """

    def __init__(self, takers: frozenset[_Taker]) -> None:
        self.takers, self.has_begun = takers, False
        self.owners: dict[Owner, list[int]] = {}

    @property
    def since(self) -> int:
        """The number of the earliest request of an owner that is still in the turn."""
        return min(numbers[0] for numbers in self.owners.values())


class TurnsInUse:
    """All turns of this process.

    Attributes:
        changed: Held while anything here is read or changed; notified of every change that may end a wait.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._in_use: list[InUse] = []
        self._waiting: dict[Request, int] = {}  # with their numbers, in the order of arrival
        self._numbers = itertools.count()

    def of(self, taker: _Taker) -> list[InUse]:
        """The turns that a group has."""
        with self.changed:
            return [turn for turn in self._in_use if taker in turn.takers]

    def rivals_of(self, taker: _Taker) -> list[InUse]:
        """The turns of others on some of the slots of a group."""
        with self.changed:
            others = [turn for turn in self._in_use if taker not in turn.takers]
            return [turn for turn in others if taker.shares_with_any(one for one in turn.takers if one.is_open)]

    def acquire(self, request: Request) -> InUse:
        """Wait until a request can have its turn, and add its owner to the owners of the turn.

        Raises:
            UsageError: The owner would wait for itself.
            TurnTimeout: Other groups had their turns for too long.
            ClosedError: One of the groups was closed.
        """
        with self.changed:
            number = self._waiting[request] = next(self._numbers)
            try:
                while (turn := self._free(request, number)) is None:
                    if not self.changed.wait(request.deadline.left()) and self._free(request, number) is None:
                        raise self._late(request)
            finally:
                del self._waiting[request]
                self.changed.notify_all()  # a request that came later may be free now
            if turn not in self._in_use:
                self._in_use.append(turn)
            turn.owners.setdefault(request.owner, []).append(number)
            return turn

    def begin(self, turn: InUse) -> None:
        """Begin a turn: from now on other threads may join it, and calls of its groups may be sent."""
        with self.changed:
            turn.has_begun = True
            self.changed.notify_all()

    def release(self, turn: InUse, owner: Owner) -> None:
        """End the use of a turn by an owner."""
        with self.changed:
            turn.owners[owner].pop()
            if not turn.owners[owner]:
                del turn.owners[owner]
            if not turn.owners:
                self._in_use.remove(turn)
            self.changed.notify_all()

    def wake(self) -> None:
        """Wake waiting requests, because a group was closed or a request cancelled."""
        with self.changed:
            self.changed.notify_all()

    def _free(self, request: Request, number: int) -> InUse | None:
        """The turn that a request gets or joins now; None if it has to wait."""
        for taker in request.takers:
            taker.check()
        if request.is_cancelled:
            raise CallCancelled("the task that waited for a turn was cancelled")
        joined = None
        for turn in [turn for turn in self._in_use if request.shares_with(turn)]:
            if request.takers <= turn.takers and request.owner in turn.owners:
                return turn
            if request.takers == turn.takers and turn.has_begun:
                joined = turn
            elif not (turn.takers <= request.takers and set(turn.owners) == {request.owner}):
                self._check_not_own(request, turn)
                return None
        has_some = any(request.blocks(owner) for turn in self._in_use for owner in turn.owners)
        for earlier, before in self._waiting.items():
            is_ahead = before < number and request.shares_with(earlier)
            if is_ahead and not has_some and (joined is None or joined.since > before):
                return None
        return joined or InUse(request.takers)

    @staticmethod
    def _check_not_own(request: Request, turn: InUse) -> None:
        """Raise UsageError if a request waits for a turn of its own thread or task."""
        if not turn.has_begun and request.takers == turn.takers:
            return
        wanted, held = request.names, _names(turn.takers)
        if request.owner in turn.owners:
            who = "this task" if request.owner.task is not None else "this thread"
            raise UsageError(
                f"group {wanted} cannot have its turn: {who} has the turn of group {held}, which shares slots with it; "
                "end that turn first, or take both at once with turn(other_group)"
            )
        if any(request.blocks(owner) for owner in turn.owners):
            raise UsageError(
                f"group {wanted} cannot have its turn: another task of this thread has the turn of group {held}, and "
                "could not end it while the thread waits; write async with"
            )

    def _late(self, request: Request) -> TurnTimeout:
        others = [turn for turn in self._in_use if request.shares_with(turn) and turn.takers != request.takers]
        holders = [_names(turn.takers) for turn in others]
        has_it = f"group {', '.join(holders)} has its turn on the same slots"
        why = has_it if holders else "an earlier request goes first"
        timeout_s = request.deadline.timeout_s or 0.0
        return TurnTimeout(
            f"group {request.names} did not get its turn within {timeout_s:g} s: {why}; end that turn, take turns in "
            f"the same order everywhere, or wait longer, for example with turn(timeout={2 * (timeout_s or 1):g})"
        )


TURNS = TurnsInUse()


def _names(takers: Sequence[_Taker] | frozenset[_Taker]) -> str:
    return ", ".join(sorted(repr(taker.name) for taker in takers))


def _enter(request: Request, resumes: bool = True) -> InUse:
    """Wait for a turn, and make all rivals yield and its groups resume. After a failure, the turn is released."""
    turn = TURNS.acquire(request)
    try:
        if not turn.has_begun:  # so that no other owner has joined it
            for rival in {rival: None for taker in turn.takers for rival in taker.rivals()}:
                if rival not in turn.takers:
                    rival.give_way(request.deadline)
            for taker in sorted(turn.takers, key=lambda taker: taker.name) if resumes else ():
                taker.resume(request.deadline)
            TURNS.begin(turn)
    except BaseException:
        TURNS.release(turn, request.owner)
        raise
    return turn


@contextlib.contextmanager
def entered(request: Request, resumes: bool = True) -> Iterator[None]:
    """Enter a turn for a block.

    Args:
        request: The request for it.
        resumes: Whether its groups resume; not if their workers are about to be constructed.
    """
    turn = _enter(request, resumes)
    try:
        yield
    finally:
        TURNS.release(turn, request.owner)


class Turn:
    """The turn of a group on its slots; see `WorkerGroup.turn`. It is entered with ``with`` or ``async with``, once."""

    def __init__(self, groups: object, takers: Sequence[_Taker], timeout_s: float | None) -> None:
        self._groups = groups  # live as long as this
        self._takers, self._timeout_s = takers, timeout_s
        self._request: Request | None = None
        self._turn: InUse | None = None

    def _requested(self, blocks_thread: bool) -> Request:
        if self._request is not None:
            raise UsageError("a turn can be entered once; call group.turn() again")
        self._request = Request(self._takers, self._timeout_s, blocks_thread)
        return self._request

    def __enter__(self) -> None:
        self._turn = _enter(self._requested(blocks_thread=True))

    def __exit__(self, *_: object) -> None:
        assert self._request is not None, "it was entered"
        assert self._turn is not None, "it was entered"
        TURNS.release(self._turn, self._request.owner)

    async def __aenter__(self) -> None:
        """Wait in a thread of its own. If the task is cancelled, the turn ends once a hook that runs has ended."""
        import asyncio  # here, as it takes a third of the import time of the whole library

        request, loop = self._requested(blocks_thread=False), asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        tell = partial(loop.call_soon_threadsafe, partial(_tell, future))
        start_thread("bandmaster-turn", self._enter_for_task, request, tell)
        try:
            await future
        except asyncio.CancelledError:
            with TURNS.changed:
                request.is_cancelled = True
                if request.is_entered and self._turn is not None:  # else the thread that enters it releases it
                    TURNS.release(self._turn, request.owner)
                TURNS.wake()
            raise

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()

    def _enter_for_task(self, request: Request, tell: Callable[[BaseException | None], object]) -> None:
        error: BaseException | None = None
        try:
            turn = _enter(request)
            with TURNS.changed:
                self._turn, request.is_entered = turn, True
                if request.is_cancelled:
                    TURNS.release(turn, request.owner)
        except BaseException as why:
            error = why
        with contextlib.suppress(RuntimeError):  # the event loop was closed
            tell(error)


def _tell(future: Any, error: BaseException | None) -> None:
    if not future.done():
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
