"""The picture of a run, and the sentence that says where its time went."""

import base64
import json
import random
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from ctrl_c import done_when
from ends import in_another_thread, until

import bandmaster as bm
from bandmaster import CallRecord, Dispatch, register
from bandmaster.timeline import Call, Finding, Moments, Run, Sample, Timeline, Waits, diagnosis, findings
from bandmaster.timeline.lanes import CONTROLLER, Item, lanes_of, stacked

ROOT = Path(__file__).parents[1]
CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="module")
def scenes():
    """The runs with bottlenecks of the benchmark."""
    sys.path.insert(0, str(ROOT / "benchmarks"))  # as long as its workers import it
    try:
        import diagnosis as module

        yield module
    finally:
        sys.path.pop(0)
        sys.modules.pop("diagnosis", None)


class Engine(bm.Worker):
    @register(Dispatch.REQUEST, concurrency=4)
    async def answer(self, value):
        return value

    @register(Dispatch.ONE_TO_ALL)
    def load(self, version):
        bm.report(self, version=version)

    @register(Dispatch.DP_PROTO)
    def score(self, rows):
        return rows * 2


@pytest.fixture
def trace(backend):
    with bm.ResourcePool([2], backend=backend) as pool:
        engine = bm.WorkerGroup(pool, Engine, name="engine")
        with bm.trace() as trace:
            engine.load(3)
            engine.answer.map([1, 2, 3, 4, 5, 6]).result()
            rows = engine.score.submit(np.arange(200_000))
            engine.score(rows)
        yield trace


def embedded(page):
    """The facts of a page, as its script reads them."""
    return json.loads(re.search(r'id="head">(.*?)</script>', page, re.DOTALL)[1])


def columns(page):
    """The columns of a page, as its script reads them."""
    body = zlib.decompress(base64.b64decode(re.search(r'id="body">(.*?)</script>', page, re.DOTALL)[1]))
    kinds = {"Float64Array": "<f8", "Float32Array": "<f4", "Uint32Array": "<u4"}
    facts = embedded(page)["columns"]
    return {name: np.frombuffer(body, kinds[kind], n, offset) for name, (kind, offset, n) in facts.items()}


def test_a_lane_for_each_rank_and_for_the_controller(trace):
    run = Run.of(trace)
    lanes = lanes_of(run)
    assert [(lane.group, lane.rank) for lane in lanes] == [(CONTROLLER, -1), ("engine", 0), ("engine", 1)]
    items = [item for lane in lanes[1:] for row in lane.rows for item in row]
    assert len(items) == sum(len(call.ranks) for call in trace.calls)
    assert [call.is_request for call in run.calls] == [False] + 6 * [True] + [False, False]
    for lane in lanes[1:]:
        assert f"rank {lane.rank} (" in lane.place
        assert [version for _, version in lane.versions] == [3]
        for row in lane.rows:
            assert all(a.end <= b.begun + 1e-9 for a, b in pairwise(row)), "items of a row do not overlap"


def test_what_ranks_report_when_they_reply_is_recorded(trace):
    load, *_, score = trace.calls
    assert load.versions == {0: 3, 1: 3}
    assert score.versions == {0: 3, 1: 3}


def test_overlapping_items_are_stacked_in_as_few_rows_as_possible():
    chance = random.Random(0)
    items = [Item(n, chance.uniform(0, 10), 0.0, 0.0, chance.uniform(0, 2), 0.0, 0.0) for n in range(300)]
    rows = stacked(items)
    assert sorted(item for row in rows for item in row) == sorted(items)
    assert all(a.end <= b.begun + 1e-9 for row in rows for a, b in pairwise(row))
    most = max(sum(one.begun <= item.begun < one.end for one in items) for item in items)
    assert len(rows) == most


