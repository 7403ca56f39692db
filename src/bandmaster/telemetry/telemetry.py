"""`Telemetry`: the thread that takes calls from a trace, and tells others of them."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager

from opentelemetry import trace as opentelemetry_trace
from opentelemetry.trace import TracerProvider
from prometheus_client import start_http_server

from bandmaster import CallRecord, UsageError, __version__, stalls, trace
from bandmaster.telemetry.figures import Figures
from bandmaster.telemetry.spans import Spans
from bandmaster.timeline import Call, Run, Timeline

RL_PHASES = ("sample", "reward", "train", "sync")
MOST_WAITING = 20_000  # calls that wait to be told of; older ones are dropped
MOST_RECENT = 20_000  # calls of `timeline`
SLICE_S = 0.0003  # the thread holds the interpreter for so long at a time
FLUSH_S = 10.0  # most seconds that `close` goes on
_log = logging.getLogger(__name__)


class Telemetry:
    """Records all calls, and tells OpenTelemetry and Prometheus of them, until it is closed.

    A thread takes the calls that have ended about once in ``interval`` seconds, and works for the share ``budget`` of
    the time at most. If calls come faster, first their spans wait, and beyond 20,000 the oldest are dropped; at very
    many calls also the figures. ``bandmaster_dropped_spans`` and ``bandmaster_dropped_calls`` count them. What is left
    is told of at the end.

    Args:
        port: Serve ``/metrics`` there, on 127.0.0.1; 0 chooses a free port, None serves nothing.
        host: The address to listen on; figures can be read by whoever can reach it.
        provider: Where spans go; by default OpenTelemetry's global provider, which does nothing unless the program sets
            one.
        phases: What methods do in a step of reinforcement learning, such as ``{"Actor.update": "train"}``:
            ``"sample"``, ``"reward"``, ``"train"`` or ``"sync"``. Their spans are named after it.
        model: The name of the model, for the spans of methods that sample.
        interval: Seconds between two looks at the trace.
        budget: The largest share of the time that the thread takes.

    Attributes:
        trace: The trace.
        url: The address of the figures; None without ``port``.

    Raises:
        UsageError: A trace is open already; or an argument is out of range.
        OSError: The port cannot be listened on.

    Example:
        >>> import bandmaster as bm
        >>> from bandmaster.telemetry import Telemetry
        >>> class Actor(bm.Worker):
        ...     @bm.register(bm.Dispatch.DP_PROTO)
        ...     def update(self, rows): return rows
        >>> with bm.ResourcePool([2], backend="inprocess") as pool:
        ...     actor = bm.WorkerGroup(pool, Actor)
        ...     with Telemetry(phases={"Actor.update": "train"}) as telemetry:
        ...         for step in range(3):
        ...             with telemetry.loop(step):
        ...                 rows = actor.update([1, 2])
        >>> 'bandmaster_call_seconds_count{group="Actor",method="Actor.update"} 3.0' in telemetry.metrics()
        True
    """

    def __init__(
        self,
        port: int | None = None,
        host: str = "127.0.0.1",
        provider: TracerProvider | None = None,
        phases: Mapping[str, str] | None = None,
        model: str | None = None,
        interval: float = 1.0,
        budget: float = 0.02,
    ) -> None:
        wrong = {phase for phase in (phases or {}).values() if phase not in RL_PHASES}
        if wrong:
            raise UsageError(f"a phase is one of {', '.join(RL_PHASES)}, got {', '.join(map(repr, sorted(wrong)))}")
        if not 0 < interval <= threading.TIMEOUT_MAX or not 0 < budget <= 1:
            raise UsageError(
                f"interval must be positive and finite, and budget between 0 and 1, got {interval} and {budget}"
            )
        if port is not None and not (isinstance(port, int) and 0 <= port <= 65535):
            raise UsageError(f"port must be from 0, for a free one, to 65535, or None for no server, got {port!r}")
        known = provider or opentelemetry_trace.get_tracer_provider()
        if not isinstance(known, TracerProvider):
            raise UsageError(
                f"provider must be a TracerProvider, to which exporters are added, got {type(known).__name__}"
            )
        with contextlib.ExitStack() as closing:
            self.trace = closing.enter_context(trace())
            self._zero = time.monotonic() - (time.time() - self.trace.began)
            self.url: str | None = None
            self._figures = Figures()
            if port is not None:
                try:
                    server, thread = start_http_server(port, host, self._figures.registry)
                except OSError as error:
                    what = f"the figures cannot be served on {host}:{port}: {error.strerror}; choose another port, or 0"
                    raise OSError(error.errno, what) from None
                for end in (thread.join, server.server_close, server.shutdown):  # the last one first
                    closing.callback(end)
                self.url = f"http://{f'[{host}]' if ':' in host else host}:{server.server_port}/metrics"
            self._spans = Spans(known, self.trace.began, phases or {}, model)
            self._interval_s, self._budget = interval, budget
            self._recent: deque[Call] = deque(maxlen=MOST_RECENT)
            self._uncounted: deque[CallRecord] = deque()
            self._unsent: deque[Call] = deque()  # those without spans
            self._last_stall = max([stall.at for stall in stalls()], default=0.0)
            self._is_over = threading.Event()
            self._has_warned = False
            closing.callback(self._is_over.set)
            self._thread = threading.Thread(target=self._run, name="bandmaster-telemetry", daemon=True)
            self._thread.start()
            self._closing = closing.pop_all()

    def metrics(self) -> str:
        """The figures in Prometheus's text format, as far as calls were counted."""
        return self._figures.text()

    def timeline(self) -> Timeline:
        """The picture of the last calls that were told of, 20,000 at most."""
        return Timeline(Run(tuple(self._recent), {}, tuple(stalls()), self.trace.began))

    def loop(self, iteration: int) -> AbstractContextManager[None]:
        """The span of one iteration of the training loop; the calls that begin in its block become its children."""
        return self._spans.loop(iteration, self._now)

    def close(self) -> None:
        """Stop to record, tell of the calls that are left, for ten seconds at most, and stop serving figures."""
        self.trace.stop()
        self._is_over.set()
        with self._closing:  # also if Ctrl-C ends the wait for the thread
            self._thread.join()

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        where = "" if self.url is None else f" at {self.url}"
        return f"<Telemetry of bandmaster {__version__}{where}>"

    def _now(self) -> float:
        return time.monotonic() - self._zero

    # --- the thread ---

    def _run(self) -> None:
        while not self._is_over.wait(0.0 if self._unsent else self._interval_s):
            self._take()
            self._tell(time.monotonic() + self._interval_s, self._budget)
        self._take()
        self._tell(time.monotonic() + FLUSH_S)
        self._drop(0)

    def _take(self) -> None:
        """Take the calls that have ended, and look at those that have not."""
        self._uncounted.extend(self.trace.take())
        self._drop(MOST_WAITING)
        self._figures.set_open(record.group for record in self.trace.calls)
        for stall in stalls():
            if stall.at > self._last_stall:
                self._figures.add_stall(stall.group)
                self._last_stall = stall.at

    def _drop(self, most: int) -> None:
        """Drop the oldest calls if more than ``most`` wait."""
        while len(self._uncounted) > most:
            self._uncounted.popleft()
            self._figures.n_dropped_calls += 1
        while len(self._unsent) > most:
            self._unsent.popleft()
            self._figures.n_dropped_spans += 1

    def _tell(self, until: float, budget: float | None = None) -> None:
        """Tell of the calls that wait, in short slices, so that other threads hardly wait for the interpreter.

        All are counted first, as that takes an eighth of the time of their spans.

        Args:
            until: The moment after which no slice begins but the first: calls that have ended meanwhile are taken.
            budget: The share of the time that it takes, until the telemetry is closed; None takes all, when it is.
        """
        while self._uncounted or self._unsent:
            begun = time.monotonic()
            while (self._uncounted or self._unsent) and time.monotonic() - begun < SLICE_S:
                try:
                    self._tell_of_one()
                except Exception:  # of an exporter
                    if not self._has_warned:
                        self._has_warned = True
                        _log.exception("cannot tell of a call; further such errors are not logged")
            took_s = time.monotonic() - begun
            if (budget is not None and self._is_over.wait(took_s / budget - took_s)) or time.monotonic() >= until:
                return

    def _tell_of_one(self) -> None:
        if self._uncounted:
            call = Call.of(self._uncounted.popleft())
            self._recent.append(call)
            self._unsent.append(call)
            self._figures.add(call)
        else:
            self._spans.add(self._unsent.popleft())
