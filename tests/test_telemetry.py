"""Spans of OpenTelemetry and figures for Prometheus, from what a trace records."""

import asyncio
import logging
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import numpy as np
import pytest
from ctrl_c import interrupted_when
from ends import until

import bandmaster as bm
from bandmaster import Dispatch, register

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from bandmaster.telemetry import Telemetry
from bandmaster.telemetry import telemetry as module
from bandmaster.watching.watch import watch

PHASES = {"Actor.make": "sample", "Actor.use": "train"}


class Actor(bm.Worker):
    @register(Dispatch.DP_PROTO)
    def make(self, ids):
        bm.report(self, version=4)
        return {"wide": np.repeat(ids[:, None], 50_000, 1)}

    @register(Dispatch.DP_PROTO)
    def use(self, rows):
        return {"sum": rows["wide"].sum(1)}

    @register(Dispatch.REQUEST, concurrency=4)
    async def answer(self, value):
        if value == "bad":
            raise ValueError("a bad value\nof two lines")
        return value

    @register(Dispatch.REQUEST)
    async def wait(self, seconds):
        await asyncio.sleep(seconds)

    @register(Dispatch.ONE_TO_ALL)
    def fail(self, rank):
        if self.rank == rank:
            raise KeyError(rank)


@pytest.fixture
def collector():
    """An exporter that keeps the spans, and the provider that sends them there."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield exporter, provider
    provider.shutdown()


@pytest.fixture(scope="module")
def actor(backend):
    with bm.ResourcePool([2], backend=backend) as pool:
        made = bm.WorkerGroup(pool, Actor)
        made.answer.all(0)  # so that each rank has its event loop
        yield made


def figure(text, name, **labels):
    """The value of a figure in Prometheus's text format; None if it is not there."""
    for line in text.splitlines():
        found = re.fullmatch(rf"{name}(?:{{(.*)}})? (\S+)", line)
        if found and dict(re.findall(r'(\w+)="([^"]*)"', found[1] or "")) == labels:
            return float(found[2])
    return None


def test_calls_and_requests_that_fail_are_errors_of_spans_and_figures(actor, collector):
    exporter, provider = collector
    with Telemetry(provider=provider, budget=1.0) as telemetry:
        for ask in (lambda: actor.fail(1), lambda: actor.answer("bad").result()):
            with pytest.raises(bm.RemoteError):
                ask()
        actor.fail(2)
    figures = telemetry.metrics()
    calls = [span for span in exporter.get_finished_spans() if span.name in ("Actor.fail", "Actor.answer")]
    first, request, fine = sorted(calls, key=lambda span: span.attributes["bandmaster.call.number"])
    assert first.status.status_code is StatusCode.ERROR and "KeyError: 1" in first.status.description
    assert request.status.status_code is StatusCode.ERROR
    assert request.status.description.endswith("ValueError: a bad value")
    assert first.attributes["error.type"] == request.attributes["error.type"] == "RemoteError"
    assert fine.status.is_unset and "error.type" not in fine.attributes
    named = {"group": first.attributes["bandmaster.group"], "type": "RemoteError"}
    assert figure(figures, "bandmaster_errors_total", method="Actor.fail", **named) == 1
    assert figure(figures, "bandmaster_errors_total", method="Actor.answer", **named) == 1


def test_calls_whose_results_no_thread_reads_are_counted(actor):
    with Telemetry(interval=0.01, budget=1.0) as telemetry:
        actor.fail.submit(1)
        actor.wait.submit(60).cancel()
        open_ones = [actor.wait.submit(60) for _ in range(2)]
        until(lambda: figure(telemetry.metrics(), "bandmaster_open_calls", group=actor.name) == 2)
        for one in open_ones:
            one.cancel()

        until(lambda: len(telemetry.timeline().run.calls) == 4)
        group = telemetry.timeline().run.calls[0].group
        until(lambda: figure(telemetry.metrics(), "bandmaster_open_calls", group=group) == 0)
    figures = telemetry.metrics()
    for method, error, n in (("Actor.fail", "RemoteError", 1), ("Actor.wait", "CallCancelled", 3)):
        assert figure(figures, "bandmaster_errors_total", group=group, method=method, type=error) == n


