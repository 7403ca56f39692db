"""Requests: each goes to one replica, many run beside each other, and each is answered exactly once."""

import asyncio
import contextlib
import fcntl
import gc
import itertools
import os
import resource
import signal
import socket
import sys
import termios
import threading
import time
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import psutil
import pytest
from clock import idle_time
from ctrl_c import done_when, pressed
from ends import until, wait_for

import bandmaster as bm
from bandmaster import Dispatch, Only, Route, TransferProtocol, register
from bandmaster.answering.request_tasks import RequestTasks
from bandmaster.calls.escalation import DEATH_PATIENCE_S, PATIENCE_S
from bandmaster.platform.locks import run_if_free
from bandmaster.requests.request import Request
from bandmaster.requests.router import Router
from bandmaster.wire.status_page import Activity

DEADLINE = 20.0  # of whatever must end


class Rollout(bm.Worker):
    def __init__(self):
        self.inside, self.most, self.log, self.cancelled = 0, 0, [], 0

    @register(Dispatch.REQUEST, concurrency=64)
    async def chat(self, prompt, factor=2):
        return self.rank, prompt * factor

    @register(Dispatch.REQUEST, concurrency=3, is_idempotent=True)
    async def hold(self, folder, name=""):
        """Show that it has begun, and stay until the file "gate" is there."""
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.log.append(f"begin {name}")
        try:
            (folder / f"begun {name}").touch()
            while not (folder / "gate").exists():
                await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.inside -= 1
            self.log.append(f"end {name}")
        return self.rank

    @register(Dispatch.REQUEST, concurrency=8)
    async def stubborn(self, folder):
        """Go on after a cancellation until the file "gate" is there."""
        (folder / "begun stubborn").touch()
        while not (folder / "gate").exists():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.001)
        return self.rank

    @register(Dispatch.REQUEST, concurrency=256)
    async def endless(self):
        await asyncio.Event().wait()

    @register(Dispatch.REQUEST, concurrency=64)
    async def meet(self, n):
        """Return when n requests are here at the same time."""
        self.inside += 1
        while self.inside < n:
            await asyncio.sleep(0.001)
        return self.rank

    @register(Dispatch.REQUEST, concurrency=64)
    async def change(self, array):
        array += 1
        return array

    @register(Dispatch.REQUEST, concurrency=64)
    async def count(self, n):
        """Return the same array each time, with the number of the request in it."""
        if len(getattr(self, "counted", ())) != n:
            self.counted = np.zeros(n)
        self.counted += 1
        return self.counted

    @register(Dispatch.REQUEST, concurrency=2)
    async def fail(self, word, n=1):
        raise ValueError(word * n)

    @register(Dispatch.REQUEST, concurrency=2)
    async def unpicklable(self):
        return threading.Lock()

    @register(Dispatch.REQUEST)
    async def yields(self):
        yield 1

    @register(Dispatch.REQUEST)
    def plain(self, value):
        return self.rank, value, self.inside

    @register(Dispatch.ONE_TO_ALL)
    def stay(self, folder):
        """Show that it has begun, and stay until the file "go" is there."""
        (folder / f"begun {self.rank}").touch()
        wait_for(folder / "go")

    @register(Dispatch.ONE_TO_ALL)
    def touch(self, path):
        path.with_name(f"{path.name} {self.rank}").touch()
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def squeeze(self, is_squeezed):
        """Let the process open no more descriptors, or as many as ever."""
        limit = most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if is_squeezed:
            os.close(limit := os.dup(0))  # the first that is free
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))

    @register(Dispatch.REQUEST, concurrency=8)
    async def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

    @register(Dispatch.REQUEST, concurrency=8, is_idempotent=True)
    async def die_once(self, path):
        """Return the rank of the first worker that does not die of it."""
        if not path.exists():
            path.write_text(str(self.rank))
            os.kill(os.getpid(), signal.SIGKILL)
        return self.rank

    @register(Dispatch.REQUEST, concurrency=8, is_idempotent=True)
    async def die_once_then_touch(self, folder):
        await self.die_once(folder / "once")
        (folder / "again").touch()
        return self.rank

    @register(Dispatch.REQUEST, concurrency=8)
    async def until(self, path):
        while not path.exists():
            await asyncio.sleep(0.001)

    @register(Dispatch.REQUEST, concurrency=8, is_idempotent=True)
    async def die_again(self):
        os.kill(os.getpid(), signal.SIGKILL)

    @register(Dispatch.REQUEST, concurrency=64, is_idempotent=True)
    async def die_at(self, folder, n):
        await asyncio.sleep(0)
        if n == 100:
            await self.die_once(folder / "once")
        return self.rank, n

    def on_replace(self, rank, state):
        pass

    @register(Dispatch.ONE_TO_ALL)
    def die_or_stick(self, rank, stuck):
        """Have the other rank take no interrupt, and end this one then."""
        if self.rank == rank:
            wait_for(stuck)
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        stuck.touch()
        time.sleep(600)

    @register(Dispatch.ONE_TO_ALL)
    def fail_on(self, rank):
        if self.rank == rank:
            raise ValueError(f"rank {rank}")

    @register(Dispatch.ONE_TO_ALL)
    def take_log(self, word=None):
        log, self.log = self.log, []
        return [*log, word] if word else log

    @register(Dispatch.ONE_TO_ALL)
    def take_counts(self):
        counts, self.most, self.cancelled, self.inside = (self.most, self.cancelled), 0, 0, 0
        return counts


class Engine(bm.Worker):
    def __init__(self, version=None):
        bm.report(self, version=version)

    @register(Dispatch.REQUEST, concurrency=8)
    async def chat(self):
        return self.rank

    @register(Dispatch.REQUEST, concurrency=8)
    async def score(self):
        return self.rank

    @register(Dispatch.REQUEST, concurrency=8)
    async def items(self):
        yield self.rank

    @register(Dispatch.REQUEST, concurrency=8)
    async def claim(self, load):
        bm.report(self, load=load)

    @register(Dispatch.REQUEST, concurrency=8)
    async def upgrade(self, version):
        bm.report(self, version=version)

    @register(Dispatch.REQUEST, concurrency=8)
    async def hold(self, folder):
        while not (folder / "gate").exists():
            await asyncio.sleep(0.001)

    @register(Dispatch.REQUEST, concurrency=1)
    async def narrow(self, folder):
        await self.hold(folder)
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def load(self, version, only=None):
        if only is None or self.rank in only:
            bm.report(self, version=version)

    @register(Dispatch.REQUEST)
    async def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

    @register(Dispatch.ONE_TO_ALL)
    def wrong(self, **reported):
        bm.report(self, **reported)

    def on_replace(self, rank, state):
        pass


class Ordered(bm.Worker):
    def __init__(self):
        self.log = []

    @register(Dispatch.REQUEST, concurrency=8)
    async def note(self, value):
        self.log.append(value)

    @register(Dispatch.REQUEST, concurrency=1)
    async def also(self, value):
        self.log.append(value)

    @register(Dispatch.REQUEST)
    def plainly(self, value):
        self.log.append(value)

    @register(TransferProtocol(Route("dp"), Only(tp=-1)))
    async def who(self):
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def take(self):
        return self.log


class Narrow(Rollout):
    """Runs one request of each method at a time."""

    @register(Dispatch.REQUEST, concurrency=1)
    async def total(self, rows, folder=None):
        if folder is not None:
            return await self.hold(folder, rows)
        return int(rows["x"].sum())

    @register(Dispatch.DP_PROTO)
    def double_later(self, rows, folder):
        """Return when the file "rows" is there."""
        while not (folder / "rows").exists():
            time.sleep(0.001)
        return {"x": rows["x"] * 2}


class Gate:
    """Holds requests until it is opened."""

    def __init__(self, folder):
        self.folder = folder

    def open(self):
        (self.folder / "gate").touch()

    def has_begun(self, name):
        return (self.folder / f"begun {name}").exists()

    def wait_for(self, *names):
        deadline = time.monotonic() + DEADLINE
        while missing := [name for name in names if not self.has_begun(name)]:
            assert time.monotonic() < deadline, f"{missing} have not begun"
            time.sleep(0.001)

    async def awaits(self, *names):
        await asyncio.to_thread(self.wait_for, *names)


@pytest.fixture(scope="module")
def group(backend):
    with bm.ResourcePool([2], backend=backend) as pool:
        made = bm.WorkerGroup(pool, Rollout)
        made.chat.all("").result()  # so that each rank has its event loop
        yield made


@pytest.fixture
def gate(tmp_path):
    gate = Gate(tmp_path)
    yield gate
    gate.open()


@pytest.fixture
def opens_soon(gate):
    """Call it to have the gate opened a moment later."""
    timer = threading.Timer(0.05, gate.open)
    yield timer.start
    timer.join()


def is_in_process(group):
    return isinstance(group.workers[0], Rollout)


async def awaited(future):
    return await future


# --- values -------------------------------------------------------------------------------------------------------


def test_a_request_has_one_value_from_one_replica(group):
    rank, value = group.chat("ab").result(DEADLINE)
    assert rank in (0, 1) and value == "abab"
    assert group.chat.submit("ab", factor=3).result(DEADLINE)[1] == "ababab"
    assert group.plain("x").result(DEADLINE)[1] == "x"


def test_all_asks_each_replica(group):
    assert group.chat.all("a").result(DEADLINE) == [(0, "aa"), (1, "aa")]
    assert [value[0] for value in group.plain.all("a").result(DEADLINE)] == [0, 1]