def test_the_page_needs_no_network_and_holds_every_call(trace, tmp_path):
    trace.timeline().save(tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert not re.search(r"(src|href)\s*=|@import|url\(|fetch\(|XMLHttp", page)
    head = embedded(page)
    assert head["sentence"] == trace.diagnosis()
    assert head["number"] == [call.number for call in trace.calls]
    assert [lane["rank"] for lane in head["lanes"]] == [-1, 0, 1]


def test_the_columns_of_the_page_have_the_times_and_rows_of_the_run(trace):
    run = Run.of(trace)
    page = Timeline(run).html()
    lanes, table = lanes_of(run), columns(page)
    names = ("begun", "encoded", "sent", "done")
    for call, *times in zip(run.calls, *[table[f"call_{name}"] for name in names], strict=True):
        assert tuple(times) == (call.begun, call.encoded, call.sent, call.finish)
    assert table["returned_nbytes"].tolist() == [call.returned_nbytes for call in run.calls]
    assert table["read_nbytes"].tolist() == [sum(call.read_nbytes.values()) for call in run.calls]
    taken = {(number, source, rank) for number, call in enumerate(run.calls) for source, rank in call.takes_from}
    assert set(map(tuple, table["taken"].reshape(-1, 3).tolist())) == taken != set()
    rows, starts = [row for lane in lanes for row in lane.rows], table["row_starts"].tolist()
    assert starts[-1] == len(table["begun"])
    for row, (start, stop) in zip(rows, pairwise(starts), strict=True):
        assert table["begun"][start:stop].tolist() == [item.begun for item in row]
        assert table["call"][start:stop].tolist() == [item.call for item in row]
        assert table["ran"][start:stop] == pytest.approx([item.ran for item in row])


def test_the_page_has_the_errors_of_calls():
    moments = {0: Moments(0.0, 0.0, 1.0, 1.0, 1.0)}
    calls = [Call(n, "g", "G.run", 0.0, 0.0, 0.0, 1.0, moments, error) for n, error in enumerate(("", "KeyError: 1"))]
    assert embedded(Timeline(Run(tuple(calls))).html())["errors"] == {"1": "KeyError: 1"}


def test_names_cannot_break_out_of_the_page():
    name = "</script><script>alert(1)</script>@@HEAD@@"
    moments = {0: Moments(0.0, 0.0, 1.0, 1.0, 1.0)}
    page = Timeline(Run((Call(0, name, f"{name}.run", 0.0, 0.0, 0.0, 1.0, moments),))).html()
    assert "<script>alert" not in page
    assert embedded(page)["methods"] == [[name, f"{name}.run"]]


def test_a_notebook_shows_the_page_in_a_frame_of_its_own(trace):
    shown = trace.timeline()._repr_html_()
    assert shown.startswith('<iframe sandbox="allow-scripts"')
    assert shown.count("<") == 2, "all else is escaped"
    assert repr(trace.timeline()) == "<Timeline of 9 calls on 2 ranks>"


def test_pictures_by_matplotlib(tmp_path):
    pytest.importorskip("matplotlib")
    moments = {rank: Moments(0.0, 0.1, 1.0, 1.1, 1.2) for rank in range(2)}
    call = Call(0, r"$\dollars$", "Engine.score", 0.0, 0.0, 0.0, 1.3, moments, versions={0: 3})
    program = "import sys; from bandmaster.timeline import *\n"  # matplotlib keeps its fonts open
    program += f"for path in sys.argv[1:]: Timeline(Run(({call!r},))).save(path)"
    files = [tmp_path / "run.svg", tmp_path / "run.png"]
    subprocess.run([sys.executable, "-c", program, *files], timeout=120, check=True)
    text = "".join(xml.etree.ElementTree.parse(files[0]).getroot().itertext())
    assert "rank 1" in text and "Engine.score" in text and "v3" in text and r"$\dollars$" in text
    assert files[1].read_bytes().startswith(b"\x89PNG")


def test_another_suffix_is_an_error_that_names_those_there_are():
    with pytest.raises(bm.UsageError, match=r"one of \.html, \.svg, \.png, got the suffix '\.json'.*use Trace\.save"):
        Timeline(Run(())).save("run.json")


def test_the_folder_of_a_picture_is_made(tmp_path):
    path = tmp_path / "new" / "folder" / "run.html"
    Timeline(Run(())).save(path)
    assert path.exists()


def test_a_picture_without_matplotlib_says_what_to_install(tmp_path):
    program = "import sys; sys.modules['matplotlib'] = None\nfrom bandmaster.timeline import *\n"
    program += f"try: Timeline(Run(())).save({str(tmp_path / 'run.svg')!r})\nexcept ImportError as error: print(error)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert "pip install 'bandmaster[timeline]'" in done.stdout


def test_nothing_of_it_is_imported_before_it_is_asked_for():
    program = "import sys, bandmaster\nbandmaster.trace\nassert 'bandmaster.timeline' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)


def test_an_open_trace_and_an_empty_one(tmp_path):
    with bm.trace() as trace:
        assert trace.diagnosis() == "no call has ended"
        trace.timeline().save(tmp_path / "run.html")
    assert repr(trace).endswith("\nno call has ended")


def test_the_last_seconds_of_a_run(trace):
    run = Run.of(trace)
    ends = sorted(call.end for call in run.calls)
    for n in (1, 4, 8):
        of_the_last = Run.of(trace, last=ends[-1] - (ends[-n - 1] + ends[-n]) / 2)
        assert sorted(call.end for call in of_the_last.calls) == ends[-n:]
    assert Run.of(trace, last=60.0).calls == run.calls


@pytest.mark.parametrize("last", ["x", -1, float("nan")])
def test_seconds_of_a_run_that_are_no_number_are_an_error(last):
    with bm.trace() as trace:
        pass
    with pytest.raises(bm.UsageError, match=f"last must be a non-negative number of seconds or None, got {last!r}"):
        Timeline.of(trace, last=last)


class Gate(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def wait_for(self, gate):
        while not gate.exists():
            time.sleep(0.01)

    @register(Dispatch.ONE_TO_ALL)
    def note(self):
        pass


@pytest.mark.backends("local")
def test_replies_that_come_as_the_picture_is_made_are_in_the_next_one(backend, tmp_path):
    class Late(bm.Worker):
        @register(Dispatch.ONE_TO_ALL)
        def wait_for(self, gate):
            while self.rank and not gate.exists():
                time.sleep(0.01)

    def is_placed(frame, kind, what):
        return kind == "call" and frame.f_code is CallRecord.place.__code__

    def reply():
        (tmp_path / "gate").touch()
        in_another_thread(future.result)

    with bm.ResourcePool([2], backend=backend) as pool, bm.trace() as trace:
        future = bm.WorkerGroup(pool, Late).wait_for.submit(tmp_path / "gate")
        until(lambda: trace.calls[0].replied)
        with done_when(is_placed, reply):
            assert repr(trace.timeline()) == "<Timeline of 1 call on 1 rank>"
        assert repr(trace.timeline()) == "<Timeline of 1 call on 2 ranks>"


@pytest.mark.backends("local")
def test_the_stall_of_a_call_under_way_is_in_the_picture(backend, tmp_path):
    with bm.ResourcePool([2], backend=backend) as pool, bm.trace() as trace:
        future = bm.WorkerGroup(pool, Gate).wait_for.options(stall_after=1.5).submit(tmp_path / "gate")
        until(lambda: [stall for stall in bm.stalls() if stall.at > trace.began])
        run = trace.timeline().run
        bm.WorkerGroup(pool, Gate).note()
        assert [call.method for call in Run.of(trace, last=0.0).calls] == ["Gate.wait_for", "Gate.note"]
        (tmp_path / "gate").touch()
        future.result()
    (stall,) = run.stalls
    assert run.end == stall.at - trace.began > 1.5
    with bm.trace() as later:
        assert later.timeline().run.stalls == (), "it was noticed before"


def test_stalls_are_in_the_picture(tmp_path):
    moments = {rank: Moments(0.0, 0.0, 5.0, 5.0, 5.0) for rank in range(2)}
    stall = bm.Stall("g", "G.run", (0, 1), 2.0, "rank 1 holds up the others", 104.0, (1,))
    head = embedded(Timeline(Run((Call(0, "g", "G.run", 0.0, 0.0, 0.0, 5.0, moments),), {}, (stall,), 100.0)).html())
    (told,) = head["stalls"]
    assert (told["from"], told["to"], told["lanes"], told["guilty"]) == (2.0, 4.0, [1, 2], [2])


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
def test_a_browser_draws_it(trace, tmp_path):
    trace.timeline().save(tmp_path / "run.html")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    options += ["--virtual-time-budget=5000", "--dump-dom"]
    command = [CHROMIUM, *options, (tmp_path / "run.html").as_uri()]
    drawn = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    assert 'data-drawn="yes"' in drawn
    assert "9 calls, 2 ranks" in drawn
    assert "version of weights" in drawn


# --- where the time went ---


def test_bottlenecks_in_records_are_named(scenes):
    wrong = []
    for name, expected, calls in scenes.simulated_runs():
        if not scenes.is_named(expected, findings(calls)):
            wrong.append((name, expected, diagnosis(calls)))
    n = sum(scenes.SIMULATED.values())
    assert len(wrong) <= 0.05 * n, wrong


@pytest.mark.slow
def test_bottlenecks_of_real_groups_are_named(scenes):
    wrong = []
    for name, expected, calls in scenes.real_runs(share=0.2):
        if not scenes.is_named(expected, findings(calls)):
            wrong.append((name, expected, diagnosis(calls)))
    assert len(wrong) <= 1, wrong


class Uneven(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def work(self, slow):
        time.sleep(0.2 if self.rank == slow else 0.05)


@pytest.mark.backends("local")
def test_a_slow_rank_is_named_in_the_summary(backend):
    with bm.ResourcePool([3], backend=backend) as pool:
        group = bm.WorkerGroup(pool, Uneven)
        with bm.trace() as trace:
            for _ in range(3):
                group.work(1)
    told = repr(trace).splitlines()[-1]
    assert re.match(r"Rank 1 runs Uneven.work \d\.\d times as long as the others \(\d\d %\)", told)


def test_ranks_that_wait_in_a_collective_are_not_blamed(scenes):
    run = scenes.Simulation(0)
    for _ in range(6):
        run.call("Actor.log_probs", [0.1, 0.02, 0.02, 0.02], is_read=False)
        run.call("Actor.update", [0.01] * 4, collective=True)  # ranks 1 to 3 seem to run it for 0.09 s
    first, *_ = findings(run.calls)
    assert (first.kind, first.method, first.ranks) == ("slow", "Actor.log_probs", (0,))
    assert not any(finding.method == "Actor.update" for finding in findings(run.calls))


def test_a_rank_that_begins_late_for_few_bytes_has_no_slow_link(scenes):
    run = scenes.Simulation(2)
    for _ in range(8):
        run.call("Actor.update", [0.05] * 4, [0.0, 0.0, 0.05, 0.0], nbytes=1000)
    assert not any(finding.kind == "link" for finding in findings(run.calls))


def test_a_run_without_a_bottleneck_says_what_it_did(scenes):
    run = scenes.Simulation(1)
    for _ in range(4):
        run.call("Actor.update", [0.5] * 4)
    told = diagnosis(run.calls)
    assert told.startswith("Actor.update runs for 100 % of the time, and no cause of delay stands out; the controller")


def test_the_three_most_expensive_causes_are_told(scenes):
    run = scenes.Simulation(1)
    run.call("Actor.update", [0.5] * 4)
    causes = [Finding("slow", share, f"cause {share}") for share in (0.2, 0.5, 0.02, 0.3, 0.4)]
    assert diagnosis(run.calls, causes).startswith("Cause 0.5; cause 0.4; cause 0.3; the controller")
    assert [found.share for found in findings(run.calls, causes)] == [0.5, 0.4, 0.3, 0.2, 0.02]


def small_calls(n, ran):
    """Calls that were submitted together, and ran one after the other, 0.1 ms apart."""
    moments = [Moments(*[at] * 2, *[at + ran] * 3) for at in (number * (ran + 1e-4) for number in range(n))]
    return [Call(n, "g", "G.run", 0.0, 0.0, 0.0, one.received, {0: one}) for n, one in enumerate(moments)]


def test_small_calls_cost_no_more_than_the_run():
    (found,) = findings(small_calls(50, ran=1e-5))
    assert found.kind == "small"
    assert 0.9 < found.share < 0.91
    assert "each works for 0.01 ms and costs 0.098 ms more (91 %)" in found.text


def test_calls_that_were_submitted_ahead_are_not_small():
    assert not any(finding.kind == "small" for finding in findings(small_calls(30, ran=5e-4)))


# --- ranks that others wait for inside of a method ---


class Trainer(bm.Worker):
    def __init__(self):
        import torch

        torch.distributed.init_process_group("gloo")

    @register(Dispatch.ONE_TO_ALL)
    def update(self, slow):
        import torch

        time.sleep(0.8 if self.rank == slow else 0.0)
        torch.distributed.barrier()


@pytest.mark.slow
@pytest.mark.backends("local")
def test_a_rank_that_is_slow_before_a_collective_of_its_own_method_is_named(backend):
    pytest.importorskip("torch")
    with bm.ResourcePool([3], backend=backend) as pool:
        trainer = bm.WorkerGroup(pool, Trainer)
        trainer.update(None)
        with bm.trace() as trace, Waits(trace, interval=0.1) as waits:
            for _ in range(3):
                trainer.update(2)
    assert not any(finding.kind == "slow" for finding in findings(trace.calls)), "all ranks have run equally long"
    first, *_ = waits.findings()
    assert (first.kind, first.method, first.ranks) == ("slow", "Trainer.update", (2,))
    assert waits.diagnosis().startswith(
        "In Trainer.update, ranks wait in collective operations for rank 2 of Trainer ("
    )


def samples_of(*missing):
    ranks = frozenset(range(4))
    return [Sample(0, ranks - {rank}, ranks) for rank in missing]


def test_a_rank_is_named_only_if_it_is_mostly_the_one_that_is_missing(scenes):
    from bandmaster.timeline.waits import awaited

    run = scenes.Simulation(0)
    run.call("Actor.update", [1.0] * 4)
    (found,) = awaited(run.calls, samples_of(3, 3, 1, 3, 3))
    assert (found.kind, found.ranks) == ("slow", (3,))
    assert awaited(run.calls, samples_of(0, 1, 2, 3, 0, 1)) == []
    assert awaited(run.calls, samples_of(3, 3)) == [], "too few"


def test_calls_that_were_submitted_together_wait_for_a_rank_no_longer_than_the_run():
    from bandmaster.timeline.waits import awaited

    moments = [{rank: Moments(*[n] * 2, *[n + 1.0] * 3) for rank in range(4)} for n in range(5)]
    calls = [Call(n, "g", "G.run", 0.0, 0.0, 0.0, n + 1.0, ranks) for n, ranks in enumerate(moments)]
    (found,) = awaited(calls, samples_of(3, 3, 3))
    assert found.share == pytest.approx(1.0)
    assert "(100 %)" in found.text


@pytest.mark.backends("local")
def test_a_call_that_no_thread_reads_hides_no_later_one(backend, tmp_path):
    with bm.ResourcePool([2], backend=backend) as pool, bm.trace() as trace, Waits(trace, interval=0.01) as waits:
        group = bm.WorkerGroup(pool, Gate)
        group.note.submit()
        future = group.wait_for.submit(tmp_path / "gate")
        until(lambda: any(sample.call == trace.calls[-1].number for sample in waits.samples))
        (tmp_path / "gate").touch()
        future.result()


def test_looks_that_follow_too_closely_are_an_error():
    with bm.trace() as trace, pytest.raises(bm.UsageError, match="interval must be at least 0"):
        Waits(trace, interval=0.001)


@pytest.mark.slow
def test_the_example_names_its_bottlenecks(tmp_path):
    command = [sys.executable, str(ROOT / "examples/timeline.py"), str(tmp_path / "run.html")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    sentence = done.stdout.splitlines()[-1]
    assert "he longest requests of Rollout.answer hold" in sentence
    assert embedded((tmp_path / "run.html").read_text(encoding="utf-8"))["sentence"] == sentence
