"""Several futures at once: callbacks, `wait`, `as_completed`, and futures in event loops."""

import asyncio
import gc
import threading
import time
import tracemalloc
import weakref

import pytest
from clock import idle_time
from ends import await_and_go_on, ends_if_cancelled

import bandmaster as bm
from bandmaster import Dispatch, register
from bandmaster.calls.call import Call
from bandmaster.calls.open_work import OpenWork
from bandmaster.calls.progress import Progress, progress


class Waits(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def add(self, x):
        return x + self.rank

    @register(Dispatch.ONE_TO_ALL)
    def fail(self):
        raise ValueError("planned")

    @register(Dispatch.ONE_TO_ALL)
    def sleep(self, seconds, begun=None):
        if begun:
            open(begun[self.rank], "w").close()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(0.01)
        return "slept"


@pytest.fixture(scope="module")
def groups():
    """Two groups on processes of their own, so that one is at work while the other one is."""
    with bm.ResourcePool([2]) as pool:
        yield bm.WorkerGroup(pool, Waits), bm.WorkerGroup(pool, Waits)


def n_threads():
    return sum(thread.name == "bandmaster-progress" for thread in threading.enumerate())


def test_a_timeout_may_be_as_long_as_one_likes(groups):
    futures = [group.add.submit(1) for group in groups]
    assert bm.wait(futures, timeout=1e12).done == set(futures)
    assert set(bm.as_completed(futures, timeout=1e12)) == set(futures)


def test_one_thread_calls_all_callbacks_and_ends_with_them(groups):
    barrier, seen = threading.Event(), []
    futures = [group.sleep.submit(1) for group in groups] + [groups[0].add.submit(n) for n in range(100)]
    for future in futures:
        future.add_done_callback(lambda future: (seen.append(future.result()), len(seen) == 102 and barrier.set()))
    assert n_threads() == 1
    assert barrier.wait(30)
    assert sorted(seen[n] for n in range(102) if "slept" not in seen[n]) == [[n, n + 1] for n in range(100)]
    deadline = idle_time() + 10
    while n_threads() and idle_time() < deadline:
        time.sleep(0.01)
    assert not n_threads()


def test_a_callback_comes_though_another_thread_reads_the_reply(groups):
    group, told = groups[0], threading.Event()
    first = group.sleep.submit(0.2)
    first.add_done_callback(lambda _: told.set())
    assert group.add(1) == [1, 2]  # this thread has read the replies of both calls
    assert told.wait(10)


def test_a_callback_comes_though_another_thread_has_taken_the_replies_without_making_the_result(groups, monkeypatch):
    """As a thread does that waits for a later call: it takes the replies of earlier ones."""
    take, wait, told, has_looked = Call._take, Call.wait, threading.Event(), threading.Event()

    def take_all(call, timeout_s):
        while threading.current_thread() is driving and call.tickets:
            take(call, 0.05)
            if not call.tickets:
                has_looked.clear()
                progress.look_at(call)  # as the last ticket has done
                assert has_looked.wait(10), "the thread of all callbacks has found the call in use"
        take(call, timeout_s)

    def look(call, timeout_s):
        is_done = wait(call, timeout_s)
        has_looked.set()
        return is_done

    future = groups[0].sleep.submit(0.3)
    driving = threading.Thread(target=future._call.drive)
    monkeypatch.setattr(Call, "_take", take_all)
    monkeypatch.setattr(Call, "wait", look)
    future.add_done_callback(lambda _: told.set())
    driving.start()
    driving.join()
    assert told.wait(10)


def test_wait_for_all_the_first_or_the_first_that_fails(groups):
    slow, quick = groups[0].sleep.submit(0.5), groups[1].add.submit(1)
    assert bm.wait([slow, quick], return_when="FIRST_COMPLETED") == ({quick}, {slow})
    assert bm.wait([slow, quick], timeout=0) == ({quick}, {slow})
    assert bm.wait([slow, quick]) == ({slow, quick}, set())
    slow, failing, quick = groups[0].sleep.submit(0.5), groups[1].fail.submit(), groups[1].add.submit(1)
    done, not_done = bm.wait([slow, failing, quick], return_when="FIRST_EXCEPTION")
    assert failing in done
    assert slow in not_done
    assert bm.wait([]) == (set(), set())
    slow.result()


def test_futures_come_as_they_are_completed(groups):
    slow, quick = groups[0].sleep.submit(0.3), groups[1].add.submit(1)
    assert list(bm.as_completed([slow, quick])) == [quick, slow]
    slow = groups[0].sleep.submit(0.5)
    with pytest.raises(TimeoutError, match=r"1 of 2 futures were not done in 0\.1 s"):
        list(bm.as_completed([slow, quick], timeout=0.1))
    slow.result()


def first_of_all(futures):
    bm.wait(futures, return_when="FIRST_COMPLETED")


def first_of_an_iterator(futures):
    for _ in bm.as_completed(futures):
        break


@pytest.mark.parametrize("wait", [first_of_all, first_of_an_iterator])
def test_a_future_that_was_waited_for_is_not_kept_by_a_slower_one(groups, wait):
    slow, futures = groups[0].sleep.submit(3), [groups[1].add.submit(n) for n in range(5)]
    seen = [weakref.ref(future) for future in futures]
    wait([slow, *futures])
    bm.wait(futures)
    del futures
    gc.collect()
    while any(future() is not None for future in seen) and not slow.done():
        time.sleep(0.01)  # the thread of callbacks may still have one
    assert not slow.done(), "they are gone before it is done"
    slow.result()


def test_a_future_can_be_polled_for_ever(groups):
    slow = groups[0].sleep.submit(2)
    bm.wait([slow], timeout=0)
    tracemalloc.start()
    for _ in range(300):
        bm.wait([slow], timeout=0)
    grown = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert not slow.done()
    assert grown < 30_000, "less than 100 bytes for a poll"
    slow.result()


async def value_of(future):
    return await future


@pytest.mark.parametrize(
    "wait",
    [lambda one: bm.wait([one]), lambda one: list(bm.as_completed([one])), lambda one: asyncio.run(value_of(one))],
)
def test_a_callback_that_would_wait_for_others_raises(groups, wait):
    def use(_):
        pending = groups[1].sleep.submit(30)
        try:
            wait(pending)
        except BaseException as error:
            raised.append(error)
        pending.cancel()
        raised.append(bm.wait([pending], timeout=0).done if pending.exception() else None)
        has_ended.set()

    raised, has_ended = [], threading.Event()
    groups[0].sleep.submit(0.05).add_done_callback(use)
    assert has_ended.wait(20)
    error, done = raised
    assert isinstance(error, bm.UsageError)
    assert "call result() of each future, or wait in a thread of your own" in str(error)
    assert len(done) == 1, "which are done, it may know"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda future: bm.wait([future, 3]), "wait takes futures returned by submit(), got int"),
        (lambda future: bm.as_completed([None]), "as_completed takes futures returned by submit(), got NoneType"),
        (lambda future: bm.wait([future], timeout=-1), "timeout of wait must be a non-negative number"),
        (lambda future: bm.wait([future], return_when="any"), "must be one of 'ALL_COMPLETED'"),
    ],
)
def test_what_cannot_be_waited_for_is_refused(groups, call, words):
    with pytest.raises(bm.UsageError) as caught:
        call(groups[0].add.submit(1))
    assert words in str(caught.value)


