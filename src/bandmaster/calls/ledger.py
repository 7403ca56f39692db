"""The ledger: what each call has cost on each rank, while a trace records.

::

    controller   submit ── encode ── send                                             received ── result
                                       └─ queued ─┬─ decoded ─┬─ ran ─┬─ encoded ─┐ moved ┘
    rank                                          begun                           replied
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from bandmaster.contract import Ticket, Workers
from bandmaster.errors import UsageError
from bandmaster.plan.render import text_table

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CallRecord", "CallTable", "RankTimes", "Trace", "calls_of", "recording", "trace"]

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
                "…" if record.seconds is None else _ms(record.seconds),
                *(_ms(_mean(record, name)) for name in RankTimes._fields),
                ", ".join(f"{rank} ({_ms(record.ranks[rank].ran)})" for rank in record.stragglers) or "-",
                _bytes_of(record),
            ]
            for record in self._records
        ]
        return text_table("calls; means of the ranks in ms", header, rows)


class Trace:
    """Records calls until it is stopped; `trace` begins one.

    Attributes:
        calls: What was recorded, in the order of submission.
    """

    def __init__(self, path: str | Path | None) -> None:
        self._path = None if path is None else Path(path)
        self._records: list[CallRecord] = []
        self._numbers = itertools.count()
        self._origin_ns = time.monotonic_ns()
        self._end: float | None = None

    @property
    def calls(self) -> CallTable:
        """What was recorded, in the order of submission."""
        return CallTable(sorted(self._records, key=lambda record: record.number))

    def begin(self, group: str, method: str, workers: Workers) -> CallRecord:
        """The record of a call that is being submitted."""
        begun = (time.monotonic_ns() - self._origin_ns) / 1e9
        record = CallRecord(next(self._numbers), group, method, begun, _origin_ns=self._origin_ns, _workers=workers)
        self._records.append(record)
        return record

    def stop(self) -> None:
        """Record no more, and write the file if there is a path. Stopping twice does nothing."""
        if recording.trace is self:
            recording.trace = None
        if self._end is None:
            self._end = (time.monotonic_ns() - self._origin_ns) / 1e9
            if self._path is not None:
                self.save(self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def summary(self) -> str:
        """A table of the methods: their calls, and which share of their time was spent on what.

        ``send`` is planning, encoding and sending in the controller; ``wait`` is what the slowest rank has queued;
        ``run`` is the mean of the ranks; ``skew`` is what the slowest has run beyond that; ``return`` is the rest:
        encoding, moving and joining of values.
        """
        by_method: dict[str, list[CallRecord]] = {}
        for record in self._records:
            if record.seconds is not None and record.ranks:
                by_method.setdefault(record.method, []).append(record)
        rows = [[method, *_shares(records)] for method, records in by_method.items()]
        return text_table("methods", ["method", "calls", "s", "send", "wait", "run", "skew", "return", "bytes"], rows)

    def __repr__(self) -> str:
        return self.summary()

    def save(self, path: str | Path) -> None:
        """Write a file that https://ui.perfetto.dev opens: a track for each rank, arrows from call to call.

        Source: the Trace Event Format of Chromium, as JSON.
        """
        Path(path).write_text(json.dumps({"traceEvents": list(_events(self._records)), "displayTimeUnit": "ms"}))


class _Recording:
    """The trace that records now."""

    trace: Trace | None = None
    last: Trace | None = None


recording = _Recording()


def trace(path: str | Path | None = None) -> Trace:
    """Begin to record the calls of all groups: what each rank has spent on each, and the bytes that have moved.

    Args:
        path: A file that is written when the trace is stopped, for https://ui.perfetto.dev; None writes none.

    Returns:
        The trace. It is a context manager that stops it; ``trace.calls``, and `WorkerGroup.calls` for one group, are
        tables of calls, and ``print(trace)`` shows which share of the time each method has spent on what.

    Raises:
        UsageError: A trace records already.

    Example:
        >>> import bandmaster as bm
        >>> class Adder(bm.Worker):
        ...     @bm.register(bm.Dispatch.DP_PROTO)
        ...     def double(self, rows): return [2 * row for row in rows]
        >>> with bm.ResourcePool([2], backend="inprocess") as pool, bm.trace() as trace:
        ...     group = bm.WorkerGroup(pool, Adder)
        ...     group.double([1, 2, 3])
        ...     [(call.method, sorted(call.ranks)) for call in group.calls()]
        [2, 4, 6]
        [('Adder.double', [0, 1])]
    """
    if recording.trace is not None:
        raise UsageError("a trace records already; stop() it, or leave its with block, before the next one begins")
    recording.trace = recording.last = Trace(path)
    return recording.trace


def calls_of(group: str) -> CallTable:
    """The calls of a group in the present trace, or in the last one.

    Raises:
        UsageError: There was none.
    """
    if recording.last is None:
        raise UsageError("no calls were recorded: make them in a block of `with bandmaster.trace():`")
    return CallTable(record for record in recording.last.calls if record.group == group)


def _mean(record: CallRecord, name: str) -> float | None:
    values = [getattr(times, name) for times in record.ranks.values()]
    return statistics.fmean(values) if values else None


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.3g}"


def _bytes_of(record: CallRecord) -> str:
    ways = {
        "sent": record.sent_nbytes,
        "returned": record.returned_nbytes,
        "kept": record.kept_nbytes,
        **{f"read by {way}": nbytes for way, nbytes in record.read_nbytes.items()},
    }
    return ", ".join(f"{nbytes:,} {way}" for way, nbytes in ways.items() if nbytes)


def _shares(records: Sequence[CallRecord]) -> list[str]:
    """The columns of a method in the summary."""
    total = sum(record.seconds or 0.0 for record in records)
    send = sum((record.sent or record.encoded) - record.begun for record in records)
    wait = sum(max(times.queued for times in record.ranks.values()) for record in records)
    run = sum(_mean(record, "ran") or 0.0 for record in records)
    skew = sum(record.skew for record in records)
    parts = [send, wait, run, skew, max(0.0, total - send - wait - run - skew)]
    nbytes = sum(record.sent_nbytes + record.returned_nbytes for record in records)
    read = sum(sum(record.read_nbytes.values()) for record in records)
    shares = [f"{part / total:.0%}" if total else "-" for part in parts]
    moved = f"{nbytes:,} through the controller" + (f", {read:,} read by reference" if read else "")
    return [str(len(records)), f"{total:.3f}", *shares, moved]


def _events(records: Sequence[CallRecord]) -> Iterator[Mapping[str, Any]]:
    """The events of a trace: a process for the controller and for each group, a thread for each rank."""
    yield {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "controller"}}
    groups = {name: pid for pid, name in enumerate(dict.fromkeys(record.group for record in records), 1)}
    for name, pid in groups.items():
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_name", "pid": 0, "tid": pid, "args": {"name": f"calls to {name}"}}
    named: set[tuple[int, int]] = set()
    by_number = {record.number: record for record in records}
    for record in records:
        pid = groups[record.group]
        end = max([record.sent, record.encoded, record.begun, *([record.done] if record.done is not None else [])])
        facts = {"call": record.number, "bytes": _bytes_of(record)}
        yield _async("b", record, 0, pid, record.begun, facts)
        yield _async("e", record, 0, pid, end, {})
        for rank in record.ranks:
            if (pid, rank) not in named:
                named.add((pid, rank))
                yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": rank, "args": {"name": record.place(rank)}}
            begun, decoded, ran, encoded, _ = record.moments(rank)
            times = {f"{name} ms": 1000 * seconds for name, seconds in record.ranks[rank]._asdict().items()}
            yield _slice(record.method, pid, rank, begun, encoded, {**facts, **times})
            for name, start, stop in (("decode", begun, decoded), ("run", decoded, ran), ("encode", ran, encoded)):
                yield _slice(name, pid, rank, start, stop, {})
        for number, rank in sorted(record.takes_from):
            source = by_number.get(number)
            if source is not None and rank in source.ranks:
                yield from _arrows(source, rank, record, groups)


def _arrows(
    source: CallRecord, rank: int, target: CallRecord, groups: Mapping[str, int]
) -> Iterator[Mapping[str, Any]]:
    """From the rank that has made rows to the ranks that have taken some."""
    for other in target.ranks:
        made, taken = source.moments(rank)[3], target.moments(other)[0]
        name = {"name": "rows", "cat": "rows", "id": f"{source.number}.{rank}-{target.number}.{other}"}
        at = {"pid": groups[source.group], "tid": rank, "ts": 1e6 * made - 0.001}
        yield {"ph": "s", **name, **at}
        yield {"ph": "f", "bp": "e", **name, "pid": groups[target.group], "tid": other, "ts": 1e6 * taken + 0.001}


def _slice(name: str, pid: int, tid: int, start: float, stop: float, facts: Mapping[str, Any]) -> Mapping[str, Any]:
    duration = max(0.0, 1e6 * (stop - start))
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": 1e6 * start, "dur": duration, "args": facts}


def _async(
    phase: str, record: CallRecord, pid: int, tid: int, at: float, facts: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Begin or end of a call in the controller, where calls overlap."""
    who = {"name": record.method, "cat": "call", "id": record.number}
    return {"ph": phase, **who, "pid": pid, "tid": tid, "ts": 1e6 * at, "args": facts}
