"""`Arguments`: those of one request, from the moment it is submitted until it is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from bandmaster.calls.future import Claim, Future, claims_of
from bandmaster.calls.hooks import CallTrace
from bandmaster.calls.request import CallSite, encode_group
from bandmaster.calls.row_arguments import RowsElsewhere
from bandmaster.codec import Payload
from bandmaster.contract import Reply, WorkerCall, Workers
from bandmaster.errors import ArgumentError
from bandmaster.plan.arguments import ArgumentGroup
from bandmaster.plan.batch import Portion


class Asks(Protocol):
    """A request, as far as its arguments know it; see `bandmaster.requests.request.Request`."""

    workers: Workers
    site: CallSite
    keeps_rows: bool
    record: CallTrace | None


class Arguments(NamedTuple):
    """The arguments of one request: values are encoded at once, and rows of futures are referred to when it is sent.

    Attributes:
        payloads: The values.
        rows: The futures, or portions of them.
        claims: The claims on the rows of these.
    """

    payloads: tuple[Payload, ...] = ()
    rows: tuple[ArgumentGroup, ...] = ()
    claims: Sequence[Claim] = ()

    @classmethod
    def of(cls, group: ArgumentGroup, method: str) -> Arguments:
        """The arguments of a group.

        Args:
            group: The group.
            method: ``"Class.method"``, for messages.

        Raises:
            ArgumentError: One of them cannot be pickled, or is a future without rows.
        """
        for _, value in group.items:
            if isinstance(value, Future | Portion):
                return cls._with_rows(group, method)
        return cls((encode_group(group, method).private(),))  # as most often

    @classmethod
    def _with_rows(cls, group: ArgumentGroup, method: str) -> Arguments:
        named = list(zip(group.items, group.names, strict=False))
        rows = [(item, name) for item, name in named if isinstance(item[1], Future | Portion)]
        values = [(item, name) for item, name in named if not isinstance(item[1], Future | Portion)]
        futures = [value.value if isinstance(value, Portion) else value for (_, value), _ in rows]
        for future, (_, name) in zip(futures, rows, strict=True):
            check_has_rows(future, name, method)
        payloads = (encode_group(_group(values, group), method).private(),) if values else ()
        return cls(payloads, (_group(rows, group),), claims_of(futures, {}))

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return sum([payload.nbytes for payload in self.payloads])

    def beside(self, others: Arguments) -> Arguments:
        """These, and arguments that several requests have in common."""
        return Arguments((*others.payloads, *self.payloads), (*self.rows, *others.rows), [*self.claims, *others.claims])

    def call(self, request: Asks, ranks: Sequence[int], method: str) -> WorkerCall:
        """The call with these arguments. The rows of the futures are there.

        Args:
            request: The request that has them.
            ranks: The ranks that are to run it.
            method: The workers' name of the method.

        Raises:
            Exception: That of a future; rows were released; or there is no memory for the arguments.
        """
        workers, record, label = request.workers, request.record, request.site.method
        reply, is_timed = Reply.KEEP if request.keeps_rows else Reply.RETURN, record is not None
        if not self.rows:
            return WorkerCall(ranks, method, tuple(workers.put(self.payloads)), reply, (), is_timed)
        elsewhere, groups = RowsElsewhere(label, workers), range(len(self.rows))
        payloads = [*self.payloads, *[encode_group(group, label) for group in elsewhere.addressed(self.rows)]]
        rows = elsewhere.named(groups, [part.placed(workers) for part in elsewhere.parts])
        if record is not None:
            elsewhere.note_in(record)
        parts, needed = tuple(workers.put(payloads)), elsewhere.needed(groups)
        return WorkerCall(ranks, method, parts, reply, rows, is_timed, needed)


def check_has_rows(value: Any, name: str, method: str) -> None:
    """Raise ArgumentError for a future that has no rows; other values are fine."""
    if isinstance(value, Future) and not value._call.keeps_rows:
        raise ArgumentError(
            f"argument {name!r} of {method} is a future of {value._call.site.method}, which leaves no rows on the "
            "ranks; pass the value that `await` or result() returns"
        )


def _group(named: Sequence[tuple[tuple[int | str, Any], str]], like: ArgumentGroup) -> ArgumentGroup:
    items, names = zip(*named, strict=True)
    return like._replace(items=items, names=names)
