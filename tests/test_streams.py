"""Streams and pull dispatch: results as they come, items of generators, chunks for whoever is free."""

import asyncio
import gc
import os
import re
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from clock import idle_time
from hypothesis import given, settings
from hypothesis import strategies as st

import bandmaster as bm
from bandmaster import Broadcast, Concat, Dispatch, Gather, Mesh, PerRank, Reduce, Split, TransferProtocol, register

LARGE = 30_000  # columns of rows that stay where they are made


class Rows(bm.Worker):
    log = ()

    @register(Dispatch.DP_PROTO)
    def double(self, rows):
        return {"id": rows * 2, "rank": np.full(len(rows), self.rank)}

    @register(Dispatch.DP_PROTO)
    def wide(self, rows, scale=1):
        return {"id": rows, "wide": np.repeat(rows[:, None] * scale, LARGE, 1).astype("f4")}

    @register(TransferProtocol(Split("dp", pad=True), Concat("dp")))
    def padded(self, rows):
        return rows

    @register(TransferProtocol(Split("dp"), (Concat("dp"), Reduce("mean", "dp", weights="rows"))))
    def with_mean(self, rows):
        return rows, float(np.mean(rows)) if len(rows) else 0.0

    @register(Dispatch.ONE_TO_ALL)
    def ranks(self, value=None):
        return self.rank, value

    @register(Dispatch.DP_PROTO)
    def wait_for(self, rows, gates):
        gate = gates[self.rank]
        while gate and not os.path.exists(gate):
            time.sleep(0.001)
        return rows

    @register(Dispatch.DP_PROTO)
    def fail_on(self, rows, bad):
        if bad in list(rows):
            raise ValueError(f"row {bad}")
        return rows

    @register(Dispatch.DP_PROTO)
    def at_least(self, rows, least):
        return np.array([row for row in rows if row >= least])  # float64 if there is none

    @register(Dispatch.DP_PROTO)
    def unlike(self, rows, bad):
        return list(rows) if bad in list(rows) else rows

    @register(TransferProtocol(Split("dp"), (Concat("dp"), Reduce("mean"))))
    def unlike_means(self, rows, bad):
        return rows, "7" if bad in list(rows) else rows.astype(float)

    @register(Dispatch.DP_PROTO)
    def die_on(self, rows, bad):
        if bad in list(rows):
            os.kill(os.getpid(), signal.SIGKILL)
        return rows

    @register(TransferProtocol(Split("dp", balance="cost"), Concat("dp")))
    def costly(self, rows):
        return rows

    @register(Dispatch.DP_PROTO)
    def groups(self, rows):
        return {"uid": rows["uid"], "n": np.array([list(rows["uid"]).count(uid) for uid in rows["uid"]])}

    @register(Dispatch.DP_PROTO)
    def items(self, rows, fails_at=None):
        self.log = ["begun"]
        try:
            for row in rows:
                if row == fails_at:
                    raise ValueError(f"row {row}")
                self.log.append(int(row))
                yield {"id": np.array([row]), "wide": np.full((1, LARGE), row, "f4")}
        finally:
            self.log.append("ended")

    @register(Dispatch.DP_PROTO)
    async def async_items(self, rows):
        for row in rows:
            await asyncio.sleep(0)
            yield int(row)

    @register(TransferProtocol(Split("dp", pad=True), Concat("dp")))
    def padded_items(self, rows):
        yield from rows

    @register(Dispatch.ONE_TO_ALL)
    def unequal(self):
        yield from range(self.rank)

    @register(Dispatch.DP_PROTO)
    def endless(self, rows):
        number = 0
        try:
            while True:
                yield number
                number += 1
        finally:
            self.log = ["ended"]

    @register(Dispatch.DP_PROTO)
    def slow_items(self, rows, gate):
        yield 1
        while not os.path.exists(gate):
            time.sleep(0.001)
        yield 2

    @register(Dispatch.DP_PROTO)
    async def gated_items(self, rows, folder):
        for row in rows:
            while not os.path.exists(f"{folder}/{row}"):
                await asyncio.sleep(0.001)
            yield int(row)

    @register(Dispatch.DP_PROTO)
    def deadly_items(self, rows, dies_at):
        for row in rows:
            if row == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            yield int(row)

    @register(Dispatch.ONE_TO_ALL)
    def logged(self):
        return list(self.log)

    @register(Dispatch.ONE_TO_ALL)
    def pids(self):
        return os.getpid()

    def on_replace(self, rank, state): ...


@pytest.fixture(scope="module")
def groups(backend):
    with bm.ResourcePool([4], backend=backend) as four, bm.ResourcePool([3], backend=backend) as three:
        made = bm.WorkerGroup(four, Rows, mesh=Mesh(dp=2, tp=2)), bm.WorkerGroup(three, Rows)
        list(made[1].async_items.stream([1, 2, 3]))  # so that each rank has its event loop
        yield made


in_parallel = pytest.mark.backends("local", "ray")  # ranks that run while the controller goes on


