"""Cancels all calls of a group: those that run or wait for rows, and streams and pulled calls, which send no more."""

from __future__ import annotations

from collections.abc import Callable

from bandmaster.calls.pending import CallSite
from bandmaster.calls.submission import Submitter, Traffic

__all__ = ["Cancelling"]


class Cancelling:
    """The part of a group that cancels its calls. The group sets the attributes that are declared here."""

    _name: str
    _submitter: Submitter

    def cancel(self) -> int:
        """Cancel all calls of this group that have not ended, whichever thread has submitted them. Does not wait.

        Ranks that run one of them are interrupted, and skip the others, as after `Future.cancel`. The futures raise
        `CallCancelled`, streams do so when they are iterated over, and the group can be called again at once: its next
        calls run when the ranks have stopped. Rows of calls that have ended stay where they are.

        Pulled calls send no more chunks, and the generators of streams are closed. For a role of `colocate` only the
        calls of that role are cancelled, for the colocated group those of all roles. On backend ``"inprocess"`` calls
        have ended when they are submitted.

        Returns:
            The number of calls that were cancelled. A stream counts as one call, and so does a pulled call.

        Raises:
            ClosedError: The group was closed.
            UsageError: A signal handler called this during an operation of the group.

        Example:
            >>> import bandmaster as bm
            >>> with bm.ResourcePool([2], backend="inprocess") as pool:
            ...     group = bm.WorkerGroup(pool, bm.Worker)
            ...     group.cancel()  # no call is running
            0
        """
        self._submitter.check_open()
        name = self._name
        return _cancel(self._submitter.traffic, lambda site: site.group == name or site.group.startswith(f"{name}."))


def _cancel(traffic: Traffic, is_meant: Callable[[CallSite], bool]) -> int:
    """Cancel the calls to the same workers that are meant, and return how many."""
    n_cancelled = traffic.later.cancel(is_meant)  # first, so that none is sent when those that run have ended
    n_cancelled += sum([call.cancel() for call in traffic.in_parts() if is_meant(call.site)])
    sent_as_one = set()
    for sent in traffic.open_calls.unfinished():
        if is_meant(sent.site) and not (sent.is_cancelled or sent.is_cleanup):
            sent.cancel()
            sent_as_one.add(id(sent.failures))
    return n_cancelled + len(sent_as_one)
