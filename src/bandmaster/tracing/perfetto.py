"""Records of calls as the events of a trace that https://ui.perfetto.dev shows.

Source: the Trace Event Format of Chromium, as JSON.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bandmaster.tracing.records import CallRecord, RankTimes, bytes_of

CONTROLLER = 1  # number of the controller's process in the trace
TRACKS = 100_000  # most tracks of a process: Perfetto requires numbers that are unique among all processes

Event = Mapping[str, Any]


def events(records: Sequence[CallRecord]) -> Iterator[Event]:
    """Yield a process for the controller and for each group, a track for each rank, and arrows between calls."""
    yield _name("process_name", {"pid": CONTROLLER}, "controller")
    processes = {name: number for number, name in enumerate(dict.fromkeys(r.group for r in records), CONTROLLER + 1)}
    for name, process in processes.items():
        yield _name("process_name", {"pid": process}, name)
        yield _name("thread_name", _track(CONTROLLER, process), f"calls to {name}")
    named: set[tuple[int, int]] = set()
    by_number, numbers = {record.number: record for record in records}, itertools.count(1)
    for record in records:
        process = processes[record.group]
        yield from _in_the_controller(record, _track(CONTROLLER, process))
        for rank, times in record.ranks.items():
            if (process, rank) not in named:
                named.add((process, rank))
                yield _name("thread_name", _track(process, rank), record.place(rank))
            yield from _on_a_rank(record, rank, times, _track(process, rank))
        for number, rank in sorted(record.takes_from):
            source = by_number.get(number)
            if source is not None and rank in source.replied:
                yield from _arrows(source, rank, record, processes, numbers)


def _track(process: int, number: int) -> dict[str, Any]:
    return {"pid": process, "tid": TRACKS * process + number}


def _name(what: str, where: Mapping[str, Any], name: str) -> Event:
    return {"ph": "M", "name": what, **where, "args": {"name": name}}


def _in_the_controller(record: CallRecord, track: Mapping[str, Any]) -> Iterator[Event]:
    """Yield the begin and end events of a call, from submission to result; calls overlap on this track."""
    end = max(record.sent, record.encoded, record.begun, record.done or 0.0)
    who = {"name": record.method, "cat": "call", "id": record.number, **track}
    yield {"ph": "b", **who, "ts": _us(record.begun), "args": {"call": record.number, "bytes": bytes_of(record)}}
    yield {"ph": "e", **who, "ts": _us(end)}


def _on_a_rank(record: CallRecord, rank: int, times: RankTimes, track: Mapping[str, Any]) -> Iterator[Event]:
    begun, decoded, ran, encoded, _ = record.moments(rank)
    facts = {f"{name} ms": 1000 * seconds for name, seconds in times._asdict().items()}
    yield _slice(record.method, track, begun, encoded, {"call": record.number, **facts})
    for name, start, stop in (("decode", begun, decoded), ("run", decoded, ran), ("encode", ran, encoded)):
        yield _slice(name, track, start, stop, {})


def _arrows(
    source: CallRecord, rank: int, target: CallRecord, processes: Mapping[str, int], numbers: Iterator[int]
) -> Iterator[Event]:
    """Yield arrows from the encoding of rows on a rank to their decoding on the ranks that take them."""
    _, _, ran, encoded, _ = source.moments(rank)
    for other in sorted(target.replied):
        begun, decoded, *_ = target.moments(other)
        arrow = {"name": "rows", "cat": "rows", "id": next(numbers)}
        yield {"ph": "s", **arrow, **_track(processes[source.group], rank), "ts": _us((ran + encoded) / 2)}
        end = _track(processes[target.group], other)
        yield {"ph": "f", "bp": "e", **arrow, **end, "ts": _us((begun + decoded) / 2)}


def _slice(name: str, track: Mapping[str, Any], start: float, stop: float, facts: Mapping[str, Any]) -> Event:
    duration = max(0.0, _us(stop) - _us(start))
    return {"ph": "X", "name": name, **track, "ts": _us(start), "dur": duration, "args": facts}


def _us(seconds: float) -> float:
    """Convert seconds to microseconds in quarters, which are whole nanoseconds, so that truncation loses nothing.

    Otherwise a nested slice could end a nanosecond after its parent, and Perfetto would drop it.
    """
    return round(4e6 * seconds) / 4
