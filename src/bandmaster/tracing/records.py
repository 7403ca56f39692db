"""Records of calls: the times of their phases in the controller and on each rank, and the bytes they moved.

::

    controller   submit ── encode ── send                                             received ── result
                                       └─ queued ─┬─ decoded ─┬─ ran ─┬─ encoded ─┐ moved ┘
    rank                                          begun                           replied
"""

from __future__ import annotations

import statistics
from collections import UserList
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from time import monotonic_ns
from types import MappingProxyType
from typing import NamedTuple
from weakref import ref

from bandmaster.calls.hooks import Traced
from bandmaster.codec import Payload
from bandmaster.contract import TIMES, Kept, Ticket, Workers
from bandmaster.errors.failure import Failure, summary_of
from bandmaster.plan.render import text_table

NOTHING: Mapping[str, int] = MappingProxyType({})
STRAGGLES, STRAGGLES_S = 1.5, 1e-3  # a rank that runs so much longer than the median is called a straggler


class RankTimes(NamedTuple):
    """The time that one rank has spent on a call, by phase, in seconds.

    Attributes:
        queued: From sending until the rank began: it still ran earlier calls, or the message was in transit.
        decoded: Decoding the arguments, and mapping rows that lie elsewhere.
        ran: Running the method.
        encoded: Encoding the value.
        moved: From the end of encoding until the controller had the reply.
    """

    queued: float
    decoded: float
    ran: float
    encoded: float
    moved: float

    @classmethod
    def of(cls, moments: Sequence[float], sent: float) -> RankTimes:
        """The times between the `CallRecord.moments` of a rank, in a call that was sent at some time."""
        begun, decoded, ran, encoded, received = moments
        return cls(max(0.0, begun - sent), decoded - begun, ran - decoded, encoded - ran, received - encoded)


