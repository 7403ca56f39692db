"""`Run`: the calls of a trace as plain values, which pictures and findings are computed from. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from numbers import Real
from typing import NamedTuple

from bandmaster import CallRecord, Stall, Trace, UsageError, stalls

Rank = tuple[str, int]  # the group's name and the rank


class Moments(NamedTuple):
    """Times of one rank in one call, in seconds since the trace began.

    Attributes:
        begun: It has begun the call.
        decoded: The arguments were decoded.
        ran: The method had returned.
        encoded: The value was encoded.
        received: The controller had the reply.
    """

    begun: float
    decoded: float
    ran: float
    encoded: float
    received: float


@dataclass(frozen=True)
class Call:
    """One call, with the attributes of `bandmaster.CallRecord` that have the same name.

    Attributes:
        moments: The times of each rank that has replied.
    """

    number: int
    group: str
    method: str
    begun: float
    encoded: float
    sent: float
    done: float | None
    moments: Mapping[int, Moments]
    error: str = ""
    is_request: bool = False
    sent_nbytes: int = 0
    returned_nbytes: int = 0
    kept_nbytes: int = 0
    read_nbytes: Mapping[str, int] = field(default_factory=dict)
    takes_from: Set[tuple[int, int]] = frozenset()
    versions: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, record: CallRecord) -> Call:
        """The values of a record, as they are now."""
        same = {name: getattr(record, name) for name in cls.__annotations__ if name != "moments"}
        return cls(moments={rank: Moments(*record.moments(rank)) for rank in sorted(record.replied)}, **same)

    @property
    def error_type(self) -> str:
        """The type of its error, without the module; "" if it has none."""
        return self.error.partition(":")[0].rpartition(".")[2]

    @property
    def end(self) -> float:
        """The last time that is known of it."""
        return max([self.sent, self.done or 0.0, *(times.received for times in self.moments.values())])

    @property
    def finish(self) -> float:
        """The time of its result; as long as there is none, the last time that is known of it."""
        return self.end if self.done is None else self.done


@dataclass(frozen=True)
class Run:
    """The calls of a trace.

    Attributes:
        calls: The calls, in the order of submission.
        places: The host, pid and device of each rank, as text.
        stalls: The notices of calls that made no progress while the trace was open.
        began: The beginning of the trace, in seconds since the epoch.
    """

    calls: tuple[Call, ...]
    places: Mapping[Rank, str] = field(default_factory=dict)
    stalls: tuple[Stall, ...] = ()
    began: float = 0.0

    @classmethod
    def of(cls, trace: Trace, last: float | None = None) -> Run:
        """The run that a trace has recorded, or the calls of its last seconds; calls may still be under way."""
        if last is not None and not (isinstance(last, Real) and float(last) >= 0):  # nan is not
            raise UsageError(f"last must be a non-negative number of seconds or None, got {last!r}")
        records = list(trace.calls)
        calls = [Call.of(record) for record in records]
        end = max([call.end for call in calls], default=0.0)
        places: dict[Rank, str] = {}
        for record, call in zip(records, calls, strict=True):
            for rank in call.moments:
                if (record.group, rank) not in places:
                    places[record.group, rank] = record.place(rank)
        under_way, until = {(call.group, call.method) for call in calls if call.done is None}, trace.began + end + 1.0
        told = [stall for stall in stalls() if stall.at <= until or (stall.group, stall.method) in under_way]
        noticed = [stall for stall in told if stall.at >= trace.began]
        if last is not None:
            calls = [call for call in calls if call.done is None or call.end >= end - last]
        return cls(tuple(calls), places, tuple(noticed), trace.began)

    @property
    def methods(self) -> list[tuple[str, str]]:
        """The groups and methods of the calls, in the order of first use."""
        return list(dict.fromkeys((call.group, call.method) for call in self.calls))

    @property
    def begin(self) -> float:
        """The submission of the first call."""
        return min([call.begun for call in self.calls], default=0.0)

    @property
    def end(self) -> float:
        """The end of the last call, or the last notice of a call under way that makes no progress."""
        return max([*(call.end for call in self.calls), *(stall.at - self.began for stall in self.stalls)], default=0.0)


def named(ranks: Iterable[int]) -> str:
    """Format some ranks, such as ``"rank 3"`` or ``"ranks 2 and 3"``."""
    numbers = [str(rank) for rank in sorted(ranks)]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"