# --- the ranks' values --------------------------------------------------------------------------------------------


def test_each_rank_comes_with_the_numbers_of_its_rows(two, three):
    found = {item.rank: (list(item.numbers), item.result()) for item in three.double.stream(np.arange(7))}
    assert {rank: numbers for rank, (numbers, _) in found.items()} == {0: [0, 1, 2], 1: [3, 4], 2: [5, 6]}
    assert {rank: value["id"].tolist() for rank, (_, value) in found.items()} == {0: [0, 2, 4], 1: [6, 8], 2: [10, 12]}
    assert [item.rank for item in two.double.stream(np.arange(4))] in ([0, 2], [2, 0]), "tp=1 is not collected"


def test_values_without_rows_come_as_they_are(three):
    assert sorted(item.result() for item in three.ranks.stream("x")) == [(0, "x"), (1, "x"), (2, "x")]
    assert {item.numbers for item in three.ranks.stream()} == {None}
    stream = three.ranks.stream()
    assert [item.done() for item in stream] == [True] * 3
    assert list(stream) == []


def test_rows_of_a_stream_can_be_passed_on(two, three):
    for item in three.wide.stream(np.arange(5), scale=2):
        assert two.double(item.select("id").result()["id"])["id"].tolist() == [2 * row for row in item.numbers]
        assert two.wide.submit(item.result()["id"]).join(item.select("wide").rename(wide="before")).nbytes > 0
        assert [place.rank for place in item.where] == [item.rank]


def test_padding_is_removed_and_tuples_come_for_each_rank(three):
    assert sorted(row for item in three.padded.stream([1, 2, 3, 4]) for row in item.result()) == [1, 2, 3, 4]
    found = {item.rank: item.result() for item in three.with_mean.stream([1, 2, 6])}
    assert found == {0: ([1], 1.0), 1: ([2], 2.0), 2: ([6], 6.0)}


@in_parallel
def test_results_come_in_the_order_in_which_they_are_made(three, tmp_path):
    gates = [str(tmp_path / str(rank)) for rank in range(3)]
    seen = []
    with three.wait_for.stream([0, 1, 2], gates=tuple(gates)) as stream:
        for rank in (2, 0, 1):
            open(gates[rank], "w").close()
            seen.append(next(stream).rank)
    assert seen == [2, 0, 1]


def test_the_first_error_ends_a_stream(three):
    stream = three.fail_on.stream([1, 2, 3], bad=2)
    with pytest.raises(bm.RemoteError, match=r"Rows.fail_on failed on rank 1.*ValueError: row 2") as caught:
        list(stream)
    assert isinstance(caught.value.__cause__, ValueError)
    assert list(stream) == [], "it is closed"
    assert three.ranks()[0] == (0, None)


@in_parallel
def test_a_wait_for_the_next_result_has_a_deadline(three, gate):
    stream = three.wait_for.options(timeout=0.2).stream([0, 1, 2], gates=("", str(gate), ""))
    assert {next_of(stream).rank, next_of(stream).rank} == {0, 2}
    with pytest.raises(bm.CallTimeout, match=r"no reply from rank 1 within 0.2 s; go on iterating .*") as caught:
        next(stream)
    assert "in wait_for" in caught.value.stacks[1]
    gate.touch()
    assert next_of(stream).rank == 1
    assert list(stream) == []


def next_of(stream):
    """The next item of a stream, though its deadline may be over a few times before."""
    deadline = idle_time() + 60
    while idle_time() < deadline:
        try:
            return next(stream)
        except bm.CallTimeout:
            pass
    raise AssertionError("nothing came")


def test_mistakes_are_known_before_anything_is_sent(three):
    with pytest.raises(bm.ArgumentError, match="missing a required argument"):
        three.double.stream()
    with pytest.raises(bm.BatchError, match="no argument is a batch"):
        three.double.stream(3)
    with pytest.raises(bm.UsageError, match=r"Rows.items is a generator: iterate over items.stream\(...\)"):
        three.items([1, 2, 3])
    with pytest.raises(bm.UsageError, match=r"Rows.padded_items yields items, from which padding cannot be removed"):
        three.padded_items.stream([1, 2])
    for wrong in (0, True, 1.5, "2"):
        with pytest.raises(bm.UsageError, match=f"maxsize must be a whole number of 1 or more, got {wrong!r}"):
            three.items.options(maxsize=wrong)


# --- generators ---------------------------------------------------------------------------------------------------


def test_generators_stream_their_items(two, three):
    found = {0: [], 1: [], 2: []}
    for item in three.items.stream(np.arange(7)):
        found[item.rank].append(item.result()["id"].item())
        assert item.result()["id"].item() in item.numbers
    assert found == {0: [0, 1, 2], 1: [3, 4], 2: [5, 6]}
    assert three.logged() == [["begun", 0, 1, 2, "ended"], ["begun", 3, 4, "ended"], ["begun", 5, 6, "ended"]]
    assert sorted(two.double(item)["id"].item() for item in narrow(three.items.stream(np.arange(5)))) == [0, 2, 4, 6, 8]


