"""What a step has cost, by the ledger: seconds per stage, the controller's bytes, and the share of the runtime."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import bandmaster as bm

__all__ = ["measured"]


@contextmanager
def measured(metrics: dict[str, float]) -> Iterator[bm.Trace]:
    """Record the calls of a block, and add to its metrics what they have cost.

    Adds ``seconds``; ``seconds/Class.method`` that its slowest ranks have run; ``controller_nbytes`` that went by
    the controller; ``moved_nbytes`` that ranks have read from where they lay; and ``overhead``, the share of the time
    in which calls were on their way, but no rank ran a method: planning, sending, moving, collecting.

    Args:
        metrics: Get what is named above.

    Yields:
        The trace of the block.
    """
    with bm.trace() as trace:
        begun = time.perf_counter()
        yield trace
        seconds = time.perf_counter() - begun
    metrics["seconds"] = seconds
    for call in trace.calls:
        name = f"seconds/{call.method}"
        metrics[name] = metrics.get(name, 0.0) + max((times.ran for times in call.ranks.values()), default=0.0)
    metrics["controller_nbytes"] = sum(call.sent_nbytes + call.returned_nbytes for call in trace.calls)
    metrics["moved_nbytes"] = sum(sum(call.read_nbytes.values()) for call in trace.calls)
    running, pending = runs(trace.calls), [(call.begun, call.done or seconds) for call in trace.calls]
    metrics["overhead"] = (covered([*running, *pending]) - covered(running)) / seconds


def runs(calls: Iterable[bm.CallRecord]) -> list[tuple[float, float]]:
    """When ranks ran methods: from and to, in seconds of the trace."""
    moments = [call.moments(rank) for call in calls for rank in call.replied]
    return [(decoded, ran) for _, decoded, ran, _, _ in moments]


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of spans.

    Example:
        >>> covered([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
        4.0
    """
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
