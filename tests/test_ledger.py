"""The ledger: what a trace knows of calls, ranks, bytes and the way that rows took."""

import asyncio
import contextlib
import re
import statistics
import threading
import time

import numpy as np
import pytest
from ends import until
from trace_processor import TraceProcessor

import bandmaster as bm
from bandmaster import Dispatch, Mesh, register
from bandmaster.calls.hooks import hooks

LARGE = 50_000  # columns of rows that stay where they are made


class Timed(bm.Worker):
    @register(Dispatch.DP_PROTO)
    def make(self, ids, slow=None):
        if self.rank == slow:
            time.sleep(0.05)
        return {"id": ids, "wide": np.repeat(ids[:, None], LARGE, 1).astype("f4")}

    @register(Dispatch.DP_PROTO)
    def use(self, rows):
        return {"sum": rows["wide"].sum(1)}

    @register(Dispatch.ONE_TO_ALL)
    def sleep(self, seconds):
        time.sleep(seconds)

    @register(Dispatch.DP_PROTO)
    def items(self, rows):
        yield from rows

    @register(Dispatch.ONE_TO_ALL)
    def fail(self):
        raise ValueError("planned")

    @register(Dispatch.REQUEST, concurrency=4)
    async def ask(self, rows, seconds):
        await asyncio.sleep(seconds)
        return rows

    @register(Dispatch.REQUEST, concurrency=4)
    async def tokens(self, n):
        for number in range(n):
            yield number

    @register(Dispatch.REQUEST)
    def ask_alone(self, value):
        return value

    @register(Dispatch.ONE_TO_ALL)
    async def wait(self):
        return self.rank


@pytest.fixture(scope="module")
def groups(backend):
    with bm.ResourcePool([4], backend=backend) as four, bm.ResourcePool([3], backend=backend) as three:
        made = bm.WorkerGroup(four, Timed, mesh=Mesh(dp=2, tp=2)), bm.WorkerGroup(three, Timed)
        for group in made:
            group.wait()  # so that each rank has its event loop
        yield made


@pytest.fixture(autouse=True)
def no_trace_is_left():
    yield
    assert hooks.trace is None
    bm.Trace.last = None


def test_what_a_call_has_cost_on_each_rank(three):
    with bm.trace() as trace:
        three.sleep(0.02)
    (call,) = trace.calls
    assert (call.method, sorted(call.ranks)) == ("Timed.sleep", [0, 1, 2])
    assert all(0.02 <= times.ran < 10 for times in call.ranks.values())
    assert all(seconds >= 0 for times in call.ranks.values() for seconds in times)
    assert call.seconds >= max(times.ran for times in call.ranks.values())
    assert call.begun <= call.encoded <= call.sent <= call.done
    three.sleep(0)
    assert len(trace.calls) == 1, "it was stopped"


def test_stragglers(three):
    with bm.trace() as trace:
        three.make(np.arange(6), slow=1)
        three.make(np.arange(6))
    slow, even = trace.calls
    assert 1 in slow.stragglers
    assert slow.ranks[1].ran >= 0.05
    assert slow.skew > 0.02
    for call in (slow, even):
        ran = [call.ranks[rank].ran for rank in range(3)]
        limit = max(1.5 * statistics.median(ran), statistics.median(ran) + 1e-3)
        assert call.stragglers == tuple(rank for rank in range(3) if ran[rank] > limit)
        assert call.skew == pytest.approx(max(ran) - statistics.fmean(ran))
    assert re.search(r"\b1 \(\d", repr(trace.calls))


def test_bytes_by_their_way(two, three, backend):
    with bm.trace() as trace:
        rows = two.make.submit(np.arange(8))
        used = three.use.submit(rows.shuffle(0)[:4])
        assert len(used.result()["sum"]) == 4
        nbytes = rows.result()["wide"].nbytes
    make, use = trace.calls
    assert make.kept_nbytes > nbytes
    assert nbytes < make.returned_nbytes < nbytes + 5000, "by result()"
    assert make.sent_nbytes < 5000
    assert use.sent_nbytes + use.returned_nbytes < 5000, "no row has passed through the controller"
    ((way, read),) = use.read_nbytes.items()
    assert nbytes / 2 <= read < nbytes / 2 + 5000
    assert way == ("controller" if backend == "inprocess" else "shared memory")
    assert use.takes_from == {(make.number, 0), (make.number, 2)}