def test_futures_in_an_event_loop(groups):
    async def wait_long(future):
        return await future

    async def main():
        one, other = groups
        assert await asyncio.gather(one.add.submit(1), other.add.submit(2)) == [[1, 2], [2, 3]]
        assert await asyncio.wait_for(one.add.submit(3), 30) == [3, 4]
        slow = one.sleep.submit(30)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(slow, 0.2)
        assert slow.cancelled(), "as with every awaitable that wait_for gives up"
        task = asyncio.ensure_future(wait_long(one.sleep.submit(30)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await one.add.submit(4)

    assert asyncio.run(main()) == [4, 5]


def test_a_task_that_is_cancelled_as_the_reply_arrives_ends_then(groups):
    async def main(n_rounds):
        future, has_come = groups[0].sleep.options(timeout=60).submit(0.01), threading.Event()
        task = asyncio.ensure_future(await_and_go_on(future))
        await asyncio.sleep(0)
        future.add_done_callback(lambda _: has_come.set())
        assert has_come.wait(30), "while the event loop does nothing else"
        return await ends_if_cancelled(task, n_rounds)

    assert [asyncio.run(main(n_rounds)) for n_rounds in range(6)] == [True] * 6


def test_a_call_may_end_after_the_event_loop_in_which_it_was_awaited(groups, caplog):
    async def give_up():
        future = groups[0].sleep.options(timeout=0.01).submit(0.3)
        with pytest.raises(bm.CallTimeout):
            await future
        return future

    future, has_ended = asyncio.run(give_up()), threading.Event()
    future.add_done_callback(lambda _: has_ended.set())
    assert has_ended.wait(30)
    assert future.result() == ["slept", "slept"]
    assert not caplog.records, "nothing was wrong"


def test_callbacks_run_though_another_thread_reads_at_the_same_moment(groups, tmp_path):
    for n in range(30):
        begun = [tmp_path / f"{n}-{rank}" for rank in range(2)]
        future, called = groups[0].sleep.submit(30, [str(path) for path in begun]), threading.Event()
        future.add_done_callback(lambda _, called=called: called.set())
        while not all(path.exists() for path in begun):
            pass
        future.cancel()
        groups[0].add(1)  # reads the replies to the earlier call as well
        assert called.wait(5)


def test_ranks_get_the_calls_of_two_threads_in_the_order_in_which_they_are_driven(groups, monkeypatch):
    """Else the ranks of a failed call wait for a thread that drives the one behind it alone."""
    group, add, is_added, futures = groups[0], OpenWork.add, threading.Event(), []

    def add_slowly(work, call):
        add(work, call)
        if call.site.method == "Waits.add":
            is_added.set()
            time.sleep(0.3)  # in which the other thread would send its call

    monkeypatch.setattr(OpenWork, "add", add_slowly)
    first = threading.Thread(target=lambda: futures.append(group.add.submit(1)))
    first.start()
    assert is_added.wait(30)
    failed = group.fail.submit()
    first.join()
    assert futures[0].result(timeout=30) == [1, 2]
    with pytest.raises(bm.RemoteError):
        failed.result(timeout=30)


class Rows(bm.Worker):
    @register(Dispatch.DP_PROTO)
    def late(self, rows):
        time.sleep(0.5)
        return rows

    @register(Dispatch.DP_PROTO)
    def echo(self, rows):
        return rows


def test_two_groups_take_rows_of_each_other_by_turns(caplog):
    """The thread that sends the calls of one comes back to them from the calls of the other."""
    with bm.ResourcePool([1], max_colocate_count=2) as pool, bm.ResourcePool([1], backend="inprocess") as here:
        source, one, other = bm.WorkerGroup(pool, Rows), bm.WorkerGroup(pool, Rows), bm.WorkerGroup(here, Rows)
        rows, has_ended = source.late.submit([1, 2]), threading.Event()
        one.echo.submit(rows)
        of_other = other.echo.submit(rows)
        one.echo.submit(of_other)
        behind = one.echo.submit([3])
        last = other.echo.submit(behind)
        last.add_done_callback(lambda _: has_ended.set())
        assert has_ended.wait(30)
        assert (behind.result(), last.result()) == ([3], [3])
    assert not caplog.records, "no callback raised"


def test_a_call_that_is_over_is_not_kept_by_the_thread_of_callbacks():
    class Over:
        pass

    progress, watch = Progress(), Over()
    seen = weakref.ref(watch)
    progress.look_at(watch)  # as a thread does that had missed its end, when the thread of callbacks has ended
    del watch
    assert seen() is None
