"""Calls that fail, hang or are cancelled: one error with its cause, in time; the group is usable or says it is not."""

import asyncio
import contextlib
import gc
import os
import re
import signal
import socket
import threading
import time
import weakref

import numpy as np
import pytest
from clock import idle_time
from ends import deadlock, wait_for

import bandmaster as bm
from bandmaster import CallCancelled, CallTimeout, Dispatch, RemoteError, WorkerDied, register
from bandmaster.wire.lanes import LaneClient


class Unpicklable(Exception):
    def __init__(self, message, lock):
        super().__init__(message)
        self.lock = lock


class BadToLoad:
    """Unpickles badly, on whoever gets it."""

    def __reduce__(self):
        return _refuse, ()


def _refuse():
    raise ValueError("cannot be made here")


class Faulty(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def echo(self, value):
        return value

    @register(Dispatch.ONE_TO_ALL)
    def raise_on(self, ranks, message="boom"):
        if self.rank in ranks:
            raise ValueError(message)
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def raise_or_hold(self, gate):
        """Fail on rank 0; the others end when the gate is there."""
        if self.rank == 0:
            raise ValueError("at once")
        while not os.path.exists(gate):
            time.sleep(0.001)

    @register(Dispatch.ONE_TO_ALL)
    def refuse(self, array):
        gc.disable()
        self.seen = weakref.ref(array)
        raise ValueError("refused")

    @register(Dispatch.ONE_TO_ALL)
    async def refuse_later(self, array):
        await asyncio.sleep(0)
        self.refuse(array)

    @register(Dispatch.REQUEST, concurrency=2)
    async def refuse_request(self, array):
        await self.refuse_later(array)

    @register(Dispatch.REQUEST, concurrency=2)
    async def return_a_lock(self, array):
        with contextlib.suppress(ValueError):
            self.refuse(array)
        return threading.Lock()

    @register(Dispatch.ONE_TO_ALL)
    async def has_seen(self):  # on the event loop, behind what that does for a call that has ended
        gc.enable()
        return self.seen() is not None

    @register(Dispatch.ONE_TO_ALL)
    def raise_what_cannot_be_pickled(self):
        raise Unpicklable("told by its text", threading.Lock())

    @register(Dispatch.ONE_TO_ALL)
    def return_what_cannot_be_pickled(self):
        return threading.Lock()

    @register(Dispatch.ONE_TO_ALL)
    def return_what_cannot_be_unpickled(self):
        return BadToLoad()

    @register(Dispatch.ONE_TO_ALL)
    def run_out_of_memory(self):
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (2 << 30, limit[1]))
        try:
            return len(bytearray(64 << 30))
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limit)

    @register(Dispatch.ONE_TO_ALL)
    def spin_on(self, ranks, raising=()):
        if self.rank in raising:
            raise ValueError("the first cause")
        while self.rank in ranks:
            pass
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def sleep_on(self, ranks, seconds=300):
        if self.rank in ranks:
            time.sleep(seconds)
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def end_late_on(self, ranks, raising):
        if self.rank in raising:
            raise ValueError("the first cause")
        end = time.monotonic() + (1 if self.rank in ranks else 0)
        while time.monotonic() < end:
            with contextlib.suppress(KeyboardInterrupt):  # it ends with a value all the same
                time.sleep(0.01)
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    async def await_on(self, ranks):
        self.n = getattr(self, "n", 0) + 1
        if self.rank in ranks:
            await asyncio.sleep(300)
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def n_awaited(self):
        return self.n

    @register(Dispatch.ONE_TO_ALL)
    def wait_for_a_signal_in_the_first_await(self, fifo):
        """The event loop tells through a fifo that it is about to be made, and is made once a signal has come."""
        number = signal.SIGRTMAX - 7  # what a call is interrupted with
        interrupt, new_event_loop, has_come = signal.getsignal(number), asyncio.new_event_loop, threading.Event()

        def note(*args):
            has_come.set()
            interrupt(*args)

        def new_event_loop_later():
            asyncio.new_event_loop = new_event_loop
            with open(fifo, "w"):
                pass
            while not has_come.is_set():
                pass
            return new_event_loop()

        signal.signal(number, note)
        asyncio.new_event_loop = new_event_loop_later

    @register(Dispatch.ONE_TO_ALL)
    def die_or_raise(self, dying):
        if self.rank == dying:
            time.sleep(0.1)  # the others have answered
            os._exit(3)
        raise ValueError("its own")

    @register(Dispatch.ONE_TO_ALL)
    def hang_in_c_on(self, ranks, raising=()):
        if self.rank in raising:
            raise ValueError("the first cause")
        if self.rank in ranks:
            _hang_in_c()
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def deadlock_on(self, ranks, raising=(), begun=None, gate=None):
        """Get stuck on some ranks, and raise on others once those have begun, or once there is a gate."""
        if self.rank in raising:
            wait_for(gate or begun)
            raise ValueError("the first cause")
        if self.rank in ranks:
            if begun is not None:
                begun.touch()
            deadlock()
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def tidy_badly(self, raising):
        if self.rank in raising:
            raise ValueError("the first cause")
        try:
            time.sleep(300)
        finally:
            raise RuntimeError("no way to tidy up")

    @register(Dispatch.ONE_TO_ALL)
    def all_reduce(self, raising):
        import torch
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo")
        if self.rank in raising:
            raise ValueError("the first cause")
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()


