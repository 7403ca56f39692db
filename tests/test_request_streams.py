"""Streams of requests: the items that one replica makes, its place until they end, and the ends that there are."""

import asyncio
import contextlib
import copy
import gc
import os
import pickle
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from ends import until

import bandmaster as bm
from bandmaster import Dispatch, Only, Route, TransferProtocol, register
from bandmaster.platform.locks import run_if_free
from bandmaster.requests.router import Router
from bandmaster.requests.stream import GeneratorRequest
from bandmaster.wire.status_page import Activity

DEADLINE = 20.0  # of whatever must end
PLACES = 3


def unreadable():
    raise ValueError("no such thing here")


class Unreadable:
    def __reduce__(self):
        return unreadable, ()


class Speaker(bm.Worker):
    def __init__(self):
        self.n_begun = self.n_made = self.n_ended = 0

    @register(Dispatch.REQUEST, concurrency=PLACES)
    async def count(self, n, fails=False):
        """Yield 0 to n - 1; forever for None."""
        self.n_begun += 1
        try:
            made = 0
            while made != n:
                await asyncio.sleep(0)
                self.n_made += 1
                yield made
                made += 1
            if fails:
                raise ValueError("no more")
        finally:
            self.n_ended += 1

    @register(Dispatch.REQUEST, concurrency=PLACES)
    async def unreadable(self):
        self.n_begun += 1
        try:
            yield 0
            while True:
                yield Unreadable()
        finally:
            self.n_ended += 1

    @register(Dispatch.REQUEST, concurrency=PLACES)
    async def outstay(self, gate):
        """Stay until the gate opens, whatever is cancelled."""
        yield "first"
        while not os.path.exists(gate):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.001)

    @register(Dispatch.REQUEST, concurrency=PLACES)
    async def ticks(self, n):
        for number in range(n):
            await asyncio.sleep(0.4)
            yield number

    @register(Dispatch.REQUEST, concurrency=PLACES)
    async def wait(self):
        try:
            yield "first"
            await asyncio.Event().wait()
        finally:
            self.n_ended += 1

    @register(Dispatch.REQUEST, concurrency=PLACES)
    async def arrays(self, n, size):
        array = np.zeros(size)
        for _ in range(n):
            yield array
            array += 1

    @register(Dispatch.REQUEST, concurrency=PLACES)
    async def sized(self, sizes):
        for number, size in enumerate(sizes):
            yield np.full(size, number)
        raise ValueError("x" * sizes[-1])

    @register(Dispatch.REQUEST, concurrency=PLACES)
    async def bad(self, what):
        yield 1
        if what == "item":
            yield threading.Lock()
        os.kill(os.getpid(), signal.SIGKILL)

    @register(Dispatch.REQUEST, concurrency=8)
    async def made(self, at_least=0):
        while self.n_made < at_least:
            await asyncio.sleep(0.001)
        return self.n_made

    @register(Dispatch.ONE_TO_ALL)
    def take_counts(self):
        counts = self.n_begun, self.n_made, self.n_ended
        self.n_begun = self.n_made = self.n_ended = 0
        return counts


class Sharded(bm.Worker):
    def __init__(self):
        self.log = []

    @register(TransferProtocol(Route("dp"), Only(tp=-1)), concurrency=4)
    async def tokens(self, name, n):
        for number in range(n):
            self.log.append((name, number))
            yield self.rank, number

    @register(TransferProtocol(Route("dp"), Only(tp=-1)), concurrency=4)
    async def hold(self, rank, folder):
        while self.rank == rank and not (folder / "gate").exists():
            await asyncio.sleep(0.001)

    @register(Dispatch.ONE_TO_ALL)
    def take_log(self):
        log, self.log = self.log, []
        return log


class Reader(bm.Worker):
    def __init__(self, group):
        self.group = group

    @register(Dispatch.REQUEST)
    async def read(self):
        """The seconds from the end of a stream to that of a call behind it."""
        stream, ended = self.group.ticks.options(replica=0).stream(2), []

        async def read():
            async for _ in stream:
                pass
            ended.append(time.monotonic())

        reading = asyncio.ensure_future(read())
        await self.group.take_counts.submit()
        await reading
        return time.monotonic() - ended[0]


class Taker(Speaker):
    def on_yield(self):
        """Nothing."""

    def on_resume(self):
        """Nothing."""


@pytest.fixture(scope="module")
def group(backend):
    with bm.ResourcePool([2], backend=backend) as pool:
        made = bm.WorkerGroup(pool, Speaker)
        made.made.all().result()
        yield made


