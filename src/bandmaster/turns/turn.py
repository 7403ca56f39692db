"""Turns: groups that share slots use them one after the other, and offload what they hold in between.

::

    with critic.turn():      acquire (turn_order.py) ──► actor: on_yield ──► critic: on_resume ──► the block ──► release
                                                          behind the actor's calls, on every rank

The actor yields when another group's turn begins, not when its own ends. So turn after turn of one group moves nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from bandmaster.errors import UsageError
from bandmaster.platform.limits import start_thread
from bandmaster.turns.order import ORDER, Owner, Request
from bandmaster.turns.participant import Participant

__all__ = ["Turn", "renewal"]


def renewal(participant: Participant) -> AbstractContextManager[object]:
    """The turn in which a group's workers are constructed: rivals yield, and the group itself does not resume.

    Raises:
        Exception: As `Turn`.
    """
    if not participant.takes_turns:
        return contextlib.nullcontext()
    return _entered(Request([participant], Owner.current()), resumes=False)


@contextlib.contextmanager
def _entered(request: Request, resumes: bool) -> Iterator[None]:
    _enter(request, resumes)
    try:
        yield
    finally:
        ORDER.release(request)


def _enter(request: Request, resumes: bool = True) -> None:
    """Wait for the turns, have all rivals yield, and the groups resume. If that fails, nobody has the turns."""
    new = ORDER.acquire(request)
    try:
        for rival in {rival: None for claim in new for rival in ORDER.rivals(claim)}:
            is_asked_for = rival in request.claims
            is_part = any(isinstance(claim, Participant) and rival in claim.roles for claim in request.claims)
            if isinstance(rival, Participant) and rival.takes_turns and not (is_asked_for or is_part):
                rival.give_way(request.deadline)
        for claim in new if resumes else ():
            assert isinstance(claim, Participant), "groups alone take turns"
            claim.resume(request.deadline)
        ORDER.begin(new)
    except BaseException:
        ORDER.release(request)
        raise


class Turn:
    """The turn of a group on its slots; see `WorkerGroup.turn`. It is entered with ``with`` or ``async with``, once."""

    def __init__(self, groups: object, participants: Sequence[Participant], timeout_s: float | None) -> None:
        self._groups = groups  # live as long as this
        self._participants, self._timeout_s = participants, timeout_s
        self._request: Request | None = None

    def _requested(self, blocks_thread: bool) -> Request:
        if self._request is not None:
            raise UsageError("a turn can be entered once; call group.turn() again")
        self._request = Request(self._participants, Owner.current(), blocks_thread, self._timeout_s)
        return self._request

    def __enter__(self) -> None:
        _enter(self._requested(blocks_thread=True))

    def __exit__(self, *_: object) -> None:
        assert self._request is not None, "it was entered"
        ORDER.release(self._request)

    async def __aenter__(self) -> None:
        """Wait in a thread of its own. If the task is cancelled, the turn ends once a hook that runs has ended."""
        import asyncio  # here, as it takes a third of the time that the import of everything takes

        request, loop = self._requested(blocks_thread=False), asyncio.get_running_loop()
        entered: asyncio.Future[None] = loop.create_future()
        tell = partial(_tell, entered)
        start_thread("bandmaster-turn", _enter_for_task, request, partial(loop.call_soon_threadsafe, tell))
        try:
            await entered
        except asyncio.CancelledError:
            with ORDER.changed:
                request.is_cancelled = True
                if request.is_entered:  # else the thread that enters it looks
                    ORDER.release(request)
                ORDER.wake()
            raise

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()


def _enter_for_task(request: Request, tell: Callable[[BaseException | None], object]) -> None:
    error: BaseException | None = None
    try:
        _enter(request)
        with ORDER.changed:
            request.is_entered = True
            if request.is_cancelled:
                ORDER.release(request)
    except BaseException as why:
        error = why
    with contextlib.suppress(RuntimeError):  # the event loop was closed
        tell(error)


def _tell(entered: Any, error: BaseException | None) -> None:
    if not entered.done():
        if error is None:
            entered.set_result(None)
        else:
            entered.set_exception(error)