def narrow(stream):
    return (item.result()["id"] for item in stream)


def test_ranks_that_are_not_collected_make_the_items_too(two):
    assert sorted(item.rank for item in two.items.stream(np.arange(3))) == [0, 0, 2]
    assert two.logged()[1][:3] == ["begun", 0, 1]


def test_generators_of_unequal_length(three):
    assert sorted((item.rank, item.result()) for item in three.unequal.stream()) == [(1, 0), (2, 0), (2, 1)]


def test_async_generators(three):
    assert sorted(item.result() for item in three.async_items.stream([3, 4, 5, 6])) == [3, 4, 5, 6]


@pytest.mark.parametrize("maxsize", [1, 3])
def test_items_are_made_as_they_are_taken(three, maxsize):
    stream = three.items.options(maxsize=maxsize).stream(np.arange(30))
    wait_for_logs(three, [1 + maxsize] * 3)
    first = next(stream)
    wait_for_logs(three, [1 + maxsize + (rank == first.rank) for rank in range(3)])
    stream.close()


def wait_for_logs(group, lengths):
    """Wait until generators have made as many items as they may, and look whether they make more."""
    deadline = idle_time() + 30
    while list(map(len, group.logged())) != lengths:
        assert idle_time() < deadline, group.logged()
    for _ in range(10):
        assert list(map(len, group.logged())) == lengths


@in_parallel
def test_a_call_comes_between_two_items(three, tmp_path):
    folder = str(tmp_path)
    with three.gated_items.options(maxsize=8).stream(np.arange(24), folder) as stream:
        for row in (0, 8, 16):  # the first of each rank
            (tmp_path / str(row)).touch()
        assert len({next(stream).rank for _ in range(3)}) == 3
        call = three.ranks.submit()  # while each rank makes its second item
        for row in (1, 9, 17):
            (tmp_path / str(row)).touch()
        assert len(call.result(timeout=30)) == 3


def test_other_calls_run_between_the_items(three):
    stream = three.items.stream(np.arange(9))
    seen = []
    for item in stream:
        assert three.ranks(int(item.result()["id"][0]))[0] == (0, item.result()["id"][0])
        seen.append(item)
    assert len(seen) == 9


def until_ranks(stream, n_ranks):
    """The next items of a stream, until so many ranks have made one: their generators have begun, and can be ended."""
    items = []
    while len({item.rank for item in items}) < n_ranks:
        items.append(next(stream))
    return items


def test_a_stream_that_is_left_early_ends_its_generators(three):
    with three.endless.stream([1, 2, 3]) as stream:
        assert {item.result() for item in until_ranks(stream, 3)} >= {0}
    assert three.logged() == [["ended"]] * 3
    assert list(stream) == []


def test_an_abandoned_stream_ends_its_generators(three):
    for item in three.endless.stream([1, 2, 3]):
        assert item.result() == 0
        break
    gc.collect()
    deadline = idle_time() + 30
    while three.logged() != [["ended"]] * 3:
        assert idle_time() < deadline


def test_a_generator_that_raises(three):
    with pytest.raises(bm.RemoteError, match=r"Rows.items failed on rank 1.*ValueError: row 4"):
        list(three.items.stream(np.arange(7), fails_at=4))
    assert three.logged()[1][-1] == "ended"
    assert len(list(three.items.stream(np.arange(7)))) == 7


@in_parallel
def test_closing_a_stream_interrupts_what_makes_the_next_item(three, gate):
    stream = three.slow_items.stream([1, 2, 3], gate=str(gate))
    assert next(stream).result() == 1
    stream.close()
    assert three.ranks.options(timeout=30)()[0] == (0, None)


def test_streams_in_an_event_loop(three):
    async def main():
        found = [item.result() async for item in three.async_items.stream([1, 2, 3, 4])]
        stream = three.double.stream(np.arange(3))
        return found, [item.rank async for item in stream]

    found, ranks = asyncio.run(main())
    assert sorted(found) == [1, 2, 3, 4]
    assert sorted(ranks) == [0, 1, 2]


@in_parallel
def test_cancelling_the_task_that_waits_closes_the_stream(three, gate):
    async def main():
        stream = three.wait_for.stream([0, 1, 2], gates=(str(gate),) * 3)
        task = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return stream

    assert list(asyncio.run(main())) == []
    assert three.ranks.options(timeout=30)()[0] == (0, None)


# --- several at once, and what goes wrong -------------------------------------------------------------------------

STREAMS = {
    "items": lambda group: group.items.stream(np.arange(30)),
    "ranks": lambda group: group.double.stream(np.arange(30)),
    "chunks": lambda group: group.double.options(pull=3).stream(np.arange(30)),
}


@pytest.mark.parametrize("kind", STREAMS)
def test_several_threads_take_from_one_stream(three, kind):
    stream = STREAMS[kind](three)
    with ThreadPoolExecutor(4) as threads:
        taken = [threads.submit(list, stream) for _ in range(4)]
        found = [item for one in taken for item in one.result(timeout=60)]
    assert sorted(row for item in found for row in item.result()["id"]) == [
        row * (1 if kind == "items" else 2) for row in range(30)
    ]


