"""The rows that the ranks of a call have kept: a table of them for handle arithmetic, and their values on request."""

from __future__ import annotations

import socket
from collections.abc import Hashable, Iterable
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any
from weakref import WeakKeyDictionary

from bandmaster.codec import Payload, decode
from bandmaster.contract import Kept, KeptCopy, RowFacts, Workers
from bandmaster.errors import BatchError, CallTimeout, ResourceError, RowsLost
from bandmaster.plan.columns import Schema
from bandmaster.plan.rows import RealRows
from bandmaster.platform.deadline import Deadline
from bandmaster.platform.weak import living
from bandmaster.rows.table import Table, table_of, take

STILL_COMING = "wait for them again with error.future.result()"
_living: WeakKeyDictionary[KeptPart, None] = WeakKeyDictionary()  # parts whose rows may lie where they were made


def released_rows(method: str, on: str = "") -> RowsLost:
    """The error for a use of rows of a method after their release; ``on`` names their place."""
    return RowsLost(
        f"the rows that {method} has left{on} were released; use them before release() or the end of the with block"
    )


class Origin:
    """The origin of some rows, for messages. It does not keep the rows.

    Attributes:
        method: ``"Class.method"``.
        rank: The rank; None for rows of the controller.
        workers: The workers of the group; None for rows of the controller.
        numbers: The numbers of the rows among those of all ranks.
    """

    def __init__(self, method: str, rank: int | None, workers: Workers | None) -> None:
        self.method, self.rank, self.workers = method, rank, workers
        self.numbers = range(0)

    @property
    def host(self) -> str:
        """Name of the host that has the rows."""
        return socket.gethostname() if self.workers is None else self.workers.records[self.rank or 0].host

    def __str__(self) -> str:
        who = "the controller has kept" if self.rank is None else f"rank {self.rank} has left on host {self.host}"
        numbers = f" {self.numbers.start} to {self.numbers.stop - 1}" if self.numbers else ""  # of a table alone
        return f"rows{numbers} of {self.method}, which {who},"


class KeptPart:
    """The rows of one rank, until they are released.

    Attributes:
        origin: The origin of the rows, for messages.
        is_here: Whether the rows came with the reply, and were not released.
        has_value: Whether the rank has sent a value.
        record: The record of the call, if a trace has made one; see `bandmaster.calls.hooks.CallTrace`.

    Args:
        method: ``"Class.method"``, for messages.
        rank: The rank; None for rows of the controller.
        kept: The rows; small ones as the payload of the reply; None for a rank that has sent no value.
        workers: The workers of the group; None for rows of the controller.
        record: The record of the call, if a trace has made one.
    """

    def __init__(
        self, method: str, rank: int | None, kept: Kept | Payload | None, workers: Workers | None, record: Any = None
    ) -> None:
        self.origin, self.record = Origin(method, rank, workers), record
        self.is_here, self.has_value = isinstance(kept, Payload), kept is not None
        self._kept: Kept | None = KeptCopy(kept) if isinstance(kept, Payload) else kept
        if self._kept is not None:
            self._kept.origin = self.origin
        self._placed: WeakKeyDictionary[Workers, Any] | None = None
        if not self.is_here and workers is not None:
            _living[self] = None

    @property
    def kept(self) -> Kept:
        """The rows. Raises RowsLost if they were released."""
        kept = self._kept  # once, as another thread may release them
        if kept is None:
            on = "" if self.origin.rank is None else f" on rank {self.origin.rank}"
            raise released_rows(self.origin.method, on)
        return kept

    @cached_property
    def facts(self) -> RowFacts | None:
        """Count, size and schema of the rows; None for a value without rows."""
        return self.kept.facts

    def placed(self, workers: Workers) -> Any:
        """The rows in the form in which calls of some workers refer to them.

        Raises:
            RowsLost: The rows were released.
            ResourceError: There is no memory or no descriptor for them.
        """
        known = self._placed  # once, as another thread may release them
        if known is None:
            known = self._placed = WeakKeyDictionary()
        found = known.get(workers)
        if found is None:
            found = known[workers] = workers.put([self.kept])[0]
        return found

    def value(self, deadline: Deadline) -> Any:
        """The rows, decoded, in memory of the caller's own.

        Raises:
            RowsLost: The rows are gone.
            CallTimeout: The rows have not arrived in time.
            ResourceError: This process has no memory or no mapping for them.
        """
        try:
            payload = self.kept.payload(deadline.left())
        except TimeoutError:
            what = f"is done, but {self.origin} have not come"
            raise CallTimeout(self.origin.method, (), deadline.timeout_s or 0.0, None, STILL_COMING, what) from None
        except (OSError, MemoryError) as error:
            raise ResourceError(
                f"the controller cannot read {self.origin}: {error!r}; free memory, and try again"
            ) from error
        if self.record is not None and not self.is_here:
            self.record.returned_nbytes += payload.nbytes
        return decode(payload)

    def release(self) -> None:
        """Release the rows."""
        self.is_here, self._kept, self._placed = False, None, None


