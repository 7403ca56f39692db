"""Maps of requests: one for each row or chunk of rows, to whichever replica is free; and rows of others in requests."""

import asyncio
import gc
import os
import re
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from clock import idle_time
from ctrl_c import called_with_a_pause, done_when, pressed
from ends import started
from hypothesis import given, settings
from hypothesis import strategies as st

import bandmaster as bm
from bandmaster import Broadcast, Dispatch, Only, Route, TransferProtocol, register
from bandmaster.calls.derived import Derived
from bandmaster.requests.map import MapFeed
from bandmaster.requests.router import Router

DEADLINE = 30.0  # of whatever must end
LARGE = 30_000  # columns of rows that stay where they are made


class Rows(bm.Worker):
    def __init__(self):
        self.log, self.inside, self.most = [], 0, 0

    @register(Dispatch.REQUEST, concurrency=8)
    async def double(self, rows):
        return {"id": rows * 2, "rank": np.full(len(rows), self.rank)}

    @register(Dispatch.REQUEST)
    def plainly(self, rows):
        return rows * 2

    @register(Dispatch.REQUEST, concurrency=8)
    async def one(self, row, end=None):
        return row if end is None else (row, end)

    @register(Dispatch.REQUEST, concurrency=8, arguments={"words": Broadcast()})
    async def with_words(self, row, words):
        return row, len(words)

    @register(Dispatch.REQUEST, concurrency=8)
    async def wide(self, rows, scale=1):
        return {"id": rows, "wide": np.repeat(rows[:, None] * scale, LARGE, 1).astype("f4")}

    @register(Dispatch.REQUEST, concurrency=64)
    async def narrow(self, rows):
        return {"id": rows, "wide": np.ones((len(rows), 3))}

    @register(Dispatch.REQUEST, concurrency=8)
    async def sums(self, rows):
        rows["wide"][:] *= 2  # its own
        return {"id": rows["id"], "sum": rows["wide"].sum(1, dtype="f8")}

    @register(Dispatch.REQUEST, concurrency=8)
    async def row_sum(self, row):
        return int(row["id"]), row["wide"].shape, float(row["wide"][0])

    @register(Dispatch.REQUEST, concurrency=8)
    async def fail_on(self, rows, bad):
        if bad in np.atleast_1d(rows):
            raise ValueError(f"row {bad}")
        return rows

    @register(Dispatch.REQUEST, concurrency=8)
    async def unlike(self, rows, bad):
        return list(rows) if bad in list(rows) else rows

    @register(Dispatch.REQUEST, concurrency=8)
    async def at_least(self, rows, least):
        return np.array([row for row in rows if row >= least])  # float64 if there is none

    @register(Dispatch.REQUEST, concurrency=8)
    async def groups(self, rows):
        return {"uid": rows["uid"], "n": np.array([list(rows["uid"]).count(uid) for uid in rows["uid"]])}

    @register(Dispatch.REQUEST, concurrency=4)
    async def hold(self, row, gate, held=None):
        """Stay until the gate is there, if the row is one of those that are held."""
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            while held is None or row in held:
                if os.path.exists(gate):
                    break
                await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            self.log.append("cancelled")
            raise
        finally:
            self.inside -= 1
        return row

    @register(Dispatch.REQUEST)
    async def n_inside(self):
        return self.inside

    @register(Dispatch.REQUEST, concurrency=8)
    async def count(self, row):
        self.inside += 1
        return row

    @register(Dispatch.ONE_TO_ALL)
    def total(self, rows):
        return int(rows["id"].sum())

    @register(Dispatch.ONE_TO_ALL)
    def take_count(self):
        found, self.inside = self.inside, 0
        return found

    @register(Dispatch.REQUEST, concurrency=2)
    async def die_on(self, row, bad):
        if row == bad:
            os.kill(os.getpid(), signal.SIGKILL)
        return row

    @register(Dispatch.DP_PROTO)
    def make(self, ids):
        return {"id": ids, "wide": np.repeat(ids[:, None], LARGE, 1).astype("f4")}

    @register(Dispatch.DP_PROTO)
    def make_when(self, ids, gate):
        while not os.path.exists(gate):
            time.sleep(0.001)
        return ids

    @register(Dispatch.DP_PROTO)
    def fail(self, ids):
        raise ValueError("no rows")

    @register(Dispatch.ONE_TO_ALL)
    def take_log(self):
        log, self.log, self.most = (self.most, self.log), [], 0
        return log

    def on_replace(self, rank, state): ...


class Sharded(bm.Worker):
    @register(TransferProtocol(Route("dp"), Only(tp=-1)), concurrency=4)
    async def add(self, rows):
        return rows["id"] + self.rank


@pytest.fixture(scope="module")
def group(backend):
    with bm.ResourcePool([3], backend=backend) as pool:
        made = bm.WorkerGroup(pool, Rows)
        made.one.all(0).result()  # so that each rank has its event loop
        yield made


