"""The rows that the ranks of a call have kept: a table of them for handle arithmetic, and their values on request."""

from __future__ import annotations

import socket
from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from bandmaster.codec import Payload, decode
from bandmaster.contract import Kept, KeptCopy, RowFacts, Workers
from bandmaster.errors import CallTimeout, ResourceError, RowsLost
from bandmaster.plan.columns import Schema, dtypes_of, stacked_schema
from bandmaster.plan.rows import RealRows
from bandmaster.platform.deadline import Deadline
from bandmaster.rows.table import Part, ResultRows, Table, Taken, concat, take

STILL_COMING = "wait for them again with error.future.result()"
_living: WeakSet[KeptPart] = WeakSet()  # parts whose rows may lie where they were made


def released_rows(method: str, on: str = "") -> RowsLost:
    """The error for a use of rows of a method after their release; ``on`` names their place."""
    return RowsLost(
        f"the rows that {method} has left{on} were released; use them before release() or the end of the with block"
    )


class Origin:
    """The origin of some rows, for messages. It does not keep the rows.

    Attributes:
        numbers: Their numbers among the rows of all ranks.

    Args:
        method: ``"Class.method"``.
        rank: The rank; None for rows of the controller.
        workers: The workers of the group; None for rows of the controller.
    """

    __slots__ = ("_workers", "method", "numbers", "rank")

    def __init__(self, method: str, rank: int | None, workers: Workers | None) -> None:
        self.method, self.rank, self._workers = method, rank, workers
        self.numbers = range(0)

    @property
    def host(self) -> str:
        """Name of the host that has the rows."""
        return socket.gethostname() if self._workers is None else self._workers.records[self.rank or 0].host

    def __str__(self) -> str:
        who = "the controller has kept" if self.rank is None else f"rank {self.rank} has left on host {self.host}"
        return f"rows {self.numbers.start} to {self.numbers.stop - 1} of {self.method}, which {who},"


class RowsRecord(Protocol):
    """The record of the call that has made rows, if a trace records.

    Attributes:
        returned_nbytes: Bytes of values that the controller received.
    """

    returned_nbytes: int


class KeptPart:
    """The rows of one rank, until they are released.

    Attributes:
        origin: The origin of the rows, for messages.
        has_value: Whether the rank has sent a value.
        record: The record of the call, if a trace has made one.

    Args:
        method: ``"Class.method"``, for messages.
        rank: The rank.
        kept: The rows; small ones as the payload of the reply; None for a rank that has sent no value.
        workers: The workers of the group; None for rows of the controller.
        record: The record of the call, if a trace has made one.
    """

    def __init__(
        self,
        method: str,
        rank: int | None,
        kept: Kept | Payload | None,
        workers: Workers | None,
        record: RowsRecord | None = None,
    ) -> None:
        self.origin, self.record, self._workers = Origin(method, rank, workers), record, workers
        self._came = isinstance(kept, Payload)
        self._kept: Kept | None = KeptCopy(kept) if isinstance(kept, Payload) else kept
        if self._kept is not None:
            self._kept.origin = self.origin
        self._placed: WeakKeyDictionary[Workers, Any] = WeakKeyDictionary()
        self.has_value = kept is not None
        if not self._came and workers is not None:
            _living.add(self)

    @property
    def way(self) -> str:
        """The place from which ranks read the rows; "controller" if the controller sends them."""
        return self._get().place

    def placed(self, workers: Workers) -> Any:
        """The rows in the form in which calls of some workers refer to them.

        Raises:
            RowsLost: The rows were released.
            ResourceError: There is no memory or no descriptor for them.
        """
        if workers not in self._placed:
            self._placed[workers] = workers.put([self._get()])[0]
        return self._placed[workers]

    @property
    def is_here(self) -> bool:
        """Whether the rows came with the reply."""
        return self._came and self._kept is not None

    def _get(self) -> Kept:
        if self._kept is None:
            on = "" if self.origin.rank is None else f" on rank {self.origin.rank}"
            raise released_rows(self.origin.method, on)
        return self._kept

    def value(self, deadline: Deadline) -> Any:
        """The rows, decoded, in memory of the caller's own.

        Raises:
            RowsLost: The rows are gone.
            CallTimeout: The rows have not arrived in time.
            ResourceError: This process has no memory or no mapping for them.
        """
        try:
            payload = self._get().payload(deadline.left())
        except TimeoutError:
            what = f"is done, but {self.origin} have not come"
            raise CallTimeout(self.origin.method, (), deadline.timeout_s or 0.0, None, STILL_COMING, what) from None
        except (OSError, MemoryError) as error:
            raise ResourceError(
                f"the controller cannot read {self.origin}: {error!r}; free memory, and try again"
            ) from error
        if self.record is not None and not self._came:
            self.record.returned_nbytes += payload.nbytes
        return decode(payload)

    @property
    def facts(self) -> RowFacts | None:
        """Count, size and schema of the rows; None for a value without rows."""
        return self._get().facts

    def release(self) -> None:
        """Release the rows."""
        self._kept = None
        self._placed.clear()