def test_many_are_awaited_and_each_gets_its_own_value(group):
    async def main():
        return await asyncio.gather(*[group.chat(str(n)) for n in range(500)])

    found = asyncio.run(main())
    assert [value for _, value in found] == [str(n) * 2 for n in range(500)]
    assert {rank for rank, _ in found} == {0, 1}


@pytest.mark.parametrize("n", [10, 100_000])
def test_values_are_copies(group, n):
    given = np.zeros(n)
    future = group.change(given)
    given += 5
    first = future.result(DEADLINE)
    assert first is future.result(DEADLINE) and first.shape == (n,) and (first == 1).all()
    first += 1  # the caller's own
    assert (group.change(np.ones(n)).result(DEADLINE) == 2).all()


@pytest.mark.parametrize("n", [10, 100_000])
def test_values_are_as_they_were_when_the_method_returned(group, n):
    async def main():
        return await asyncio.gather(*[group.count.options(replica=0)(n) for _ in range(20)])

    values = [array.tolist() for array in asyncio.run(main())]
    assert sorted(values) == [[k] * n for k in range(1, 21)]


def test_many_large_values_at_a_time(group):
    async def main():
        return await asyncio.gather(*[group.change(np.full(20_000 + 5_000 * (n % 5), n)) for n in range(60)])

    assert [(int(array[0]), len(array)) for array in asyncio.run(main())] == [
        (n + 1, 20_000 + 5_000 * (n % 5)) for n in range(60)
    ]


# --- routes -------------------------------------------------------------------------------------------------------


def test_the_replica_with_the_fewest_requests_gets_the_next(group, gate):
    held = [group.hold.options(replica=0)(gate.folder) for _ in range(2)]
    held += [group.hold(gate.folder) for _ in range(2)]
    gate.open()
    assert [future.result(DEADLINE) for future in held] == [0, 0, 1, 1]


def test_a_key_has_a_replica_until_that_is_much_busier(group, gate):
    for key in "abcdef":
        chat = group.chat.options(key=key)
        assert len({chat("").result(DEADLINE)[0] for _ in range(5)}) == 1
    hold = group.hold.options(key="k", spill=1)
    held = [hold(gate.folder) for _ in range(3)]
    gate.open()
    first, second, third = (future.result(DEADLINE) for future in held)
    assert first == second != third, "it had two more than the other one"


def test_of_equally_busy_replicas_the_first_gets_a_request(group):
    assert [group.chat("").result(DEADLINE)[0] for _ in range(6)] == [0] * 6


def test_one_replica_can_be_chosen(group):
    for replica in (0, 1, 0):
        assert group.chat.options(replica=replica)("").result(DEADLINE)[0] == replica


def test_ranks_of_a_replica_get_the_same_requests_in_one_order(make_group):
    group = make_group(bm.Mesh(dp=2, tp=2), Ordered)

    def ask(thread):
        for n in range(20):
            (group.note, group.also, group.plainly)[n % 3]((thread, n)).result(DEADLINE)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    logs = group.take()
    assert logs[0] == logs[1] and logs[2] == logs[3] and len(logs[0]) + len(logs[2]) == 80
    assert [group.who.options(replica=replica)().result(DEADLINE) for replica in (0, 1)] == [1, 3]


class Pair(bm.Worker):
    """Rank 0 waits for rank 1, as in a collective."""

    @register(TransferProtocol(Route("dp"), Only(tp=0)), concurrency=4)
    async def step(self, how):
        if how == "well":
            return self.rank
        if self.rank == 0 and how == "stuck":
            time.sleep(600)  # the event loop takes no cancellation
        elif self.rank == 0:
            await asyncio.Event().wait()
        elif how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("the first cause")

    @register(TransferProtocol(Route("dp"), Only(tp=0)), concurrency=4, is_idempotent=True)
    async def step_again(self, path, how):
        if self.rank == 0:
            path.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.rank == 1:
            await (asyncio.Event().wait() if how == "waits" else asyncio.sleep(DEATH_PATIENCE_S / 2))
        else:
            await asyncio.sleep(2 * DEATH_PATIENCE_S)  # the ranks of the first replica would have been ended by then
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def after(self):
        return self.rank


@pytest.mark.parametrize("how", ["raises", "dies", "stuck"])
def test_the_other_ranks_of_a_replica_do_not_wait_for_one_that_has_failed(make_group, how):
    group = make_group(bm.Mesh(dp=1, tp=2), Pair)
    if how != "raises" and isinstance(group.workers[0], Pair):
        pytest.skip("ranks of backend inprocess share their process with this test")
    group.set_default_options(grace=0.5)
    assert group.step("well").result(DEADLINE) == 0
    with pytest.raises(bm.WorkerDied if how == "dies" else bm.RemoteError) as caught:
        group.step(how).result(DEADLINE)
    assert "rank 1" in str(caught.value)
    if how == "raises":
        assert "the first cause" in str(caught.value) and group.after() == [0, 1]
        assert group.step("well").result(DEADLINE) == 0
    if how == "stuck":
        assert "had not stopped 0.5 s after Pair.step failed on rank 1 (ValueError: the first cause)" in str(
            caught.value
        )


@pytest.mark.backends("local", "ray")
@pytest.mark.parametrize("how", ["replies", "waits"])
def test_a_request_that_was_sent_again_is_not_ended_with_the_ranks_of_the_replica_before(make_group, tmp_path, how):
    group = make_group(bm.Mesh(dp=2, tp=2), Pair)
    group.set_default_options(grace=DEATH_PATIENCE_S / 2)
    assert group.step_again.options(retries=1)(tmp_path / "first", how).result(DEADLINE) == 2


def test_requests_and_calls_of_one_caller_begin_in_their_order(make_group):
    group = make_group(1, Ordered)

    async def main():
        first = [group.note(1), group.plainly(2), group.note(3), group.also(4), group.also(5), group.note(6)]
        taken = group.take.submit()
        last = group.note(7)
        await asyncio.gather(*first, last)
        return await taken

    assert asyncio.run(main()) == [[1, 2, 3, 4, 6]], "but for one that waits for a place"
    assert sorted(group.take()[0][5:]) == [5, 7]


@pytest.mark.backends("local")
def test_those_that_wait_are_cancelled_though_a_thread_looks_for_a_place_for_them(group, gate):
    ask = group.hold.options(replica=0, timeout=5.0)
    held = [ask(gate.folder, f"{n}") for n in range(3)]
    cancel = threading.Thread(target=group.cancel)

    def is_placing(frame, kind, what):
        return is_at(Router._choose, frame, kind, what) and frame.f_back.f_code is Router._place_waiting.__code__

    def begin():
        cancel.start()
        until(lambda: any(request.is_cancelled for request in held[0]._call.router.open_requests()))

    with done_when(is_placing, begin):
        waits = ask(gate.folder, "waits")
    with pytest.raises(bm.CallCancelled):
        waits.result(DEADLINE)
    cancel.join(DEADLINE)


def test_those_that_wait_for_a_place_get_it_in_their_order(make_group):
    group = make_group(1, Ordered)

    async def later():
        await asyncio.sleep(0)
        await asyncio.gather(*[group.also(n) for n in range(10, 20)])

    async def main():
        await asyncio.gather(*[group.also(n) for n in range(10)], later())

    asyncio.run(main())
    assert group.take() == [list(range(20))]


def test_a_thread_learns_at_once_of_a_place_that_is_free(make_group, monkeypatch):
    monkeypatch.setattr("bandmaster.requests.request.LOOK_AROUND_S", 10 * DEADLINE)  # it does not help
    group, futures = make_group(2, Ordered), []
    thread = threading.Thread(target=lambda: futures.extend(group.also(n) for n in range(20)), daemon=True)
    thread.start()
    thread.join(DEADLINE)
    assert len([future.result(DEADLINE) for future in futures]) == 20


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_request_with_a_callback_gets_a_place_though_its_event_loop_is_stopped_or_busy(
    group, gate, monkeypatch, is_busy
):
    for module in ("requests.request", "calls.progress"):
        monkeypatch.setattr(f"bandmaster.{module}.LOOK_AROUND_S", 10 * DEADLINE)  # it does not help
    told = threading.Event()

    async def begin():
        futures = [group.hold(gate.folder, name) for name in "abcdefg"]
        await gate.awaits(*"abcdef")
        if is_busy:
            go_on(futures)
        return futures

    def go_on(futures):
        futures[-1].add_done_callback(lambda _: told.set())
        gate.open()
        assert told.wait(DEADLINE)

    async def end(futures):
        return await asyncio.gather(*futures, group.hold(gate.folder))

    with contextlib.closing(asyncio.new_event_loop()) as loop:
        futures = loop.run_until_complete(begin())
        if not is_busy:
            go_on(futures)
        values = loop.run_until_complete(asyncio.wait_for(end(futures), DEADLINE))
        loop.run_until_complete(loop.shutdown_default_executor())
    assert len(values) == 8 and set(values) == {0, 1}


@pytest.mark.backends("local")
def test_a_request_to_all_replicas_waits_for_its_rows_and_for_no_place(make_group, gate):
    group, other = make_group(2, Narrow), make_group(1, Narrow)
    held = [group.total(name, gate.folder) for name in "ab"]
    gate.wait_for(*"ab")
    rows = other.double_later.submit({"x": np.arange(4)}, gate.folder)
    future = group.total.all(rows)
    (gate.folder / "rows").touch()
    assert future.result(DEADLINE) == [12, 12]
    gate.open()
    assert sorted(future.result(DEADLINE) for future in held) == [0, 1]


