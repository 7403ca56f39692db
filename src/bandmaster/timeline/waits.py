"""`Waits`: which ranks wait in collective operations of torch, and for which rank.

::

    Waits, a thread: every interval ── CallRecord.stacks ──► ranks of the oldest open call of each group
                                                               in torch.distributed: waits; elsewhere: is waited for

A rank that is slow before a collective operation makes all others slow: they wait for it inside of their methods, and
the times of all are alike. Only their stacks tell them apart, so they are asked for, now and then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from bandmaster import BandmasterError, CallRecord, Trace, UsageError
from bandmaster.errors.failure import is_in_collective
from bandmaster.timeline.causes import LEAST, Finding, diagnosis, findings, length, merged, percent
from bandmaster.timeline.run import Call, named

LEAST_SAMPLES = 3  # of a method, in which some ranks wait for others
MOSTLY = 0.6  # a rank that is waited for in such a share of them is named
LEAST_INTERVAL_S = 0.01


class Sample(NamedTuple):
    """The places of the ranks of a call at one moment.

    Attributes:
        call: The number of the call.
        waiting: The ranks that waited in a collective operation.
        ranks: All ranks that could be asked.
    """

    call: int
    waiting: frozenset[int]
    ranks: frozenset[int]


class Waits:
    """Looks now and then which ranks wait in collective operations, while a trace is open.

    Each look interrupts the ranks that run for less than a millisecond, as `bandmaster stack` does.

    Args:
        trace: The trace.
        interval: Seconds between two looks; a tenth of the shortest call of interest is often enough.

    Attributes:
        samples: What was seen.

    Raises:
        UsageError: The interval is shorter than 10 ms.

    Example::

        with bm.trace() as trace, Waits(trace, interval=0.2) as waits:
            train()
        print(waits.diagnosis())  # "Ranks of Trainer wait in collective operations for rank 3 (31 %); ..."
    """

    def __init__(self, trace: Trace, interval: float = 0.5) -> None:
        if not interval >= LEAST_INTERVAL_S:
            raise UsageError(f"interval must be at least {LEAST_INTERVAL_S:g} seconds, got {interval:g}")
        self.samples: list[Sample] = []
        self._trace, self._interval_s = trace, interval
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bandmaster-waits", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._is_over.set()
        self._thread.join()

    def __enter__(self) -> Waits:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def findings(self) -> list[Finding]:
        """The findings about the calls of the trace, and the ranks that others wait for in collective operations."""
        calls = self._calls()
        return findings(calls, awaited(calls, self.samples))

    def diagnosis(self) -> str:
        """One sentence, as of `bandmaster.timeline.diagnosis`, that knows of these waits as well."""
        calls = self._calls()
        return diagnosis(calls, awaited(calls, self.samples))

    def _calls(self) -> list[Call]:
        return [Call.of(record) for record in self._trace.calls]

    def _run(self) -> None:
        while not self._is_over.wait(self._interval_s):
            self._look()

    def _look(self) -> None:
        oldest: dict[str, CallRecord] = {}
        for record in self._trace.calls:
            if record.done is None and not record.is_request:
                oldest.setdefault(record.group, record)
        now = time.time() - self._trace.began
        for record in oldest.values():
            if now - record.sent > self._interval_s / 2:
                with suppress(BandmasterError):  # the group is being closed
                    stacks = record.stacks()
                    waiting = frozenset(rank for rank, stack in stacks.items() if is_in_collective(stack))
                    self.samples.append(Sample(record.number, waiting, frozenset(stacks)))


def awaited(calls: Sequence[Call], samples: Sequence[Sample]) -> list[Finding]:
    """The ranks that others wait for in collective operations: those that are elsewhere in most samples of a method."""
    by_number = {call.number: call for call in calls if call.done is not None}
    total = max([call.end for call in by_number.values()], default=0.0)
    total -= min([call.begun for call in by_number.values()], default=0.0)
    by_method: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        if sample.call in by_number and len(sample.ranks) > 1:
            call = by_number[sample.call]
            by_method.setdefault((call.group, call.method), []).append(sample)
    found = []
    for (group, method), of_method in by_method.items():
        telling = [sample for sample in of_method if sample.waiting and sample.waiting != sample.ranks]
        missing = [rank for sample in telling for rank in sample.ranks - sample.waiting]
        late = tuple(sorted(r for r in set(missing) if missing.count(r) > MOSTLY * len(telling)))
        spans = merged((c.sent, c.end) for c in by_number.values() if (c.group, c.method) == (group, method))
        share = length(spans) * len(telling) / len(of_method) / max(total, 1e-9)
        if len(telling) >= LEAST_SAMPLES and late and share >= LEAST["slow"]:
            text = f"in {method}, ranks wait in collective operations for {named(late)} of {group} ({percent(share)})"
            found.append(Finding("slow", share, text, group, method, late))
    return found
