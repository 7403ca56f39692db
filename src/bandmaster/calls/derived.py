"""What handle operations make of the rows of other calls, in the place that a call has in its future."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from bandmaster.calls.encoding import encode_argument
from bandmaster.calls.outcome import Outcome, late, wait_for_all
from bandmaster.calls.pending import CallSite
from bandmaster.contract import KeptCopy
from bandmaster.errors import BatchError, CallTimeout, ResourceError, RowsLost
from bandmaster.plan.batch import KNOWN, describe, detached
from bandmaster.plan.columns import facts_of
from bandmaster.platform.deadline import Deadline
from bandmaster.rows.kept import KeptPart
from bandmaster.rows.table import JoinPath, Part, Result, Table, Taken, addressed, assemble

__all__ = ["DerivedCall", "PutRows"]


class DerivedCall:
    """Rows that are made of the rows of other calls, without moving any until `bring_rows`.

    Attributes:
        parents: The futures of the other calls, until they are done.
        site: What messages say about it.
        keeps_rows: Always true.
        error: What is to be raised, once it is done; None if there is a result.
        outcome: The rows, once they were brought.

    Args:
        parents: The futures of the other calls.
        what: The operation, for messages.
        make: Returns the table; the other calls are done by then.
    """

    keeps_rows = True
    rows_are_here = False
    is_cancelled = False

    def __init__(self, parents: Sequence[Any], what: str, make: Callable[[], Table]) -> None:
        first = parents[0]._call.site
        site = first._replace(method=f"{first.method}.{what}" if what != "rows" else first.method)
        self._start(parents, site, make)

    def _start(self, parents: Sequence[Any], site: CallSite, make: Callable[[], Table]) -> None:
        self.parents = tuple(parents)
        self.site = site
        self.error: BaseException | None = None
        self.outcome: Any = None
        self._make: Callable[[], Table] | None = make
        self._made: Table | None = None
        self._is_brought = self._is_released = False
        self._lock = threading.RLock()
        if all(parent._call.is_done for parent in parents):
            self._settle()
            if self.error is not None:
                raise self.error

    @property
    def is_done(self) -> bool:
        """Whether the table, or an error, is there."""
        return self._make is None

    @property
    def is_over(self) -> bool:
        """Whether all ranks that were asked have replied."""
        return all(future._call.is_over for future in self._awaited_futures())

    @property
    def waits_for(self) -> Sequence[Outcome]:
        """The calls of the rows that it is made of."""
        return [parent._call for parent in self.parents]

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until the other calls are done; False when the time is over before."""
        deadline = Deadline(timeout_s)
        for operation in self._open_operations():
            if not wait_for_all(operation._calls(), deadline):
                return False
            operation._settle()
        return True

    def cancel(self) -> bool:
        """Nothing: the other calls may be wanted for something else."""
        return False

    def late(self, timeout_s: float) -> CallTimeout:
        """The error for who has waited for so long."""
        return late(self, timeout_s, "takes its rows", can_be_cancelled=False)

    def watch(self, when_done: Callable[[], object]) -> None:
        """Call a function when one of the other calls is done."""
        for future in self._awaited_futures():
            future.add_done_callback(lambda _: when_done())

    def table(self) -> Table:
        """The rows; the other calls are done, without an error."""
        if self._made is None:
            raise RowsLost(f"the rows of {self.site.method} were released; use them before that")
        return self._made

    def bring_rows(self, deadline: Deadline) -> None:
        """Make the rows here, or the error. Raises as `KeptPart.value` does."""
        with self._lock:
            if self._is_brought or self.error is not None:
                return

            def read(kept: KeptPart, _: JoinPath) -> Any:
                return kept.value(deadline)

            try:
                self.outcome = detached(assemble(addressed(self.table(), _itself), cache(read)))
                self._is_brought = True
            except (RowsLost, CallTimeout, ResourceError):
                raise  # which may be true of some of them alone, or of now
            except Exception as error:
                self.error = error

    def release(self) -> None:
        """Let go of the rows, as far as this refers to them, or will."""
        self._is_released = True
        self._made = self.outcome = None
        self._is_brought = False

    def drive(self) -> None:
        """Take what has arrived for the other calls."""
        for future in self._awaited_futures():
            future._call.drive()

    def _open_operations(self) -> list[DerivedCall]:
        """The operations that it is made of and that are not done, each behind its parents, and itself.

        A loop, since a chain of them may be longer than the stack of Python is deep.
        """
        found: dict[DerivedCall, None] = {}
        stack = [self]
        while stack:
            operation = stack[-1]
            calls = [parent._call for parent in operation.parents if isinstance(parent._call, DerivedCall)]
            before = [call for call in calls if not call.is_done and call not in found]
            if not before:
                found.setdefault(stack.pop())
            stack += reversed(before)
        return list(found)

    def _calls(self) -> list[Any]:
        """Of the parents those that are no operations."""
        return [parent for parent in self.parents if not isinstance(parent._call, DerivedCall)]

    def _awaited_futures(self) -> list[Any]:
        """The futures of calls that it is made of."""
        return list(dict.fromkeys(future for operation in self._open_operations() for future in operation._calls()))

    def _settle(self) -> None:
        with self._lock:
            if self._make is None:
                return
            try:
                self._made = self._make()
                if self._is_released:
                    self._made = None
            except Exception as error:
                self.error = error
            self.parents = ()  # so that a chain of handles does not keep all that came before
            self._make = None  # last: after Ctrl-C, it is made again


def _itself(part: Any) -> Any:
    return part.kept


class PutRows(DerivedCall):
    """Rows of the controller's own.

    Args:
        batch: The rows.
        site: What messages say about them.

    Raises:
        BatchError: It has no rows.
        ArgumentError: It cannot be pickled.
    """

    def __init__(self, batch: Any, site: CallSite) -> None:
        found = facts_of(batch, 0)
        if found is None:
            raise BatchError(f"{site.method} takes a batch, got {describe(batch)}; batches are {KNOWN}")
        payload = encode_argument(batch, "batch", site.method).private()
        facts = found._replace(nbytes=payload.nbytes)
        self._kept = KeptPart(site.method, None, KeptCopy(payload, facts), None)
        result = Result(site.method, (Part(None, facts.n_rows, facts.nbytes, self._kept),), facts.schema)
        self._start((), site, lambda: Taken(result, range(result.n_rows)))

    def release(self) -> None:
        """Let go of the rows."""
        self._kept.release()