@pytest.mark.parametrize("kind", STREAMS)
def test_several_tasks_take_from_one_stream(three, kind):
    async def take(stream):
        return [item async for item in stream]

    async def main():
        stream = STREAMS[kind](three)
        return await asyncio.wait_for(asyncio.gather(*[take(stream) for _ in range(4)]), 60)

    found = [item for one in asyncio.run(main()) for item in one]
    assert sum(len(item) for item in found) == 30


@in_parallel
@pytest.mark.parametrize("kind", ["items", "ranks", "chunks"])
def test_another_thread_may_close_a_stream(three, gate, kind):
    streams = {
        "items": lambda: three.slow_items.stream([1, 2, 3], gate=str(gate)),
        "ranks": lambda: three.wait_for.stream([1, 2, 3], gates=(str(gate),) * 3),
        "chunks": lambda: three.wait_for.options(pull=1).stream([1, 2, 3], gates=(str(gate),) * 3),
    }
    stream, first = streams[kind](), threading.Event()

    def take():
        for _ in stream:
            first.set()
        return stream

    with ThreadPoolExecutor(2) as threads:
        taken = [threads.submit(take) for _ in range(2)]
        assert kind != "items" or first.wait(30)
        stream.close()
        assert [one.result(timeout=30) for one in taken] == [stream] * 2
    assert three.ranks.options(timeout=30)()[0] == (0, None)


def test_threads_close_a_stream_while_others_take_from_it(three):
    for _ in range(10):
        stream = three.endless.stream([1, 2, 3])
        with ThreadPoolExecutor(3) as threads:
            taken = [threads.submit(list, stream) for _ in range(2)]
            next(stream)
            stream.close()
            for one in taken:
                one.result(timeout=30)


def test_an_item_that_fails_leaves_those_of_other_ranks(three):
    found = {}
    for item in three.items.options(on_error="return").stream(np.arange(7), fails_at=4):
        found.setdefault(item.rank, []).append(item)
    assert [item.result()["id"].item() for item in found[0]] == [0, 1, 2]
    assert [item.result()["id"].item() for item in found[2]] == [5, 6]
    first, failed = found[1]
    assert first.result()["id"].item() == 3
    assert list(failed.numbers) == [3, 4]
    assert "ValueError: row 4" in str(failed.exception())


@pytest.mark.backends("local")
def test_a_rank_that_dies_leaves_the_items_of_others(backend):
    with bm.ResourcePool([3], backend=backend) as pool:
        group, found = bm.WorkerGroup(pool, Rows), {}
        for item in group.deadly_items.options(on_error="return").stream(np.arange(30), dies_at=12):
            found.setdefault(item.rank, []).append(item)
        assert [item.result() for item in found[0]] == list(range(10))
        assert [item.result() for item in found[2]] == list(range(20, 30))
        *made, failed = found[1]
        assert [item.result() for item in made] == [10, 11][: len(made)]
        assert isinstance(failed.exception(), bm.WorkerDied) and list(failed.numbers) == list(range(10, 20))
        assert set(failed.exception().failures) == {1}
        group.replace(1)
        assert group.logged() == [[]] * 3


@pytest.mark.backends("local")
def test_closing_a_stream_ends_generators_beside_a_rank_that_died(backend):
    with bm.ResourcePool([2], backend=backend) as pool:
        group = bm.WorkerGroup(pool, Rows)
        stream = group.endless.stream([1, 2])
        assert {item.rank for item in until_ranks(stream, 2)} == {0, 1}
        os.kill(group.pids()[1], signal.SIGKILL)
        with pytest.raises(bm.WorkerDied):
            list(stream)
        group.replace(1)
        assert group.logged() == [["ended"], []]


@pytest.mark.backends("inprocess", "local")
def test_a_stream_of_a_worker_that_was_replaced_has_no_end_but_an_error(backend):
    with bm.ResourcePool([2], backend=backend) as pool:
        group = bm.WorkerGroup(pool, Rows)
        stream = group.items.options(maxsize=1).stream(np.arange(8))
        wait_for_logs(group, [2, 2])
        group.replace(1)
        with pytest.raises(bm.RemoteError, match="LookupError: this worker has no open generator of the stream"):
            list(stream)


# --- streams behind calls that wait for rows ------------------------------------------------------------------------


@in_parallel
@pytest.mark.parametrize("kind", STREAMS)
def test_a_stream_is_returned_before_earlier_calls_have_their_rows(two, three, gate, kind):
    held = two.wait_for.submit(np.arange(3), gates=(str(gate),) * 4)
    before = three.double.submit(held)
    stream = STREAMS[kind](three)
    assert not before.done()
    gate.touch()
    assert sum(len(item) for item in stream) == 30
    assert before.done(), "calls come in the order of their submission"