@pytest.fixture(scope="module")
def sharded(backend):
    with bm.ResourcePool([4], backend=backend) as pool:
        made = bm.WorkerGroup(pool, Sharded, mesh=bm.Mesh(dp=2, tp=2))
        made.add.all({"id": np.arange(1)}).result()
        yield made


@pytest.fixture
def gate(tmp_path):
    path = tmp_path / "gate"
    yield path
    path.touch()


in_parallel = pytest.mark.backends("local", "ray")  # ranks that run while the controller goes on


# --- the whole, in the order of the rows --------------------------------------------------------------------------


def test_each_row_is_a_request_and_values_come_in_order(group):
    assert group.one.map(list("abc")).result(DEADLINE) == ["a", "b", "c"]
    assert group.one.map(list("abc"), end="!").result() == [("a", "!"), ("b", "!"), ("c", "!")]
    assert group.one.map([[1, 2], [3]], end=["x", "y"]).result() == [([1, 2], "x"), ([3], "y")], "both are batches"
    assert group.with_words.map([1, 2], words=["a", "b", "c"]).result() == [(1, 3), (2, 3)], "declared as a whole"
    assert group.one.map([]).result() == []


@pytest.mark.parametrize(
    ("batch", "first"),
    [
        (np.arange(6).reshape(2, 3), [0, 1, 2]),
        ({"id": np.arange(2), "text": ["a", "b"]}, {"id": 0, "text": "a"}),
        ([{"role": "user"}, {"role": "tool"}], {"role": "user"}),
    ],
)
def test_a_request_gets_the_row_itself(group, batch, first):
    found = group.one.map(batch).result()[0]
    assert (found.tolist() if isinstance(found, np.ndarray) else found) == first


def test_chunks_come_back_complete_and_in_order(group):
    for method in (group.double, group.plainly):
        for n in (11, 1, 0):
            whole = method.map(np.arange(n), chunk=2).result(DEADLINE)
            assert (whole["id"] if isinstance(whole, dict) else whole).tolist() == [2 * row for row in range(n)]


@settings(max_examples=20, deadline=None)
@given(n=st.integers(0, 12), size=st.integers(1, 5), uids=st.lists(st.integers(0, 3), min_size=12, max_size=12))
def test_chunks_equal_rows(group, n, size, uids):
    uid = np.array(uids[:n], dtype=np.int64)
    grouped = group.groups.map({"uid": uid}, chunk=size, group_by="uid").result()
    assert grouped["uid"].tolist() == uids[:n]
    assert grouped["n"].tolist() == [uids[:n].count(one) for one in uids[:n]]
    assert group.double.map(uid, chunk=size).result()["id"].tolist() == [2 * row for row in uids[:n]]
    assert group.one.map(uid, in_flight=size).result() == uids[:n]


def test_rows_of_a_group_stay_together(group):
    uid = np.array([3, 1, 3, 2, 1, 3, 2, 5])
    mapped = group.groups.map({"uid": uid}, chunk=3, group_by="uid")
    assert mapped.future.select("n").result()["n"].tolist() == [3, 2, 3, 2, 2, 3, 2, 1]
    assert mapped.result()["uid"].tolist() == uid.tolist()


@pytest.mark.parametrize(
    "keys",
    [
        *([1, "1"], ["a\0", "a"], [2**63 + 1, 2**63], [None, "a"], [(1, 2), (1, 3)]),
        *([np.array(1), np.array(2)], [np.int64(1), np.int64(2)]),
    ],
    ids=str,
)
def test_rows_are_grouped_by_the_values_of_a_list_as_python_compares_them(group, keys):
    mapped = group.one.map({"key": keys * 2}, chunk=2, group_by="key")
    assert sorted(list(chunk.numbers) for chunk in mapped) == [[0, 2], [1, 3]]


def test_the_whole_of_chunks_is_a_handle(group):
    rows = group.wide.map(np.arange(7), scale=3, chunk=2).future
    assert (len(rows), list(rows.schema)) == (7, ["id", "wide"])
    assert rows[::2].select("id").result()["id"].tolist() == [0, 2, 4, 6]
    again = group.sums.map(rows, chunk=3).future
    both = again.join(rows.select("wide"))
    assert both.result()["sum"].tolist() == [6.0 * row * LARGE for row in range(7)]
    assert rows.result()["wide"][:, 0].tolist() == [3.0 * row for row in range(7)], "what a request changes is its own"


