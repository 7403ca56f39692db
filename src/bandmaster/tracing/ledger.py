"""The ledger: records of all calls while a trace is open."""

from __future__ import annotations

import importlib
import itertools
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Protocol

from bandmaster.calls.hooks import Traced, hooks
from bandmaster.contract import Workers
from bandmaster.errors import UsageError
from bandmaster.plan.render import text_table
from bandmaster.tracing.perfetto import events
from bandmaster.tracing.records import CallRecord, CallTable, mean_of


class Picture(Protocol):
    """A picture of a run: it shows itself in a notebook, as a `bandmaster.timeline.Timeline` does."""

    def save(self, path: str | Path) -> None:
        """Write it to a file: ``.html``, ``.svg`` or ``.png``."""

    def _repr_html_(self) -> str: ...


class Trace:
    """Records calls until it is stopped; `trace` begins one.

    Attributes:
        last: The trace that was begun last; None if there was none.
        calls: The recorded calls, in the order of submission.
        began: The time at which it began, in seconds since the epoch.
    """

    last: ClassVar[Trace | None] = None

    def __init__(self, path: str | Path | None) -> None:
        self._path = None if path is None else Path(path)
        self._records: list[CallRecord] = []
        self._numbers = itertools.count()
        self._origin_ns, self.began = time.monotonic_ns(), time.time()

    @property
    def calls(self) -> CallTable:
        """The recorded calls, in the order of submission."""
        return CallTable(sorted(self._known(), key=lambda record: record.number))

    def begin(self, call: Traced, workers: Workers) -> CallRecord:
        """Begin the record of a call that is being submitted."""
        record = CallRecord(next(self._numbers), call, workers, self._origin_ns)
        self._records.append(record)
        return record

    def _known(self) -> list[CallRecord]:
        """The records, which say of calls that have ended that they have, though no thread waits for them."""
        known = self._records[:]
        for record in known if hooks.trace == self.begin else ():  # what ends later is not of this run
            if record.done is None:
                record.look_for_end()
        return known

    def take(self) -> CallTable:
        """Remove the calls that have ended, and return them: a trace that stays open for long does not grow then."""
        known = self._known()
        ended = {record.number for record in known if record.done is not None}
        self._records[: len(known)] = [record for record in known if record.number not in ended]
        return CallTable(record for record in known if record.number in ended)

    def stop(self) -> None:
        """Record no more, and write the file if there is a path. Stopping twice does nothing."""
        if hooks.trace == self.begin:
            self._known()
            hooks.trace = None
            if self._path is not None:
                self.save(self._path)

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def summary(self) -> str:
        """A table of the methods: the number of their calls, and the share of each phase in their time.

        ``send`` is planning, encoding and sending in the controller; ``wait`` is the longest queueing time of a rank,
        and the wait of a request for a place; ``run`` is the mean running time of the ranks; ``skew`` is the excess of
        the slowest rank over that mean; ``return`` is the rest: encoding, moving and joining of values. A method of
        several groups has a line for each.
        """
        by_method: dict[tuple[str, str], list[CallRecord]] = {}
        for record in self.calls:
            if record.seconds is not None and record.ranks:
                by_method.setdefault((record.group, record.method), []).append(record)
        n_groups = Counter(method for _, method in by_method)
        rows = [
            [method if n_groups[method] == 1 else f"{method} of {group}", *_shares(records)]
            for (group, method), records in by_method.items()
        ]
        return text_table("methods", ["method", "calls", "s", "send", "wait", "run", "skew", "return", "bytes"], rows)

    def timeline(self) -> Picture:
        """The picture of the run: a lane for each rank; see `bandmaster.timeline`. A notebook shows it."""
        picture: Picture = importlib.import_module("bandmaster.timeline").Timeline.of(self)
        return picture

    def diagnosis(self) -> str:
        """Say in one sentence where the time went; see `bandmaster.timeline.diagnosis`."""
        return str(importlib.import_module("bandmaster.timeline").diagnosis(self.calls))

    def __repr__(self) -> str:
        return f"{self.summary()}\n{self.diagnosis()}"

    def save(self, path: str | Path) -> None:
        """Write a file that https://ui.perfetto.dev opens: a track for each rank, arrows from call to call.

        Source: the Trace Event Format of Chromium, as JSON.
        """
        Path(path).write_text(json.dumps({"traceEvents": list(events(self.calls)), "displayTimeUnit": "ms"}))


def trace(path: str | Path | None = None) -> Trace:
    """Begin to record the calls of all groups: the times of each rank, and the bytes that are moved.

    Args:
        path: A file that is written when the trace is stopped, for https://ui.perfetto.dev; None writes none.

    Returns:
        The trace. It is a context manager that stops it; ``trace.calls``, and `WorkerGroup.calls` for one group, are
        tables of calls, and ``print(trace)`` shows the share of each phase in the time of each method.

    Raises:
        UsageError: Another trace is open; the path is a folder; or there is no folder for the file.

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
    if hooks.trace is not None:
        raise UsageError(
            "a trace is already open; stop() it, leave its with block, or close the Telemetry that it is of, "
            "before the next one begins"
        )
    if path is not None and Path(path).is_dir():
        raise UsageError(f"cannot write the trace to {str(path)!r}: it is a folder; name a file in it")
    if path is not None and not (folder := Path(path).parent).is_dir():
        raise UsageError(f"cannot write the trace to {path}: there is no folder {folder}; make it first")
    Trace.last = made = Trace(path)
    hooks.trace = made.begin
    return made


def calls_of(group: str) -> CallTable:
    """The calls of a group in the present trace, or in the last one.

    Raises:
        UsageError: There was no trace.
    """
    if Trace.last is None:
        raise UsageError("no calls were recorded: make them in a block of `with bandmaster.trace():`")
    return CallTable(record for record in Trace.last.calls if record.group == group)


def _shares(records: Sequence[CallRecord]) -> list[str]:
    """The columns of a method in the summary."""
    total = sum(record.seconds or 0.0 for record in records)
    send = sum((record.encoded if record.is_request else record.sent) - record.begun for record in records)
    ranks = [record.ranks.values() for record in records]
    wait = sum(max(times.queued for times in each) for each in ranks)
    wait += sum(record.sent - record.encoded for record in records if record.is_request)
    run = sum(mean_of(each, "ran") or 0.0 for each in ranks)
    skew = sum(max(times.ran for times in each) for each in ranks) - run
    parts = [send, wait, run, skew, max(0.0, total - send - wait - run - skew)]
    nbytes = sum(record.sent_nbytes + record.returned_nbytes for record in records)
    read = sum(sum(record.read_nbytes.values()) for record in records)
    shares = [f"{part / total:.0%}" if total else "-" for part in parts]
    moved = f"{nbytes:,} through the controller" + (f", {read:,} read by reference" if read else "")
    return [str(len(records)), f"{total:.3f}", *shares, moved]
