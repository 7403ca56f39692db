"""`Figures`: what calls have cost, as Prometheus reads it.

Calls are counted in plain dictionaries, which takes a fraction of the time that counters of the client would take. They
become figures when somebody reads them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from bandmaster import RankTimes
from bandmaster.timeline import Call

SECONDS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
PHASES = RankTimes._fields
NAMED = ("group", "method")


class _Times:
    """A histogram of seconds."""

    def __init__(self) -> None:
        self.counts, self.sum = [0] * (len(SECONDS) + 1), 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.sum += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """The counts of calls up to each limit."""
        return list(zip([*map(str, SECONDS), "+Inf"], map(float, accumulate(self.counts)), strict=True))


class Figures:
    """The figures of all calls, in a registry of their own. One thread counts, any thread reads."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[str, str], _Times] = {}
        self._ranks: dict[tuple[str, str, int], list[float]] = {}
        self._nbytes: Counter[tuple[str, str, str]] = Counter()
        self._versions: dict[tuple[str, str], int] = {}
        self._open: Mapping[tuple[str], int] = {}
        self._errors: Counter[tuple[str, str, str]] = Counter()
        self._stalls: Counter[tuple[str]] = Counter()
        self.n_dropped_calls = self.n_dropped_spans = 0
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def add(self, call: Call) -> None:
        """Count a call that has ended."""
        group, method = call.group, call.method
        times = self._seconds.get((group, method)) or self._seconds.setdefault((group, method), _Times())
        times.add(call.finish - call.begun)
        for rank, moments in call.moments.items():
            key = (group, method, rank)
            sums = self._ranks.get(key) or self._ranks.setdefault(key, [0.0] * len(PHASES))
            for n, seconds in enumerate(RankTimes.of(moments, call.sent)):
                sums[n] += max(0.0, seconds)
        if call.error:
            self._errors[group, method, call.error_type] += 1
        for rank, version in call.versions.items():
            self._versions[group, str(rank)] = version
        ways = {"sent": call.sent_nbytes, "returned": call.returned_nbytes, "kept": call.kept_nbytes}
        for way, nbytes in {**ways, **call.read_nbytes}.items():
            if nbytes:
                self._nbytes[group, method, way] += nbytes

    def set_open(self, groups: Iterable[str]) -> None:
        """Say of which groups calls are open, each named once for each call; other groups that are known have none."""
        known = [*self._open, *((group,) for group, _ in self._seconds)]
        self._open = {**dict.fromkeys(known, 0), **Counter((group,) for group in groups)}

    def add_stall(self, group: str) -> None:
        """Count a notice of a call that makes no progress."""
        self._stalls[(group,)] += 1

    def collect(self) -> Iterator[Metric]:
        """Yield the figures as Prometheus's client has them."""
        seconds = HistogramMetricFamily(
            "bandmaster_call_seconds", "Seconds from submission to the result, of calls that have ended", labels=NAMED
        )
        for key, times in list(self._seconds.items()):
            seconds.add_metric(key, times.buckets(), times.sum)
        yield seconds
        phases = {
            (group, method, str(rank), phase): value
            for (group, method, rank), sums in list(self._ranks.items())
            for phase, value in zip(PHASES, sums, strict=True)
        }
        counter, gauge = CounterMetricFamily, GaugeMetricFamily
        of_rank, of_way, of_type = [*NAMED, "rank", "phase"], [*NAMED, "way"], [*NAMED, "type"]
        yield _family(counter, "rank_seconds", "Seconds of ranks, by phase of a call", of_rank, phases)
        yield _family(counter, "bytes", "Bytes of calls, by their way", of_way, self._nbytes)
        yield _family(counter, "errors", "Calls that have failed, by their error", of_type, self._errors)
        what = "Version of weights that a rank has reported"
        yield _family(gauge, "weights_version", what, ["group", "rank"], self._versions)
        yield _family(counter, "stalls", "Notices of calls without progress", ["group"], self._stalls)
        yield _family(gauge, "open_calls", "Calls that have not ended", ["group"], self._open)
        yield _family(counter, "dropped_calls", "Calls not counted", [], {(): self.n_dropped_calls})
        yield _family(counter, "dropped_spans", "Calls without spans", [], {(): self.n_dropped_spans})

    def text(self) -> str:
        """All figures in Prometheus's text format."""
        return generate_latest(self.registry).decode()


def _family(kind: Any, name: str, text: str, labels: Sequence[str], values: Mapping[Any, float]) -> Metric:
    """The figures of one name, with the values of the labels as keys."""
    family = kind(f"bandmaster_{name}", text, labels=labels)
    for key, value in list(values.items()):
        family.add_metric(key, value)
    metric: Metric = family
    return metric