# --- what replicas report ------------------------------------------------------------------------------------------


def test_open_requests_count_for_all_methods(make_group, gate):
    group = make_group(2, Engine)
    held = [group.hold.options(replica=0)(gate.folder) for _ in range(3)]
    assert [group.chat().result(DEADLINE) for _ in range(3)] == [1, 1, 1]
    assert [group.score().result(DEADLINE) for _ in range(3)] == [1, 1, 1]
    narrow = [group.narrow(gate.folder) for _ in range(2)]  # the second one has no place on the least busy replica
    gate.open()
    assert [future.result(DEADLINE) for future in (*held, *narrow)] == [None, None, None, 1, 0]


def test_a_key_stays_while_its_request_waits_for_a_place(make_group, gate, tmp_path):
    group = make_group(2, Engine)
    opened, other = Gate(tmp_path / "opened"), Gate(tmp_path / "other")
    opened.folder.mkdir()
    other.folder.mkdir()
    opened.open()

    async def main():
        mine = await group.narrow.options(key="k")(opened.folder)
        held = [group.hold.options(replica=mine)(gate.folder) for _ in range(3)]
        first = group.narrow.options(replica=mine)(gate.folder)
        last = group.narrow.options(replica=1 - mine)(other.folder)
        keyed = group.narrow.options(key="k", spill=1)(opened.folder)  # the less busy replica has no place for it
        await asyncio.sleep(0)
        gate.open()
        await asyncio.gather(*held, first)
        assert await asyncio.wait_for(keyed, DEADLINE) == mine
        other.open()
        await last

    asyncio.run(main())


def test_a_replica_that_reports_the_load_of_others_gets_fewer(make_group):
    group = make_group(2, Engine)
    group.claim.options(replica=0)(4.5).result(DEADLINE)

    async def main():
        return Counter(await asyncio.gather(*[group.chat() for _ in range(10)]))

    assert asyncio.run(main()) == {0: 3, 1: 7}
    group.claim.options(replica=0)(0).result(DEADLINE)
    assert asyncio.run(main()) == {0: 5, 1: 5}


def test_requests_go_to_replicas_that_have_the_version(make_group):
    group = make_group(3, Engine)
    newest = group.chat.options(min_version=7)
    with pytest.raises(
        bm.CallTimeout, match="no replica has version 7 of its weights: replica 0 none, replica 1 none, re"
    ):
        newest.options(timeout=0.05)()
    group.load(7, [1])
    assert {newest().result(DEADLINE) for _ in range(6)} == {1}
    group.upgrade.options(replica=2)(8).result(DEADLINE)

    async def main():
        return Counter(await asyncio.gather(*[newest() for _ in range(8)]))

    assert asyncio.run(main()) == {1: 4, 2: 4}
    with pytest.raises(bm.CallTimeout, match=r"no replica has version 9 .*: replica 0 none, replica 1 7, replica 2 8"):
        group.chat.options(min_version=9, timeout=0.05)()


def test_all_ranks_of_a_replica_need_the_version(make_group):
    group = make_group(bm.Mesh(dp=2, tp=2), Engine)
    group.load(3)
    group.load(4, [0, 2, 3])
    assert {group.chat.options(min_version=4)().result(DEADLINE) for _ in range(4)} == {2}


def test_a_request_waits_for_its_version(make_group):
    group = make_group(2, Engine, 1)

    async def main():
        newest = [asyncio.ensure_future(awaited(group.chat.options(min_version=2)())) for _ in range(4)]
        assert await group.chat.options(min_version=1)() in (0, 1), "they hold up no others"
        assert not any(task.done() for task in newest)
        await asyncio.to_thread(group.load, 2)
        return await asyncio.gather(*newest)

    assert {*asyncio.run(asyncio.wait_for(main(), DEADLINE))} <= {0, 1}
    found = []
    thread = threading.Thread(target=lambda: found.append(group.chat.options(min_version=3)().result(DEADLINE)))
    thread.start()
    group.load(3)
    thread.join(DEADLINE)
    assert found in ([0], [1])


@pytest.mark.parametrize("ends", ["close", "restart"])
def test_one_that_waits_for_its_version_ends_with_the_workers(make_group, ends):
    group = make_group(1, Engine)

    async def main():
        waiting = asyncio.ensure_future(awaited(group.chat.options(min_version=7)()))
        await group.score()
        await asyncio.to_thread(getattr(group, ends))
        with pytest.raises((bm.WorkerDied, bm.ClosedError)):
            await waiting

    asyncio.run(asyncio.wait_for(main(), DEADLINE))