@in_parallel
@pytest.mark.parametrize("kind", ["items", "ranks", "chunks"])
def test_a_stream_takes_rows_that_are_not_there(two, three, gate, kind):
    rows = two.wait_for.submit(np.arange(6), gates=(str(gate),) * 4)
    method = {"items": three.items, "ranks": three.double, "chunks": three.double.options(pull=1)}[kind]
    batch = rows
    stream = method.options(timeout=0.2).stream(batch)
    with pytest.raises(
        bm.CallTimeout, match=r"Rows.wait_for got no reply .* and so was not sent: go on iterating"
    ) as late:
        next(stream)
    assert late.value.stream is stream and late.value.missing
    gate.touch()
    found = []
    while len(found) < 6:
        found += next_of(stream).result()["id"].tolist()
    assert sorted(found) == [row * (1 if kind == "items" else 2) for row in range(6)]
    assert list(stream) == []


@in_parallel
@pytest.mark.parametrize("kind", ["ranks", "chunks"])
def test_a_wait_for_a_call_behind_a_stream_names_the_call_that_makes_its_rows(two, three, gate, kind):
    rows = two.wait_for.submit(np.arange(6), gates=(str(gate),) * 4)
    stream = {"ranks": three.double, "chunks": three.double.options(pull=1)}[kind].stream(rows)
    with pytest.raises(bm.CallTimeout, match=r"Rows.wait_for got no reply .*Rows.ranks was submitted behind"):
        three.ranks.submit().result(timeout=0.1)
    gate.touch()
    assert sum(len(item) for item in stream) == 6


@in_parallel
def test_a_stream_that_was_not_sent_can_be_closed_or_cancelled(two, three, gate):
    rows = two.wait_for.submit(np.arange(6), gates=(str(gate),) * 4)
    closed, cancelled, kept = (three.double.stream(rows) for _ in range(3))
    closed.close()
    assert list(closed) == []
    after = three.ranks.submit()
    kept_rank = three.double.submit(rows)
    assert three.cancel() == 4
    for stream in (cancelled, kept):
        with pytest.raises(bm.CallCancelled):
            next(stream)
    for call in (after, kept_rank):
        with pytest.raises(bm.CallCancelled):
            call.result()
    gate.touch()
    assert rows.result().tolist() == list(range(6))


@in_parallel
def test_mistakes_about_rows_that_are_not_there_come_with_the_stream(two, three, gate):
    rows = two.wait_for.submit(np.arange(6), gates=(str(gate),) * 4)
    with pytest.raises(bm.ArgumentError, match="missing a required argument"):
        three.fail_on.stream(rows)
    stream = three.groups.options(pull=1, group_by="uid").stream(rows)
    gate.touch()
    with pytest.raises(bm.BatchError, match="group_by='uid'"):
        next(stream)


# --- pull dispatch ------------------------------------------------------------------------------------------------


def test_pulled_rows_come_back_complete_and_in_order(two, three):
    for group in (two, three):
        pulled = group.double.options(pull=2)
        assert pulled(np.arange(11))["id"].tolist() == [2 * row for row in range(11)]
        assert pulled.submit(np.arange(11)).result()["id"].tolist() == [2 * row for row in range(11)]
    assert pulled(np.arange(1))["id"].tolist() == [0]
    assert pulled(np.arange(0))["id"].tolist() == []


def test_pulled_rows_can_be_passed_on(two, three):
    rows = three.wide.options(pull=2).submit(np.arange(7), scale=3)
    assert (len(rows), list(rows.schema)) == (7, ["id", "wide"])
    again = two.wide.options(pull=3).submit(rows.select("id").result()["id"])
    assert again.join(rows.rename(id="other", wide="more"))[::2].result()["other"].tolist() == [0, 2, 4, 6]
    assert rows.result()["wide"][:, 0].tolist() == [3.0 * row for row in range(7)]


def test_chunks_without_rows_do_not_determine_the_dtype(three):
    rows = three.at_least.options(pull=2).submit(np.arange(6), least=3)
    assert [part.dtype for part in (rows.result(), rows[1:].result(), rows[:0].result())] == [np.int64] * 3
    assert len(three.at_least.options(pull=2).submit(np.arange(6), least=9)) == 0


def test_a_stream_of_chunks(three):
    found = [
        (list(item.numbers), item.result()["id"].tolist()) for item in three.double.options(pull=2).stream(range_of(5))
    ]
    assert sorted(found) == [([0, 1], [0, 2]), ([2, 3], [4, 6]), ([4], [8])]


def range_of(n):
    return np.arange(n)


@in_parallel
def test_chunks_go_to_whoever_is_free(three, gate):
    rows = three.double.options(pull=1)
    held = three.wait_for.submit([0, 1, 2], gates=("", str(gate), ""))
    stream = rows.stream(np.arange(20))
    seen = [next(stream) for _ in range(19)]
    assert {item.rank for item in seen} == {0, 2}
    gate.touch()
    assert [item.rank for item in stream] == [1]
    assert held.result() == [0, 1, 2]