@in_parallel
def test_a_request_takes_rows_of_a_map_as_that_ends(make_group, monkeypatch):
    group, made = make_group(1, Rows), []
    flushes, waits = threading.Event(), threading.Event()

    def flush(router, real=Router.flush):
        if threading.current_thread().name == "bandmaster-progress" and made and made[0].done():
            flushes.set()  # the thread of callbacks sends what a map has left, which has failed
            waits.wait(DEADLINE)
        real(router)

    def wait(mapped, timeout_s, real=MapFeed.wait):
        if timeout_s is None:
            waits.set()  # a request is sent, and asks for the rows
        return real(mapped, timeout_s)

    def ask():
        flushes.wait(0.5)
        with pytest.raises(bm.RemoteError, match="row 5"):
            group.sums(made[0]).result(DEADLINE)

    monkeypatch.setattr(Router, "flush", flush)
    monkeypatch.setattr(MapFeed, "wait", wait)
    made.append(group.fail_on.map(np.arange(6), bad=5, chunk=2, in_flight=1).future)
    asks = threading.Thread(target=ask, daemon=True)
    asks.start()
    asks.join(DEADLINE)
    assert not asks.is_alive()


def test_chunks_without_rows_do_not_determine_the_dtype(group):
    rows = group.at_least.map(np.arange(6), least=3, chunk=2).future
    assert [part.dtype for part in (rows.result(), rows[1:].result(), rows[:0].result())] == [np.int64] * 3
    assert len(group.at_least.map(np.arange(6), least=9, chunk=2).future) == 0


def test_in_an_event_loop(group):
    async def main():
        rows = await group.double.map(np.arange(5), chunk=2)
        several = await asyncio.gather(*[group.one.map([n, n + 1]) for n in range(20)])
        return rows["id"].tolist(), several, sorted([part.numbers[0] async for part in group.one.map(list("abc"))])

    assert asyncio.run(main()) == ([0, 2, 4, 6, 8], [[n, n + 1] for n in range(20)], [0, 1, 2])


def test_the_rows_are_those_of_the_batch_as_it_was(group):
    batch = np.arange(6)
    parts, whole = group.double.map(batch, chunk=1, maxsize=1), group.double.map(batch, chunk=2, in_flight=1)
    batch += 100
    assert sorted(part.result()["id"][0] for part in parts) == [0, 2, 4, 6, 8, 10]
    assert whole.result()["id"].tolist() == [0, 2, 4, 6, 8, 10]


# --- as they come -------------------------------------------------------------------------------------------------


def test_parts_come_with_their_rows_and_rank(group):
    found = {tuple(part.numbers): (part.rank, part.result()) for part in group.double.map(np.arange(5), chunk=2)}
    assert {numbers: value["id"].tolist() for numbers, (_, value) in found.items()} == {
        (0, 1): [0, 2],
        (2, 3): [4, 6],
        (4,): [8],
    }
    assert all(set(value["rank"]) == {rank} for rank, value in found.values())


def test_rows_of_a_part_can_be_passed_on(group):
    for part in group.wide.map(np.arange(5), scale=2, chunk=2):
        assert part.done() and [place.rank for place in part.where] == [part.rank]
        assert group.sums.map(part, chunk=9).result()["id"].tolist() == list(part.numbers)


@in_parallel
def test_results_come_in_the_order_in_which_they_are_made(group, gate):
    with group.hold.map(list(range(8)), str(gate), held={0: None}) as mapped:
        seen = [next(mapped).result() for _ in range(7)]
        gate.touch()
        assert [*seen, *[part.result() for part in mapped]][-1] == 0
    assert sorted(seen) == list(range(1, 8))


@in_parallel
def test_rows_go_to_whichever_replica_is_free(group, gate):
    held = [group.hold.options(replica=1)(-1, str(gate)) for _ in range(4)]
    ranks = Counter(part.rank for part in group.hold.map(list(range(30)), str(gate), held={}))
    assert not any(one.done() for one in held)
    assert set(ranks) == {0, 2}
    gate.touch()
    assert [one.result(DEADLINE) for one in held] == [-1] * 4


@in_parallel
@pytest.mark.parametrize("in_flight", [1, 5])
def test_no_more_requests_are_open_than_may_be_in_flight(group, in_flight):
    group.take_log()
    assert group.hold.options(replica=0).map(list(range(30)), "/", in_flight=in_flight).result() == list(range(30))
    assert group.take_log()[0][0] <= min(in_flight, 4)


@in_parallel
def test_an_iteration_may_bound_what_is_made_ahead(group):
    mapped = group.count.map(list(range(9)), maxsize=2)
    found = [next(mapped)]
    assert sum(group.take_count()) <= 3
    found += mapped
    assert sorted(part.result() for part in found) == list(range(9))
    group.take_count()


def test_keys_and_replicas_are_those_of_the_options(group):
    assert {part.rank for part in group.one.options(replica=2).map(list(range(20)))} == {2}
    assert len({part.rank for part in group.one.options(key="a").map(list(range(20)))}) == 1
    with pytest.raises(bm.UsageError, match=r"the whole of the map of Rows.one was asked for"):
        mapped = group.one.map([1])
        mapped.result()
        next(mapped)
    mapped = group.one.map([1, 2])
    assert len(list(mapped)) == 2
    with pytest.raises(bm.UsageError, match=r"the map of Rows.one was iterated over, so the whole cannot be had"):
        mapped.result()


