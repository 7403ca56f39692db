"""What a future stands for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from bandmaster.calls.pending import CallSite, PendingCall
from bandmaster.errors import CallTimeout
from bandmaster.platform.deadline import Deadline
from bandmaster.rows.table import Table

__all__ = ["Outcome", "awaited", "late", "wait_for_all"]


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
        waits_for: What has to be done before it can be, the first one first; nothing for a call that was sent.
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
    def waits_for(self) -> Sequence[Outcome]: ...  # noqa: D102

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

    def bring_rows(self, deadline: Deadline) -> None:
        """Make the result, or the error, of rows that were kept; it is done.

        Raises:
            RowsLost: They are gone.
            CallTimeout: They have not come in time.
        """

    def release(self) -> None:
        """Let go of the rows."""


def wait_for_all(futures: Sequence[Any], deadline: Deadline) -> bool:
    """Wait until the calls of futures are done; False when the time is over before."""
    return all(future._call.wait(deadline.left()) for future in futures)


def awaited(outcome: Outcome) -> PendingCall | None:
    """The call whose ranks are waited for, which may be one that has to be done first; None if there is none.

    Each outcome is looked at once, however many others wait for it.
    """
    seen, todo = set[int](), [outcome]
    while todo:
        one = todo.pop()
        if isinstance(one, PendingCall):
            return one
        seen.add(id(one))
        todo += [other for other in reversed(one.waits_for) if not other.is_done and id(other) not in seen]
    return None


def late(outcome: Outcome, timeout_s: float, why: str, can_be_cancelled: bool = True) -> CallTimeout:
    """The `CallTimeout` to raise after a wait of ``timeout_s`` for a call that could not be sent.

    Args:
        outcome: The call.
        timeout_s: How long it was waited for, in seconds.
        why: How it belongs to the call that it waits for: ``"takes its rows"``.
        can_be_cancelled: Whether it can be cancelled without what it waits for.
    """
    site, first = outcome.site, awaited(outcome)
    if first is None:
        return CallTimeout(site.method, (), timeout_s)
    alone = "cancel it alone with error.future.cancel(), or " if can_be_cancelled else ""
    what_next = (
        f"{site.method} {why}, and so was not sent: wait again with error.future.result(), {alone}cancel all calls of "
        f"group {first.site.group!r} with its cancel()"
    )
    return CallTimeout(first.site.method, first.missing, timeout_s, first.stacks(), what_next, behind=first.behind)