def _hang_in_c():
    """A blocked read."""
    import ctypes

    ours, _theirs = socket.socketpair()
    ctypes.CDLL(None).recv(ours.fileno(), ctypes.create_string_buffer(1), 1, 0)


@pytest.fixture
def group(make_group):
    return make_group(3, Faulty)


def within(seconds):
    """A context that fails when it takes longer than this."""
    return _Within(seconds)


class _Within:
    def __init__(self, seconds):
        self.seconds = seconds

    def __enter__(self):
        self.start = idle_time()

    def __exit__(self, kind, *_):
        took = idle_time() - self.start
        assert took < self.seconds or kind is not None, f"took {took:.1f} s of at most {self.seconds}"


@pytest.mark.parametrize("ranks", [[1], [0, 2], [0, 1, 2]])
def test_a_method_raises_on_one_some_or_all_ranks(group, ranks):
    with within(5), pytest.raises(RemoteError, match=rf"failed on rank {ranks[0]} \(dp={ranks[0]}") as caught:
        group.raise_on(ranks)
    error = caught.value
    assert list(error.failures) == ranks
    assert isinstance(error.__cause__, ValueError)
    assert error.group == group.name
    assert group.name in str(error)
    assert "raise ValueError(message)" in str(error), "the remote traceback"
    failure = error.failures[ranks[0]]
    assert (failure.host, failure.pid, failure.device) == (socket.gethostname(), failure.pid, "cpu")
    assert group.echo(1) == [1, 1, 1]


@pytest.mark.backends("local", "ray")
@pytest.mark.parametrize(
    "fail",
    [
        lambda group, array: group.refuse(array),
        lambda group, array: group.refuse_later(array),
        lambda group, array: group.refuse_request.all(array).result(),
        lambda group, array: group.return_a_lock.all(array).result(),
    ],
    ids=["plain", "async", "request", "request with a bad value"],
)
def test_a_rank_frees_the_arguments_of_a_call_that_has_failed_without_a_garbage_collection(group, fail):
    with pytest.raises(RemoteError):
        fail(group, np.ones(1))
    assert group.has_seen() == [False] * 3


def test_an_exception_that_cannot_be_pickled_is_told_by_its_text(group):
    with pytest.raises(RemoteError, match=r"Unpicklable: told by its text"):
        group.raise_what_cannot_be_pickled()
    assert group.echo(1) == [1, 1, 1]


def test_a_result_that_cannot_be_pickled(group):
    with pytest.raises(bm.CollectError, match="returned lock cannot be pickled"):
        group.return_what_cannot_be_pickled()
    assert group.echo(1) == [1, 1, 1]


def test_a_result_that_cannot_be_unpickled(group):
    with pytest.raises(bm.CollectError, match="cannot be made here"):
        group.return_what_cannot_be_unpickled()
    assert group.echo(1) == [1, 1, 1]


def test_an_argument_that_cannot_be_unpickled(group):
    with pytest.raises(RemoteError, match="cannot be made here"):
        group.echo(BadToLoad())
    assert group.echo(1) == [1, 1, 1]


@pytest.mark.backends("local", "ray")
def test_a_worker_that_may_have_no_more_memory(group):
    with pytest.raises(RemoteError, match="MemoryError") as caught:
        group.run_out_of_memory()
    assert isinstance(caught.value.__cause__, MemoryError)
    assert group.echo(1) == [1, 1, 1]