def held_by(workers: Workers) -> dict[int, int]:
    """Bytes of rows that each rank has made and that futures hold, without those that came with the replies."""
    held: dict[int, int] = {}
    for part in living(_living.keyrefs()):
        kept = part._kept
        if kept is not None and part.origin.workers is workers and kept.facts is not None:
            rank = part.origin.rank or 0
            held[rank] = held.get(rank, 0) + kept.facts.nbytes
    return held


class KeptRows:
    """The rows that the ranks of one call have kept.

    Attributes:
        parts: The rows of the collected ranks, by rank, in the order of the rows.

    Args:
        parts: The rows of the collected ranks, in the order of the rows.
        real_rows: The rows that each rank was sent.
    """

    def __init__(self, parts: Iterable[KeptPart], real_rows: RealRows | None) -> None:
        self.parts: dict[Any, KeptPart] = {part.origin.rank: part for part in parts}
        self._real_rows = real_rows

    @property
    def is_here(self) -> bool:
        """Whether all rows arrived with the replies."""
        return all(part.is_here for part in self.parts.values())

    @cached_property
    def table(self) -> Table:
        """All rows, without those that were computed from padding.

        Ranks without rows, or with padding alone, do not determine the columns.

        Raises:
            BatchError: The values of the ranks cannot be one batch; the message says which rank has returned what.
        """
        parts, facts = list(self.parts.values()), [_facts(part) for part in self.parts.values()]
        counts = [known.n_rows for known in facts]
        starts = list(accumulate(counts, initial=0))
        for part, (start, stop) in zip(parts, pairwise(starts), strict=True):
            part.origin.numbers = range(start, stop)
        order = None
        if self._real_rows is not None:
            order = self._real_rows.order(list(self.parts))
            if order is not None or self._real_rows.padded_to is not None:
                kept, counts = counts, [len(self._real_rows.numbers[rank]) for rank in self.parts]
                sent = [self._real_rows.padded_to or n for n in counts]
                for rank, n_kept, n_sent in zip(self.parts, kept, sent, strict=True):
                    if n_kept != n_sent:
                        raise BatchError(f"rank {rank} has returned {n_kept} rows for {n_sent}")
        with_rows = [number for number, n in enumerate(counts) if n] or range(len(parts))
        first = with_rows[0]
        kinds = _kinds(facts[first].schema)
        for other in with_rows[1:]:
            if _kinds(facts[other].schema) != kinds:
                raise BatchError(
                    f"rank {parts[first].origin.rank} has returned {facts[first].schema}, "
                    f"rank {parts[other].origin.rank} {facts[other].schema}"
                )
        table = table_of([parts[number] for number in with_rows], [counts[number] for number in with_rows])
        return table if order is None else take(table, order)

    def release(self) -> None:
        """Release all rows."""
        for part in self.parts.values():
            part.release()


def _facts(part: KeptPart) -> RowFacts:
    try:
        facts = part.facts
    except BatchError as error:
        raise BatchError(f"rank {part.origin.rank}: {error}") from None
    if facts is None:
        raise BatchError(f"rank {part.origin.rank} has returned no batch")
    return facts


def _kinds(schema: Schema) -> dict[Hashable, Any]:
    """A key of each column that has to be equal on all ranks: the row shape of arrays, else the type."""
    return {name: column.dtype if column.shape is None else column.shape for name, column in schema.items()}
