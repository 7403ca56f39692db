"""Results that are derived from other results: handle operations, and rows of the controller's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bandmaster.calls.request import CallSite, encode_argument
from bandmaster.calls.result import Done, Result, late, wait_for_all
from bandmaster.contract import KeptCopy
from bandmaster.errors import BatchError, CallTimeout, ResourceError, RowsLost
from bandmaster.plan.batch import KNOWN, describe, detached
from bandmaster.plan.columns import facts_of
from bandmaster.platform.deadline import Deadline
from bandmaster.rows.kept import KeptPart
from bandmaster.rows.table import Table, assemble, table_of


class Derived(Result):
    """Rows that are derived from the rows of other futures; no row moves until `value`.

    Attributes:
        parents: The futures of the others, until they are done.

    Args:
        parents: The futures of the others.
        site: Its `CallSite`: names for messages, and limits.
        make: Returns the table; the others are done by then.

    Raises:
        Exception: The exception of ``make``, if the others are done already.
    """

    def __init__(self, parents: Sequence[Any], site: CallSite, make: Callable[[], Table]) -> None:
        super().__init__(site, keeps_rows=True)
        self.parents = tuple(parents)
        self._make: Callable[[], Table] | None = make
        self._made: Table | None = None
        self._is_watched = False
        if all(parent._call.done is not None for parent in parents):
            self._settle()
            if self.done is not None and self.done.error is not None:
                raise self.done.error

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until the others are done; False if the time is over before."""
        if self.done is not None:
            return True
        deadline = Deadline(timeout_s)
        for operation in self._open_operations():
            if not wait_for_all(operation._calls(), deadline):
                return False
            operation._settle()
        return True

    def cancel(self) -> bool:
        """Do nothing, as other code may use the same parents. Returns False."""
        return False

    def late(self, timeout_s: float) -> CallTimeout:
        """The `CallTimeout` to raise after a wait of ``timeout_s``."""
        return late(self, timeout_s, "takes its rows", can_be_cancelled=False)

    def drive_in_background(self) -> None:
        """Call the functions of `watch` when the last of the others is done."""
        if not self._is_watched:
            self._is_watched = True
            awaited = [future for operation in self._open_operations() for future in operation._calls()]
            for future in dict.fromkeys(awaited):
                future.add_done_callback(self._look)
            self.wait(0)  # another thread may have ended the last of its operations meanwhile

    def _look(self, _: object) -> None:
        if self.wait(0):
            self.tell()

    def table(self) -> Table:
        """The rows; the others are done, without an error."""
        made = self._made  # once, as another thread may release them
        if made is None:
            raise RowsLost(f"the rows of {self.site.method} were released; use them before that")
        return made

    def _brought(self, deadline: Deadline) -> Done:
        def read(part: KeptPart) -> Any:
            return part.value(deadline)

        try:
            return Done(value=detached(assemble(self.table(), read)))
        except (RowsLost, CallTimeout, ResourceError):
            raise  # it may be temporary, or concern only some of the rows
        except Exception as error:
            return Done(error)

    def _drop_rows(self) -> None:
        self._made = None

    def _open_operations(self) -> list[Derived]:
        """The operations that are not done among its ancestors, and itself; each follows its parents.

        This is a loop, because a chain of operations may exceed Python's recursion limit.
        """
        found: dict[Derived, None] = {}
        stack = [self]
        while stack:
            operation = stack[-1]
            calls = [parent._call for parent in operation.parents if isinstance(parent._call, Derived)]
            before = [call for call in calls if call.done is None and call not in found]
            if not before:
                found.setdefault(stack.pop())
            stack += reversed(before)
        return list(found)

    def _calls(self) -> list[Any]:
        """The parents that are not operations."""
        return [parent for parent in self.parents if not isinstance(parent._call, Derived)]

    def _settle(self) -> None:
        with self.lock:
            if self.done is not None or self._make is None:
                return
            try:
                self._made = self._make()
                done = Done(is_here=False)
                if self.is_released:
                    self._made = None
            except Exception as error:
                done = Done(error)
            self.done = done  # before the others, which say the same: after Ctrl-C, the table is made again
            self.parents, self._make = (), None  # so that a chain of handles does not keep all its ancestors


class PutRows(Derived):
    """Rows of the controller's own.

    Args:
        batch: The rows.
        site: Their `CallSite`: names for messages, and limits.

    Raises:
        BatchError: ``batch`` has no rows.
        ArgumentError: ``batch`` cannot be pickled.
    """

    def __init__(self, batch: Any, site: CallSite) -> None:
        found = facts_of(batch, 0)
        if found is None:
            raise BatchError(f"{site.method} takes a batch, got {describe(batch)}; batches are {KNOWN}")
        payload = encode_argument(batch, "batch", site.method).private()
        facts = found._replace(nbytes=payload.nbytes)
        self._kept = KeptPart(site.method, None, KeptCopy(payload, facts), None)
        super().__init__((), site, lambda: table_of([self._kept]))

    def _drop_rows(self) -> None:
        self._kept.release()