def test_chunks_that_cost_most_come_first(three):
    pulled = three.costly.options(pull=1)
    cost = np.array([1, 5, 2, 9, 3])
    assert pulled({"cost": cost})["cost"].tolist() == cost.tolist()
    assert pulled.submit({"cost": cost})[1:3].result()["cost"].tolist() == [5, 2]
    items = list(pulled.options(maxsize=1).stream({"cost": cost}))
    assert [item.result()["cost"][0] for item in items] == [9, 5, 3, 2, 1]
    assert [item.numbers[0] for item in items] == [3, 1, 4, 2, 0]


def test_rows_of_a_group_stay_together(three):
    uid = np.array([3, 1, 3, 2, 1, 3, 2, 5])
    rows = three.groups.options(pull=3, group_by="uid")({"uid": uid})
    assert rows["uid"].tolist() == uid.tolist()
    assert rows["n"].tolist() == [3, 2, 3, 2, 2, 3, 2, 1]
    later = three.groups.options(pull=3, group_by="uid").submit({"uid": uid})
    assert later.select("n").result()["n"].tolist() == [3, 2, 3, 2, 2, 3, 2, 1]


def test_tuples_are_joined_and_reduced_over_chunks(three):
    rows, mean = three.with_mean.options(pull=2)(np.array([1.0, 2, 3, 4, 10]))
    assert (rows.tolist(), mean) == ([1, 2, 3, 4, 10], 4.0)


def test_a_failed_chunk_fails_the_call(three):
    with pytest.raises(bm.RemoteError, match=r"Rows.fail_on failed on rank \d.*ValueError: row 7"):
        three.fail_on.options(pull=2)(np.arange(20), bad=7)
    with pytest.raises(bm.RemoteError, match="row 7"):
        list(three.fail_on.options(pull=2).stream(np.arange(20), bad=7))
    assert three.ranks()[0] == (0, None)


@pytest.mark.parametrize("method", ["unlike", "unlike_means"])
def test_chunks_that_cannot_be_combined_are_told_from_ranks(three, method):
    pulled = getattr(three, method).options(pull=1)
    with pytest.raises(bm.CollectError) as raised:
        pulled(np.arange(9), bad=7)
    error = raised.value
    assert error.rank in (0, 1, 2)
    assert error.coordinates == {error.rank: {"dp": error.rank}}
    assert re.search(rf"Rows.{method} failed on rank {error.rank} \(dp={error.rank}\): in chunk [07], ", str(error))
    assert ("chunk 7: str" if method == "unlike_means" else "list, but chunk 0 returned ndarray") in str(error)


def test_failed_chunks_come_back_as_errors(three):
    pulled = three.fail_on.options(pull=2, on_error="return")
    value, numbers, failed = pulled(np.arange(9), bad=4)
    assert (value.tolist(), numbers) == ([0, 1, 2, 3, 6, 7, 8],) * 2
    assert [list(one.numbers) for one in failed] == [[4, 5]]
    assert "ValueError: row 4" in str(failed[0].error)
    items = list(pulled.stream(np.arange(9), bad=4))
    assert sorted(n for item in items if item.exception() is None for n in item.numbers) == [0, 1, 2, 3, 6, 7, 8]
    assert pulled(np.arange(2), bad=0)[:2] == (None, [])
    assert pulled.submit(np.arange(2), bad=7).result().value.tolist() == [0, 1]


def test_chunks_are_those_of_the_batch_as_it_was(three):
    batch = np.arange(6)
    stream = three.double.options(pull=1, maxsize=1).stream(batch)
    pulled = three.double.options(pull=2).submit(batch)
    batch += 100
    assert sorted(item.result()["id"][0] for item in stream) == [0, 2, 4, 6, 8, 10]
    assert pulled.result()["id"].tolist() == [0, 2, 4, 6, 8, 10]


def test_a_group_that_is_closed_ends_streams_and_pulled_calls(backend):
    with bm.ResourcePool([2], backend=backend) as pool:
        group = bm.WorkerGroup(pool, Rows)
        chunks = group.double.options(pull=1, maxsize=1).stream(np.arange(6))
        items = group.endless.stream([1, 2])
        assert len(next(chunks)) == 1
        assert next(items).result() == 0
        group.close()
        for stream in (chunks, items):
            with pytest.raises((bm.WorkerDied, bm.ClosedError)):
                list(stream)
            assert list(stream) == []
        with pytest.raises(bm.ClosedError):
            group.double.options(pull=1).submit(np.arange(3))


def lost(rows):
    """The error of who reads rows, without frames that refer to them."""
    try:
        rows.result()
    except bm.RowsLost as error:
        return error.with_traceback(None)


def test_one_collection_frees_a_stream_that_has_failed(three):
    def use():
        rows = np.arange(6)
        with pytest.raises(bm.RemoteError):
            list(three.fail_on.stream(rows, bad=3))
        return weakref.ref(rows)

    gc.disable()
    try:
        rows, deadline = use(), idle_time() + 30
        while any(thread.name == "bandmaster-progress" for thread in threading.enumerate()):  # which lets go of calls
            assert idle_time() < deadline
            time.sleep(0.01)
        gc.collect()
        assert rows() is None
    finally:
        gc.enable()