@pytest.mark.parametrize("takers", ["threads", "tasks"])
def test_several_take_from_one_map(group, takers):
    async def take(mapped):
        return [part async for part in mapped]

    async def main():
        mapped = group.double.map(np.arange(30), chunk=3)
        return await asyncio.wait_for(asyncio.gather(*[take(mapped) for _ in range(4)]), DEADLINE)

    if takers == "tasks":
        found = asyncio.run(main())
    else:
        mapped = group.double.map(np.arange(30), chunk=3)
        with ThreadPoolExecutor(4) as threads:
            found = [one.result(DEADLINE) for one in [threads.submit(list, mapped) for _ in range(4)]]
    assert sorted(row for parts in found for part in parts for row in part.numbers) == list(range(30))


def test_a_map_goes_on_though_a_request_of_its_method_waits(group):
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def ask():
        return await group.one.options(min_version=9)(0)

    async def end(task):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def begin():
        return asyncio.create_task(ask())

    waiting = asyncio.run_coroutine_threadsafe(begin(), loop).result(DEADLINE)
    try:
        start = time.monotonic()
        assert group.one.map(list(range(9)), in_flight=1).result() == list(range(9))
        assert time.monotonic() - start < 9
    finally:
        asyncio.run_coroutine_threadsafe(end(waiting), loop).result(DEADLINE)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_several_maps_at_a_time_share_the_replicas(group):
    maps = [group.one.map(list(range(60))) for _ in range(5)]
    assert group.one(7).result(DEADLINE) == 7
    assert [mapped.result(DEADLINE) for mapped in maps] == [list(range(60))] * 5


# --- replicas of several ranks ------------------------------------------------------------------------------------


def test_replicas_of_several_ranks_return_one_value(sharded):
    rows = sharded.put({"id": np.arange(6)})
    found = {tuple(part.numbers): (part.rank, part.result().tolist()) for part in sharded.add.map(rows, chunk=2)}
    assert {rank for rank, _ in found.values()} <= {1, 3}
    assert all(values == [row + rank for row in numbers] for numbers, (rank, values) in found.items())


# --- rows of others -----------------------------------------------------------------------------------------------


def test_a_map_over_a_handle_sends_references(group):
    rows = group.make.submit(np.arange(8))
    assert group.row_sum.map(rows[::-1]).result() == [(row, (LARGE,), float(row)) for row in range(7, -1, -1)]
    assert group.sums.map(rows, chunk=3).result()["sum"].tolist() == [2.0 * row * LARGE for row in range(8)]
    assert rows.result()["wide"][:, 5].tolist() == list(range(8))


def test_requests_take_handles(group):
    rows = group.make.submit(np.arange(4))
    assert group.sums(rows[1:3]).result()["id"].tolist() == [1, 2]
    assert [one["id"].tolist() for one in group.sums.all(rows.select("id", "wide")).result()] == [[0, 1, 2, 3]] * 3
    assert group.one(rows.select("id"), end=group.put([5, 6])).result()[1] == [5, 6]

    async def main():
        return await asyncio.gather(*[group.sums(rows[n : n + 1]) for n in range(4)])

    assert [value["id"].tolist() for value in asyncio.run(main())] == [[0], [1], [2], [3]]


def test_the_whole_of_thousands_of_small_chunks_is_an_argument(group):
    rows = group.narrow.map(np.arange(4000), chunk=1).future
    assert len(rows) == 4000
    before = len(os.listdir("/proc/self/fd"))
    assert group.sums(rows).result(60)["sum"].tolist() == [6.0] * 4000
    assert group.total(rows) == [sum(range(4000))] * 3
    assert len(os.listdir("/proc/self/fd")) < before + 50, "the chunks have no descriptors of their own"


def test_a_handle_that_is_no_batch_of_the_map_goes_with_each_request(group):
    rows = group.make.submit(np.arange(3))
    assert group.with_words.map([1, 2], words=rows.select("id")).result() == [(1, 1), (2, 1)]


@in_parallel
def test_requests_wait_for_rows_without_blocking_an_event_loop(group, gate):
    async def main():
        rows = group.make_when.submit(np.arange(6), str(gate))
        tasks = [asyncio.ensure_future(one) for one in (group.double(rows[2:4]), group.double.map(rows, chunk=4))]
        waiting = group.double(rows)
        before = [group.one.map(rows), group.one(rows)]
        for _ in range(20):
            await asyncio.sleep(0)
        assert not any(task.done() for task in tasks) and not waiting.done()
        gate.touch()
        found = await asyncio.wait_for(asyncio.gather(*tasks), DEADLINE)
        return [one["id"].tolist() for one in found], await waiting, await before[0]

    part, waiting, singles = asyncio.run(main())
    assert part == [[4, 6], [0, 2, 4, 6, 8, 10]]
    assert waiting["id"].tolist() == [0, 2, 4, 6, 8, 10] and singles == list(range(6))