@pytest.mark.backends("local", "ray")
@pytest.mark.parametrize("method", ["spin_on", "sleep_on", "await_on", "hang_in_c_on", "deadlock_on"])
def test_a_timeout_says_which_ranks_hang_and_where(group, method):
    with within(10), pytest.raises(CallTimeout, match=r"no reply from rank 0, 2 within 0.5 s") as caught:
        getattr(group, method).options(timeout=0.5)([0, 2])
    error = caught.value
    assert error.missing == (0, 2)
    assert set(error.stacks) == {0, 2}
    if method != "await_on":  # a coroutine that waits is on no stack
        assert all(f"in {method}" in stack for stack in error.stacks.values()), error.stacks
        assert method in str(error)
    error.future.cancel()


@pytest.mark.backends("local", "ray")
def test_a_timeout_of_a_call_that_is_queued_says_so(group):
    """Where its ranks are is where another call is."""
    running = group.sleep_on.submit([0, 2])
    with pytest.raises(CallTimeout) as caught:
        group.echo.options(timeout=0.5)(1)
    stacks = caught.value.stacks
    assert set(stacks) == {0, 2}
    assert all(
        stack.startswith("(this rank has not begun the call") and "in sleep_on" in stack for stack in stacks.values()
    )
    with pytest.raises(CallTimeout) as of_running:
        running.result(timeout=0)
    assert not any("has not begun" in stack for stack in of_running.value.stacks.values())
    running.cancel()
    assert caught.value.future.result(timeout=20) == [1, 1, 1]


@pytest.mark.backends("local", "ray")
def test_what_a_future_is_printed_as(group):
    future = group.sleep_on.submit([0, 2])
    assert repr(future) == "<Future of Faulty.sleep_on, waiting for rank 0, 1, 2>"
    future.cancel()
    assert "cancelled" in repr(future)
    echoed = group.echo.submit(1)
    assert group.echo(2) == [2, 2, 2]
    assert not echoed.cancel(), "it was answered before"
    assert repr(echoed) == "<Future of Faulty.echo, done>"


@pytest.mark.backends("local", "ray")
@pytest.mark.parametrize("method", ["spin_on", "sleep_on", "await_on"])
def test_a_call_can_be_given_up(group, method):
    future = getattr(group, method).submit([1])
    with pytest.raises(CallTimeout):
        future.result(timeout=0.3)
    queued = group.sleep_on.submit([0, 1, 2])
    with within(10):
        assert queued.cancel()
        assert future.cancel()
        with pytest.raises(CallCancelled, match="cancelled"):
            future.result()
        with pytest.raises(CallCancelled):
            queued.result()
        assert future.cancelled()
        assert future.done()
        assert not future.cancel()
        assert group.echo(1) == [1, 1, 1]


@pytest.mark.backends("local", "ray")
def test_a_call_that_timed_out_can_still_be_waited_for(group):
    with pytest.raises(CallTimeout) as caught:
        group.sleep_on.options(timeout=0.2)([1], seconds=1)
    assert caught.value.future.result(timeout=10) == [0, 1, 2]


@pytest.mark.backends("local", "ray")
def test_timeouts_of_the_group_and_of_the_library(group):
    group.set_default_options(timeout=0.2)
    with pytest.raises(CallTimeout, match=r"within 0\.2 s") as caught:
        group.sleep_on([1])
    caught.value.future.cancel()
    group.set_default_options(timeout=None)
    bm.set_default_options(timeout=0.3)
    try:
        assert group.sleep_on([1], seconds=0.5) == [0, 1, 2], "the group says: as long as it takes"
        with pytest.raises(CallTimeout, match=r"within 0\.1 s"):
            group.sleep_on.options(timeout=0.1)([1], seconds=0.5)
    finally:
        bm.set_default_options(timeout=None)


@pytest.mark.backends("local", "ray")
@pytest.mark.parametrize("method", ["spin_on", "sleep_on"])
def test_ranks_that_go_on_with_a_call_that_failed_elsewhere_are_interrupted(group, method):
    with (
        within(10),
        pytest.raises(RemoteError, match=r"failed on rank 1 \([^)]*\): ValueError: the first cause\n") as caught,
    ):
        group.spin_on([0, 2], raising=[1])
    assert list(caught.value.failures) == [1, 0, 2], "the first cause first"
    assert len(re.findall(r"\nrank [02] .*: interrupted by the controller", str(caught.value))) == 2
    assert isinstance(caught.value.__cause__, ValueError)
    assert group.echo(1) == [1, 1, 1], "the group stays usable"