@pytest.fixture
def counts(group):
    """What has begun, was made and has ended on all ranks since the last time, once no request runs any more."""
    group.take_counts()
    return lambda: tuple(map(sum, zip(*group.take_counts(), strict=True)))


def has_processes(group):
    return not isinstance(group.workers[0], Speaker)


async def listed(stream):
    return [item async for item in stream]


# --- items --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("maxsize", [1, 2, 16, 1000])
@pytest.mark.parametrize("n", [0, 1, 2, 16, 17, 100])
def test_items_come_in_their_order(group, n, maxsize):
    count = group.count.options(maxsize=maxsize)
    assert list(count.stream(n)) == list(range(n)) == asyncio.run(listed(count.stream(n)))


def test_many_streams_are_read_beside_each_other(group):
    async def main():
        return await asyncio.gather(*[listed(group.count.stream(n)) for n in range(30)])

    assert asyncio.run(main()) == [list(range(n)) for n in range(30)]


def test_several_threads_and_event_loops_read(group):
    found = []
    threads = [threading.Thread(target=lambda: found.append(list(group.count.stream(40)))) for _ in range(3)]
    threads += [threading.Thread(target=lambda: found.append(asyncio.run(listed(group.count.stream(40)))))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert found == [list(range(40))] * 4


def test_tasks_that_share_a_stream_get_each_item_once(group):
    async def main():
        stream = group.count.options(maxsize=3).stream(50)
        return await asyncio.gather(*[listed(stream) for _ in range(4)])

    assert sorted(item for some in asyncio.run(main()) for item in some) == list(range(50))


@pytest.mark.parametrize("size", [10, 100_000])
def test_items_are_copies_as_they_were_when_they_were_made(group, size):
    found = list(group.arrays.stream(5, size))
    assert [(array.shape, array.min(), array.max()) for array in found] == [((size,), n, n) for n in range(5)]
    found[0] += 7
    assert found[1].max() == 1


@pytest.mark.parametrize("maxsize", [1, 3, 100])
def test_small_and_large_items_and_errors_come_in_their_order(group, maxsize):
    sizes, found = [1, 30_000, 2, 2, 100_000, 0, 5_000, 30_000, 1] * 3, []
    with pytest.raises(bm.RemoteError):
        found.extend(group.sized.options(maxsize=maxsize).stream([*sizes, 100_000]))
    assert [(len(item), set(item.tolist())) for item in found] == [
        (size, {number} if size else set()) for number, size in enumerate([*sizes, 100_000])
    ]


def test_ranks_of_a_replica_run_the_generators_in_one_order(make_group):
    group = make_group(bm.Mesh(dp=2, tp=2), Sharded)

    async def main():
        tokens = group.tokens.options(maxsize=2)
        return await asyncio.gather(*[listed(tokens.options(replica=n % 2).stream(n, 9)) for n in range(6)])

    found = asyncio.run(main())
    assert found == [[(1 + 2 * (n % 2), number) for number in range(9)] for n in range(6)], "from the last of each"
    logs = [[entry for entry in log if entry[1] == 0] for log in group.take_log()]
    assert logs[0] == logs[1] == [(0, 0), (2, 0), (4, 0)] and logs[2] == logs[3] == [(1, 0), (3, 0), (5, 0)]


@pytest.mark.backends("local", "ray")
def test_a_rank_of_a_replica_that_begins_later_yields_as_many_items(make_group, tmp_path):
    group = make_group(bm.Mesh(dp=1, tp=2), Sharded)
    held = group.hold(0, tmp_path)
    before = group.take_log.submit()
    stream = group.tokens.options(maxsize=4, timeout=DEADLINE).stream("x", 20)
    assert [next(stream)[1] for _ in range(4)] == [0, 1, 2, 3], "though rank 0 has still to end the calls before"
    (tmp_path / "gate").touch()
    assert [number for _, number in stream] == list(range(4, 20))
    held.result(DEADLINE), before.result(DEADLINE)


@pytest.mark.backends("local")
def test_threads_that_share_a_stream_wait_for_their_next_items(group):
    stream = group.ticks.options(timeout=2.0).stream(8)
    with ThreadPoolExecutor(5) as threads:
        found = [threads.submit(list, stream) for _ in range(5)]
        assert sorted(item for one in found for item in one.result(DEADLINE)) == list(range(8))


@pytest.mark.backends("local", "ray")
def test_a_call_of_a_worker_behind_its_stream_begins_as_that_ends(make_group):
    assert make_group(1, Reader, make_group(1, Speaker)).read().result(DEADLINE) < 4.0, "seconds"


def test_a_stream_that_was_closed_keeps_no_items(group, counts):
    stream = group.arrays.options(replica=0).stream(100, 40_000)
    next(stream)
    stream.close()
    assert counts() == (0, 0, 0) and not stream._run.items


# --- places and back-pressure -------------------------------------------------------------------------------------


def test_a_generator_is_ahead_of_its_reader_by_no_more_than_maxsize(group, counts):
    with group.count.options(replica=0, maxsize=5).stream(None) as stream:
        made = group.made.options(replica=0)
        assert made(5).result(DEADLINE) == 5
        for number in range(12):
            assert next(stream) == number and made().result(DEADLINE) <= number + 6
    assert counts()[0::2] == (1, 1)


def test_a_stream_has_its_place_until_it_ends(group, counts):
    streams = [group.count.options(replica=0).stream(None) for _ in range(PLACES)]
    with pytest.raises(bm.CallTimeout, match=r"Speaker.count was not sent within 0.05 s; replica 0 runs 3 requests"):
        group.count.options(replica=0, timeout=0.05).stream(1)
    assert next(group.count.stream(1)) == 0, "the other replica has one"
    streams.pop().close()
    assert list(group.count.options(replica=0).stream(2)) == [0, 1]
    for stream in streams:
        stream.close()
    assert counts()[0::2] == (PLACES + 2, PLACES + 2)


def test_what_a_stream_has_read_needs_no_garbage_collection(group):
    list(group.count.stream(3))
    gc.collect()
    gc.disable()
    try:
        list(group.count.stream(3))
        assert not [one for one in gc.get_objects() if isinstance(one, GeneratorRequest)]
    finally:
        gc.enable()


def test_a_turn_begins_when_the_stream_of_a_rival_has_ended_though_its_items_are_not_taken(make_pool):
    pool = make_pool([1])
    first, second = [bm.WorkerGroup(pool, Taker, name=name) for name in ("first", "second")]
    with first.turn():
        stream = first.ticks.stream(3)
        assert next(stream) == 0
    with second.turn(timeout=DEADLINE):
        second.take_counts()
    with first.turn():
        assert list(stream) == [1, 2]


def test_streams_wait_for_a_place_in_an_event_loop(group):
    async def main():
        count = group.count.options(replica=0)
        held = [count.stream(None) for _ in range(PLACES)]
        waiting = [asyncio.ensure_future(listed(count.stream(3))) for _ in range(5)]
        never = count.stream(3)
        assert [await anext(stream) for stream in held] == [0] * PLACES and not any(task.done() for task in waiting)
        never.close()
        for stream in held:
            stream.close()
        assert await listed(never) == []
        return await asyncio.gather(*waiting)

    assert asyncio.run(main()) == [[0, 1, 2]] * 5


def test_a_call_of_all_ranks_waits_for_a_stream_that_goes_on(group):
    stream = group.count.options(replica=0, maxsize=2).stream(100)
    assert next(stream) == 0
    begins = threading.Event()
    found = []

    def call():
        begins.set()
        found.append(group.take_counts()[0])

    thread = threading.Thread(target=call)
    thread.start()
    begins.wait(DEADLINE)
    assert list(stream) == list(range(1, 100))
    thread.join(DEADLINE)
    assert found[0][2] >= 1, "its finally block has run before"


@pytest.mark.backends("local", "ray")
def test_calls_behind_a_stream_do_not_hold_it_up(group, counts):
    stream = group.count.options(replica=0, maxsize=2, timeout=DEADLINE).stream(100)
    calls = [group.take_counts.submit() for _ in range(300)]  # more than are sent before there are replies
    behind = group.count.options(replica=0).stream(3)
    assert list(stream) == list(range(100)) and list(behind) == [0, 1, 2]
    assert sum(call.result(DEADLINE)[0][2] for call in calls) == 1


@pytest.mark.backends("inprocess")
def test_a_stream_goes_on_while_a_call_waits_for_it_and_another_thread_sends_requests(group):
    count = group.count.options(replica=0, maxsize=1)
    streams = [count.stream(50) for _ in range(PLACES)]
    with ThreadPoolExecutor(3) as threads:
        waiting = threads.submit(lambda: list(count.stream(2)))
        while not Router.of(group._submitter, group.count._spec).waiting:
            assert not waiting.done(), "it waits for a place"
        call = threads.submit(group.take_counts)
        while run_if_free(group._submitter.workers()._running, bool):
            assert not call.done(), "it waits for the stream"
        request = threads.submit(lambda: group.made().result(DEADLINE))
        while run_if_free(group._submitter.work.sending.lock, bool):
            assert not request.done(), "it waits for the call"
        assert [list(stream) for stream in streams] == [list(range(50))] * PLACES
        assert call.result(DEADLINE) and request.result(DEADLINE) >= 0 and waiting.result(DEADLINE) == [0, 1]


@pytest.mark.backends("inprocess")
@pytest.mark.parametrize("end", ["restart", "close"])
def test_a_call_that_waits_for_a_stream_ends_with_the_workers(end, make_group):
    group = make_group(1, Speaker)
    stream = group.count.options(maxsize=1).stream(None)
    assert next(stream) == 0
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(group.take_counts)
        while run_if_free(group._submitter.workers()._running, bool):
            assert not call.done(), "it waits for the stream"
        getattr(group, end)()
        with pytest.raises(bm.WorkerDied):
            call.result(DEADLINE)
    with pytest.raises(bm.WorkerDied):
        list(stream)


# --- ends ---------------------------------------------------------------------------------------------------------


def _close(group):
    stream = group.count.stream(None)
    assert next(stream) == 0
    stream.close()
    stream.close()
    assert list(stream) == [] and "ended" in repr(stream)


def _leave_the_block(group):
    with pytest.raises(KeyError), group.count.stream(None) as stream:
        for item in stream:
            raise KeyError(item)


def _break(group):
    for _ in group.count.stream(None):
        break
    gc.collect()


def _break_out_of_async(group):
    async def main():
        async for _ in group.count.stream(None):
            break

    asyncio.run(main())
    gc.collect()


def _cancel_the_task(group):
    async def main():
        began = asyncio.Event()

        async def read():
            async for _ in group.wait.stream():
                began.set()

        task = asyncio.ensure_future(read())
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def _drop_a_closed_event_loop(group):
    async def read(began):
        async for _ in group.wait.stream():
            began.set()

    async def begin():
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # else it tells of the task
        began = asyncio.Event()
        reading = asyncio.ensure_future(read(began))
        await began.wait()
        return weakref.ref(reading)

    loop = asyncio.new_event_loop()
    reading = loop.run_until_complete(begin())
    loop.close()
    del loop

    def is_collected():
        gc.collect()  # again: a thread that has just put an item into the stream may still refer to the loop
        return reading() is None

    until(is_collected)


def _be_late(group):
    stream = group.wait.options(timeout=0.1).stream()
    assert next(stream) == "first"
    with pytest.raises(
        bm.CallTimeout, match=r"Speaker.wait got no item from rank . within 0.1 s; the stream was"
    ) as late:
        next(stream)
    assert late.value.stream is stream and list(stream) == []
    if has_processes(group):
        assert "in wait" in str(late.value) and "another task" in str(late.value)
        assert "item_stream" not in str(late.value) and str(late.value).count("another task") == 1


def test_a_wait_for_an_item_of_a_cancelled_stream_that_does_not_stop_advises_what_can_be_done(group, gate):
    stream = group.outstay.options(timeout=0.1).stream(gate)
    assert next(stream) == "first"
    group.cancel()
    with pytest.raises(bm.CallTimeout, match="the stream was closed; iterate over a new one") as late:
        next(stream)
    assert late.value.future is None and "error.future" not in str(late.value)


def _be_late_in_a_loop(group):
    async def main():
        stream = group.wait.options(timeout=0.1).stream()
        assert await anext(stream) == "first"
        with pytest.raises(bm.CallTimeout, match="got no item from rank"):
            await anext(stream)

    asyncio.run(main())


def _cancel_the_group(group):
    stream = group.wait.stream()
    assert next(stream) == "first"
    assert group.cancel() == 1
    with pytest.raises(bm.CallCancelled, match=r"Speaker.wait was cancelled"):
        next(stream)


def _close_in_another_thread(group):
    stream = group.wait.stream()
    assert next(stream) == "first"
    timer = threading.Timer(0.05, stream.close)
    timer.start()
    assert list(stream) == []
    timer.join()


def _raise(group):
    stream = group.count.options(replica=1).stream(5, fails=True)
    found = []
    with pytest.raises(bm.RemoteError, match=r"Speaker.count failed on rank 1 \(dp=1, .*ValueError: no more"):
        found.extend(stream)
        for item in stream:
            found.append(item)
    assert list(stream) == []


ENDS = [_close, _leave_the_block, _break, _break_out_of_async, _cancel_the_task, _be_late, _be_late_in_a_loop]
ENDS += [_cancel_the_group, _close_in_another_thread, _raise, _drop_a_closed_event_loop]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_its_finally_block_runs_and_its_place_is_free(group, counts, end):
    end(group)
    deadline = time.monotonic() + DEADLINE
    while not (ended := counts()[2]):  # garbage is closed by another thread
        assert time.monotonic() < deadline
    assert ended == 1
    for replica in (0, 1):
        streams = [group.count.options(replica=replica, timeout=DEADLINE).stream(1) for _ in range(PLACES)]
        assert [list(stream) for stream in streams] == [[0]] * PLACES


def test_the_items_before_an_error_come_first(group):
    stream, found = group.count.options(maxsize=3).stream(7, fails=True), []
    with pytest.raises(bm.RemoteError):
        for item in stream:
            found.append(item)
    assert found == list(range(7))


def test_an_item_that_cannot_be_pickled(group):
    stream = group.bad.stream("item")
    assert next(stream) == 1
    with pytest.raises(bm.CollectError, match="the returned lock cannot be pickled"):
        next(stream)


@pytest.mark.parametrize("listing", [list, lambda stream: asyncio.run(listed(stream))], ids=["for", "async for"])
def test_an_item_that_cannot_be_unpickled_ends_the_stream(group, counts, listing):
    stream = group.unreadable.options(timeout=DEADLINE).stream()
    with pytest.raises(bm.CollectError, match="no such thing here"):
        listing(stream)
    assert listing(stream) == []
    n_begun, _, n_ended = counts()
    assert (n_begun, n_ended) == (1, 1)


@pytest.mark.backends("local", "ray")
def test_the_death_of_its_replica(make_group):
    group = make_group(2, Speaker)
    stream = group.bad.options(replica=1, maxsize=1).stream("death")
    assert next(stream) == 1
    with pytest.raises(bm.WorkerDied, match=r"Speaker.bad.* on rank 1 \(dp=1"):
        next(stream)
    assert [list(group.count.stream(3)) for _ in range(4)] == [[0, 1, 2]] * 4
    group.close()


def test_closing_the_group(make_group):
    group = make_group(1, Speaker)
    stream = group.wait.stream()
    assert next(stream) == "first"
    group.close()
    with pytest.raises(bm.WorkerDied, match="the group was closed"):
        next(stream)


# --- mistakes and tools -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda group: group.count(1), bm.UsageError, r"Speaker.count yields items: iterate over count.stream\(...\)"),
        (lambda group: group.count.all(1), bm.UsageError, "Speaker.count yields items"),
        (lambda group: group.made.stream(), bm.UsageError, r"Speaker.made has one value and no stream, .*call made\("),
        (lambda group: group.count.stream(), bm.ArgumentError, "count"),
        (lambda group: group.count.stream(threading.Lock()), bm.ArgumentError, "argument 'n' of Speaker.count"),
        (
            lambda group: group.count.options(maxsize=0),
            bm.UsageError,
            "maxsize must be a whole number of 1 or more",
        ),
    ],
)
def test_mistakes(group, use, error, message):
    with pytest.raises(error, match=message):
        use(group)


@pytest.mark.backends("inprocess")
@pytest.mark.parametrize(
    "stream",
    [
        lambda group: group.count.stream(3),
        lambda group: group.made.map([0, 0, 0]),
        lambda group: group.take_counts.stream(),
    ],
)
def test_a_stream_cannot_be_copied_as_the_end_of_the_copy_would_end_it(group, stream):
    with stream(group) as one:
        for again in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(
                TypeError, match="a stream cannot be copied or pickled: its end cancels its other results"
            ):
                again(one)
        assert len(list(one)) in (2, 3)


def test_a_generator_that_is_not_async_is_refused():
    def tokens(self):
        yield 1

    with pytest.raises(bm.ProtocolError, match=r"tokens is a generator, .*; write async def"):
        register(Dispatch.REQUEST)(tokens)


@pytest.mark.backends("local")
def test_it_is_shown_as_running(group):
    with group.wait.options(replica=0).stream() as first, group.wait.options(replica=0).stream() as second:
        assert next(first) == next(second) == "first"
        shown = Activity.of(group.workers[0].pid)
        assert (shown.method, shown.n_more) == ("wait", 1)
    group.take_counts()
    assert Activity.of(group.workers[0].pid).method == ""
