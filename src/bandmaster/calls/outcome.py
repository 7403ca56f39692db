"""What a future stands for, and how calls and rows are waited for where no thread does."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from bandmaster.calls.progress import progress
from bandmaster.contract import Ticket, Workers
from bandmaster.errors import CallTimeout
from bandmaster.plan.handles import Table

if TYPE_CHECKING:
    from bandmaster.calls.pending import CallSite, PendingCall

__all__ = ["CallWatch", "Outcome", "late"]

PATIENCE_S = 0.02


class Outcome(Protocol):
    """What a future stands for: a call, one that is sent later, rows made of those of others, or chunks of rows.

    Attributes:
        site: What messages say about it.
        keeps_rows: Whether its rows stay where they are made.
        rows_are_here: Whether all rows came with the replies, as they are small.
        error: What is to be raised, once it is done; None if there is a result.
        outcome: The result, once it is done and `bring_rows` was called.
        is_done: Whether the result or the error is there.
        is_over: Whether all ranks that were asked have replied.
        is_cancelled: Whether it was cancelled.
        awaited: The call whose ranks are waited for, if there is one.
    """

    site: CallSite
    keeps_rows: bool
    error: BaseException | None
    outcome: Any

    @property
    def rows_are_here(self) -> bool: ...  # noqa: D102
    @property
    def is_done(self) -> bool: ...  # noqa: D102
    @property
    def is_over(self) -> bool: ...  # noqa: D102
    @property
    def is_cancelled(self) -> bool: ...  # noqa: D102
    @property
    def awaited(self) -> PendingCall | None: ...  # noqa: D102

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until it is done; False when the time is over before."""

    def drive(self) -> object:
        """Take what has arrived."""

    def cancel(self) -> bool:
        """Cancel it; False if others may want it, so that it goes on."""

    def late(self, timeout_s: float) -> CallTimeout:
        """The error for who has waited for so long."""

    def watch(self, when_done: Callable[[], object]) -> None:
        """Call a function when it may be done, though no thread waits for it."""

    def table(self) -> Table:
        """The rows; it is done, without an error, and keeps them."""

    def bring_rows(self) -> None:
        """Make the result, or the error, of rows that were kept; it is done."""

    def release(self) -> None:
        """Let go of the rows."""


class CallWatch:
    """Has a call be done, and then something be called, though no thread waits for it."""

    def __init__(self, call: PendingCall, when_done: Callable[[], object]) -> None:
        self.workers: Workers = call.workers
        self.due: float | None = None
        self._call = call
        self._when_done = when_done
        look = partial(progress.look_at, self)
        call.on_done = look
        for ticket in list(call.tickets.values()):
            if isinstance(ticket, Ticket):
                ticket.on_done = look

    def look(self) -> bool:
        """Read what has arrived for the call."""
        if self._call.wait(0):
            self._call.on_done = None  # which refers to this, so that rows would stay until garbage is collected
            self._when_done()
            return True
        due = self._call.due
        self.due = None if due is None else max(due, time.monotonic() + PATIENCE_S)  # another thread may be at it
        return False


def late(site: CallSite, timeout_s: float, awaited: PendingCall | None, why: str) -> CallTimeout:
    """The error for who has waited for a call that could not be sent.

    Args:
        site: The call.
        timeout_s: How long.
        awaited: The call that it waits for.
        why: How the two belong together: ``"takes its rows"``.
    """
    if awaited is None:
        return CallTimeout(site.method, (), timeout_s)
    what_next = f"{site.method} {why}, and so was not sent; wait for it again, or cancel both"
    return CallTimeout(awaited.site.method, awaited.missing, timeout_s, awaited.stacks(), what_next)