@pytest.mark.backends("local", "ray")
def test_a_rank_that_cannot_be_interrupted_is_ended(group, tmp_path):
    with within(15), pytest.raises(RemoteError, match=r"(?s)the first cause.*rank 0.*ended by the controller"):
        group.deadlock_on.options(grace=0.5)([0], raising=[1], begun=tmp_path / "begun")
    with within(5), pytest.raises(WorkerDied, match=r"rank 0 .*ended by the controller, as it had not stopped"):
        group.echo(1)


@pytest.mark.backends("local", "ray")
def test_a_rank_that_is_stuck_in_a_call_that_was_given_up_is_said_to_have_been_ended_for_that(group, tmp_path):
    future = group.deadlock_on.options(grace=0.2).submit([1], begun=tmp_path / "begun")
    wait_for(tmp_path / "begun")
    with pytest.raises(CallTimeout):
        future.result(timeout=0.2)
    future.cancel()
    with within(10), pytest.raises(WorkerDied, match=r"had not stopped in time after Faulty.deadlock_on was cancelled"):
        while True:
            group.echo(1)


@pytest.mark.backends("local", "ray")
def test_one_message_has_one_name_for_a_host(group):
    with within(20), pytest.raises(WorkerDied) as caught:
        group.die_or_raise(dying=1)
    assert set(caught.value.failures) == {0, 1, 2}
    assert {failure.host for failure in caught.value.failures.values()} == {socket.gethostname()}


@pytest.mark.backends("local")
def test_a_collective_that_one_rank_has_left(group):
    assert group.all_reduce([]) == [3.0, 3.0, 3.0]
    with within(20), pytest.raises(RemoteError, match=r"on rank 1 .*the first cause") as caught:
        group.all_reduce.options(grace=0.5)([1])
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.backends("local")
def test_a_rank_that_has_left_a_collective_does_not_meet_the_others_in_the_next_call(group):
    group.all_reduce([])
    failed, following = group.all_reduce.options(grace=0.5).submit([1]), group.all_reduce.submit([])
    with (
        within(20),
        pytest.raises((RemoteError, WorkerDied), match=r"after Faulty\.all_reduce failed on rank 1 \(ValueE"),
    ):
        following.result()
    assert isinstance(failed.exception(), RemoteError)


WAYS = {
    "result": lambda group, timeout: group.echo.submit(1).result(timeout),
    "blocking": lambda group, timeout: group.echo.options(timeout=timeout)(1),
    "stream": lambda group, timeout: list(group.echo.options(timeout=timeout).stream(1)),
    "await": lambda group, timeout: asyncio.run(_awaited(group.echo.options(timeout=timeout).submit(1))),
}


async def _awaited(future):
    return await future


@pytest.mark.backends("local")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("grace", [0.3, None])
def test_the_error_of_a_call_behind_one_that_failed_tells_of_that_one(group, way, grace, tmp_path):
    group.deadlock_on.options(grace=grace).submit([0], raising=[1], begun=tmp_path / "begun")
    error, words = (WorkerDied, "after") if grace else (CallTimeout, "it is behind a call that failed:")
    words = rf"{words} Faulty.deadlock_on failed on rank 1 \(ValueError: the first cause\)"
    with within(10), pytest.raises(error, match=words) as caught:
        WAYS[way](group, 0.8 if grace is None else 10)
    if grace is None:
        assert caught.value.missing == (0, 1), "the third rank ran neither call in vain"
        assert "it waits for the ranks that still run a call which failed here" in caught.value.stacks[1]


@pytest.mark.backends("local")
def test_a_call_behind_a_failed_one_begins_when_the_last_rank_has_ended_that_one_by_itself(group):
    failing = group.end_late_on.submit([0], raising=[1])
    with within(4):  # of which the failed call takes one; the wait for a reply takes five
        assert group.echo(1) == [1, 1, 1]
    assert list(failing.exception().failures) == [1]