def test_a_failed_call_can_be_released(three):
    with three.fail_on.options(pull=2).submit(np.arange(6), bad=3) as failed:
        assert isinstance(failed.exception(), bm.RemoteError)


def test_rows_of_chunks_and_items_are_freed_with_the_last_future(three):
    def use():
        rows = three.wide.options(pull=2).submit(np.arange(6))
        assert len(rows[2:4].result()["id"]) == 2
        with three.wide.options(pull=2).submit(np.arange(6)) as more:
            assert len(more) == 6
        assert isinstance(more.exception() or lost(more), bm.RowsLost)
        assert sum(len(item) for item in three.items.stream(np.arange(6))) == 6

    use()
    gc.collect()
    gc.disable()  # nothing of them is left for it
    try:
        use()
        deadline = idle_time() + 30
        while {line.split("  ")[-1].strip() for line in three.describe().splitlines()[2:]} != {"-"}:
            assert idle_time() < deadline, three.describe()
            time.sleep(0.01)  # polling for a thread that ran a callback, and lets go of the call then
    finally:
        gc.enable()


@pytest.mark.backends("local")
def test_a_death_fails_the_chunks_that_are_left(backend):
    with bm.ResourcePool([2], backend=backend) as pool:
        group = bm.WorkerGroup(pool, Rows)
        value, numbers, failed = group.die_on.options(pull=1, on_error="return")(np.arange(8), bad=3)
        assert value.tolist() == numbers == sorted(set(range(8)) - {n for one in failed for n in one.numbers})
        assert 3 in {n for one in failed for n in one.numbers}
        assert {type(one.error) for one in failed} == {bm.WorkerDied}
        with pytest.raises(bm.WorkerDied):
            group.double(np.arange(2))
        group.restart()
        assert group.double.options(pull=1)(np.arange(2))["id"].tolist() == [0, 2]


@in_parallel
def test_calls_come_after_the_chunks_of_the_call_before(three, gate):
    held = three.wait_for.submit([0, 1, 2], gates=(str(gate),) * 3)
    pulled = three.double.options(pull=1).submit(np.arange(9))
    after = three.ranks.submit("after")
    assert not after.done()
    gate.touch()
    assert after.result()[0] == (0, "after")
    assert held.done()
    assert pulled.result()["id"].tolist() == [2 * row for row in range(9)]


@in_parallel
def test_a_pulled_call_takes_rows_that_are_not_there(two, three, gate):
    rows = two.wait_for.submit(np.arange(8), gates=(str(gate),) * 4)
    pulled = three.double.options(pull=3).submit(rows)
    told = threading.Event()
    pulled.add_done_callback(lambda _: told.set())
    end = two.double.submit(pulled.select("id"))
    assert not pulled.done()
    gate.touch()
    assert told.wait(60)
    with pytest.raises(bm.RemoteError):
        end.result()  # rows of a dict, which the method cannot double
    assert pulled.result()["id"].tolist() == [2 * row for row in range(8)]


@in_parallel
def test_a_pulled_call_can_be_cancelled_and_waited_for_in_vain(three, gate):
    pulled = three.wait_for.options(pull=1, timeout=0.2).submit([0, 1, 2, 3], gates=(str(gate),) * 3)
    with pytest.raises(bm.CallTimeout, match=r"Rows.wait_for got no reply from rank 0, 1, 2 within 0.2 s") as caught:
        pulled.result()
    assert set(caught.value.stacks) == {0, 1, 2}
    assert pulled.cancel()
    assert pulled.cancelled()
    with pytest.raises(bm.CallCancelled):
        pulled.result()
    assert three.ranks.options(timeout=30)()[0] == (0, None)


@in_parallel
@pytest.mark.parametrize("how", ["pull", "stream"])
def test_ctrl_c_cancels_what_is_waited_for(three, gate, how):
    method = three.wait_for.options(pull=1) if how == "pull" else three.wait_for
    timer = threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT])
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        if how == "pull":
            method([0, 1, 2, 3], gates=(str(gate),) * 3)
        else:
            list(method.stream([0, 1, 2], gates=(str(gate),) * 3))
    assert three.ranks.options(timeout=30)()[0] == (0, None)


@in_parallel
def test_no_more_chunks_run_than_there_is_room_for(three):
    stream = three.double.options(pull=1, maxsize=2).stream(np.arange(9))
    items = [next(stream)]
    three.ranks()
    items += list(stream)
    assert sorted(n for item in items for n in item.numbers) == list(range(9))


def test_pull_in_an_event_loop(three):
    async def main():
        rows = await three.double.options(pull=2).submit(np.arange(5))
        return rows["id"].tolist(), sorted(
            [item.numbers[0] async for item in three.double.options(pull=2).stream(range_of(5))]
        )

    assert asyncio.run(main()) == ([0, 2, 4, 6, 8], [0, 2, 4])


