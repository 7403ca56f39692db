"""Figures for Prometheus: those of an endpoint, and of the engine of each replica."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    """The figures of one endpoint, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        self.requests = Counter("bandmaster_requests", "Requests by status", ["route", "status"], registry=own)
        self.seconds = Histogram(
            "bandmaster_request_seconds", "Seconds to the end of the answer", ["route"], buckets=SECONDS, registry=own
        )
        self.first = Histogram(
            "bandmaster_first_token_seconds", "Seconds to the first part of a stream", buckets=SECONDS, registry=own
        )
        self.open = Gauge("bandmaster_open_requests", "Requests that are being answered", registry=own)
        self.prompt_tokens = Counter("bandmaster_prompt_tokens", "Tokens of prompts", registry=own)
        self.known_tokens = Counter(
            "bandmaster_known_tokens", "Tokens of prompts known from turns before", registry=own
        )
        self.answer_tokens = Counter("bandmaster_answer_tokens", "Tokens of answers", registry=own)
        self.drifts = Counter(
            "bandmaster_rerendered_turns", "Turns of which the template did not show what is new", registry=own
        )
        self.hang_ups = Counter("bandmaster_hang_ups", "Requests whose client hung up", registry=own)
        self.remembered = Gauge(
            "bandmaster_session_tokens", "Tokens of conversations that are remembered", registry=own
        )
        self.dropped = Gauge("bandmaster_dropped_turns", "Recorded turns that were dropped", registry=own)

    def text(self, replicas: Mapping[int, Mapping[str, float] | None]) -> bytes:
        """All figures in Prometheus's text format.

        Args:
            replicas: The figures of the engine of each replica; None of one that does not answer.
        """
        return generate_latest(self.registry) + generate_latest(_Replicas(replicas))


class _Replicas:
    """The figures of engines, as a registry has them."""

    def __init__(self, replicas: Mapping[int, Mapping[str, float] | None]) -> None:
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("bandmaster_replica_up", "Whether the replica answers", labels=["replica"])
        families: dict[str, GaugeMetricFamily] = {}
        for number, figures in self._replicas.items():
            up.add_metric([str(number)], float(figures is not None))
            for name, value in (figures or {}).items():
                name = re.sub(r"[^a-zA-Z0-9_:]", "_", name if ":" in name else f"engine_{name}")
                family = families.setdefault(name, GaugeMetricFamily(name, "Of the engine", labels=["replica"]))
                family.add_metric([str(number)], value)
        yield up
        yield from families.values()
