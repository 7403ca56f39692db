"""Streams: results as they come, and the items of generators."""

import asyncio
import gc
import os
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from clock import idle_time
from ctrl_c import pressed
from ends import await_and_go_on, ends_if_cancelled

import bandmaster as bm
from bandmaster import Concat, Dispatch, Mesh, Reduce, Split, TransferProtocol, register

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

    @register(TransferProtocol(Split("dp", balance="cost"), Concat("dp")))
    def costly(self, rows):
        return rows

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
        self.log = ["begun"]
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


@pytest.mark.backends("inprocess")
def test_a_stream_ends_its_generators_though_ctrl_c_keeps_it_from_the_user(backend):
    with bm.ResourcePool([1], backend=backend) as pool:
        group = bm.WorkerGroup(pool, Rows)
        for n in range(1, 2000):
            made = []  # outside, as Python ignores Ctrl-C as the last reference ends
            was_pressed = pressed(lambda: made.append(group.endless.stream([1])), n)  # noqa: B023
            made.clear()
            deadline = idle_time() + 30
            while ["begun"] in group.logged():
                assert idle_time() < deadline, n
                gc.collect()  # what the traceback of Ctrl-C keeps
            if not was_pressed:
                break
        assert 5 < n < 1999


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


@pytest.mark.backends("local")
def test_a_task_that_is_cancelled_as_it_gets_an_item_ends_then(three):
    async def take(stream):
        await await_and_go_on(anext(stream))

    async def main(n_rounds):
        stream, has_come = three.double.options(timeout=60).stream(np.arange(3)), threading.Event()
        three.ranks.submit().add_done_callback(lambda _: has_come.set())  # behind it
        assert has_come.wait(30)
        return await ends_if_cancelled(asyncio.ensure_future(take(stream)), n_rounds)

    assert [asyncio.run(main(n_rounds)) for n_rounds in range(6)] == [True] * 6


# --- several at once, and what goes wrong -------------------------------------------------------------------------

STREAMS = {
    "items": lambda group: group.items.stream(np.arange(30)),
    "ranks": lambda group: group.double.stream(np.arange(30)),
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
@pytest.mark.parametrize("kind", ["items", "ranks"])
def test_another_thread_may_close_a_stream(three, gate, kind):
    streams = {
        "items": lambda: three.slow_items.stream([1, 2, 3], gate=str(gate)),
        "ranks": lambda: three.wait_for.stream([1, 2, 3], gates=(str(gate),) * 3),
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
@pytest.mark.parametrize("kind", ["items", "ranks"])
def test_a_stream_takes_rows_that_are_not_there(two, three, gate, kind):
    rows = two.wait_for.submit(np.arange(6), gates=(str(gate),) * 4)
    method = {"items": three.items, "ranks": three.double}[kind]
    stream = method.options(timeout=0.2).stream(rows)
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
def test_a_wait_for_a_call_behind_a_stream_names_the_call_that_makes_its_rows(two, three, gate):
    rows = two.wait_for.submit(np.arange(6), gates=(str(gate),) * 4)
    stream = three.double.stream(rows)
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
    stream = three.costly.stream(rows)
    gate.touch()
    with pytest.raises(bm.BatchError, match="balance='cost'"):
        next(stream)


# --- the end of streams -------------------------------------------------------------------------------------------


def test_a_group_that_is_closed_ends_streams(backend):
    with bm.ResourcePool([2], backend=backend) as pool:
        group = bm.WorkerGroup(pool, Rows)
        stream = group.endless.stream([1, 2])
        assert next(stream).result() == 0
        group.close()
        with pytest.raises((bm.WorkerDied, bm.ClosedError)):
            list(stream)
        assert list(stream) == []


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
    with three.fail_on.submit(np.arange(6), bad=3) as failed:
        assert isinstance(failed.exception(), bm.RemoteError)


def test_rows_of_items_are_freed_with_the_last_future(three):
    def use():
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


@in_parallel
def test_ctrl_c_cancels_what_is_waited_for(three, gate):
    timer = threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT])
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        list(three.wait_for.stream([0, 1, 2], gates=(str(gate),) * 3))
    assert three.ranks.options(timeout=30)()[0] == (0, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_error": "ignore"}, "on_error must be 'raise' or 'return', got 'ignore'"),
        (
            {"on_error": "return"},
            r"on_error is about the items of a generator; .*map\(rows, on_error='return'\)",
        ),
        ({"pull": 2}, r"pull= was removed: register the method with .* and call method.map\(rows, chunk=n\)"),
        ({"pul": 2}, "a call has no option 'pul'"),
        ({"replica": 1}, "no option 'replica'; .*; replica is for methods that are registered with Dispatch.REQUEST"),
    ],
)
def test_options_that_make_no_sense(three, options, message):
    with pytest.raises(bm.UsageError, match=message):
        three.double.options(**options)
    with pytest.raises(bm.UsageError, match=r"maxsize is for group.method.options\(...\)"):
        three.set_default_options(maxsize=2)
