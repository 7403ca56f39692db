"""`Spans`: calls as spans of OpenTelemetry.

::

    rl.loop                        telemetry.loop(7)
      rl.sample                    a call or request whose method was said to sample; else its own name
        rank 3                     the part of one rank, with events: decoded, ran, encoded
      rl.train  ── link ──► rl.sample    it took rows that this call had made

Source: the draft of semantic conventions for reinforcement learning (``rl.*``),
https://github.com/open-telemetry/semantic-conventions-genai/issues/88, and those for generative AI (``gen_ai.*``),
https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/. Both are in development.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, StatusCode, TracerProvider, set_span_in_context

from bandmaster import __version__
from bandmaster.timeline import Call

Attributes = Mapping[str, str | int | float]

MOST_KNOWN = 20_000  # calls that later ones can link to
MOST_LOOPS = 1_000  # iterations that calls can belong to


class _Loop:
    """One iteration: the calls that were submitted between its times belong to it."""

    def __init__(self, span: Span, begun: float) -> None:
        self.context = set_span_in_context(span)
        self.begun, self.ended = begun, float("inf")


class Spans:
    """Makes spans of calls that have ended.

    Args:
        provider: Where the spans go.
        began: The beginning of the trace, in seconds since the epoch.
        phases: The phase of each method, such as ``{"Actor.update": "train"}``.
        model: The name of the model, for the spans of requests that sample; None to leave it out.
    """

    def __init__(self, provider: TracerProvider, began: float, phases: Mapping[str, str], model: str | None) -> None:
        self._tracer = provider.get_tracer("bandmaster", __version__)
        self._began_ns = int(1e9 * began)
        self._phases, self._model = phases, model
        self._known: OrderedDict[int, SpanContext] = OrderedDict()  # the spans of calls, by number
        self._loops: list[_Loop] = []

    @contextmanager
    def loop(self, iteration: int, now: Callable[[], float]) -> Iterator[None]:
        """The span of one iteration; ``now`` returns the time since the trace began."""
        with self._tracer.start_as_current_span("rl.loop", attributes={"rl.loop.iteration": iteration}) as span:
            made = _Loop(span, now())
            self._loops = [*self._loops[-MOST_LOOPS:], made]
            try:
                yield
            finally:
                made.ended = now()

    def add(self, call: Call) -> None:
        """Make the spans of a call: they begin and end at its own times, in the past."""
        phase = self._phases.get(call.method)
        sources = sorted({number for number, _ in call.takes_from})
        links = [Link(self._known[number]) for number in sources if number in self._known]
        name, parent, begun_ns = f"rl.{phase}" if phase else call.method, self._parent(call), self._ns(call.begun)
        span = self._tracer.start_span(name, parent, SpanKind.CLIENT, links=links, start_time=begun_ns)
        if not span.is_recording():  # nobody wants it
            return
        span.set_attributes(self._attributes(call, phase))
        if call.error:
            span.set_attribute("error.type", call.error_type)
            span.set_status(StatusCode.ERROR, call.error)
        within = set_span_in_context(span)
        for rank in call.moments:
            self._add_rank(call, rank, within)
        span.end(self._ns(call.finish))
        self._known[call.number] = span.get_span_context()
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)

    def _add_rank(self, call: Call, rank: int, within: Context) -> None:
        begun, decoded, ran, encoded, _ = call.moments[rank]
        attributes: dict[str, str | int | float] = {"bandmaster.group": call.group, "bandmaster.rank": rank}
        attributes["bandmaster.queued"] = max(0.0, begun - call.sent)
        if rank in call.versions:
            attributes["bandmaster.weights.version"] = call.versions[rank]
        span = self._tracer.start_span(f"rank {rank}", within, SpanKind.SERVER, attributes, start_time=self._ns(begun))
        for name, moment in (("decoded", decoded), ("ran", ran)):
            span.add_event(name, timestamp=self._ns(moment))
        span.end(self._ns(encoded))

    def _attributes(self, call: Call, phase: str | None) -> Attributes:
        attributes: dict[str, str | int | float] = {
            "rpc.system": "bandmaster",
            "rpc.method": call.method,
            "bandmaster.group": call.group,
            "bandmaster.call.number": call.number,
            "bandmaster.call.kind": "request" if call.is_request else "call",
        }
        ways = {"sent": call.sent_nbytes, "returned": call.returned_nbytes, "kept": call.kept_nbytes}
        ways["read"] = sum(call.read_nbytes.values())
        attributes |= {f"bandmaster.{way}.bytes": nbytes for way, nbytes in ways.items() if nbytes}
        if phase == "sync":
            attributes["rl.sync.bytes"] = sum(ways.values())
        if phase == "sample":
            attributes |= {"gen_ai.operation.name": "generate_content", "gen_ai.provider.name": "bandmaster"}
            if self._model is not None:
                attributes["gen_ai.request.model"] = self._model
        return attributes

    def _parent(self, call: Call) -> Context | None:
        """The iteration in which a call was submitted; a span of its own trace outside of any."""
        for loop in reversed(self._loops):
            if loop.begun <= call.begun <= loop.ended:
                return loop.context
        return Context()

    def _ns(self, moment: float) -> int:
        return self._began_ns + int(1e9 * moment)