def test_spans_of_calls_ranks_and_iterations(actor, collector):
    exporter, provider = collector
    with Telemetry(provider=provider, phases=PHASES, model="tiny", budget=1.0) as telemetry:
        with telemetry.loop(7):
            rows = actor.make.submit(np.arange(8))
            actor.use(rows)
        actor.answer.submit(1).result()
    spans = exporter.get_finished_spans()
    by_name = {}
    for span in spans:
        by_name.setdefault(span.name, []).append(span)
    (loop,), (sample,), (train,), (answer,) = (by_name[n] for n in ("rl.loop", "rl.sample", "rl.train", "Actor.answer"))
    assert loop.attributes["rl.loop.iteration"] == 7
    assert {sample.parent.span_id, train.parent.span_id} == {loop.context.span_id}
    assert answer.parent is None, "it was made outside of the iteration"
    assert [link.context.span_id for link in train.links] == [sample.context.span_id], "it took those rows"
    assert sample.attributes["gen_ai.operation.name"] == "generate_content"
    assert sample.attributes["gen_ai.request.model"] == "tiny"
    assert sample.attributes["bandmaster.kept.bytes"] > 8 * 50_000
    assert (answer.attributes["bandmaster.call.kind"], train.attributes["bandmaster.call.kind"]) == ("request", "call")
    assert sample.kind == SpanKind.CLIENT
    for rank in (0, 1):
        of_rank = [span for span in by_name[f"rank {rank}"] if span.parent.span_id == sample.context.span_id]
        (span,) = of_rank
        assert span.attributes["bandmaster.rank"] == rank
        assert span.attributes["bandmaster.weights.version"] == 4
        assert [event.name for event in span.events] == ["decoded", "ran"]
        assert sample.start_time <= span.start_time <= span.end_time <= train.end_time
    slack_ns = 50_000_000  # of the clock of the epoch
    assert loop.start_time - slack_ns <= sample.start_time <= train.end_time <= loop.end_time + slack_ns


def test_spans_have_the_times_and_the_bytes_of_their_calls(actor, collector):
    exporter, provider = collector
    with Telemetry(provider=provider, phases={"Actor.use": "sync"}, budget=1.0) as telemetry:
        actor.use(actor.make.submit(np.arange(8)))
    spans = exporter.get_finished_spans()

    def seconds(ns):
        return pytest.approx((ns - int(1e9 * telemetry.trace.began)) / 1e9, abs=1e-6)

    for call in telemetry.timeline().run.calls:
        (span,) = [one for one in spans if one.attributes.get("bandmaster.call.number") == call.number]
        assert (call.begun, call.finish) == (seconds(span.start_time), seconds(span.end_time))
        ways = (call.sent_nbytes, call.returned_nbytes, call.kept_nbytes, sum(call.read_nbytes.values()))
        named = [span.attributes.get(f"bandmaster.{way}.bytes", 0) for way in ("sent", "returned", "kept", "read")]
        assert named == list(ways)
        assert span.attributes.get("rl.sync.bytes") == (sum(ways) if call.method == "Actor.use" else None)
        of_ranks = {one.attributes["bandmaster.rank"]: one for one in spans if one.parent == span.context}
        assert of_ranks.keys() == {0, 1}
        for rank, moments in call.moments.items():
            one = of_ranks[rank]
            assert (moments.begun, moments.encoded) == (seconds(one.start_time), seconds(one.end_time))
            assert [moments.decoded, moments.ran] == [seconds(event.timestamp) for event in one.events]
            assert one.attributes["bandmaster.queued"] == max(0.0, moments.begun - call.sent)
    assert sum(call.read_nbytes.values()) > 8 * 50_000, "the last one has read rows"


def test_figures_add_up_what_calls_have_cost(actor):
    with Telemetry(budget=1.0) as telemetry:
        rows = actor.make.submit(np.arange(8))
        for _ in range(3):
            actor.use(rows)
    text, (_, *uses) = telemetry.metrics(), telemetry.timeline().run.calls
    named = {"group": actor.name, "method": "Actor.use"}
    seconds = [call.finish - call.begun for call in uses]
    assert figure(text, "bandmaster_call_seconds_sum", **named) == pytest.approx(sum(seconds))
    for limit in ("0.003", "0.03", "0.3"):
        n = sum(each <= float(limit) for each in seconds)
        assert figure(text, "bandmaster_call_seconds_bucket", le=limit, **named) == n
    for rank in (0, 1):
        times = [bm.RankTimes.of(call.moments[rank], call.sent) for call in uses]
        for phase in bm.RankTimes._fields:
            found = figure(text, "bandmaster_rank_seconds_total", rank=str(rank), phase=phase, **named)
            assert found == pytest.approx(sum(max(0.0, getattr(each, phase)) for each in times))
    ((way, nbytes),) = uses[0].read_nbytes.items()
    assert figure(text, "bandmaster_bytes_total", way=way, **named) == 3 * nbytes > 3 * 8 * 50_000