def held_by(workers: Workers) -> dict[int, int]:
    """Bytes of rows that each rank has made and that futures hold, without those that came with the replies."""
    held: dict[int, int] = {}
    for part in list(_living):
        if part._workers is workers and part._kept is not None and part._kept.facts is not None:
            rank = part.origin.rank or 0
            held[rank] = held.get(rank, 0) + part._kept.facts.nbytes
    return held


class KeptRows:
    """The rows that the ranks of one call have kept.

    Args:
        method: ``"Class.method"``, for messages.
        ranks: The collected ranks, in the order of the rows.
        parts: The rows, by rank.
        real_rows: The rows that each rank was sent.
    """

    def __init__(
        self, method: str, ranks: Sequence[int], parts: Mapping[int, KeptPart], real_rows: RealRows | None
    ) -> None:
        self._method = method
        self._parts = {rank: parts[rank] for rank in ranks}
        self._real_rows = real_rows

    def value(self, rank: int, deadline: Deadline) -> Any:
        """The rows of a rank, decoded. Raises the exceptions of `KeptPart.value`."""
        return self._parts[rank].value(deadline)

    def has_value_of(self, rank: int) -> bool:
        """Whether a rank has sent a value."""
        return self._parts[rank].has_value

    @property
    def is_here(self) -> bool:
        """Whether all rows arrived with the replies."""
        return all(part.is_here for part in self._parts.values())

    @cached_property
    def table(self) -> Table | None:
        """All rows, without those that were computed from padding; None if they cannot be one batch.

        Ranks without rows do not determine the columns.

        Raises:
            BatchError: The value of a rank mixes batches with other values.
        """
        facts = {rank: part.facts for rank, part in self._parts.items()}
        known = {rank: fact for rank, fact in facts.items() if fact is not None}
        with_rows = {rank: fact for rank, fact in known.items() if fact.n_rows} or known
        kinds = [_kinds(fact.schema) for fact in with_rows.values()]
        if len(known) < len(facts) or any(kind != kinds[0] for kind in kinds):
            return None
        starts = list(accumulate([fact.n_rows for fact in known.values()], initial=0))
        for rank, (start, stop) in zip(known, pairwise(starts), strict=True):
            self._parts[rank].origin.numbers = range(start, stop)
        by_dtypes = [list(ranks) for _, ranks in groupby(with_rows, lambda rank: dtypes_of(with_rows[rank].schema))]
        table = concat([self._rows_of(ranks, with_rows) for ranks in by_dtypes], [self._method] * len(by_dtypes))
        real_rows, ranks = self._real_rows, list(self._parts)
        order = None if real_rows is None else real_rows.order(ranks)
        if real_rows is None or (real_rows.padded_to is None and order is None):
            return table
        counts = [len(real_rows.numbers[rank]) for rank in ranks]
        sent = counts if real_rows.padded_to is None else [real_rows.padded_to] * len(ranks)
        if [fact.n_rows for fact in known.values()] != sent:
            return None
        index = np.concatenate([np.arange(n) + start for n, start in zip(counts, starts, strict=False)])
        restored: Table = take(table, index if order is None else index[order])
        return restored

    def _rows_of(self, ranks: Sequence[int], facts: Mapping[int, RowFacts]) -> Taken:
        """The rows of some ranks whose columns have the same dtypes."""
        parts = tuple([Part(rank, facts[rank].n_rows, facts[rank].nbytes, self._parts[rank]) for rank in ranks])
        schema = stacked_schema([facts[rank].schema for rank in ranks])
        result = ResultRows(self._method, parts, schema, any(part.kept.way == "network" for part in parts))
        return Taken(result, range(result.n_rows))

    def release(self) -> None:
        """Release all rows."""
        for part in self._parts.values():
            part.release()


def _kinds(schema: Schema) -> dict[Hashable, Any]:
    """A key of each column that has to be equal on all ranks: the row shape of arrays, else the type."""
    return {name: column.dtype if column.shape is None else column.shape for name, column in schema.items()}