class Stuck(bm.Worker):
    passed = 0

    @register(Dispatch.REQUEST)
    def stuck(self):
        signal.raise_signal(signal.SIGINT)
        self.passed += 1

    @register(Dispatch.REQUEST)
    def fork(self):
        """Whether Ctrl-C does in a fork what it did before."""
        if not (child := os.fork()):
            os._exit(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
        return bool(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    @register(Dispatch.REQUEST)
    def n_passed(self):
        return self.passed


@pytest.mark.backends("inprocess")
def test_ctrl_c_interrupts_a_plain_request_in_this_process(make_group):
    group = make_group(1, Stuck)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            group.stuck()
    assert group.n_passed().result(DEADLINE) == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.backends("inprocess")
def test_a_fork_that_a_plain_request_makes_in_this_process_has_the_handler_of_ctrl_c(make_group):
    assert make_group(1, Stuck).fork().result(DEADLINE)


@pytest.mark.backends("inprocess")
def test_workers_that_another_thread_closes_while_a_request_begins_leave_nothing_behind(make_group):
    group, has_tried = make_group(1, Engine), threading.Event()

    def look_at_close(frame, kind, what):
        if kind == "return" and frame.f_code is run_if_free.__code__:
            has_tried.set()

    def close():
        sys.setprofile(look_at_close)
        group.close()

    def close_at_start(frame, kind, what):
        if kind == "call" and frame.f_code is RequestTasks.start.__code__:
            sys.setprofile(None)
            thread.start()
            assert has_tried.wait(DEADLINE), "the thread that closes discards the workers, or leaves it to this one"

    thread = threading.Thread(target=close)
    try:
        sys.setprofile(close_at_start)
        answer = group.score()
    finally:
        sys.setprofile(None)
    thread.join(DEADLINE)
    with contextlib.suppress(bm.WorkerDied, bm.ClosedError):
        answer.result(DEADLINE)


@pytest.mark.backends("local", "ray")
def test_one_that_waits_for_its_version_ends_with_the_last_replica(make_group):
    group = make_group(1, Engine)

    async def main():
        waiting = asyncio.ensure_future(awaited(group.chat.options(min_version=7)()))
        await group.score()
        with pytest.raises(bm.WorkerDied):
            await group.die()
        with pytest.raises(bm.WorkerDied):
            await waiting

    asyncio.run(asyncio.wait_for(main(), DEADLINE))


def test_late_ones_say_what_they_wait_for(make_group, gate):
    group = make_group(2, Engine)

    async def main():
        with pytest.raises(bm.CallTimeout, match="version 7 of its weights: replica 0 none, replica 1 none"):
            async for _ in group.items.options(min_version=7, timeout=0.1).stream():
                pass
        with pytest.raises(bm.CallTimeout, match="version 7 of its weights: replica 1 none;"):
            await group.chat.options(min_version=7, replica=1, timeout=0.1)()
        held = [group.narrow.options(key="k")(gate.folder)]
        with pytest.raises(bm.CallTimeout, match=r"replica \d, to which key='k' went before, runs 1 requests"):
            await group.narrow.options(key="k", timeout=0.1)(gate.folder)
        held.append(group.narrow(gate.folder))
        with pytest.raises(bm.CallTimeout, match="replica 1 runs 1 requests"):
            await group.narrow.options(replica=1, timeout=0.1)(gate.folder)
        with pytest.raises(bm.CallTimeout, match="each of the 2 replicas runs 1 requests"):
            await group.narrow.options(timeout=0.1)(gate.folder)
        gate.open()
        await asyncio.gather(*map(awaited, held))

    asyncio.run(main())
    with pytest.raises(bm.UsageError, match="min_version=7"):
        group.chat.options(min_version=7).all()


@pytest.mark.backends("local", "ray")
def test_a_replica_that_was_replaced_has_no_version_yet(make_group):
    group = make_group(2, Engine)
    group.load(5)
    with pytest.raises(bm.WorkerDied):
        group.die.options(replica=1)().result(DEADLINE)
    group.replace(1)
    assert {group.chat.options(min_version=5)().result(DEADLINE) for _ in range(4)} == {0}


def test_roles_report_for_themselves(make_pool):
    group = bm.colocate(make_pool([2]), first=Engine, second=Engine)
    group.first.load(1)
    group.second.load(2)
    assert group.second.chat.options(min_version=2)().result(DEADLINE) in (0, 1)
    with pytest.raises(bm.CallTimeout, match="replica 0 1, replica 1 1"):
        group.first.chat.options(min_version=2, timeout=0.05)()


@pytest.mark.parametrize(
    ("reported", "message"),
    [
        ({"load": -1}, "load must be a non-negative number of requests, got -1"),
        ({"load": float("nan")}, "load must be a non-negative number"),
        ({"version": 1.5}, "version must be a whole number, got 1.5"),
    ],
)
def test_bad_reports(make_group, reported, message):
    with pytest.raises(bm.RemoteError, match=message):
        make_group(1, Engine).wrong(**reported)
    with pytest.raises(bm.UsageError, match="report takes the worker itself"):
        bm.report(3, load=1)


# --- overlap ------------------------------------------------------------------------------------------------------


def test_requests_run_beside_each_other(group):
    async def main():
        return await asyncio.gather(*[group.meet(20) for _ in range(40)])

    group.take_counts()
    assert Counter(asyncio.run(main())) == {0: 20, 1: 20}
    group.take_counts()


def test_further_requests_wait_in_the_caller(group, gate):
    async def main():
        futures = [group.hold(gate.folder, str(n)) for n in range(20)]
        await gate.awaits(*"012345")
        assert sum("waiting for a free replica" in repr(future) for future in futures) == 14
        title, header, *ranks = group.describe().splitlines()
        assert title.endswith("; 14 requests wait for a replica") and header.split()[-3:] == [
            "requests",
            "rows",
            "held",
        ]
        assert [line.split()[-2:] for line in ranks] == [["3", "-"]] * 2
        gate.open()
        return await asyncio.gather(*futures)

    group.take_counts()
    assert sum(Counter(asyncio.run(main())).values()) == 20
    assert [most for most, _ in group.take_counts()] == [3, 3]
    assert [line.split()[-2:] for line in group.describe().splitlines()[2:]] == [["-", "-"]] * 2


@pytest.mark.backends("local", "ray")
def test_the_first_requests_of_two_threads_share_the_places(make_group, gate):
    group = make_group(1, Rollout)
    futures = []
    other = threading.Thread(target=lambda: futures.extend(group.hold(gate.folder, name) for name in "abc"))

    def begin_the_other(frame, kind, _):
        if kind == "call" and frame.f_code.co_name == "__init__" and type(frame.f_locals.get("self")) is Router:
            sys.setprofile(None)
            other.start()
            other.join(0.5)  # its requests wait for this one, or not

    sys.setprofile(begin_the_other)
    try:
        futures.append(group.hold.options(timeout=None)(gate.folder, "d"))
    finally:
        sys.setprofile(None)
    gate.wait_for("d")
    gate.open()
    other.join(DEADLINE)
    assert [future.result(DEADLINE) for future in futures] == [0] * 4
    assert group.take_counts()[0][0] <= 3


def test_a_thread_waits_for_a_place_as_it_sends(group, gate, opens_soon):
    held = [group.hold(gate.folder) for _ in range(6)]
    with pytest.raises(bm.CallTimeout, match=r"Rollout.hold was not sent within 0.05 s; each of the 2 replicas runs 3"):
        group.hold.options(timeout=0.05)(gate.folder)
    opens_soon()
    assert group.hold(gate.folder).result(DEADLINE) in (0, 1)
    assert Counter(future.result(DEADLINE) for future in held) == {0: 3, 1: 3}


@pytest.mark.backends("local", "ray")
def test_a_request_that_another_thread_cancels_as_it_is_sent_is_interrupted(group, gate):
    futures = []
    cancelling = threading.Thread(target=lambda: futures[0].cancel())

    def cancel_as_it_is_sent(frame, kind, _):
        if kind == "call" and frame.f_code is Router._send.__code__:
            sys.setprofile(None)
            cancelling.start()
            cancelling.join(0.2)  # it waits for the lock that sending holds

    async def main():
        futures.append(group.hold(gate.folder))
        sys.setprofile(cancel_as_it_is_sent)
        await asyncio.sleep(0)  # the next round, at the start of which it is sent

    try:
        asyncio.run(main())
    finally:
        sys.setprofile(None)
    cancelling.join(DEADLINE)
    with pytest.raises(bm.CallCancelled):
        futures[0].result(DEADLINE)


@pytest.mark.backends("local", "ray")
def test_a_call_begins_behind_the_requests_that_an_event_loop_has_not_sent_yet(group, gate):
    gate.open()
    group.take_log()

    async def main():
        futures = [group.hold.options(replica=rank)(gate.folder, "before") for rank in (0, 1)]
        alone = group.take_log.submit("alone")
        await asyncio.gather(*futures)
        return alone.result(DEADLINE)

    assert asyncio.run(main()) == [["begin before", "end before", "alone"]] * 2


def test_a_call_of_all_ranks_runs_alone(group, gate, opens_soon):
    group.take_log()
    before = [group.hold.options(replica=rank)(gate.folder, f"before {rank}") for rank in (0, 1)]
    gate.wait_for("before 0", "before 1")
    opens_soon()
    call = group.take_log.submit("alone")
    after = [group.hold.options(replica=rank)(gate.folder, "after") for rank in (0, 1)]
    assert call.result(DEADLINE) == [[f"begin before {n}", f"end before {n}", "alone"] for n in (0, 1)]
    for future in (*before, *after):
        future.result(DEADLINE)
    assert group.take_log() == [["begin after", "end after"]] * 2


@pytest.mark.backends("local", "ray")
def test_a_call_that_fails_ends_no_rank_that_still_runs_requests(group, gate, opens_soon):
    held = group.hold.options(replica=1)(gate.folder, "held")
    gate.wait_for("held")
    call = group.fail_on.options(grace=0.0).submit(0)
    with pytest.raises(bm.CallTimeout):
        call.result(0.3)
    opens_soon()
    with pytest.raises(bm.RemoteError, match="on rank 0 "):
        call.result(DEADLINE)
    assert held.result(DEADLINE) == 1 and group.healthy


@pytest.mark.backends("local", "ray")
@pytest.mark.parametrize("is_awaited", [True, False])
def test_a_failed_call_that_nobody_waits_for_holds_back_no_request(group, is_awaited):
    async def main():
        return await asyncio.wait_for(awaited(group.chat.all("a")), DEADLINE)

    group.fail_on.submit(0)
    found = asyncio.run(main()) if is_awaited else group.chat.all("a").result(DEADLINE)
    assert found == [(0, "aa"), (1, "aa")]


@pytest.mark.backends("local", "ray")
def test_a_call_is_told_of_though_a_request_was_made_as_it_was_sent(group):
    asking = threading.Thread(target=lambda: group.chat("a").result(DEADLINE))
    is_over, told = threading.Event(), threading.Event()

    def ask_as_it_is_sent(frame, kind, _):
        if kind == "call" and frame.f_code.co_name == "send_calls":
            sys.setprofile(None)
            asking.start()
            asking.join(0.2)  # its request waits for the lock that sending holds, or not

    async def keep_busy():
        while not is_over.is_set():
            await group.chat("b")

    other = threading.Thread(target=lambda: asyncio.run(keep_busy()))
    other.start()
    try:
        sys.setprofile(ask_as_it_is_sent)
        future = group.take_counts.submit()
        sys.setprofile(None)
        future.add_done_callback(lambda _: told.set())
        assert told.wait(4), "less than the seconds after which all calls are looked at"
    finally:
        is_over.set()
        other.join(DEADLINE)
        asking.join(DEADLINE)


@pytest.mark.backends("local", "ray")
def test_a_callback_comes_though_another_thread_reads_the_reply_as_it_is_added(group, gate):
    future, told = group.hold(gate.folder), threading.Event()

    def read_the_reply():
        while not future._call.is_done:
            group.chat("a").result(DEADLINE)

    other = threading.Thread(target=read_the_reply)

    def let_it_be_read(frame, kind, _):
        if kind == "call" and frame.f_code.co_name == "drive_in_background":
            sys.setprofile(None)
            gate.open()
            other.start()
            other.join(DEADLINE)

    sys.setprofile(let_it_be_read)
    try:
        future.add_done_callback(lambda _: told.set())
    finally:
        sys.setprofile(None)
    assert told.wait(1), "less than the seconds after which all is looked at"


@pytest.mark.backends("local", "ray")
def test_a_call_is_sent_though_an_event_loop_sends_its_requests_meanwhile(group):
    is_submitted, may_go_on = threading.Event(), threading.Event()

    async def ask():
        future = group.chat("a")
        is_submitted.set()
        may_go_on.wait(DEADLINE)  # the request is sent when this round has ended
        return await future

    other = threading.Thread(target=lambda: asyncio.run(ask()))
    lines = []

    def trace(frame, kind, _):
        if frame.f_code.co_name != "send_calls":
            return None
        lines.append(kind)
        if lines.count("line") == 2:  # it has looked whether there are requests to be sent
            may_go_on.set()
            other.join(DEADLINE)
        return trace

    other.start()
    try:
        assert is_submitted.wait(DEADLINE)
        sys.settrace(trace)
        counts = group.take_counts()
    finally:
        sys.settrace(None)
        may_go_on.set()
        other.join(DEADLINE)
    assert len(counts) == group.world_size


def test_a_method_that_is_not_async_runs_alone(group, gate, opens_soon):
    group.take_counts()
    held = group.hold.options(replica=0)(gate.folder, "held")
    gate.wait_for("held")
    opens_soon()
    assert group.plain.options(replica=0)("x").result(DEADLINE) == (0, "x", 0), "nothing ran beside it"
    assert held.result(DEADLINE) == 0


def test_several_event_loops_and_threads_share_a_group(group):
    async def loop():
        return [value for _, value in await asyncio.gather(*[group.chat("a") for _ in range(50)])]

    def plainly():
        return [group.chat("a").result(DEADLINE)[1] for _ in range(50)]

    found = []
    threads = [threading.Thread(target=lambda: found.append(asyncio.run(loop()))) for _ in range(3)]
    threads += [threading.Thread(target=lambda: found.append(plainly())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert found == [["aa"] * 50] * 6


def test_an_event_loop_that_ends_leaves_no_place_taken(group, gate):
    async def forget():
        for n in range(8):  # six have a place
            group.hold(gate.folder, f"forgotten {n}")
        await gate.awaits(*[f"forgotten {n}" for n in range(6)])

    asyncio.run(forget())
    gate.open()
    assert asyncio.run(asyncio.wait_for(awaited(group.hold(gate.folder)), DEADLINE)) in (0, 1)


def test_one_future_is_awaited_by_several_tasks(group, gate, opens_soon):
    async def main():
        future = group.hold.options(replica=1)(gate.folder)
        opens_soon()
        return await asyncio.gather(*[awaited(future) for _ in range(3)])

    assert asyncio.run(main()) == [1, 1, 1]


def test_a_task_waits_on_though_another_one_that_awaits_the_same_future_is_cancelled(group, gate):
    async def main():
        future = group.stubborn(gate.folder)
        await gate.awaits("stubborn")
        first, second = (asyncio.ensure_future(awaited(future)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await group.chat("a")
        await asyncio.sleep(0.05)
        gate.open()
        with pytest.raises(bm.CallCancelled):
            await second

    asyncio.run(asyncio.wait_for(main(), DEADLINE))


def test_callbacks_are_called(group):
    told = threading.Event()
    future = group.chat("x")
    future.add_done_callback(lambda done: told.set() if done is future else None)
    assert told.wait(DEADLINE) and future.done() and future.exception() is None


# --- errors -------------------------------------------------------------------------------------------------------


def test_an_error_names_its_rank(group):
    with pytest.raises(bm.RemoteError, match=r"Rollout.fail failed on rank 1 \(dp=1, .*ValueError: word") as caught:
        group.fail.options(replica=1)("word").result(DEADLINE)
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(bm.CollectError, match="the returned lock cannot be pickled"):
        group.unpicklable().result(DEADLINE)
    assert group.chat("a").result(DEADLINE)[1] == "aa"


@pytest.mark.backends("local")
def test_a_request_whose_arguments_cannot_be_opened_has_an_error(backend):
    with bm.ResourcePool([1], backend=backend) as pool:
        group = bm.WorkerGroup(pool, Rollout)
        assert group.chat("a").result(DEADLINE)[1] == "aa"
        group.squeeze(True)
        futures = [group.change(np.zeros(100_000)), group.chat("a")]
        with pytest.raises(bm.RemoteError, match="a segment of shared memory cannot be opened"):
            futures[0].result(DEADLINE)
        assert futures[1].result(DEADLINE)[1] == "aa"
        group.squeeze(False)
        assert group.change(np.zeros(100_000)).result(DEADLINE).sum() == 100_000


@pytest.mark.backends("local")
def test_requests_of_a_worker_without_descriptors_have_an_error_until_it_has_some(make_group):
    async def main():
        return await asyncio.gather(*[group.chat("a") for _ in range(3)], return_exceptions=True)

    group = make_group(1, Rollout)
    group.squeeze(True)
    for _ in range(2):
        errors = asyncio.run(asyncio.wait_for(main(), DEADLINE))
        assert [(type(error), type(error.__cause__)) for error in errors] == [(bm.RemoteError, OSError)] * 3
    group.squeeze(False)
    assert asyncio.run(asyncio.wait_for(main(), DEADLINE)) == [(0, "aa")] * 3


@pytest.mark.backends("local")
def test_a_large_error_of_a_worker_without_descriptors_is_shortened(make_group):
    group = make_group(1, Rollout)
    assert group.chat("a").result(DEADLINE) == (0, "aa")
    group.squeeze(True)
    with pytest.raises(bm.RemoteError, match="ValueError: xxx") as caught:
        group.fail("x", 100_000).result(DEADLINE)
    assert "the rest of this error could not be sent: [Errno 24] Too many open files" in str(caught.value)
    assert len(str(caught.value)) < 20_000


@pytest.mark.parametrize(
    ("send", "message"),
    [
        (lambda group: group.chat(), "chat"),
        (lambda group: group.chat(1, wrong=2), "wrong"),
        (lambda group: group.chat(threading.Lock()), r"argument 'prompt' of Rollout.chat \(lock\) cannot be pickled"),
        (
            lambda group: group.chat(group.take_log.submit()),
            "'prompt' of Rollout.chat is a future of Rollout.take_log",
        ),
    ],
)
def test_mistakes_are_errors_before_anything_is_sent(group, send, message):
    with pytest.raises(bm.ArgumentError, match=message):
        send(group)


def test_options_that_would_be_ignored_are_refused(group):
    with pytest.raises(bm.UsageError, match=r"chat.all\(...\) goes to all replicas, once; leave out replica=1, or"):
        group.chat.options(replica=1).all("a")
    with pytest.raises(bm.UsageError, match=r"a map has its own: chat.map\(..., maxsize=\)"):
        group.chat.options(maxsize=1).map(["a"])
    with pytest.raises(bm.UsageError, match=r"yields items: iterate over yields.stream"):
        group.yields.map([1])


def test_those_that_are_never_sent_again(group):
    with pytest.raises(bm.UsageError, match=r"goes to all replicas, once; leave out retries=1, or .all"):
        group.chat.options(retries=1).all("a")
    with pytest.raises(
        bm.UsageError, match=r"yields.stream\(...\), whose items may have been read, is never sent again"
    ):
        group.yields.options(retries=2).stream()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replica": 2}, "replica must be a whole number from 0 to 1, as there are 2 replicas, got 2"),
        ({"spill": -1}, "spill must be a whole number of 0 or more, got -1"),
        ({"retries": -1}, "retries must be a whole number of 0 or more, got -1"),
        ({"retries": True}, "retries must be a whole number of 0 or more, got True"),
        ({"retries": 1, "replica": 0}, "retries=1 sends a request to another replica, but replica=0 allows one"),
        ({"min_version": 1.0}, "min_version must be a whole number or None, got 1.0"),
        ({"key": []}, "key must be hashable, got list"),
        (
            {"pull": 1},
            "a request has no option 'pull'; its options are timeout, stall_after, on_stall, key, .* and min_version",
        ),
        ({"timeout": -1}, "timeout must be a non-negative number"),
    ],
)
def test_bad_options(group, options, message):
    with pytest.raises(bm.UsageError, match=message):
        group.chat.options(**options)


class Unshowable(Exception):
    """One that computes attributes, as a wrapper of an API's error may, and has no `__notes__`."""

    def __getattr__(self, name):
        return {"status": 500}[name]


def in_a_circle():
    first, second = ValueError("the first one"), KeyError("the second one")
    first.__context__, second.__context__ = second, first
    return first


def made(kind):
    kinds = {"unshowable": Unshowable, "circle": in_a_circle, "syntax": lambda: compile("1 +", "<answer>", "eval")}
    return kinds[kind]()


class Raises(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def alone(self, kind):
        raise made(kind)

    @register(Dispatch.REQUEST, concurrency=4)
    async def beside(self, kind):
        raise made(kind)

    @register(Dispatch.ONE_TO_ALL)
    def ping(self):
        return self.rank


@pytest.mark.backends("inprocess", "local")
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("unshowable", "Unshowable"),  # which Python 3.13 can show, and those before it cannot
        ("circle", "ValueError: the first one"),
        ("syntax", "SyntaxError: invalid syntax"),
    ],
)
def test_whatever_a_method_raises_is_the_error_of_its_call_alone(make_group, kind, said):
    group = make_group(1, Raises)
    group.set_default_options(timeout=DEADLINE)
    for method in (group.alone.submit, group.beside):
        with pytest.raises(bm.RemoteError) as raised:
            method(kind).result(DEADLINE)
        assert said in str(raised.value).splitlines()[0]
        assert "in alone" in str(raised.value) or "in beside" in str(raised.value)
    assert group.ping() == [0]


@pytest.mark.parametrize("kind", [SystemExit, asyncio.CancelledError, RuntimeError])
def test_callbacks_go_on_whatever_one_raises(group, gate, caplog, kind):
    def fails(_):
        raise kind("no more")

    called = threading.Event()
    first, later = group.hold(gate.folder), group.hold(gate.folder)
    first.add_done_callback(fails)
    later.add_done_callback(lambda _: called.set())
    gate.open()
    assert called.wait(DEADLINE)
    assert first.result(DEADLINE) in (0, 1)
    assert group.chat.map(["a", "b"]).result(DEADLINE)
    assert "a callback added to a future of Rollout.hold raised an exception" in caplog.text


def test_a_method_with_one_option_of_its_own_has_the_groups_others(make_group, gate):
    group = make_group(1, Rollout)
    held = group.hold.options(stall_after=50)
    group.set_default_options(timeout=0.1)
    with pytest.raises(bm.CallTimeout, match=r"within 0\.1 s"):
        held(gate.folder).result()


# --- cancel, deadlines, ends --------------------------------------------------------------------------------------


def test_a_request_that_is_cancelled_ends_its_coroutine(group, gate):
    group.take_counts()
    future = group.hold.options(replica=0)(gate.folder, "one")
    gate.wait_for("one")
    assert future.cancel() and future.cancelled()
    with pytest.raises(bm.CallCancelled, match=r"Rollout.hold was cancelled; make the request again"):
        future.result(DEADLINE)
    assert [cancelled for _, cancelled in group.take_counts()] == [1, 0]


def test_a_task_that_is_cancelled_frees_its_place(group, gate):
    async def main():
        tasks = [asyncio.ensure_future(awaited(group.hold(gate.folder, str(n)))) for n in range(6)]
        await gate.awaits(*"012345")
        for task in tasks:
            task.cancel()
        return await asyncio.gather(*[group.hold(gate.folder, f"next {n}") for n in range(6)], opened())

    async def opened():
        await gate.awaits(*[f"next {n}" for n in range(6)])
        gate.open()

    group.take_counts()
    assert Counter(asyncio.run(main())[:6]) == {0: 3, 1: 3}
    assert sum(cancelled for _, cancelled in group.take_counts()) == 6


def test_one_that_waits_for_a_place_can_be_cancelled(group, gate):
    async def main():
        held = [group.hold(gate.folder) for _ in range(6)]
        waiting = group.hold(gate.folder, "never")
        assert waiting.cancel()
        gate.open()
        with pytest.raises(bm.CallCancelled):
            await waiting
        await asyncio.gather(*held)

    asyncio.run(main())
    assert not gate.has_begun("never")


@pytest.mark.backends("inprocess", "local")
def test_ctrl_c_as_a_request_is_cancelled_that_another_event_loop_awaits(make_group, gate):
    group = make_group(1, Rollout)
    held = [group.hold.submit(gate.folder, str(n)) for n in range(3)]
    gate.wait_for(*"012")
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def submitted():
        return group.hold(gate.folder, "3")

    try:
        n, was_pressed = 0, True
        while was_pressed:
            n += 1
            waiting = asyncio.run_coroutine_threadsafe(submitted(), loop).result(DEADLINE)
            ended = asyncio.run_coroutine_threadsafe(awaited(waiting), loop)
            was_pressed = pressed(waiting.cancel, n)
            waiting.cancel()  # Ctrl-C may have come before the first one had begun
            with pytest.raises(bm.CallCancelled):
                ended.result(DEADLINE)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
    gate.open()
    assert [future.result(DEADLINE) for future in held] == [0] * 3
    assert n > 5, "Ctrl-C came in between"


@pytest.mark.backends("inprocess")
def test_the_group_cancels_requests_though_ctrl_c_came_as_their_method_was_asked_for_first(backend, gate):
    with bm.ResourcePool([1], backend=backend) as pool:
        for n in range(1, 1000):
            group = bm.WorkerGroup(pool, Rollout)
            was_pressed = pressed(group.hold.options, n)
            held = group.hold(gate.folder, str(n))
            assert (group.cancel(), held.cancelled()) == (1, True), n
            group.close()
            if not was_pressed:
                break
        assert n > 20


@pytest.mark.backends("inprocess")
def test_the_group_cancels_a_request_that_is_sent_just_then(backend, gate, tmp_path):
    with bm.ResourcePool([1], backend=backend) as pool, ThreadPoolExecutor(1) as threads:
        group = bm.WorkerGroup(pool, Rollout)
        for n in range(1, 1000):
            folder, left = tmp_path / str(n), n
            folder.mkdir()
            held = [group.hold(folder, str(i)) for i in range(3)]
            sending = threads.submit(group.hold, gate.folder, f"last {n}")
            until(lambda: any(router.waiting for router in group._submitter.work.routers.values()))

            def at_instruction(frame, event, _, folder=folder):
                nonlocal left
                frame.f_trace_opcodes = True
                left -= event == "opcode"
                if left == 0 and event == "opcode":
                    (folder / "gate").touch()
                    sending.result(DEADLINE)  # noqa: B023
                return at_instruction

            sys.settrace(lambda f, *_, at=at_instruction: at if f.f_code is Router.open_requests.__code__ else None)
            try:
                group.cancel()
            finally:
                sys.settrace(None)
            if left > 0:
                with contextlib.suppress(bm.CallCancelled):
                    sending.result(DEADLINE).result(DEADLINE)
                break
            assert sending.result(DEADLINE).cancelled(), n
            bm.wait(held, DEADLINE)
        assert n > 20


@pytest.mark.backends("local", "ray")  # in one process, a call has run by the time it is sent
def test_one_behind_a_call_can_be_cancelled(group, gate):
    held = group.hold.options(replica=0)(gate.folder, "held")
    gate.wait_for("held")
    call = group.take_counts.submit()
    behind = group.hold.options(replica=0)(gate.folder, "behind")
    assert behind.cancel()
    gate.open()
    call.result(DEADLINE)
    with pytest.raises(bm.CallCancelled):
        behind.result(DEADLINE)
    assert not gate.has_begun("behind") and held.result(DEADLINE) == 0


def n_unread(group, rank):
    """Bytes that were sent to a rank, and that it has not received."""
    unread = np.zeros(1, np.intc)
    fcntl.ioctl(group._ownership.workers()._lanes[rank].socket.fileno(), termios.TIOCOUTQ, unread)
    return unread[0]


@pytest.mark.backends("local")
def test_one_that_is_cancelled_while_a_call_before_it_runs_does_not_begin(group, gate):
    held = group.hold.options(replica=0)(gate.folder, "held")
    gate.wait_for("held")
    call = group.stay.submit(gate.folder)
    behind = group.hold.options(replica=0)(gate.folder, "behind")
    until(lambda: n_unread(group, 0) == 0)  # the worker knows both, and lets them wait
    gate.open()
    wait_for(gate.folder / "begun 0")
    assert behind.cancel()
    (gate.folder / "go").touch()
    call.result(DEADLINE)
    with pytest.raises(bm.CallCancelled):
        behind.result(DEADLINE)
    assert not gate.has_begun("behind") and held.result(DEADLINE) == 0


@pytest.mark.parametrize("is_awaited", [True, False])
def test_a_deadline_cancels_and_shows_where_the_coroutine_is(group, gate, is_awaited):
    group.take_counts()
    future = group.hold.options(replica=0, timeout=0.1)(gate.folder)
    with pytest.raises(bm.CallTimeout, match=r"rank 0 within 0.1 s; it was cancelled: ") as caught:
        asyncio.run(awaited(future)) if is_awaited else future.result()
    assert caught.value.future is future
    if not is_in_process(group):
        assert "in hold" in str(caught.value) and "next_message" not in str(caught.value)
    with pytest.raises(bm.CallCancelled):
        future.result(DEADLINE)
    assert [cancelled for _, cancelled in group.take_counts()] == [1, 0]


@pytest.mark.backends("local")
def test_the_deadlines_of_many_requests_are_over_after_one_look_at_each_rank(group):
    async def main():
        return await asyncio.gather(*[group.endless.options(timeout=0.5)() for _ in range(400)], return_exceptions=True)

    began = idle_time()
    assert {type(error) for error in asyncio.run(main())} == {bm.CallTimeout}
    assert idle_time() - began < 5, "a look at a process takes 10 ms or more"


def test_a_wait_with_a_timeout_of_its_own_does_not_cancel(group, gate):
    future = group.hold(gate.folder)
    with pytest.raises(bm.CallTimeout, match="the call still runs: wait again"):
        future.result(0.05)
    gate.open()
    assert future.result(DEADLINE) in (0, 1)


def test_cancel_of_the_group_cancels_its_requests(group, gate):
    futures = [group.hold(gate.folder, str(n)) for n in range(4)]
    gate.wait_for(*"0123")
    assert group.cancel() == 1
    for future in futures:
        with pytest.raises(bm.CallCancelled):
            future.result(DEADLINE)
    assert group.chat("a").result(DEADLINE)[1] == "aa"


def test_cancel_of_the_group_counts_no_request_that_was_cancelled_before(group, gate):
    future = group.hold(gate.folder, "0")
    gate.wait_for("0")
    future.cancel()
    assert group.cancel() == 0


def test_closing_a_group_ends_its_requests(make_group, gate):
    group = make_group(2, Rollout)
    futures = [group.hold(gate.folder, str(n)) for n in range(2)]
    gate.wait_for(*"01")

    async def main():
        closer = threading.Timer(0.05, group.close)
        closer.start()
        found = await asyncio.gather(*map(awaited, futures), return_exceptions=True)
        closer.join()
        return found

    found = asyncio.run(asyncio.wait_for(main(), DEADLINE))
    assert [type(error) for error in found] == [bm.WorkerDied] * 2 and "the group was closed" in str(found[0])
    with pytest.raises(bm.ClosedError):
        group.chat("a")


@pytest.mark.backends("local", "ray")
@pytest.mark.parametrize("end", [bm.WorkerGroup.close, bm.WorkerGroup.restart])
@pytest.mark.parametrize("n", [4, 100_000])
def test_what_was_answered_before_the_end_of_the_workers_is_kept(make_group, tmp_path, end, n):
    group = make_group(2, Rollout)
    request, call = group.change(np.zeros(n)), group.touch.submit(tmp_path / "one")
    group.touch.submit(tmp_path / "other")  # begins when the others were answered
    while len(list(tmp_path.glob("other *"))) < 2:
        time.sleep(0.001)
    end(group)
    assert request.result(DEADLINE).sum() == n
    assert call.result(DEADLINE) == [0, 1]


@pytest.mark.backends("local", "ray")
def test_a_dead_replica_fails_its_requests_and_gets_no_more(make_group, gate):
    group = make_group(3, Rollout)

    async def main():
        held = [group.hold.options(replica=n % 3)(gate.folder, str(n)) for n in range(6)]
        await gate.awaits(*"012345")
        ended = group.die.options(replica=1)(), held[1], held[4]
        errors = await asyncio.gather(*map(awaited, ended), return_exceptions=True)
        assert [type(error) for error in errors] == [bm.WorkerDied] * 3 and "rank 1" in str(errors[1])
        ranks = [rank for rank, _ in await asyncio.gather(*[group.chat("a") for _ in range(30)])]
        gate.open()
        assert sorted(await asyncio.gather(*[held[n] for n in (0, 2, 3, 5)])) == [0, 0, 2, 2]
        return Counter(ranks)

    assert asyncio.run(asyncio.wait_for(main(), DEADLINE)) == {0: 15, 2: 15}
    with pytest.raises(bm.WorkerDied, match="rank 1"):
        group.chat.options(replica=1)("a").result(DEADLINE)
    replacing = threading.Thread(target=group.replace, args=(1,))
    replacing.start()
    while replacing.is_alive():  # nobody meets a rank that is not constructed yet
        assert group.chat("a").result(DEADLINE)[1] == "aa"
    assert group.chat.all("a").result(DEADLINE) == [(rank, "aa") for rank in range(3)]


class SlowlyRenewed(Rollout):
    def __init__(self, folder):
        super().__init__()
        if (folder / "renews").exists():
            (folder / "begun new").touch()
            while not (folder / "gate").exists():
                time.sleep(0.001)


def test_a_request_to_all_replicas_waits_for_a_rank_that_is_being_replaced(make_group, gate):
    group = make_group(2, SlowlyRenewed, gate.folder)
    (gate.folder / "renews").touch()
    replacing = threading.Thread(target=group.replace, args=(1,))
    replacing.start()
    gate.wait_for("new")
    with pytest.raises(bm.CallTimeout, match="rank 1 is being replaced"):
        group.chat.options(timeout=0.05).all("a")

    async def main():
        asked = group.chat.all("a")
        gate.open()
        return await asked

    assert asyncio.run(asyncio.wait_for(main(), DEADLINE)) == [(0, "aa"), (1, "aa")]
    replacing.join(DEADLINE)


@pytest.mark.backends("local", "ray")
def test_a_rank_that_is_stuck_after_a_death_is_ended_though_only_requests_wait_for_it(make_group, tmp_path):
    group = make_group(2, Rollout)
    group.set_default_options(grace=1.0)  # longer than the call waits
    with pytest.raises(bm.WorkerDied):
        group.die_or_stick(0, tmp_path / "stuck")
    with pytest.raises(bm.WorkerDied, match="rank 1"):
        group.chat.options(replica=1)("a").result(DEADLINE)


@pytest.mark.backends("local", "ray")
@pytest.mark.parametrize("is_awaited", [True, False])
def test_requests_that_are_sent_again(make_group, tmp_path, is_awaited):
    group = make_group(4, Rollout)

    def ask(future):
        return asyncio.run(asyncio.wait_for(awaited(future), DEADLINE)) if is_awaited else future.result(DEADLINE)

    answered = ask(group.die_once.options(retries=1)(tmp_path / "once"))
    first = int((tmp_path / "once").read_text())
    assert answered != first
    with pytest.raises(bm.WorkerDied) as caught:
        ask(group.die.options(retries=5)())
    (second,) = caught.value.failures
    assert second != first, "it had begun, and is not idempotent"
    with pytest.raises(bm.WorkerDied, match=r"die_again lost its process on rank .*, and on rank .: ") as caught:
        ask(group.die_again.options(retries=1)())
    assert sorted([first, second, *caught.value.failures]) == [0, 1, 2, 3]


class Mortal(bm.Worker):
    @register(Dispatch.REQUEST, is_idempotent=True)
    async def die_after(self, path):
        await asyncio.to_thread(wait_for, path)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.backends("local")
def test_a_request_that_is_cancelled_as_it_is_sent_again_ends(make_group, tmp_path):
    group = make_group(2, Mortal)
    died, held = group.die_after.options(retries=1)(tmp_path / "now"), group.die_after(tmp_path / "never")
    is_cancelling, is_sending_again = threading.Event(), threading.Event()

    def cancel():
        with done_when(partial(is_at, Request.cancel), begin):
            died.cancel()

    def begin():
        is_cancelling.set()
        is_sending_again.wait(DEADLINE)

    def go_on():
        is_sending_again.set()
        until(lambda: died._call.is_cancelled)

    thread = threading.Thread(target=cancel)
    thread.start()
    assert is_cancelling.wait(DEADLINE)
    (tmp_path / "now").touch()
    with done_when(partial(is_at, Router.note_deaths), go_on), pytest.raises(bm.CallCancelled):
        died.result(DEADLINE)
    thread.join(DEADLINE)
    assert died._call.router.open_requests() == [held._call]


def is_at(function, frame, kind, _):
    return kind == "call" and frame.f_code is function.__code__


@pytest.mark.backends("local", "ray")
def test_a_request_is_sent_again_although_its_caller_waits_for_another_one(make_group, tmp_path):
    group = make_group(2, Rollout)
    waited = group.until.options(replica=1)(tmp_path / "again")
    sent = group.die_once_then_touch.options(retries=1)(tmp_path)
    assert waited.result(DEADLINE) is None
    assert sent.result(DEADLINE) == 1


def test_a_request_of_a_replica_that_is_replaced_is_sent_again(make_group, gate):
    group = make_group(1, Rollout)
    held = group.hold.options(retries=1)(gate.folder, "0")
    gate.wait_for("0")
    group.replace(0)
    gate.open()
    assert held.result(DEADLINE) == 0


@pytest.mark.backends("local")  # the process has to be one of this host
def test_a_request_that_was_never_sent_is_sent_again(make_group):
    group = make_group(2, Rollout)
    group.chat.all("").result(DEADLINE)

    async def main(**options):
        held = group.chat.options(replica=0)("held")
        future = group.chat.options(**options)("a")  # it goes to rank 1 when this round of the event loop has ended
        process = psutil.Process(group.workers[1].pid)
        process.kill()
        with contextlib.suppress(psutil.NoSuchProcess):
            process.wait(DEADLINE)
        return (await held, await future)[1]

    assert asyncio.run(asyncio.wait_for(main(retries=1), DEADLINE)) == (0, "aa")
    group.replace(1)
    with pytest.raises(bm.WorkerDied, match="rank 1"):
        asyncio.run(asyncio.wait_for(main(), DEADLINE))


@pytest.mark.backends("local", "ray")
def test_many_are_answered_once_although_a_replica_dies(make_group, tmp_path):
    group = make_group(3, Rollout)

    async def main():
        ask = group.die_at.options(retries=1)
        return await asyncio.gather(*[ask(tmp_path, n) for n in range(300)])

    found = asyncio.run(asyncio.wait_for(main(), DEADLINE))
    died = int((tmp_path / "once").read_text())
    assert [value for _, value in found] == list(range(300)) and len({rank for rank, _ in found} - {died}) == 2


def test_requests_go_on_after_a_restart(make_group):
    group = make_group(2, Rollout)
    assert group.chat("a").result(DEADLINE)[1] == "aa"

    async def main():
        await group.chat("a")
        group.restart()
        return await asyncio.wait_for(awaited(group.chat.all("a")), DEADLINE)

    assert asyncio.run(main()) == [(0, "aa"), (1, "aa")]


class SlowAgain(Rollout):
    """One that takes as long to start as one likes, but for the first time."""

    def __init__(self, folder):
        super().__init__()
        if (folder / "once").exists():
            (folder / "again").touch()
            while not (folder / "gate").exists():
                time.sleep(0.001)
        (folder / "once").touch()


def test_those_that_come_while_the_group_restarts_have_lost_their_process(make_group, tmp_path):
    group = make_group(1, SlowAgain, tmp_path)
    with ThreadPoolExecutor(1) as thread:
        restart = thread.submit(group.restart)
        while not (tmp_path / "again").exists():
            time.sleep(0.001)
        ask = group.chat.options(retries=1, timeout=DEADLINE)
        for send in (lambda: ask(1), lambda: ask(np.zeros(1 << 20)), lambda: ask.map([[1], [2]], chunk=1)):
            with pytest.raises(bm.WorkerDied, match="the group was restarted"):
                send().result(DEADLINE)
        (tmp_path / "gate").touch()
        restart.result(DEADLINE)
    assert group.chat("a").result(DEADLINE) == (0, "aa")


def test_event_loops_that_have_ended_are_collected(group):
    async def main():
        await group.chat("a")
        return weakref.ref(asyncio.get_running_loop())

    loops = [asyncio.run(main()) for _ in range(3)]
    deadline = time.monotonic() + DEADLINE
    while any(loop() for loop in loops):  # a thread that has told the last of them may not have returned yet
        assert time.monotonic() < deadline
        gc.collect()


@pytest.mark.backends("local")
def test_connections_of_the_users_own_are_read_though_a_group_was_closed_among_requests_of_another(
    group, make_group, gate
):
    async def main():
        held = asyncio.ensure_future(awaited(group.hold(gate.folder, "held")))
        await gate.awaits("held")
        closed = make_group(1, Rollout)
        await closed.chat("a")
        closed.close()
        ends = [end for _ in range(20) for end in socket.socketpair()]  # some get the numbers that are free again
        streams = [await asyncio.open_connection(sock=end) for end in ends]
        for _, writer in streams:
            writer.write(b"x")
        read = await asyncio.wait_for(asyncio.gather(*[reader.read(1) for reader, _ in streams]), DEADLINE)
        gate.open()
        await held
        for _, writer in streams:
            writer.close()
            await writer.wait_closed()
        return read

    assert asyncio.run(main()) == [b"x"] * 40


@pytest.mark.backends("local")
def test_groups_that_are_closed_among_requests_of_another_leave_no_descriptors(group, make_group, gate):
    async def main():
        held = asyncio.ensure_future(awaited(group.hold(gate.folder, "held")))
        await gate.awaits("held")
        counts = []
        for _ in range(4):
            closed = make_group(1, Rollout)
            await closed.chat("a")
            counts.append(len(os.listdir("/proc/self/fd")))
            closed.close()
        gate.open()
        await held
        return counts

    counts = asyncio.run(main())
    assert counts[1:] == counts[1:2] * 3


def test_a_group_is_collected_though_an_event_loop_was_closed_before_its_requests_had_ended(make_group, gate):
    """Ctrl-C leaves such loops, also of groups that were closed since."""

    def ask(loop):
        group, known = make_group(1, Rollout), []

        async def begin():
            known.append(asyncio.ensure_future(awaited(group.hold(gate.folder, "0"))))
            await gate.awaits("0")

        loop.run_until_complete(begin())
        known[0].get_loop().set_exception_handler(lambda *_: None)  # else it tells of its task
        group.close()
        return weakref.ref(group)

    loop = asyncio.new_event_loop()
    known = ask(loop)
    loop.close()
    del loop
    deadline = time.monotonic() + DEADLINE
    while known() is not None:  # a thread that has ended the request may not have returned yet
        assert time.monotonic() < deadline
        gc.collect()


def test_a_request_is_cancelled_with_a_task_that_goes_with_its_closed_event_loop(make_group, gate):
    group = make_group(1, Rollout)

    async def begin():
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # else it tells of the task
        task = asyncio.ensure_future(awaited(group.hold(gate.folder, "0")))
        await gate.awaits("0")
        return weakref.ref(task)

    loop = asyncio.new_event_loop()
    task = loop.run_until_complete(begin())
    loop.close()
    del loop
    deadline = time.monotonic() + DEADLINE
    while task() is not None:  # the thread of the gate may not have returned yet
        assert time.monotonic() < deadline
        gc.collect()
    assert group.take_counts.options(timeout=DEADLINE)() == [(1, 1)]


def test_a_task_that_awaits_a_request_is_not_collected_while_its_event_loop_runs(make_group, gate):
    group, answered = make_group(1, Rollout), []

    async def ask():
        answered.append(await group.hold(gate.folder, "0"))

    async def main():
        asyncio.ensure_future(ask())  # noqa: RUF006  # nothing else refers to it
        await gate.awaits("0")
        gc.collect()
        gate.open()
        while not answered:
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(main(), DEADLINE))
    assert answered == [0]


def test_requests_that_are_late_at_the_same_time(group, gate):
    async def ask(n):
        with pytest.raises(bm.CallTimeout):
            await group.meet.options(timeout=0.2)(1000)
        return (await group.chat("a"))[1]

    async def main():
        return await asyncio.gather(*[ask(n) for n in range(100)])

    assert asyncio.run(main()) == ["aa"] * 100 and group.healthy
    group.take_counts()


class Yields(bm.Worker):
    state = "resident"

    @register(Dispatch.REQUEST, concurrency=1)
    async def ask(self):
        await asyncio.sleep(0.005)
        return self.state

    def on_yield(self):
        self.state = "yielded"

    def on_resume(self):
        self.state = "resident"


@pytest.mark.backends("inprocess", "local")
def test_requests_of_a_turn_are_over_before_the_group_yields(make_pool):
    pool = make_pool([1])
    first, second = bm.WorkerGroup(pool, Yields), bm.WorkerGroup(pool, Yields)

    async def main():
        async with first.turn():
            futures = [first.ask() for _ in range(10)]
        async with second.turn():
            return await asyncio.gather(*futures)

    assert asyncio.run(main()) == ["resident"] * 10


@pytest.mark.backends("local")
def test_ranks_show_what_they_run(group, gate):
    futures = [group.hold.options(replica=0)(gate.folder, str(n)) for n in range(3)]
    gate.wait_for(*"012")
    pid = group.workers[0].pid
    shown = Activity.of(pid)
    assert (shown.method, shown.n_more) == ("hold", 2) and shown.seconds >= 0
    gate.open()
    for future in futures:
        future.result(DEADLINE)
    group.take_log()
    assert Activity.of(pid).method == ""


# --- registration -------------------------------------------------------------------------------------------------


def _plain(self):
    return 1


def _generator(self):
    yield 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: register(Dispatch.REQUEST, concurrency=0), "concurrency must be a whole number of 1 or more, got 0"),
        (lambda: register(Dispatch.DP_PROTO, is_idempotent=True), "is_idempotent=True is for requests"),
        (lambda: register(Dispatch.DP_PROTO, concurrency=2), "concurrency=2 is for requests, which go to one replica"),
        (lambda: register(Dispatch.REQUEST, concurrency=2)(_plain), "only async methods run beside each other"),
        (lambda: register(Dispatch.REQUEST)(_generator), "_generator is a generator, .*; write async def"),
        (lambda: register(Dispatch.REQUEST, execute_mode=bm.Execute.RANK_ZERO), "remove execute_mode= and arguments="),
        (lambda: Route(), "Route requires at least one axis"),
        (lambda: TransferProtocol(Route("dp"), bm.Gather()), r"so that Route\('dp'\) collects with Only\(\)"),
        (lambda: TransferProtocol(Route("dp"), Only(dp=1)), r"chooses the coordinate on 'dp'; remove dp= from Only"),
        (lambda: bm.plan(Dispatch.REQUEST, bm.Mesh(dp=2), rows=1), "so there is no plan"),
    ],
)
def test_bad_registrations(make, message):
    with pytest.raises(bm.ProtocolError, match=message):
        make()