@pytest.mark.backends("local")
def test_ranks_that_wait_for_one_that_runs_an_earlier_call_are_not_ended_for_cancelled_ones(group):
    group.sleep_on.submit([0, 1, 2], 0.5)  # while the others are cancelled
    long = group.sleep_on.submit([1], 2)
    cancelled = [group.echo.options(grace=0.3).submit(1) for _ in range(2)]
    for call in reversed(cancelled):
        call.cancel()
    assert isinstance(cancelled[1].exception(), CallCancelled)
    assert long.result() == [0, 1, 2]
    assert group.echo(2) == [2, 2, 2]


@pytest.mark.backends("local")
def test_calls_that_are_cancelled_before_they_are_sent_resume_no_rank(group):
    stuck = group.spin_on.submit([1])
    for _ in range(40):  # more than a rank that does not read has room for
        group.echo.submit(bytes(60_000)).cancel()
    stuck.cancel()
    with within(10):
        assert group.echo(1) == [1, 1, 1]


@pytest.mark.backends("local")
@pytest.mark.parametrize("kind", ["of the first", "of the last"])
def test_a_call_that_fails_while_it_is_awaited_has_its_error_though_a_rank_is_stuck(group, kind, gate, tmp_path):
    begun = tmp_path / "begun"
    failing = group.deadlock_on.options(grace=0.3).submit([0], raising=[1], begun=begun, gate=gate)
    wait_for(begun)
    behind = group.echo.submit(1)

    async def wait():
        asyncio.get_running_loop().call_later(0.2, gate.touch)  # then the failure comes to who waits already
        return await (failing if kind == "of the first" else behind)

    with within(10), pytest.raises((RemoteError, WorkerDied), match="the first cause"):
        asyncio.run(asyncio.wait_for(wait(), 10))


@pytest.mark.backends("local", "ray")
@pytest.mark.parametrize("how", ["raised", "cancelled"])
def test_calls_that_fail_one_after_the_other_on_different_ranks_are_all_run(group, how):
    calls = [group.spin_on.submit([(n + 1) % 3], raising=[n % 3] if how == "raised" else []) for n in range(4)]
    if how == "cancelled":
        assert all(call.cancel() for call in reversed(calls))
    error = RemoteError if how == "raised" else CallCancelled
    with within(20):
        assert group.echo(1) == [1, 1, 1]
    assert all(isinstance(call.exception(), error) for call in calls)


@pytest.mark.backends("local", "ray")
def test_a_call_nobody_waits_for_does_not_hold_up_those_behind_it(group):
    forgotten = group.spin_on.submit([0], raising=[1])
    with within(10):
        assert group.echo.submit(1).result() == [1, 1, 1]
    assert isinstance(forgotten.exception(timeout=5), RemoteError)


@pytest.mark.backends("local", "ray")
def test_a_call_nobody_knows_any_more_does_not_hold_up_those_behind_it(group):
    group.spin_on.submit([0], raising=[1])
    with within(10):
        assert group.echo(1) == [1, 1, 1]


@pytest.mark.backends("local", "ray")
def test_a_call_nobody_knows_any_more_does_not_keep_the_group(make_pool):
    group = bm.WorkerGroup(make_pool([2]), Faulty)
    gone = weakref.ref(group)
    group.sleep_on.submit([0])
    gc.disable()
    try:
        del group
        assert gone() is None
    finally:
        gc.enable()


def test_many_calls_that_nobody_waits_for(group):
    for n in range(500):
        group.echo.submit(n)
    assert group.echo(1) == [1, 1, 1]


def test_an_async_method_that_is_interrupted_before_it_begins_is_neither_run_nor_complained_of(zygote, tmp_path, capfd):
    os.mkfifo(fifo := tmp_path / "fifo")
    with bm.ResourcePool([1], backend="local") as pool:
        group = bm.WorkerGroup(pool, Faulty)
        group.wait_for_a_signal_in_the_first_await(fifo)
        future = group.await_on.submit([0])
        with open(fifo):  # once the worker opens it
            pass
        assert future.cancel()
        with within(10), pytest.raises(CallCancelled):
            future.result()
        assert group.await_on([]) == [0]
        assert group.n_awaited() == [1], "of the two, one was begun"
    assert capfd.readouterr().err == ""