@pytest.mark.backends("local")
def test_a_stall_is_counted_once(actor):
    def n_stalls():
        watch.soon.put(None)  # the thread looks at once
        return figure(telemetry.metrics(), "bandmaster_stalls_total", group=actor.name)

    with Telemetry(interval=0.01, budget=1.0) as telemetry:
        late = actor.wait.options(stall_after=0.01).submit(60)
        until(n_stalls)
        actor.answer(1).result()
        until(lambda: telemetry.timeline().run.calls)  # it has looked again
        late.cancel()
    assert n_stalls() == 1


def test_prometheus_reads_the_figures(actor):
    with Telemetry(port=0, interval=0.01, budget=1.0) as telemetry:
        for _ in range(3):
            actor.use(actor.make.submit(np.arange(4)))
        answers = [actor.answer.submit(n) for n in range(5)]
        assert [one.result() for one in answers] == list(range(5))
        name = actor.name

        def scraped():
            with urllib.request.urlopen(telemetry.url, timeout=10) as reply:
                assert reply.headers["Content-Type"].startswith("text/plain")
                return reply.read().decode()

        count = {"group": name, "method": "Actor.answer"}
        waiting = threading.Event()
        for _ in range(1000):
            text = scraped()
            if figure(text, "bandmaster_call_seconds_count", **count) == 5.0:
                break
            waiting.wait(0.01)
        assert figure(text, "bandmaster_call_seconds_count", **count) == 5.0
        assert figure(text, "bandmaster_call_seconds_count", group=name, method="Actor.make") == 3.0
        ran = [
            figure(text, "bandmaster_rank_seconds_total", group=name, method="Actor.use", rank=str(rank), phase="ran")
            for rank in (0, 1)
        ]
        assert all(0 < seconds < 60 for seconds in ran)
        assert figure(text, "bandmaster_bytes_total", group=name, method="Actor.make", way="kept") > 3 * 4 * 50_000
        assert figure(text, "bandmaster_weights_version", group=name, rank="1") == 4.0
        assert figure(text, "bandmaster_dropped_calls_total") == 0.0
    with pytest.raises(OSError):
        urllib.request.urlopen(telemetry.url, timeout=10)


def test_a_trace_that_is_taken_from_does_not_grow(actor):
    with bm.trace() as trace:
        actor.answer.submit(1).result()
        open_one = actor.wait.submit(60)
        assert [call.done is not None for call in trace.take()] == [True]
        assert len(trace.calls) == 1
        open_one.cancel()
        with pytest.raises(bm.CallCancelled):
            open_one.result()
        assert len(trace.take()) == 1
        assert len(trace.calls) == len(trace.take()) == 0


def test_taking_and_submitting_in_two_threads_loses_no_call(actor):
    taken, is_over = [], threading.Event()
    with bm.trace() as trace:

        def take():
            while not is_over.is_set():
                taken.extend(trace.take())

        thread = threading.Thread(target=take)
        thread.start()
        for n in range(300):
            actor.answer.submit(n).result()
        is_over.set()
        thread.join()
        taken.extend(trace.take())
    assert sorted(call.number for call in taken) == list(range(300))


def test_calls_that_are_too_many_are_dropped_and_counted(actor, monkeypatch):
    monkeypatch.setattr(module, "MOST_WAITING", 10)
    with Telemetry(interval=3600.0) as telemetry:
        for n in range(30):
            actor.answer.submit(n).result()
    text = telemetry.metrics()
    assert figure(text, "bandmaster_dropped_calls_total") == 20.0
    assert figure(text, "bandmaster_dropped_spans_total") == 0.0
    assert figure(text, "bandmaster_call_seconds_count", group=actor.name, method="Actor.answer") == 10.0
    assert len(telemetry.timeline().run.calls) == 10


class Slow(SpanExporter):
    """Takes as many spans as it is allowed to, and waits then."""

    def __init__(self):
        self.allowed = threading.Semaphore(0)

    def export(self, spans):
        assert self.allowed.acquire(timeout=30)
        return SpanExportResult.SUCCESS


def test_calls_are_counted_while_spans_of_earlier_ones_wait(actor):
    exporter, provider, waiting = Slow(), TracerProvider(), threading.Event()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    def wait_until_counted(n):
        deadline = time.monotonic() + 30
        labels = {"group": actor.name, "method": "Actor.answer"}
        while figure(telemetry.metrics(), "bandmaster_call_seconds_count", **labels) != n:
            assert time.monotonic() < deadline, f"{n} calls are not counted, and {len(telemetry.trace.calls)} wait"
            waiting.wait(0.01)

    with Telemetry(provider=provider, interval=1e-6, budget=1.0) as telemetry:
        try:
            for n in range(50):
                actor.answer.submit(n).result()
            exporter.allowed.release(10)
            wait_until_counted(50)
            actor.answer.submit(50).result()
            exporter.allowed.release(10)
            wait_until_counted(51)
        finally:
            exporter.allowed.release(1000)
    assert figure(telemetry.metrics(), "bandmaster_dropped_spans_total") == 0.0
    provider.shutdown()