def test_a_route_over_an_axis_that_the_mesh_lacks():
    class Lost(bm.Worker):
        @register(TransferProtocol(Route("cp"), Only()))
        async def ask(self):
            return 1

    with bm.ResourcePool([1], backend="inprocess") as pool, pytest.raises(bm.MeshError, match=r"uses Route\('cp'\)"):
        bm.WorkerGroup(pool, Lost)


class Both(bm.Worker):
    @register(Dispatch.REQUEST)
    async def meet(self, folder):
        try:
            (folder / f"begun {self.rank}").touch()
            await asyncio.sleep(10 * DEADLINE)
        finally:
            (folder / f"ended {self.rank}").touch()

    @register(Dispatch.REQUEST)
    def plain(self, value):
        return value


@pytest.mark.backends("local", "ray")
def test_a_request_that_cannot_be_sent_to_all_ranks_of_its_replica_ends_on_the_others(
    make_group, tmp_path, monkeypatch
):
    group = make_group(bm.Mesh(dp=1, tp=2), Both)
    workers = group._ownership.workers()
    real = workers.request

    def request(rank, requests, take):
        if rank == 1:
            until((tmp_path / "begun 0").exists)
            raise bm.ResourceError("no memory")
        real(rank, requests, take)

    monkeypatch.setattr(workers, "request", request)
    with pytest.raises(bm.ResourceError, match="no memory"):
        group.meet(tmp_path).result(DEADLINE)
    until((tmp_path / "ended 0").exists, DEADLINE)