def test_ranks_that_were_asked_one_by_one_are_not_left_with_one_that_failed(zygote):
    with bm.ResourcePool([3], backend="local") as pool:
        group = bm.WorkerGroup(pool, Faulty)
        first, second, third = group.execute_all_async("spin_on", [0], raising=[1])
        with within(10), pytest.raises(RemoteError, match=r"rank 1 .*the first cause"):
            first.result()
        with pytest.raises(RemoteError, match=r"rank 1 .*the first cause"):
            second.result()
        assert third.result() == 2
        assert group.echo(1) == [1, 1, 1]


@pytest.mark.parametrize("backend_with_futures", ["inprocess", "local"])
def test_ranks_that_were_asked_one_by_one_and_all_fail_can_be_awaited_together(zygote, backend_with_futures):
    async def wait(group):
        return await asyncio.gather(*group.execute_all_async("raise_on", [0, 1, 2, 3]), return_exceptions=True)

    with bm.ResourcePool([4], backend=backend_with_futures) as pool:
        group = bm.WorkerGroup(pool, Faulty)
        for _ in range(20):
            assert {type(error) for error in asyncio.run(wait(group))} == {RemoteError}


@pytest.mark.backends("local", "ray")
def test_who_asks_whether_a_call_is_done_does_not_hold_up_who_waits(group):
    """Both read answers: the one that is blocked has to hear of what the other one has read for it."""
    is_over = threading.Event()

    def ask():
        while not is_over.is_set():
            group.echo.submit(1).done()

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        with within(20):
            for n in range(300):
                assert group.echo(n) == [n] * 3
    finally:
        is_over.set()
        asking.join()


def test_options_that_make_no_sense(group):
    for wrong in ({"timeout": -1}, {"timeout": "long"}, {"grace": True}, {"patience": 1}):
        with pytest.raises(bm.UsageError, match=next(iter(wrong))):
            group.echo.options(**wrong)
        with pytest.raises(bm.UsageError):
            group.set_default_options(**wrong)
        with pytest.raises(bm.UsageError):
            bm.set_default_options(**wrong)
    assert group.echo.options(timeout=5, grace=None)(1) == [1, 1, 1]


@pytest.mark.backends("local", "ray")
def test_ranks_that_stopped_when_they_were_told_are_not_ended_later(group):
    before = group.echo(1)
    future = group.spin_on.options(grace=0.2).submit([0, 1, 2])
    assert future.cancel()
    time.sleep(1)  # longer than the grace: nobody looks meanwhile
    with pytest.raises(CallCancelled):
        future.result()
    assert group.echo(1) == before


@pytest.mark.backends("local", "ray")
def test_a_rank_that_has_not_come_to_a_call_that_failed_is_not_ended(group):
    earlier = group.sleep_on.submit([2], seconds=2)
    with pytest.raises(RemoteError, match="rank 0"):
        group.raise_on.options(grace=0.1)([0])
    assert earlier.result(timeout=20) == [0, 1, 2]
    assert group.echo(1) == [1, 1, 1]


@pytest.mark.backends("local", "ray")
def test_an_error_while_tidying_up_after_an_interruption_is_not_the_cause(group):
    with pytest.raises(RemoteError, match=r"rank 1 .*the first cause") as caught:
        group.tidy_badly(raising=[1])
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.backends("local", "ray")
def test_awaiting_a_call_has_its_timeout(group):
    async def wait():
        return await group.sleep_on.options(timeout=0.3).submit([1])

    with pytest.raises(CallTimeout, match=r"within 0\.3 s") as caught:
        asyncio.run(wait())
    caught.value.future.cancel()


@pytest.mark.backends("local")
def test_a_failed_rank_goes_on_though_an_earlier_call_is_found_to_have_ended_after_a_later_one(
    make_group, gate, monkeypatch
):
    group = make_group(2, Faulty)
    earlier = group.execute_rank_zero_async("raise_on", [0])
    later = group.raise_or_hold.options(grace=None).submit(str(gate))
    ticket, last = earlier._call.tickets[0], later._call.tickets[0]
    resume = LaneClient.resume

    def resume_both(workers, tickets):
        """Let ranks go on, and then those of the earlier call, as another thread may that looks at it last."""
        resume(workers, tickets)
        if tickets.get(0) is last:
            resume(workers, {0: ticket})

    monkeypatch.setattr(LaneClient, "resume", resume_both)
    gate.touch()
    for future in (later, earlier):
        assert isinstance(future.exception(20), RemoteError)
    assert group.echo.submit(1).result(20) == [1, 1]
