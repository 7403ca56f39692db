"""Records of calls: when they came where, on the controller and on each rank, and how many bytes they took.

::

    controller   submit ── encode ── send                                             received ── result
                                       └─ queued ─┬─ decoded ─┬─ ran ─┬─ encoded ─┐ moved ┘
    rank                                          begun                           replied
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from time import monotonic_ns
from types import MappingProxyType
from typing import NamedTuple, overload

from bandmaster.codec import Payload
from bandmaster.contract import TIMES, Kept, Ticket, Workers
from bandmaster.errors.failure import Failure
from bandmaster.plan.render import text_table

__all__ = ["CallRecord", "CallTable", "RankTimes", "bytes_of", "mean_of"]

NOTHING: Mapping[str, int] = MappingProxyType({})
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


class CallRecord:
    """One call. Its times are in seconds since the trace began.

    Attributes:
        number: Its number in the trace, from 0.
        group: Name of the group.
        method: ``"Class.method"``.
        sent_nbytes: Bytes of arguments that the controller has encoded, each payload once.
        returned_nbytes: Bytes of values that came to the controller.
        kept_nbytes: Bytes of rows that have stayed where they were made.
        read_nbytes: Bytes of rows that ranks have read from where they lie, by the way: ``"shared memory"``, or
            ``"Ray"`` for its object store.
        takes_from: The numbers of the calls that made those rows, with the rank that did.

    Args:
        number: Its number in the trace.
        group: Name of the group.
        method: ``"Class.method"``.
        origin_ns: When the trace began, by the monotonic clock.
        workers: The workers that are asked.
    """

    sent_nbytes = returned_nbytes = kept_nbytes = 0
    read_nbytes: Mapping[str, int] = NOTHING
    takes_from: Set[tuple[int, int]] = frozenset()
    _encoded_ns = _sent_ns = _done_ns = 0

    def __init__(self, number: int, group: str, method: str, origin_ns: int, workers: Workers) -> None:
        self.number, self.group, self.method = number, group, method
        self._origin_ns, self._begun_ns, self._workers = origin_ns, monotonic_ns(), workers
        self._raw: dict[int, tuple[bytes, int]] = {}  # by rank, `Ticket.times`

    @property
    def begun(self) -> float:
        """When it was submitted."""
        return self._seconds(self._begun_ns)

    @property
    def encoded(self) -> float:
        """When its arguments were planned and encoded."""
        return self._seconds(self._encoded_ns or self._begun_ns)

    @property
    def sent(self) -> float:
        """When it was sent; a rank may have replied before the last one was sent to."""
        return self._seconds(self._sent_ns or self._encoded_ns or self._begun_ns)

    @property
    def done(self) -> float | None:
        """When its result was there; None if it is not."""
        return self._seconds(self._done_ns) if self._done_ns else None

    @property
    def replied(self) -> Collection[int]:
        """The ranks that have replied, and were not lost."""
        return self._raw.keys()

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
        self._encoded_ns, self.sent_nbytes = monotonic_ns(), nbytes

    def is_sent(self) -> None:
        """It was sent."""
        self._sent_ns = monotonic_ns()

    def is_done(self) -> None:
        """Its result is there, or its error."""
        self._done_ns = monotonic_ns()

    def came(self, rank: int, ticket: Ticket, value: Payload | Kept | Failure | None) -> None:
        """The reply of a rank has come."""
        try:
            self._raw[rank] = ticket.times
        except AttributeError:
            self._raw.pop(rank, None)  # a worker that has died tells of none
        if type(value) is Payload:
            self.returned_nbytes += value.nbytes
        elif value is not None and type(value) is not Failure and value.facts is not None:  # type: ignore[union-attr]
            self.kept_nbytes += value.facts.nbytes  # type: ignore[union-attr]

    def read(self, nbytes: int, way: str, source: CallRecord | None, rank: int | None) -> None:
        """Ranks read rows that a rank has made in another call.

        Args:
            nbytes: Their bytes.
            way: How.
            source: The other call, if it was recorded.
            rank: The rank that has made them; None for the controller.
        """
        self.read_nbytes = {**self.read_nbytes, way: self.read_nbytes.get(way, 0) + nbytes}
        if source is not None and rank is not None:
            self.takes_from |= {(source.number, rank)}

    def _seconds(self, moment_ns: int) -> float:
        return (moment_ns - self._origin_ns) / 1e9

    def _times(self, rank: int) -> RankTimes:
        begun, decoded, ran, encoded, received = self.moments(rank)
        waited = max(0.0, begun - self.sent)
        return RankTimes(waited, decoded - begun, ran - decoded, encoded - ran, received - encoded)

    def moments(self, rank: int) -> list[float]:
        """When a rank had begun, decoded, run and encoded, and when the reply came: seconds since the trace began.

        The first four are by the clock of the rank's host. If it differs from the controller's, they are put into the
        middle of the time between sending and reply.
        """
        times, received_ns = self._raw[rank]
        theirs, received = [self._seconds(moment) for moment in TIMES.unpack(times)], self._seconds(received_ns)
        if theirs[0] < self.encoded or theirs[-1] > received:
            shift = (self.sent + received - theirs[0] - theirs[-1]) / 2
            theirs = [moment + shift for moment in theirs]
        return [*theirs, received]

    def place(self, rank: int) -> str:
        """Where a rank is."""
        known = self._workers.records[rank]
        return f"rank {rank} ({known.host}, pid {known.pid}, {known.device})"


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
        return text_table("calls; means of the ranks in ms", header, [_row(record) for record in self._records])


def _row(record: CallRecord) -> list[object]:
    ranks = record.ranks
    return [
        record.number,
        record.method,
        f"{record.begun:.3f}",
        "…" if record.seconds is None else _ms(record.seconds),
        *(_ms(mean_of(ranks.values(), name)) for name in RankTimes._fields),
        ", ".join(f"{rank} ({_ms(ranks[rank].ran)})" for rank in record.stragglers) or "-",
        bytes_of(record),
    ]


def mean_of(ranks: Iterable[RankTimes], name: str) -> float | None:
    """The mean of one field over some ranks; None if there is none."""
    values = [getattr(times, name) for times in ranks]
    return statistics.fmean(values) if values else None


def _ms(seconds: float | None) -> str:
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
