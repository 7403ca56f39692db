"""What the ranks of a call have kept: a table for handle arithmetic, and the rows for who asks for them."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from bandmaster.calls.records import CallRecord
from bandmaster.codec import Payload, decode
from bandmaster.contract import Kept, KeptCopy, RowFacts, Workers
from bandmaster.errors import RowsLost
from bandmaster.plan.handles import Part, Result, Taken
from bandmaster.plan.rows import RealRows

__all__ = ["KeptPart", "KeptRows", "Origin", "held_by"]

FETCHED = {"Ray", "network"}  # places from where hosts fetch rows
_living: WeakSet[KeptPart] = WeakSet()  # that lie where they were made, or may


class Origin:
    """Whose rows they are, for messages. It does not hold them.

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
        """Where the rank is."""
        return socket.gethostname() if self._workers is None else self._workers.records[self.rank or 0].host

    def __str__(self) -> str:
        who = "the controller has kept" if self.rank is None else f"rank {self.rank} has left on host {self.host}"
        return f"rows {self.numbers.start} to {self.numbers.stop - 1} of {self.method}, which {who},"


class KeptPart:
    """The rows of one rank, until they are released.

    Attributes:
        origin: Whose rows they are.
        record: The record of the call, if a trace has made one.

    Args:
        method: ``"Class.method"``, for messages.
        rank: The rank.
        kept: The rows; small ones as they came; None for a rank that has sent no value.
        workers: The workers of the group; None for rows of the controller.
        record: The record of the call, if a trace has made one.
    """

    def __init__(
        self,
        method: str,
        rank: int | None,
        kept: Kept | Payload | None,
        workers: Workers | None,
        record: CallRecord | None = None,
    ) -> None:
        self.origin, self.record, self._workers = Origin(method, rank, workers), record, workers
        self._came = isinstance(kept, Payload)
        self._kept: Kept | None = KeptCopy(kept) if isinstance(kept, Payload) else kept
        if self._kept is not None:
            self._kept.origin = self.origin
        self._placed: WeakKeyDictionary[Workers, Any] = WeakKeyDictionary()
        if not self._came and workers is not None:
            _living.add(self)

    @property
    def way(self) -> str:
        """How ranks read the rows: "controller" if they are sent to them, else where they lie."""
        return self._get().place

    def placed(self, workers: Workers) -> Any:
        """The rows as the calls of some workers name them.

        Raises:
            RowsLost: They were released.
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
            raise RowsLost(
                f"the rows that {self.origin.method} has left{on} were released; use them before release() or the end "
                "of the with block"
            )
        return self._kept

    def value(self) -> Any:
        """The rows, decoded, in memory of the caller's own.

        Raises:
            RowsLost: They are gone.
        """
        payload = self._get().payload()
        if self.record is not None and not self._came:
            self.record.returned_nbytes += payload.nbytes
        return decode(payload)

    @property
    def facts(self) -> RowFacts | None:
        """What is known of the rows; None for a value without rows."""
        return self._get().facts

    def release(self) -> None:
        """Let go of the rows."""
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
    """What the ranks of one call have kept.

    Args:
        method: ``"Class.method"``, for messages.
        ranks: The collected ranks, in the order of the rows.
        parts: By rank, the rows.
        real_rows: The rows that each rank was sent.
    """

    def __init__(
        self, method: str, ranks: Sequence[int], parts: Mapping[int, KeptPart], real_rows: RealRows | None
    ) -> None:
        self._method = method
        self._parts = {rank: parts[rank] for rank in ranks}
        self._real_rows = real_rows

    def value(self, rank: int) -> Any:
        """The rows of a rank, decoded."""
        return self._parts[rank].value()

    @property
    def is_here(self) -> bool:
        """Whether all rows have come with the replies."""
        return all(part.is_here for part in self._parts.values())

    @cached_property
    def table(self) -> Taken | None:
        """All rows, without those that were computed from padding; None if they cannot be one batch.

        Raises:
            BatchError: The value of a rank mixes batches with other values.
        """
        facts = {rank: part.facts for rank, part in self._parts.items()}
        known = {rank: fact for rank, fact in facts.items() if fact is not None}
        if len(known) < len(facts):
            return None
        with_rows = [fact for fact in known.values() if fact.n_rows] or list(known.values())
        if any(_kinds(fact) != _kinds(with_rows[0]) for fact in with_rows):
            return None
        parts = tuple([Part(rank, fact.n_rows, fact.nbytes, self._parts[rank]) for rank, fact in known.items()])
        columns = with_rows[0].schema
        nbytes = {name: sum(fact.schema[name].nbytes for fact in with_rows) for name in columns}
        schema = {name: column._replace(nbytes=nbytes[name]) for name, column in columns.items()}
        result = Result(self._method, parts, schema, any(part.way in FETCHED for part in self._parts.values()))
        for part, start in zip(parts, result.starts, strict=True):
            part.kept.origin.numbers = range(start, start + part.n_rows)
        real_rows, ranks = self._real_rows, list(self._parts)
        order = None if real_rows is None else real_rows.order(ranks)
        if real_rows is None or (real_rows.padded_to is None and order is None):
            return Taken(result, range(result.n_rows))
        counts = [len(real_rows.numbers[rank]) for rank in ranks]
        sent = counts if real_rows.padded_to is None else [real_rows.padded_to] * len(ranks)
        if [part.n_rows for part in parts] != sent:
            return None
        real = [np.arange(n) + start for n, start in zip(counts, result.starts, strict=True)]
        index = np.concatenate(real)
        return Taken(result, index if order is None else index[order])

    def release(self) -> None:
        """Let go of all rows."""
        for part in self._parts.values():
            part.release()


def _kinds(facts: RowFacts) -> list[tuple[Any, ...]]:
    """What has to be equal on all ranks."""
    return [(name, column.dtype, column.shape) for name, column in facts.schema.items()]