class Broken(SpanExporter):
    def export(self, spans):
        raise OSError("the collector is gone")

    def shutdown(self):
        return SpanExportResult.SUCCESS


def test_a_collector_that_is_gone_disturbs_no_call(actor, caplog):
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(Broken()))
    with caplog.at_level(logging.CRITICAL), Telemetry(provider=provider, budget=1.0) as telemetry:
        assert actor.answer.submit(3).result() == 3
    assert figure(telemetry.metrics(), "bandmaster_call_seconds_count", group=actor.name, method="Actor.answer") == 1.0
    provider.shutdown()


class Held(SpanExporter):
    """Exports nothing before it is let go on."""

    def __init__(self):
        self.has_begun, self.may_go = threading.Event(), threading.Event()

    def export(self, spans):
        self.has_begun.set()
        self.may_go.wait(60)
        return SpanExportResult.SUCCESS


def test_a_telemetry_whose_end_ctrl_c_interrupts_leaves_its_port_free(actor):
    provider, exporter = TracerProvider(), Held()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    def is_waited_for(frame, kind, what):
        return kind == "call" and frame.f_code is threading.Thread.join.__code__

    with interrupted_when(is_waited_for), Telemetry(port=0, provider=provider, interval=0.01) as telemetry:
        actor.answer.submit(3).result()
        assert exporter.has_begun.wait(60)
    with Telemetry(port=int(telemetry.url.split(":")[2].split("/")[0])):
        exporter.may_go.set()
    telemetry.close()
    provider.shutdown()


class Refusing(TracerProvider):
    def get_tracer(self, *args, **kwargs):
        raise OSError("no certificate")


def test_a_telemetry_whose_provider_has_no_tracer_leaves_nothing_open(actor):
    with Telemetry(port=0) as telemetry:
        port = int(telemetry.url.split(":")[2].split("/")[0])
    with pytest.raises(OSError, match="no certificate"):
        Telemetry(port=port, provider=Refusing())
    with Telemetry(port=port):
        pass


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            OSError, match=rf"served on 127\.0\.0\.1:{port}: Address already in use; choose another port"
        ):
            Telemetry(port=port, provider=TracerProvider())
    with Telemetry(port=0, provider=TracerProvider()):  # nothing was left open
        pass


def test_mistakes_are_errors_before_anything_is_begun(actor):
    with pytest.raises(bm.UsageError, match="a phase is one of sample, reward, train, sync, got 'learn'"):
        Telemetry(phases={"Actor.use": "learn"})
    with pytest.raises(bm.UsageError, match=r"budget between 0 and 1, got 1\.0 and 2"):
        Telemetry(budget=2)
    with pytest.raises(bm.UsageError, match=r"interval must be positive and finite, .* got inf"):
        Telemetry(interval=float("inf"))
    with pytest.raises(bm.UsageError, match=r"port must be from 0, for a free one, to 65535, .* got 70000"):
        Telemetry(port=70000)
    with pytest.raises(bm.UsageError, match=r"port must be from 0, .* got '9464'"):
        Telemetry(port="9464")
    with pytest.raises(bm.UsageError, match=r"provider must be a TracerProvider, .* got int"):
        Telemetry(port=0, provider=3)
    with Telemetry(port=0) as telemetry:
        with pytest.raises(bm.UsageError, match="a trace is already open"):
            Telemetry()
        with pytest.raises(bm.UsageError, match="or close the Telemetry that it is of, before the next one begins"):
            bm.trace()
        port = int(telemetry.url.split(":")[2].split("/")[0])
        telemetry.close()
        with bm.trace():
            pass
    with Telemetry(port=0) as first:
        port = int(first.url.split(":")[2].split("/")[0])
        first.trace.stop()
        with pytest.raises(OSError):
            Telemetry(port=port)
        with bm.trace():
            pass  # none was left open


def test_without_the_extra_the_error_says_what_to_install():
    program = "import sys; sys.modules['prometheus_client'] = None\n"
    program += "try: import bandmaster.telemetry\nexcept ImportError as error: print(error)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert "pip install 'bandmaster[telemetry]'" in done.stdout