@in_parallel
def test_a_wait_for_rows_has_a_deadline_and_can_be_cancelled(group, gate):
    rows = group.make_when.submit(np.arange(6), str(gate))
    request, mapped = group.double(rows), group.double.map(rows, chunk=2)
    with pytest.raises(bm.CallTimeout, match=r"Rows.make_when got no reply .*Rows.double takes its rows"):
        request.result(0.1)
    with pytest.raises(bm.CallTimeout, match=r"Rows.make_when got no reply .*Rows.double takes its rows"):
        mapped.result(0.1)
    assert request.cancel() and mapped.cancel()
    with pytest.raises(bm.CallCancelled):
        request.result()
    with pytest.raises(bm.CallCancelled):
        mapped.result()
    gate.touch()
    assert rows.result().tolist() == list(range(6))


@in_parallel
@pytest.mark.parametrize("is_map", [False, True])
def test_a_thread_that_waits_for_what_was_not_sent_is_told_that_another_one_cancels_it(group, gate, is_map):
    rows = group.make_when.submit(np.arange(6), str(gate))
    waited = group.double.map(rows, chunk=2) if is_map else group.double(rows)
    threading.Timer(0.1, waited.cancel).start()
    with pytest.raises(bm.CallCancelled):
        waited.result(DEADLINE)
    gate.touch()
    assert rows.result().tolist() == list(range(6))


def test_rows_that_fail_fail_the_requests_that_take_them(group):
    rows = group.fail.submit(np.arange(6))
    with pytest.raises(bm.RemoteError, match="no rows"):
        group.double(rows).result(DEADLINE)
    with pytest.raises(bm.RemoteError, match="no rows"):
        group.double.map(rows, chunk=2).result(DEADLINE)
    with group.make.submit(np.arange(3)) as released:
        pass
    with pytest.raises(bm.RowsLost):
        group.double(released).result(DEADLINE)
    assert group.one(1).result() == 1


@in_parallel
def test_a_callback_of_a_map_whose_rows_fail_may_wait_for_a_thread_that_submits_a_call(group, gate):
    failing, later = (group.make_when.submit(np.arange(6), str(gate)) for _ in range(2))
    lock, has_come, was_free = threading.Lock(), threading.Event(), []

    def take_lock(_):
        has_come.set()
        was_free.append(lock.acquire(timeout=5))

    whole = group.one.map(failing).future
    whole.add_done_callback(take_lock)
    with lock:
        failing.cancel()
        assert has_come.wait(DEADLINE)
        echo = group.make.submit(later)
    gate.touch()
    assert echo.result(DEADLINE)["id"].tolist() == list(range(6))
    with pytest.raises(bm.CallCancelled):
        whole.result(DEADLINE)
    assert was_free == [True]


@in_parallel
def test_rows_that_are_released_stay_for_the_requests_that_were_submitted_before(group, gate):
    with group.make.submit(np.arange(6)) as rows:
        held = [group.hold.options(replica=replica)(-1, str(gate)) for replica in range(3) for _ in range(4)]
        mapped = group.row_sum.map(rows, in_flight=2)
        future = mapped.future
    gate.touch()
    assert [one.result() for one in held] == [-1] * 12
    assert [row for row, _, _ in future.result(DEADLINE)] == list(range(6))


# --- errors, deadlines, ends --------------------------------------------------------------------------------------


def test_a_request_that_fails_ends_the_map(group):
    with pytest.raises(bm.RemoteError, match=r"Rows.fail_on failed on rank \d.*ValueError: row 7"):
        group.fail_on.map(np.arange(20), bad=7, chunk=2).result()
    with pytest.raises(bm.RemoteError, match="row 7"):
        list(group.fail_on.map(np.arange(20), bad=7))
    assert group.one(1).result() == 1


def test_requests_that_fail_come_back_as_errors(group):
    value, numbers, failed = group.fail_on.map(np.arange(9), bad=4, chunk=2, on_error="return").result()
    assert (value.tolist(), numbers) == ([0, 1, 2, 3, 6, 7, 8],) * 2
    assert [list(one.numbers) for one in failed] == [[4, 5]] and "ValueError: row 4" in str(failed[0].error)
    value, numbers, failed = group.fail_on.map(np.arange(4), bad=2, on_error="return").result()
    assert (value, numbers, [list(one.numbers) for one in failed]) == ([0, 1, 3], [0, 1, 3], [[2]])
    parts = list(group.fail_on.map(np.arange(9), bad=4, on_error="return"))
    assert sorted(part.numbers[0] for part in parts if part.exception() is None) == [0, 1, 2, 3, 5, 6, 7, 8]
    assert group.fail_on.map(np.arange(2), bad=0, chunk=2, on_error="return").result()[:2] == (None, [])


def test_chunks_that_cannot_be_joined_are_told_from_ranks(group):
    with pytest.raises(bm.CollectError) as raised:
        group.unlike.map(np.arange(9), bad=7, chunk=1).result()
    error = raised.value
    assert error.coordinates == {error.rank: {"dp": error.rank}}
    assert re.search(rf"Rows.unlike failed on rank {error.rank} \(dp={error.rank}.*\): in chunk 7, ", str(error))
    assert "list, but chunk 0 returned ndarray" in str(error)