def test_calls_of_a_group(two, three):
    with bm.trace():
        two.sleep(0)
        three.sleep(0)
        two.wait()
        assert [call.method for call in two.calls()] == ["Timed.sleep", "Timed.wait"]
        assert [call.number for call in two.calls()[1:]] == [2]
    assert len(three.calls()) == 1, "of the last trace"
    assert repr(three.calls()).splitlines()[1].split() == (
        ["call", "method", "at", "s", "ms", "queued", "decoded", "ran", "encoded", "moved", "stragglers", "bytes"]
    )


def test_calls_that_fail_and_calls_under_way(three):
    with bm.trace() as trace:
        with pytest.raises(bm.RemoteError):
            three.fail()
        future = three.sleep.submit(0)
        assert "…" in repr(trace.calls) or future.done()
        future.result()
    fail, sleep = trace.calls
    assert 0 in fail.ranks
    assert fail.done is not None
    assert sleep.done is not None


def cancel_all(group):
    async def task():
        futures = [group.ask(1, 60) for _ in range(20)]  # in a task, so that some of them wait for a place
        group.cancel()
        return futures

    return asyncio.run(task())


def leave_late(group):
    with pytest.raises(bm.CallTimeout):
        group.ask.options(timeout=0.01)(1, 60).result()


def leave_in_a_task(group):
    async def task():
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(group.ask.submit(1, 60), 0.01)

    asyncio.run(task())


def send_what_cannot_be_sent(group):
    with pytest.raises(bm.ArgumentError):
        group.sleep(threading.Lock())


LEFT = {
    "a dropped call": (lambda group: group.sleep.submit(0), ""),
    "a call that fails": (lambda group: group.fail.submit(), "RemoteError"),
    "a call that cannot be sent": (send_what_cannot_be_sent, "ArgumentError"),
    "a dropped stream": (lambda group: next(iter(group.items.stream([1, 2, 3, 4]))), None),  # cancelled if in time
    "a dropped request": (lambda group: group.ask.submit(1, 0), ""),
    "a request that fails": (lambda group: group.ask.submit(1, "soon"), "RemoteError"),
    "a cancelled request": (lambda group: group.ask.submit(1, 60).cancel(), "CallCancelled"),
    "a request that is late": (leave_late, "CallCancelled"),
    "a request of a task": (leave_in_a_task, "CallCancelled"),
    "a stream of tokens": (lambda group: next(group.tokens.stream(1000)), "CallCancelled"),
    "all requests": (cancel_all, "CallCancelled"),
}


@pytest.mark.parametrize("way", LEFT)
def test_calls_whose_results_no_thread_reads_end_as_well(three, way):
    leave, error = LEFT[way]
    taken = []
    with bm.trace() as trace:
        kept = leave(three)  # noqa: F841  # also futures that are kept, but not read
        until(lambda: taken.extend(trace.take()) or not trace.calls)
    if error is not None:
        assert {call.error.partition(":")[0].rpartition(".")[2] for call in taken} == {error}
    assert all(call.begun <= call.done < 60 for call in taken)
    if error == "":
        assert all(call.ranks for call in taken)


def test_a_call_that_no_thread_reads_has_ended_with_its_last_reply(three):
    with bm.trace() as trace:
        three.sleep.submit(0)
        three.sleep(0.2)
        first, second = trace.calls
    last = max(first.moments(rank)[-1] for rank in first.ranks)
    assert first.done == last < second.done


def test_items_are_calls(three):
    with bm.trace() as trace:
        list(three.items.stream([1, 2, 3, 4]))
    methods = [call.method for call in trace.calls]
    assert methods.count("Timed.items") >= 1 + 4
    assert {rank for call in trace.calls for rank in call.ranks} == {0, 1, 2}


def test_requests(three, backend):
    rows = {"id": np.arange(6), "wide": np.zeros((6, LARGE), "f4")}
    with bm.trace() as trace:
        asked = [three.ask.submit(rows, seconds) for seconds in (0.02, 0.03)]
        [one.result() for one in asked]
        kept = three.ask.map(rows, 0.0, chunk=3).future
        three.ask.map(kept, 0.0, chunk=3).result()
        three.ask_alone(1).result()
    first, second, *maps, alone = trace.calls
    assert [call.method for call in trace.calls] == ["Timed.ask"] * 6 + ["Timed.ask_alone"]
    assert [len(call.ranks) for call in trace.calls] == [1] * 7, "each ran on one replica"
    assert first.ranks.keys() != second.ranks.keys()
    for call, seconds in ((first, 0.02), (second, 0.03)):
        (times,) = call.ranks.values()
        assert seconds <= times.ran < 10 and min(times) >= 0
        assert call.begun <= call.encoded <= call.sent <= call.done
        assert min(call.sent_nbytes, call.returned_nbytes) > 6 * LARGE * 4
    made, took = maps[:2], maps[2:]
    assert min(call.kept_nbytes for call in made) > 3 * LARGE * 4
    assert all(sum(call.read_nbytes.values()) > 3 * LARGE * 4 for call in took)
    assert {number for call in took for number, _ in call.takes_from} == {call.number for call in made}
    assert "Timed.ask " in trace.summary() and alone.done is not None


