"""`Figures`: what calls have cost, as Prometheus reads it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from bandmaster.timeline import Call

SECONDS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
PHASES = ("queued", "decoded", "ran", "encoded", "moved")


class Figures:
    """The figures of all calls, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        named = ["group", "method"]
        self.seconds = Histogram(
            "bandmaster_call_seconds",
            "Seconds from submission to the result, of calls and requests that have ended",
            named,
            buckets=SECONDS,
            registry=own,
        )
        self.ranks = Counter(
            "bandmaster_rank_seconds", "Seconds of ranks, by phase of a call", [*named, "rank", "phase"], registry=own
        )
        self.nbytes = Counter("bandmaster_bytes", "Bytes of calls, by their way", [*named, "way"], registry=own)
        self.open = Gauge("bandmaster_open_calls", "Calls and requests that have not ended", ["group"], registry=own)
        self.versions = Gauge(
            "bandmaster_weights_version",
            "Version of weights that a rank has reported",
            ["group", "rank"],
            registry=own,
        )
        self.stalls = Counter("bandmaster_stalls", "Notices of calls that make no progress", ["group"], registry=own)
        self.dropped = Counter("bandmaster_dropped_calls", "Calls that were too many to be counted", registry=own)

    def add(self, call: Call) -> None:
        """Count a call that has ended."""
        group, method = call.group, call.method
        self.seconds.labels(group, method).observe((call.end if call.done is None else call.done) - call.begun)
        for rank, (begun, decoded, ran, encoded, received) in call.moments.items():
            moments = (min(call.sent, begun), begun, decoded, ran, encoded, received)
            for n, phase in enumerate(PHASES):
                self.ranks.labels(group, method, rank, phase).inc(max(0.0, moments[n + 1] - moments[n]))
        for rank, version in call.versions.items():
            self.versions.labels(group, rank).set(version)
        ways = {
            "sent": call.sent_nbytes,
            "returned": call.returned_nbytes,
            "kept": call.kept_nbytes,
            **call.read_nbytes,
        }
        for way, nbytes in ways.items():
            if nbytes:
                self.nbytes.labels(group, method, way).inc(nbytes)

    def text(self) -> str:
        """All figures in Prometheus's text format."""
        return generate_latest(self.registry).decode()
