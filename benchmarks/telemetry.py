"""The cost of telemetry for a no-op call: without a trace, with one, and with `Telemetry`, in turns of a second each.

Each round times the three one after the other, in random order; the ratios are medians of the ratios within rounds, so
that a machine with other work to do disturbs them less. Processor time is that of the whole controller, the thread of
telemetry included. Telemetry sends spans to an exporter that drops them, and is scraped once a second. ``--smoke`` does
two short rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import threading
import time
import urllib.request
from collections.abc import Iterator

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

import bandmaster as bm
from bandmaster import Dispatch, register
from bandmaster.telemetry import Telemetry


class Worker(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def nothing(self):
        pass


class Dropped(SpanExporter):
    def export(self, spans):
        return SpanExportResult.SUCCESS


@contextlib.contextmanager
def telemetry() -> Iterator[None]:
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Dropped()))
    is_over = threading.Event()
    with Telemetry(port=0, provider=provider, interval=0.2) as made:

        def scrape() -> None:
            while not is_over.wait(1.0):
                urllib.request.urlopen(made.url).read()

        thread = threading.Thread(target=scrape)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
            provider.shutdown()


WAYS = {"nothing": contextlib.nullcontext, "trace": bm.trace, "telemetry": telemetry}


def timed(group: bm.WorkerGroup, way: str, seconds: float) -> tuple[float, float]:
    """Seconds of a call by the clock, without the few that the machine has held up; and of processor time."""
    times = []
    with WAYS[way]():
        group.nothing()
        end, cpu = time.perf_counter() + seconds, time.process_time()
        while (begun := time.perf_counter()) < end:
            group.nothing()
            times.append(time.perf_counter() - begun)
        cpu = time.process_time() - cpu
    return statistics.fmean(sorted(times)[: int(0.95 * len(times))]), cpu / len(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    rounds, seconds = (2, 0.1) if options.smoke else (options.rounds, 1.0)
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    with bm.ResourcePool([options.workers]) as pool:
        group = bm.WorkerGroup(pool, Worker)
        for _ in range(500):
            group.nothing()
        for _ in range(rounds):
            for way in random.sample(list(WAYS), len(WAYS)):
                found[way].append(timed(group, way, seconds))
    for n, kind in enumerate(("by the clock", "processor time")):
        for way, times in found.items():
            print(f"{kind:15} {way:10} {1e6 * statistics.median(each[n] for each in times):8.1f} us")
        for way, other in (("trace", "nothing"), ("telemetry", "trace"), ("telemetry", "nothing")):
            ratios = [a[n] / b[n] for a, b in zip(found[way], found[other], strict=True)]
            least, most = min(ratios), max(ratios)
            print(f"{kind:15} {way} / {other}: {statistics.median(ratios):.3f} ({least:.3f} to {most:.3f})")


if __name__ == "__main__":
    main()
