"""Sends what a trace records out of the machine: spans of OpenTelemetry, and figures that Prometheus reads.

::

    calls ── records ──► Trace ── take ──► a thread of its own, for a small share of the time
                                             ├──► spans: a span for each call, and one for each rank of it ──► exporters
                                             └──► figures ◄── GET /metrics ── Prometheus

`Telemetry` begins both. Nothing of it runs in the threads that call groups, but for the trace. The room needs the extra
``telemetry``. Nothing else imports it.
"""

try:
    import opentelemetry.sdk.trace  # noqa: F401
    import prometheus_client  # noqa: F401
except ImportError as error:
    raise ImportError(f"bandmaster.telemetry needs {error.name}: pip install 'bandmaster[telemetry]'") from error

from bandmaster.telemetry.telemetry import Telemetry

__all__ = ["Telemetry"]