@in_parallel
def test_each_request_has_a_deadline(group, gate):
    method = group.hold.options(timeout=0.2)
    value, numbers, failed = method.map(list(range(6)), str(gate), held={3: None}, on_error="return").result(DEADLINE)
    assert value == numbers == [0, 1, 2, 4, 5]
    assert [type(one.error) for one in failed] == [bm.CallTimeout] and list(failed[0].numbers) == [3]
    assert "in hold" in "".join(failed[0].error.stacks.values())
    with pytest.raises(bm.CallTimeout, match=r"Rows.hold got no reply .* it was cancelled: make it again"):
        list(method.map(list(range(6)), str(gate), held={3: None}))
    with group.hold.map([1], str(gate)) as mapped, pytest.raises(bm.CallTimeout):
        mapped.result(timeout=0.1)
    assert n_cancelled(group) >= 2


def n_cancelled(group):
    """The number of requests of `hold` that were cancelled, once none runs."""
    return sum(len(log) for _, log in group.take_log.options(timeout=DEADLINE)())


def wait_until_begun(group, n):
    deadline = idle_time() + DEADLINE
    while sum(group.n_inside.all().result()) < n:
        assert idle_time() < deadline


@in_parallel
@pytest.mark.parametrize("end", ["cancel", "close", "with", "group.cancel", "drop", "task"])
def test_the_end_of_a_map_cancels_its_requests(group, gate, end):
    group.take_log()
    mapped = group.hold.map(list(range(40)), str(gate))
    wait_until_begun(group, 12)  # as many as there are places
    if end == "cancel":
        assert mapped.cancel()
        with pytest.raises(bm.CallCancelled):
            next(mapped)
    elif end == "close":
        mapped.close()
        assert list(mapped) == []
    elif end == "with":
        with mapped:
            assert not mapped.future.done()
    elif end == "group.cancel":
        future = mapped.future
        assert group.cancel() == 1
        with pytest.raises(bm.CallCancelled):
            future.result(DEADLINE)
        assert future.cancelled()
    elif end == "drop":
        del mapped
    else:

        async def main():
            await asyncio.wait_for(read(), 0.1)

        async def read():
            await mapped

        with pytest.raises(asyncio.TimeoutError):  # another one before Python 3.11
            asyncio.run(main())
    assert n_cancelled(group) == 12


@in_parallel
@pytest.mark.parametrize("how", ["whole", "parts"])
def test_ctrl_c_cancels_what_is_waited_for(group, gate, how):
    group.take_log()
    mapped = group.hold.map([0, 1, 2, 3], str(gate))
    wait_until_begun(group, 4)
    timer = threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT])
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        mapped.result() if how == "whole" else list(mapped)
    assert n_cancelled(group) == 4


async def submitted(method, *arguments):
    return method.submit(*arguments)


def check_that_none_runs_on(group):
    """Wait until no request of `hold` runs on the only rank."""
    end = time.monotonic() + DEADLINE
    while n_inside := group.n_inside().result(DEADLINE):
        assert time.monotonic() < end, f"{n_inside} run on"
        gc.collect()  # what the traceback of Ctrl-C keeps


@pytest.mark.backends("inprocess")
def test_a_map_that_is_dropped_ends_though_ctrl_c_has_come_as_it_was_closed(backend, tmp_path):
    with bm.ResourcePool([1], backend=backend) as pool:
        group = bm.WorkerGroup(pool, Rows)
        for n in range(1, 1000):
            mapped = group.hold.map([0, 1], str(tmp_path / "never"), maxsize=2)
            was_pressed = pressed(mapped.close, n)
            del mapped
            check_that_none_runs_on(group)
            if not was_pressed:
                break
        assert n > 5


@pytest.mark.backends("inprocess")
def test_a_map_ends_though_ctrl_c_keeps_it_from_the_user(backend, tmp_path):
    with bm.ResourcePool([1], backend=backend) as pool:
        group = bm.WorkerGroup(pool, Rows)
        for n in range(1, 1000):
            made = []  # outside, as Python ignores Ctrl-C as the last reference ends
            was_pressed = pressed(lambda: made.append(group.hold.map([0, 1], str(tmp_path / "never"), maxsize=2)), n)  # noqa: B023
            made.clear()
            check_that_none_runs_on(group)
            if not was_pressed:
                break
        assert 5 < n < 999