@pytest.mark.backends("inprocess", "local")
def test_a_plain_request_that_cannot_be_sent_fails_alone(make_group, monkeypatch):
    group = make_group(1, Both)
    workers = group._ownership.workers()
    real, n_sent = workers.call, itertools.count(1)

    def call(calls, tickets):
        if next(n_sent) == 2:
            raise bm.ResourceError("no memory")
        real(calls, tickets)

    async def main():
        return await asyncio.gather(*map(group.plain.all, range(3)), return_exceptions=True)

    monkeypatch.setattr(workers, "call", call)
    first, second, third = asyncio.run(main())
    assert (first, third) == ([0], [2]) and isinstance(second, bm.ResourceError)


class Beside(bm.Worker):
    @register(Dispatch.REQUEST, concurrency=2)
    async def fail_or_stick(self):
        if self.rank == 1:
            raise ValueError("the first cause")
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(DEADLINE)

    @register(Dispatch.REQUEST, concurrency=2, is_idempotent=True)
    async def other(self):
        while self.rank < 2:
            await asyncio.sleep(0.001)
        return self.rank


@pytest.mark.backends("local", "ray")
def test_a_request_beside_one_for_which_its_rank_is_ended_is_sent_again(make_group):
    group = make_group(bm.Mesh(dp=2, tp=2), Beside)
    group.set_default_options(grace=0.1)
    other = group.other.options(retries=1)()
    with pytest.raises(bm.RemoteError, match="the first cause"):
        group.fail_or_stick.options(replica=0)().result(DEADLINE)
    assert other.result(DEADLINE) == 2


class Busy(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def stay(self, folder):
        while self.rank == 0 and not (folder / "gate").exists():
            (folder / "begun").touch()
        return self.rank

    @register(TransferProtocol(Route("dp"), Only(tp=0)), concurrency=4)
    async def fail_on_rank_1(self):
        if self.rank == 1:
            raise ValueError("the first cause")
        return self.rank


@pytest.mark.backends("local", "ray")
def test_a_rank_that_has_not_come_to_a_request_that_has_failed_is_not_ended(make_group, tmp_path):
    group = make_group(bm.Mesh(dp=1, tp=2), Busy)
    group.set_default_options(grace=0.1)
    stay = group.stay.submit(tmp_path)
    until((tmp_path / "begun").exists)
    failed = group.fail_on_rank_1()
    with pytest.raises(bm.CallTimeout):
        failed.result(2 * PATIENCE_S)  # in which a rank at the request is ended
    (tmp_path / "gate").touch()
    with pytest.raises(bm.RemoteError, match="the first cause"):
        failed.result(DEADLINE)
    assert stay.result(DEADLINE) == [0, 1]
