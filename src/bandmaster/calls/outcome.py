"""What a future stands for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from bandmaster.calls.deadline import Deadline
from bandmaster.calls.pending import CallSite, PendingCall
from bandmaster.errors import CallTimeout
from bandmaster.plan.handles import Table

__all__ = ["Outcome", "Watchers", "first_awaited", "late", "wait_for_all"]


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
        """Make the result, or the error, of rows that were kept; it is done. Raises RowsLost if they are gone."""

    def release(self) -> None:
        """Let go of the rows."""


class Watchers:
    """Functions to be called when something has come to an end."""

    def __init__(self) -> None:
        self._functions: list[Callable[[], object]] = []

    def add(self, function: Callable[[], object], is_over: bool) -> None:
        """Call a function at the end, which may have come: then ``is_over``."""
        self._functions.append(function)
        if is_over:  # another thread was faster
            self.tell()

    def tell(self) -> None:
        """It has come to its end: call each once."""
        while self._functions:
            self._functions.pop()()


def wait_for_all(futures: Sequence[Any], deadline: Deadline) -> bool:
    """Wait until the calls of futures are done; False when the time is over before."""
    return all(future._call.wait(deadline.left()) for future in futures)


def first_awaited(futures: Sequence[Any]) -> PendingCall | None:
    """The call that the first of some futures waits for which is not done; None if there is none."""
    return next((future._call.awaited for future in futures if not future._call.is_done), None)


def late(
    site: CallSite, timeout_s: float, awaited: PendingCall | None, why: str, can_be_cancelled: bool = True
) -> CallTimeout:
    """The error for who has waited for a call that could not be sent.

    Args:
        site: The call.
        timeout_s: How long.
        awaited: The call that it waits for.
        why: How the two belong together: ``"takes its rows"``.
        can_be_cancelled: Whether it can be cancelled without what it waits for.
    """
    if awaited is None:
        return CallTimeout(site.method, (), timeout_s)
    alone = "cancel it alone with error.future.cancel(), or " if can_be_cancelled else ""
    what_next = (
        f"{site.method} {why}, and so was not sent: wait again with error.future.result(), {alone}cancel all calls of "
        f"group {awaited.site.group!r} with its cancel()"
    )
    return CallTimeout(awaited.site.method, awaited.missing, timeout_s, awaited.stacks(), what_next)