@pytest.mark.backends("inprocess")
@pytest.mark.parametrize("is_map", [False, True])
def test_requests_end_though_ctrl_c_comes_as_they_are_cancelled(backend, tmp_path, is_map):
    with bm.ResourcePool([1], backend=backend) as pool:
        group = bm.WorkerGroup(pool, Rows)
        for n in range(1, 1000):
            gate, never = tmp_path / str(n), str(tmp_path / "never")
            held = [group.hold.submit(0, str(gate)) for _ in range(4)]  # as many as may run at a time
            if is_map:
                mapped = group.hold.map([0, 1], never, in_flight=2)
                ends, cancel = mapped.future, mapped.close
            else:
                ends = asyncio.run(submitted(group.hold, 0, never))  # elsewhere, it waits until it is sent
                cancel = ends.cancel
            was_pressed = pressed(cancel, n)
            cancel()  # if it was pressed before anything was done
            gate.touch()
            for one in (ends, *held):
                one.exception(timeout=DEADLINE)
            group.hold(0, str(gate)).result(DEADLINE)  # it waits for a place behind those that were not cancelled
            check_that_none_runs_on(group)
            if not was_pressed:
                break
        assert n > 5


def test_ctrl_c_in_a_wait_for_the_whole_loses_no_value(group):
    for n in range(1, 1000):
        whole = group.one.map(list(range(5))).future
        was_pressed = pressed(whole.result, n)
        assert whole.result(DEADLINE) == list(range(5))
        if not was_pressed:
            break
    assert n > 5


@pytest.mark.backends("inprocess")
def test_a_callback_of_rows_of_a_map_is_called_though_it_was_added_in_the_midst_of_its_end(backend, tmp_path):
    with bm.ResourcePool([1], backend=backend) as pool:
        group = bm.WorkerGroup(pool, Rows)
        for n in range(1, 1000):
            mapped = group.hold.map([0, 1], str(tmp_path / "never"), chunk=1)
            called = threading.Event()
            add = partial(mapped.future[:1].add_done_callback, lambda _, called=called: called.set())
            adding = threading.Thread(target=add)
            called_with_a_pause(mapped.close, n, partial(started, adding))
            if adding.ident is None:
                break
            adding.join(DEADLINE)
            assert called.wait(DEADLINE), n
        assert n > 5


@pytest.mark.backends("inprocess")
def test_a_callback_of_rows_is_called_though_another_thread_made_these_as_it_was_added(backend, tmp_path):
    def is_about_to_drive(frame, kind, _):
        return kind == "call" and frame.f_code is Derived.drive_in_background.__code__

    with bm.ResourcePool([1], backend=backend) as pool:
        group = bm.WorkerGroup(pool, Rows)
        for n in range(1, 1000):
            gate = tmp_path / str(n)
            whole = group.hold.map([0], str(gate), chunk=1).future
            rows = whole[:1]
            called, paused, go_on = threading.Event(), threading.Event(), threading.Event()

            def add(rows=rows, called=called, paused=paused, go_on=go_on):
                with done_when(is_about_to_drive, lambda: paused.set() or go_on.wait(DEADLINE)):
                    rows.add_done_callback(lambda _: called.set())

            adding = threading.Thread(target=add)
            adding.start()
            assert paused.wait(DEADLINE)
            gate.touch()
            whole.result(DEADLINE)
            has_paused = threading.Event()

            def pause(adding=adding, go_on=go_on, has_paused=has_paused):
                has_paused.set()
                go_on.set()
                adding.join(0.1)  # it may wait for a lock of this thread

            called_with_a_pause(rows.result, n, pause, "derived.py")
            go_on.set()
            adding.join(DEADLINE)
            assert called.wait(DEADLINE), n
            if not has_paused.is_set():
                break
        assert n > 5


@pytest.mark.backends("inprocess", "local")
def test_a_map_goes_on_wherever_other_threads_run_as_it_begins(group, tmp_path):
    for n in range(1, 80):
        gate = tmp_path / str(n)
        mapped = called_with_a_pause(
            partial(group.hold.map, [0, 1], str(gate), maxsize=1), n, partial(time.sleep, 0.01)
        )
        gate.touch()
        with ThreadPoolExecutor(1) as pool:
            taken = pool.submit(list, mapped)
            try:
                assert len(taken.result(DEADLINE)) == 2, n
            finally:
                mapped.close()


def test_a_future_outlives_its_map(group):
    future = group.one.map(list(range(30)), in_flight=2).future
    gc.collect()
    told = threading.Event()
    future.add_done_callback(lambda done: told.set())
    assert told.wait(DEADLINE) and future.result() == list(range(30))


@pytest.mark.backends("local")
def test_a_death_fails_the_requests_of_its_replica_alone(backend):
    with bm.ResourcePool([2], backend=backend) as pool:
        group = bm.WorkerGroup(pool, Rows)
        value, numbers, failed = group.die_on.map(list(range(20)), bad=3, on_error="return").result(DEADLINE)
        lost = {n for one in failed for n in one.numbers}
        assert value == numbers == sorted(set(range(20)) - lost)
        assert 3 in lost and len(lost) <= 2, "those that ran there"
        assert {type(one.error) for one in failed} == {bm.WorkerDied}
        with pytest.raises(bm.WorkerDied):
            group.die_on.map(list(range(20)), bad=7).result(DEADLINE)
        group.restart()
        assert group.one.map([1, 2]).result() == [1, 2]