class CallRecord:
    """One call. Its times are in seconds since the trace began.

    Attributes:
        number: Its number in the trace, from 0.
        group: Name of the group.
        method: ``"Class.method"``.
        begun: Time of submission.
        encoded: Time when its arguments were planned and encoded.
        sent: Time when it was sent to the last rank; a rank may reply earlier.
        done: Time when it had its result or its error, or of its last reply as long as no thread reads the result; None
            before.
        error: Type and first line of its error; "" if it has none.
        sent_nbytes: Bytes of arguments that the controller has encoded, each payload once.
        returned_nbytes: Bytes of values that the controller received.
        kept_nbytes: Bytes of rows that have stayed where they were made.
        read_nbytes: Bytes of rows that ranks have read by reference, by place: ``"shared memory"``, ``"network"`` for
            those of other hosts, or ``"controller"``; see `bandmaster.contract.Kept`.
        takes_from: The numbers of the calls that made those rows, each with the rank that made them.
        is_request: Whether it is a request, which waits in the controller until a replica has a place for it.
        versions: By rank, the version of its weights that it had reported when it replied, if it has.

    Args:
        number: Its number in the trace.
        call: The call; the record does not keep it alive.
        workers: The workers that run the call.
        origin_ns: The beginning of the trace on the monotonic clock.
    """

    error = ""
    sent_nbytes = returned_nbytes = kept_nbytes = 0
    read_nbytes: Mapping[str, int] = NOTHING
    takes_from: Set[tuple[int, int]] = frozenset()
    is_request = False
    versions: Mapping[int, int] = MappingProxyType({})

    def __init__(self, number: int, call: Traced, workers: Workers, origin_ns: int) -> None:
        self.number, self.group, self.method = number, call.site.group, call.site.method
        self._call, self._workers, self._origin_ns = ref(call), workers, origin_ns
        self.begun = self.encoded = self.sent = self._seconds(monotonic_ns())
        self.done: float | None = None
        self._raw: dict[int, tuple[bytes, int]] = {}  # by rank, `Ticket.times`

    @property
    def replied(self) -> Collection[int]:
        """The ranks that have replied and have not died."""
        return self._raw.keys()

    @property
    def ranks(self) -> dict[int, RankTimes]:
        """The times of each rank that has replied and has not died, by rank."""
        return {rank: RankTimes.of(self.moments(rank), self.sent) for rank in sorted(self._raw)}

    @property
    def seconds(self) -> float | None:
        """Seconds from submission to `done`; None before."""
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
        """Record that the arguments of the call are encoded."""
        self.encoded = self.sent = self._seconds(monotonic_ns())
        self.sent_nbytes = nbytes

    def is_sent(self) -> None:
        """Record that the call is sent."""
        self.sent = self._seconds(monotonic_ns())

    def is_done(self, error: BaseException | None, is_read: bool = True) -> None:
        """Record that the call has ended, with an error or without; ``is_read`` says whether it has its result."""
        if error is not None:
            self.error = summary_of(error).partition("\n")[0]
        replied_ns = [] if is_read else [received_ns for _, received_ns in self._raw.values()]
        self.done = self._seconds(max(replied_ns, default=0) or monotonic_ns())

    def look_for_end(self) -> None:
        """Record that the call has ended if it has, though no thread waits for it, or it was dropped."""
        if (call := self._call()) is not None:
            call.take_arrived()
        else:
            self.error = "" if self._raw else "dropped before a reply was taken"
            self.done = max([self.sent, *[self._seconds(received_ns) for _, received_ns in self._raw.values()]])

    def came(self, rank: int, ticket: Ticket, value: Payload | Kept | Failure | None) -> None:
        """Record the reply of a rank."""
        if ticket.times is None:
            self._raw.pop(rank, None)  # a worker that has died reports no times
        else:
            self._raw[rank] = ticket.times
        if reported := self._workers.reports.get(rank):
            known = [one.version for one in reported.values() if one.version is not None]
            self.versions = {**self.versions, rank: max(known)} if known else self.versions
        if type(value) is Payload:
            self.returned_nbytes += value.nbytes
        elif value is not None and type(value) is not Failure and value.facts is not None:  # type: ignore[union-attr]
            self.kept_nbytes += value.facts.nbytes  # type: ignore[union-attr]

    def read(self, nbytes: int, way: str, source: CallRecord | None, rank: int | None) -> None:
        """Record that ranks read rows that a rank has made in another call.

        Args:
            nbytes: Size of the rows in bytes.
            way: The transport, a key of `read_nbytes`.
            source: The other call, if it was recorded.
            rank: The rank that has made them; None for the controller.
        """
        self.read_nbytes = {**self.read_nbytes, way: self.read_nbytes.get(way, 0) + nbytes}
        if source is not None and rank is not None:
            self.takes_from |= {(source.number, rank)}

    def _seconds(self, moment_ns: int) -> float:
        return (moment_ns - self._origin_ns) / 1e9

    def moments(self, rank: int) -> list[float]:
        """Times at which a rank began, had decoded, run and encoded, and of its reply: seconds since the trace began.

        The first four are by the clock of the rank's host. If that differs from the controller's clock, they are
        shifted to the middle of the time between sending and reply.
        """
        times, received_ns = self._raw[rank]
        theirs, received = [self._seconds(moment) for moment in TIMES.unpack(times)], self._seconds(received_ns)
        if theirs[0] < self.encoded or theirs[-1] > received:
            shift = (self.sent + received - theirs[0] - theirs[-1]) / 2
            theirs = [moment + shift for moment in theirs]
        return [*theirs, received]

    def stacks(self) -> Mapping[int, str]:
        """The Python stacks of the ranks of its group, innermost frame last, whatever they are doing now."""
        return self._workers.stacks(dict.fromkeys(range(len(self._workers.records))))

    def place(self, rank: int) -> str:
        """A label for a rank: its number, host, pid and device."""
        known = self._workers.records[rank]
        return f"rank {rank} ({known.host}, pid {known.pid}, {known.device})"


class CallTable(UserList[CallRecord]):
    """Records of calls, which print as a table."""

    def __repr__(self) -> str:
        header = ["call", "method", "at s", "ms", "queued", "decoded", "ran", "encoded", "moved", "stragglers", "bytes"]
        return text_table("calls; means of the ranks in ms", header, [_row(record) for record in self])


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
    """The mean of one field over some ranks; None if there are no ranks."""
    values = [getattr(times, name) for times in ranks]
    return statistics.fmean(values) if values else None


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.3g}"


def bytes_of(record: CallRecord) -> str:
    """Format the bytes that a call has moved, by kind of transfer."""
    ways = {
        "sent": record.sent_nbytes,
        "returned": record.returned_nbytes,
        "kept": record.kept_nbytes,
        **{f"read by {way}": nbytes for way, nbytes in record.read_nbytes.items()},
    }
    return ", ".join(f"{nbytes:,} {way}" for way, nbytes in ways.items() if nbytes)
