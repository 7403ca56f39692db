"""Records of calls: when they came where, on the controller and on each rank, and how many bytes they took.

::

    controller   submit ── encode ── send                                             received ── result
                                       └─ queued ─┬─ decoded ─┬─ ran ─┬─ encoded ─┐ moved ┘
    rank                                          begun                           replied
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, overload

from bandmaster.contract import Ticket, Workers
from bandmaster.plan.render import text_table

__all__ = ["CallRecord", "CallTable", "RankTimes", "bytes_of", "mean_of"]

STRAGGLES, STRAGGLES_S = 1.5, 1e-3  # a rank that runs so much longer than the median is called a straggler


class RankTimes(NamedTuple):
    """What one rank has spent on a call, in seconds.

    Attributes:
        queued: From sending until the rank began: it still ran earlier calls, or the message was on its way.
        decoded: Decoding the arguments, and mapping rows that lie elsewhere.
        ran: Running the method.
        encoded: Encoding the value.
        moved: From then until the controller had the reply.
    """

    queued: float
    decoded: float
    ran: float
    encoded: float
    moved: float


@dataclass(slots=True, eq=False)
class CallRecord:
    """One call.

    Attributes:
        number: Its number in the trace, from 0.
        group: Name of the group.
        method: ``"Class.method"``.
        begun: When it was submitted, in seconds since the trace began.
        encoded: When its arguments were planned and encoded.
        sent: When it was sent.
        done: When its result was there; None if it is not.
        sent_nbytes: Bytes of arguments that the controller has encoded, each payload once.
        returned_nbytes: Bytes of values that came to the controller.
        kept_nbytes: Bytes of rows that have stayed where they were made.
        read_nbytes: Bytes of rows that ranks have read from where they lie, by the way: ``"shared memory"``, or
            ``"Ray"`` for its object store.
        takes_from: The numbers of the calls that made those rows, with the rank that did.
    """

    number: int
    group: str
    method: str
    begun: float
    encoded: float = 0.0
    sent: float = 0.0
    done: float | None = None
    sent_nbytes: int = 0
    returned_nbytes: int = 0
    kept_nbytes: int = 0
    read_nbytes: dict[str, int] = field(default_factory=dict)
    takes_from: set[tuple[int, int]] = field(default_factory=set)
    _origin_ns: int = 0
    _workers: Workers | None = None
    _raw: dict[int, tuple[int, int, int, int, int]] = field(default_factory=dict)

    @property
    def ranks(self) -> dict[int, RankTimes]:
        """What each rank has spent that has replied, and was not lost."""
        return {rank: self._times(rank) for rank in sorted(self._raw)}

    @property
    def seconds(self) -> float | None:
        """From submission to the result; None if it is not there."""
        return None if self.done is None else self.done - self.begun

    @property
    def stragglers(self) -> tuple[int, ...]:
        """The ranks that ran more than 1.5 times as long as the median of the ranks, and 1 ms longer."""
        ran = {rank: times.ran for rank, times in self.ranks.items()}
        limit = statistics.median(ran.values()) if ran else 0.0
        limit = max(STRAGGLES * limit, limit + STRAGGLES_S)
        return tuple(sorted(rank for rank, seconds in ran.items() if seconds > limit))

    @property
    def skew(self) -> float:
        """Seconds by which the slowest rank has run longer than the mean of the ranks."""
        ran = [times.ran for times in self.ranks.values()]
        return max(ran) - statistics.fmean(ran) if ran else 0.0

    def is_encoded(self, nbytes: int) -> None:
        """Its arguments were encoded."""
        self.encoded, self.sent_nbytes = self._now(), nbytes

    def is_sent(self) -> None:
        """It was sent."""
        self.sent = self._now()

    def is_done(self) -> None:
        """Its result is there, or its error."""
        self.done = self._now()

    def came(self, rank: int, ticket: Ticket) -> None:
        """The reply of a rank has come."""
        times = getattr(ticket, "times", None)  # a worker that has died tells of none
        if times is not None:
            self._raw[rank] = times

    def _now(self) -> float:
        return (time.monotonic_ns() - self._origin_ns) / 1e9

    def _times(self, rank: int) -> RankTimes:
        begun, decoded, ran, encoded, received = self.moments(rank)
        sent = self.sent or self.encoded  # a rank may reply before the last one was sent to
        return RankTimes(max(0.0, begun - sent), decoded - begun, ran - decoded, encoded - ran, received - encoded)

    def moments(self, rank: int) -> list[float]:
        """When a rank had begun, decoded, run and encoded, and when the reply came: seconds since the trace began.

        The first four are by the clock of the rank's host. If it differs from the controller's, they are put into the
        middle of the time between sending and reply.
        """
        *theirs, received = [(moment - self._origin_ns) / 1e9 for moment in self._raw[rank]]
        sent = self.sent or self.encoded
        if theirs[0] < self.encoded or theirs[-1] > received:
            shift = (sent + received - theirs[0] - theirs[-1]) / 2
            theirs = [moment + shift for moment in theirs]
        return [*theirs, received]

    def place(self, rank: int) -> str:
        """Where a rank is."""
        known = self._workers.records[rank] if self._workers is not None else None
        return f"rank {rank}" if known is None else f"rank {rank} ({known.host}, pid {known.pid}, {known.device})"


class CallTable(Sequence[CallRecord]):
    """Records of calls, which print as a table."""

    def __init__(self, records: Iterable[CallRecord]) -> None:
        self._records = list(records)

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, index: int) -> CallRecord: ...
    @overload
    def __getitem__(self, index: slice) -> CallTable: ...
    def __getitem__(self, index: int | slice) -> CallRecord | CallTable:
        return CallTable(self._records[index]) if isinstance(index, slice) else self._records[index]

    def __repr__(self) -> str:
        header = ["call", "method", "at s", "ms", "queued", "decoded", "ran", "encoded", "moved", "stragglers", "bytes"]
        rows = [
            [
                record.number,
                record.method,
                f"{record.begun:.3f}",
                "…" if record.seconds is None else milliseconds(record.seconds),
                *(milliseconds(mean_of(record, name)) for name in RankTimes._fields),
                ", ".join(f"{rank} ({milliseconds(record.ranks[rank].ran)})" for rank in record.stragglers) or "-",
                bytes_of(record),
            ]
            for record in self._records
        ]
        return text_table("calls; means of the ranks in ms", header, rows)


def mean_of(record: CallRecord, name: str) -> float | None:
    """The mean of one field of `RankTimes` over the ranks of a call; None if none has replied."""
    values = [getattr(times, name) for times in record.ranks.values()]
    return statistics.fmean(values) if values else None


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.3g}"


def bytes_of(record: CallRecord) -> str:
    """What has moved for a call, and how."""
    ways = {
        "sent": record.sent_nbytes,
        "returned": record.returned_nbytes,
        "kept": record.kept_nbytes,
        **{f"read by {way}": nbytes for way, nbytes in record.read_nbytes.items()},
    }
    return ", ".join(f"{nbytes:,} {way}" for way, nbytes in ways.items() if nbytes)
