"""Cancels all calls of a group: running calls, calls that wait for rows, streams and pulled calls."""

from __future__ import annotations

from bandmaster.calls.submission import Submitter


class Cancelling:
    """The part of a group that cancels its calls. The group sets the attributes that are declared here."""

    _name: str
    _submitter: Submitter

    def cancel(self) -> int:
        """Cancel all calls of this group that have not ended, from any thread. Does not wait.

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
        return self._submitter.work.cancel(lambda site: site.group == name or site.group.startswith(f"{name}."))