@pytest.mark.parametrize("method", ["one", "hold"])
def test_a_group_that_is_closed_ends_its_maps(backend, method, gate):
    with bm.ResourcePool([2], backend=backend) as pool:
        group = bm.WorkerGroup(pool, Rows)
        arguments = {"one": (), "hold": (str(gate),)}[method]
        mapped = getattr(group, method).map(list(range(6)), *arguments, maxsize=1)
        if method == "one":
            assert next(mapped).done()
        group.close()
        with pytest.raises((bm.WorkerDied, bm.ClosedError)):
            list(mapped)
        assert list(mapped) == []
        with pytest.raises(bm.ClosedError):
            group.one.map([1])


@pytest.fixture
def no_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_values_that_nobody_takes_are_freed_with_the_map(group, no_collection):
    def use():
        rows = group.wide.map(np.arange(6), chunk=2)
        assert len(next(rows)) == 2
        deadline = idle_time() + DEADLINE
        while "open" in repr(rows):
            assert idle_time() < deadline
            time.sleep(0.01)  # polling for the thread of callbacks
        rows.close()

    use()
    wait_until_freed(group)


def test_rows_of_chunks_are_freed_with_the_last_future(group):
    def use():
        rows = group.wide.map(np.arange(6), chunk=2).future
        assert len(rows[2:4].result()["id"]) == 2
        assert sum(len(part) for part in group.wide.map(np.arange(6), chunk=2)) == 6
        with group.wide.map(np.arange(6), chunk=2).future as more:
            assert len(more) == 6
        with pytest.raises(bm.RowsLost):
            more.result()

    use()
    gc.collect()
    wait_until_freed(group)


def wait_until_freed(group):
    """Wait until no rows are kept: a thread that ran a callback, or looked at a map, lets go of it a moment later."""
    deadline = idle_time() + DEADLINE
    while {line.split("  ")[-1].strip() for line in group.describe().splitlines()[2:]} != {"-"}:
        assert idle_time() < deadline, group.describe()
        time.sleep(0.01)


# --- mistakes -----------------------------------------------------------------------------------------------------


def jagged(n):
    import torch

    return torch.nested.nested_tensor([torch.arange(2)] * n, layout=torch.jagged)


@pytest.mark.parametrize(
    ("send", "message"),
    [
        (lambda group: group.one.map(), "missing a required argument: 'row'"),
        (lambda group: group.one.map(3), "Rows.one.map got no batch, so there are no rows to send: 'row' is int; pass"),
        (lambda group: group.one.map([1, 2], [3]), "unequal row counts: 'row' has 2, 'end' has 1"),
        (lambda group: group.one.map([threading.Lock()]), r"argument 'row' of Rows.one \(list\) cannot be pickled"),
        (
            lambda group: group.one.map([1], group.take_log.submit()),
            "'end' of Rows.one is a future of Rows.take",
        ),
        (lambda group: group.one.map([1], chunk=0), "chunk must be a whole number of 1 or more, got 0"),
        (lambda group: group.one.map([1], in_flight=True), "in_flight must be a whole number of 1 or more, got True"),
        (lambda group: group.one.map([1], on_error="ignore"), "on_error must be 'raise' or 'return', got 'ignore'"),
        (lambda group: group.one.map([1], group_by="uid"), "group_by is about chunks of rows; set chunk= as well"),
        (lambda group: group.groups.map({"x": [1]}, chunk=2, group_by="uid"), "neither a column of 'rows' nor an argu"),
        (
            lambda group: group.groups.map({"uid": np.zeros((2, 2))}, chunk=2, group_by="uid"),
            r"group_by='uid', which has shape \(2, 2\) for 2 rows; pass one value for each row",
        ),
        (
            lambda group: group.groups.map({"uid": jagged(2)}, chunk=2, group_by="uid"),
            r"map cannot group rows by 'uid' \(.*\); pass a number, a string or a tuple",
        ),
        (
            lambda group: group.groups.map({"uid": [{}, {}]}, chunk=2, group_by="uid"),
            r"Rows.groups.map cannot group rows by 'uid' \(unhashable type: 'dict'\); pass a number, a string or",
        ),
        (lambda group: group.one.map([1], maxsize=1).future, "waits for an iteration to take values, as maxsize says"),
        (lambda group: group.make.options(pull=2), r"pull= was removed: register .* call method.map\(rows, chunk=n\)"),
    ],
)
def test_mistakes_are_errors_at_the_call(group, send, message):
    with pytest.raises(bm.UsageError, match=message):
        send(group)


def test_mistakes_about_rows_that_are_not_there_come_with_the_map(group, gate):
    rows = group.fail.submit(np.arange(3))
    with pytest.raises(bm.ArgumentError, match="missing a required argument"):
        group.hold.map(rows)
    with pytest.raises((bm.BatchError, bm.RemoteError)):
        group.groups.map(rows, chunk=1, group_by="uid").result(DEADLINE)