def test_the_summary_of_methods(three):
    with bm.trace() as trace:
        for _ in range(3):
            three.sleep(0.05)
        three.use(three.make.submit(np.arange(3)))
    *lines, last = repr(trace).splitlines()
    assert last == trace.diagnosis()
    assert lines[1].split() == ["method", "calls", "s", "send", "wait", "run", "skew", "return", "bytes"]
    (sleep,) = [line.split() for line in lines if line.startswith("Timed.sleep")]
    assert sleep[1] == "3"
    assert float(sleep[2]) >= 0.15
    assert int(sleep[5].rstrip("%")) > 10
    assert "read by reference" in next(line for line in lines if line.startswith("Timed.use"))


def test_requests_that_wait_for_a_place_are_no_work_of_the_controller(three):
    async def ask():
        await asyncio.gather(*[three.ask(1, 0.1) for _ in range(24)])  # twice as many as there are places

    with bm.trace() as trace:
        asyncio.run(ask())
    header, line = [line.split() for line in trace.summary().splitlines()[1:]]
    send, wait = (int(line[header.index(name)].rstrip("%")) for name in ("send", "wait"))
    assert wait > 20 and wait > 2 * send


def test_a_method_of_several_groups_has_a_line_for_each(two, three):
    with bm.trace() as trace:
        two.sleep(0)
        three.sleep(0)
        three.wait()
    lines = [line.split("  ")[0] for line in trace.summary().splitlines()[2:]]
    groups = [call.group for call in trace.calls]
    assert lines == [f"Timed.sleep of {groups[0]}", f"Timed.sleep of {groups[1]}", "Timed.wait"]


def test_perfetto_reads_the_file(two, three, tmp_path):
    with bm.trace(tmp_path / "run.json") as trace:
        rows = two.make.submit(np.arange(8))
        three.use.submit(rows).result()
        three.make(np.arange(8))
    with TraceProcessor(tmp_path / "run.json") as perfetto:
        assert perfetto.query("select name, value from stats where severity = 'error' and value > 0") == []
        tracks = perfetto.query(
            "select process.name, thread.name from thread join process using (upid) where thread.name like 'rank 1 (%'"
        )
        assert sorted(group for group, _ in tracks) == sorted(
            call.group for call in [*two.calls()[:1], *three.calls()[:1]]
        )
        slices = dict(perfetto.query("select name, count() from slice group by name"))
        assert (slices["Timed.use"], slices["run"], slices["decode"]) == (1 + 3, 4 + 3 + 3, 10)
        arrows = perfetto.query(
            "select a.name, b.name, count() from flow join slice a on a.id = slice_out join slice b on b.id = slice_in "
            "group by 1, 2"
        )
        assert arrows == [("encode", "decode", 2 * 3)]
        ran = sum(times.ran for call in trace.calls for times in call.ranks.values())
        assert perfetto.query("select sum(dur) from slice where name = 'run'") == [(pytest.approx(1e9 * ran, abs=1e4),)]
        (within,) = perfetto.query(
            "select count() from slice a join slice b on b.parent_id = a.id where b.ts + b.dur > a.ts + a.dur"
        )
        assert within == (0,)


def test_a_file_for_which_there_is_no_folder_is_refused_at_once(tmp_path):
    with pytest.raises(bm.UsageError, match=r"cannot write the trace to .*/runs/1\.json: there is no folder .*/runs;"):
        bm.trace(tmp_path / "runs" / "1.json")
    with bm.trace(tmp_path / "1.json"):
        pass
    assert (tmp_path / "1.json").exists()


def test_a_folder_in_place_of_a_file_is_refused_at_once(tmp_path):
    for path in (tmp_path, str(tmp_path), ""):
        with pytest.raises(bm.UsageError, match=r"cannot write the trace to .*: it is a folder; name a file"):
            bm.trace(path)


def test_one_trace_at_a_time(three):
    with bm.trace() as trace:
        with pytest.raises(bm.UsageError, match=r"a trace is already open; stop\(\) it"):
            bm.trace()
        trace.stop()
        with bm.trace() as second:
            three.sleep(0)
    assert (len(trace.calls), len(second.calls)) == (0, 1)


def test_who_has_recorded_nothing_is_told_how(three):
    with pytest.raises(bm.UsageError, match=r"no calls were recorded: make them in a block of `with bandmaster.trace"):
        three.calls()