@settings(max_examples=20, deadline=None)
@given(n=st.integers(0, 12), size=st.integers(1, 5), uids=st.lists(st.integers(0, 3), min_size=12, max_size=12))
def test_pulled_calls_equal_plain_ones(groups, n, size, uids):
    batch = {"uid": np.array(uids[:n], dtype=np.int64)}
    _, three = groups
    grouped = three.groups.options(pull=size, group_by="uid")(batch)
    assert grouped["uid"].tolist() == uids[:n]
    assert grouped["n"].tolist() == [uids[:n].count(uid) for uid in uids[:n]]
    assert three.double.options(pull=size)(batch["uid"])["id"].tolist() == three.double(batch["uid"])["id"].tolist()


class Odd(bm.Worker):
    @register(TransferProtocol(Split("dp"), Gather("dp")))
    def listed(self, rows): ...

    @register(TransferProtocol(Split("dp", pad=True), Concat("dp")))
    def padded(self, rows): ...

    @register(TransferProtocol(Split("dp", "tp"), Concat("dp", tp=0)))
    def half(self, rows): ...

    @register(Dispatch.DP_PROTO, arguments={"seed": PerRank()})
    def seeded(self, rows, seed): ...

    @register(Dispatch.DP_PROTO, arguments={"x": Split("tp")})
    def crossed(self, rows, x): ...

    @register(Dispatch.DP_PROTO, arguments={"rows": Broadcast()})
    def whole(self, rows): ...

    @register(Dispatch.DP_PROTO)
    def fine(self, rows): ...

    @register(Dispatch.ONE_TO_ALL)
    def all(self): ...

    @register(Dispatch.ONE_TO_ALL, execute_mode=bm.Execute.RANK_ZERO)
    def zero(self): ...

    @register(Dispatch.DP_PROTO)
    def items(self, rows):
        yield


@pytest.fixture(scope="module")
def odd():
    with bm.ResourcePool([4], backend="inprocess") as pool:
        yield bm.WorkerGroup(pool, Odd, mesh=Mesh(dp=2, tp=2))


@pytest.mark.parametrize(
    ("method", "args", "message"),
    [
        ("listed", [[1]], r"Odd.listed collects with Gather\('dp'\), but with pull= there is no value of each rank;"),
        ("padded", [[1]], r"Odd.padded is split by Split\('dp', pad=True\), but with pull= there is no padding;"),
        ("half", [[1]], r"Odd.half collects from none of the ranks 1, which would take chunks with pull=;"),
        ("seeded", [[1], [1, 2, 3, 4]], r"argument 'seed' of Odd.seeded has a value for each rank, but with pull="),
        ("crossed", [[1], [1]], r"argument 'x' of Odd.crossed is split by Split\('tp'\) and others by Split\('dp'\)"),
        ("whole", [[1]], r"Odd.whole got no batch, so there are no rows to pull; pass one"),
        ("fine", [3], r"Odd.fine splits batches by Split\('dp'\), but no argument is a batch"),
        ("all", [], r"Odd.all splits no rows, so there are none to pull; register it with Dispatch.DP_PROTO"),
        ("zero", [], r"Odd.zero runs on rank 0 alone, so it cannot be called with pull=; call it without"),
        ("items", [[1]], r"Odd.items is a generator"),
    ],
)
def test_what_cannot_be_pulled(odd, method, args, message):
    pulled = getattr(odd, method).options(pull=2)
    for call in (pulled, pulled.submit, pulled.stream):
        with pytest.raises(bm.UsageError, match=message):
            call(*args)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pull": 0}, "pull must be a whole number of 1 or more, got 0"),
        ({"pull": 2, "on_error": "ignore"}, "on_error must be 'raise' or 'return', got 'ignore'"),
        ({"pull": 2, "group_by": 3}, "group_by must be the name of a column or of an argument, got 3"),
        ({"group_by": "uid"}, "group_by and on_error are about chunks of rows; set pull= as well"),
        ({"on_error": "return"}, "group_by and on_error are about chunks of rows; set pull= as well"),
        ({"pul": 2}, "a call has no option 'pul'"),
    ],
)
def test_options_that_make_no_sense(odd, options, message):
    with pytest.raises(bm.UsageError, match=message):
        odd.fine.options(**options)


def test_columns_to_group_by_are_looked_for(odd):
    with pytest.raises(
        bm.BatchError, match=r"group_by='uid', but neither a column of 'rows' nor an argument is called"
    ):
        odd.fine.options(pull=2, group_by="uid")({"x": [1]})
    with pytest.raises(bm.BatchError, match=r"group_by='uid', which has shape \(2, 2\) for 2 rows; pass one value for"):
        odd.fine.options(pull=2, group_by="uid")({"uid": np.zeros((2, 2))})
    with pytest.raises(bm.UsageError, match=r"pull is for group.method.options\(...\)"):
        odd.set_default_options(pull=2)
