"""Groups as arguments: a worker that was given a group calls it, and gets what the controller would get."""

import asyncio
import contextlib
import gc
import math
import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
import types
import weakref
from concurrent.futures import Future
from functools import partial

import cloudpickle
import numpy as np
import pytest
from by_value import shown
from ctrl_c import called_with_a_pause, pressed
from ends import started, wait_for
from hosts import spread

import bandmaster as bm
from bandmaster import Dispatch, Mesh, Only, Route, TransferProtocol, register
from bandmaster.callers import called
from bandmaster.callers.called import CalledGroup
from bandmaster.callers.circles import OpenChains, Wait, Waiting
from bandmaster.callers.door import Door
from bandmaster.callers.passed import FarCalls, PassedCalls
from bandmaster.callers.reached import ReachedWorkers
from bandmaster.codec import Payload, decode
from bandmaster.hosts.link import FrameKind, Message
from bandmaster.wire.messages import ReplyKind
from bandmaster.worker_process.executor import Executor

DEADLINE = 20.0  # of whatever must end


class Rollout(bm.Worker):
    def __init__(self):
        self.inside, self.cancelled, self.version = 0, 0, 0

    @register(Dispatch.REQUEST, concurrency=64)
    async def chat(self, prompt, factor=2):
        return self.rank, prompt * factor

    @register(Dispatch.REQUEST, concurrency=8)
    async def hold(self, folder):
        """Show that it has begun, and stay until the file "gate" is there."""
        self.inside += 1
        try:
            (folder / f"begun {self.rank}").touch()
            while not (folder / "gate").exists():
                await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            self.cancelled += 1
            (folder / f"cancelled {self.rank}").touch()
            raise
        finally:
            self.inside -= 1
        return self.rank

    @register(Dispatch.REQUEST)
    def plain(self, value):
        return self.rank, value, self.inside

    @register(Dispatch.REQUEST, concurrency=64)
    async def large(self):
        return b"x" * 60_000

    @register(Dispatch.REQUEST, concurrency=8)
    async def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

    @register(Dispatch.REQUEST, concurrency=2)
    async def fail(self, word):
        raise ValueError(word)

    @register(Dispatch.ONE_TO_ALL)
    def load(self, version):
        self.version = version
        return self.rank, self.inside

    @register(Dispatch.REQUEST, concurrency=32)
    async def slow_version(self):
        version = self.version
        await asyncio.sleep(0.01)
        return version

    @register(Dispatch.ONE_TO_ALL)
    def loaded(self):
        return self.version

    @register(Dispatch.ONE_TO_ALL)
    def load_slowly(self, folder):
        (folder / f"begun {self.rank}").touch()
        try:
            while not (folder / "gate").exists():
                time.sleep(0.001)
        except KeyboardInterrupt:
            (folder / f"cancelled {self.rank}").touch()
            raise

    @register(Dispatch.DP_PROTO)
    def double(self, rows):
        return rows * 2

    @register(Dispatch.DP_PROTO, blocking=False)
    def later(self, rows):
        return rows * 2

    @register(
        {
            "dispatch_fn": lambda group, rows: ((np.array_split(rows, group.world_size),), {}),
            "collect_fn": lambda group, values: np.concatenate(values),
        }
    )
    def double_by_functions(self, rows):
        return rows * 2

    @register(Dispatch.ONE_TO_ALL)
    def fail_on(self, rank):
        if self.rank == rank:
            raise ValueError(f"rank {rank}")

    @register(Dispatch.DP_PROTO)
    def items(self, rows):
        yield from rows

    def unregistered(self):
        pass

    def on_replace(self, rank, state):
        pass

    @register(Dispatch.REQUEST, concurrency=8)
    async def tokens(self, n):
        self.inside += 1
        try:
            for number in range(n):
                await asyncio.sleep(0)
                yield self.rank, number
        finally:
            self.inside -= 1

    @register(Dispatch.ONE_TO_ALL)
    def open_many(self, n):
        """Have more descriptors open than so many."""
        limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit, n + 200), most))
        self.files = [os.dup(0) for _ in range(n)]

    @register(Dispatch.ONE_TO_ALL)
    def squeeze(self, n):
        """Let the process open no more than so many descriptors."""
        free = [os.dup(0) for _ in range(n + 1)]
        for fd in free:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    @register(Dispatch.REQUEST, concurrency=8)
    async def upgrade(self, version):
        bm.report(self, version=version)

    @register(Dispatch.REQUEST, concurrency=8)
    async def rest(self, load):
        bm.report(self, load=load)

    @register(Dispatch.ONE_TO_ALL)
    def upgrade_all(self, version):
        bm.report(self, version=version)


class Agent(bm.Worker):
    def __init__(self, rollout=None):
        self.rollout = rollout

    @register(Dispatch.ONE_TO_ALL)
    def do(self, function, *args):
        return function(self.rollout, *args)

    @register(Dispatch.ONE_TO_ALL)
    async def await_(self, function, *args):
        return await function(self.rollout, *args)

    @register(Dispatch.DP_PROTO)
    def do_rows(self, rows, function, *args):
        return function(self.rollout, rows, *args)

    @register(Dispatch.ONE_TO_ALL)
    def with_group(self, group, prompt):
        return group.chat(prompt).result()[1]


@pytest.fixture(scope="module")
def pools(backend):
    two = spread([2])
    with bm.ResourcePool(two, backend=backend) as first, bm.ResourcePool(two, backend=backend) as second:
        yield first, second


@pytest.fixture(scope="module")
def rollout(pools):
    return bm.WorkerGroup(pools[0], Rollout)


@pytest.fixture(scope="module")
def agents(pools, rollout):
    return warm(rollout, bm.WorkerGroup(pools[1], Agent, rollout))


def warm(rollout, agents):
    """Have all event loops and connections made, which last as long as the groups."""

    async def ask(group):
        return await group.chat("a"), await group.load.submit(0)

    rollout.chat.all("").result(DEADLINE)
    agents.await_(ask)
    return agents


@pytest.fixture
def own(backend):
    """Two groups of this test alone: one agent, and two replicas."""
    with bm.ResourcePool(spread([2]), backend=backend) as first, bm.ResourcePool([1], backend=backend) as second:
        rollout = bm.WorkerGroup(first, Rollout)
        yield rollout, warm(rollout, bm.WorkerGroup(second, Agent, rollout))


@pytest.fixture
def is_in_process(backend):
    return backend == "inprocess"


async def hold_on_zero(group, folder):
    return await group.hold.options(replica=0)(folder)


async def hold_and_die(group, folder):
    held = asyncio.ensure_future(hold_on_zero(group, folder))
    while not (folder / "die").exists():
        await asyncio.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)
    await held


# --- values -------------------------------------------------------------------------------------------------------


def test_workers_send_requests_to_the_replicas(agents):
    async def many(rollout):
        return await asyncio.gather(*[rollout.chat(str(n)) for n in range(200)])

    for found in agents.await_(many):
        assert [value for _, value in found] == [str(n) * 2 for n in range(200)]
        assert {rank for rank, _ in found} == {0, 1}


@pytest.mark.parametrize("n", [10, 100_000])
def test_large_values_go_both_ways(agents, n):
    def both(rollout, array):
        return rollout.chat(array, factor=3).result()[1]

    for found in agents.do(both, np.arange(n)):
        assert np.array_equal(found, np.arange(n) * 3)


@pytest.mark.backends("local")
def test_the_future_of_a_group_that_a_worker_has_made_is_refused_as_an_argument(agents):
    def ask(rollout):
        with bm.ResourcePool([1], backend="inprocess") as pool:
            rows = bm.WorkerGroup(pool, Rollout).double.submit(np.ones(4))
            for method in rollout.chat, rollout.double:
                with pytest.raises(bm.ArgumentError, match="gets its arguments by value"):
                    method.submit(rows)
            return rollout.double(rows.result()).sum()

    assert agents.do(ask) == [8.0 * 2] * 2


@pytest.mark.backends("local")
def test_large_values_come_from_a_worker_with_many_open_descriptors(backend):
    def double(rollout, array):
        return rollout.chat.options(timeout=DEADLINE)(array).result()[1]

    with bm.ResourcePool([1], backend=backend) as first, bm.ResourcePool([1], backend=backend) as second:
        rollout = bm.WorkerGroup(first, Rollout)
        rollout.open_many(1024)  # so that the caller's lane has a higher number
        agents = bm.WorkerGroup(second, Agent, rollout)
        assert (agents.do(double, np.ones(100_000))[0] == 2).all()


@pytest.mark.backends("local")
def test_a_caller_for_which_a_worker_has_too_few_descriptors_is_told_so(backend):
    def ask(rollout):
        with pytest.raises(bm.WorkerDied):
            rollout.chat.options(timeout=DEADLINE)("a").result()

    with bm.ResourcePool([1], backend=backend) as first, bm.ResourcePool([1], backend=backend) as second:
        rollout = bm.WorkerGroup(first, Rollout)
        agents = bm.WorkerGroup(second, Agent, rollout)
        rollout.squeeze(1)
        agents.do(ask)


def test_calls_of_all_ranks_are_split_and_joined_as_from_the_controller(agents):
    def calls(rollout, rows):
        later = rollout.later(rows)
        return rollout.double(rows), later.result(), rollout.double.submit(rows).result(), rollout.load(3)

    for doubled, later, submitted, loaded in agents.do(calls, np.arange(5)):
        assert all(np.array_equal(found, np.arange(5) * 2) for found in (doubled, later, submitted))
        assert loaded == [(0, 0), (1, 0)]


def test_requests_of_plain_methods_run_alone(agents):
    async def both(rollout):
        return await asyncio.gather(*[rollout.plain(n) for n in range(20)], *[rollout.chat("a") for _ in range(20)])

    for found in agents.await_(both):
        assert [(value, inside) for _, value, inside in found[:20]] == [(n, 0) for n in range(20)]


def test_a_group_may_be_an_argument_of_any_call(agents, rollout):
    assert agents.with_group(rollout, "ab") == ["abab", "abab"]


def test_workers_that_were_given_it_twice_have_it_once(agents, rollout):
    def is_same(held, given):
        return held is given

    assert agents.do(is_same, rollout) == [True, True]


def test_it_says_what_it_is(agents):
    def seen(rollout):
        return rollout.name, rollout.world_size, rollout.mesh, "chat" in dir(rollout), repr(rollout)

    for name, size, mesh, has_chat, text in agents.do(seen):
        assert (name, size, mesh, has_chat) == ("Rollout", 2, Mesh(dp=2), True)
        assert "Rollout" in text and "2 ranks" in text


def test_each_public_name_of_it_is_one_that_the_controllers_group_has(agents, rollout):
    for names in agents.do(lambda group: [name for name in dir(group) if not name.startswith("_")]):
        assert set(names) <= set(dir(rollout))  # names that methods cannot have, and methods


# --- options and mistakes -----------------------------------------------------------------------------------------


def test_keys_and_numbers_choose_the_replica(agents):
    async def chosen(rollout):
        keyed = [(await rollout.chat.options(key="k")("a"))[0] for _ in range(4)]
        return keyed, (await rollout.chat.options(replica=1)("a"))[0]

    for keyed, first in agents.await_(chosen):
        assert len(set(keyed)) == 1 and first == 1


def test_all_asks_each_replica(agents):
    def every(rollout):
        return rollout.chat.all("a").result()

    assert agents.do(every) == [[(0, "aa"), (1, "aa")]] * 2


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda rollout: rollout.chat(), bm.ArgumentError, "prompt"),
        (lambda rollout: rollout.double(), bm.ArgumentError, "rows"),
        (lambda rollout: rollout.chat.options(replica=2), bm.UsageError, "from 0 to 1"),
        (lambda rollout: rollout.double(3), bm.BatchError, "rows"),
        (lambda rollout: rollout.items([1]), bm.UsageError, "yields|generator"),
        (lambda rollout: rollout.unregistered(), AttributeError, "unregistered"),
        (lambda rollout: rollout.close(), AttributeError, "for the controller"),
        (lambda rollout: rollout.caht("a"), AttributeError, "chat"),
    ],
)
def test_mistakes_are_errors_in_the_worker(agents, call, error, words, is_in_process):
    def raised(rollout):
        try:
            call(rollout)
        except Exception as why:
            return type(why), str(why)

    for kind, text in agents.do(raised):
        assert issubclass(kind, error), (kind, text)
        if not is_in_process or error is not bm.UsageError:
            assert any(word in text for word in words.split("|")), text


@pytest.mark.parametrize("method, rank", [("fail", None), ("fail_on", 1)])
def test_errors_name_the_rank_of_the_called_group(agents, method, rank):
    def raised(rollout, method, argument):
        try:
            made = getattr(rollout, method)(argument)
            made.result()
        except bm.RemoteError as error:
            return error.method, list(error.failures), type(error.__cause__ or error.root_cause)

    argument = "word" if rank is None else rank
    for name, ranks, _ in agents.do(raised, method, argument):
        assert name == f"Rollout.{method}"
        assert ranks == [rank] if rank is not None else ranks[0] in (0, 1)


def test_an_error_that_a_method_lets_through_is_known_in_the_controller(agents):
    with pytest.raises(bm.RemoteError, match=r"Rollout\.fail failed on rank"):
        agents.do(lambda rollout: rollout.fail("word").result())


# --- order --------------------------------------------------------------------------------------------------------


@pytest.mark.backends("local", "ray")
def test_calls_of_a_worker_begin_in_the_order_in_which_it_has_made_them(agents, tmp_path):
    def calls(rollout, folder, version):
        held = rollout.hold(folder)
        first = rollout.load.submit(version)
        second, request = rollout.loaded.submit(), rollout.slow_version()
        (folder / "gate").touch()
        return second.result(), request.result(), first.result()[0][0], held.result() in (0, 1)

    for n in range(10):
        folder = tmp_path / str(n)
        folder.mkdir()
        for second, request, *_ in agents.do(calls, folder, n + 1):
            assert (second, request) == ([n + 1] * 2, n + 1)


@pytest.mark.backends("local", "ray")
async def chat_with_rank_0(group):
    return await group.chat.options(replica=0)("a")


@pytest.mark.backends("local", "ray")
def test_requests_of_a_worker_begin_behind_a_call_that_another_of_its_threads_has_made_meanwhile(own, tmp_path):
    def calls(rollout, folder, version):
        import sys
        import threading

        made = []

        def call():
            made.extend([rollout.hold(folder), rollout.load.submit(version)])

        def look(frame, kind, what):
            if kind == "return" and frame.f_code is bm.Future.done.__code__:  # the call before is known to have ended
                sys.setprofile(None)
                thread = threading.Thread(target=call)
                thread.start()
                thread.join()

        rollout.load(0)
        sys.setprofile(look)
        beside, behind = rollout.chat("a"), rollout.slow_version()
        (folder / "gate").touch()
        return behind.result(), len(made), beside.result()[1]

    assert own[1].do(calls, tmp_path, 7) == [(7, 2, "aa")]


@pytest.mark.backends("local", "ray")
def test_a_request_behind_a_call_that_was_cancelled_does_not_wait_for_what_that_call_waited_for(own, tmp_path):
    def calls(rollout, folder, within_s):
        import threading

        held, load = rollout.hold(folder), rollout.load.submit(1)
        behind = rollout.chat("a")
        waiting = threading.Thread(target=behind.result)
        waiting.start()
        waiting.join(0.5)  # it has come to wait for the request that is held
        load.cancel()
        waiting.join(within_s)
        found = waiting.is_alive(), behind.done()
        (folder / "gate").touch()
        return found, held.result() in (0, 1)

    assert own[1].do(calls, tmp_path, DEADLINE) == [((False, True), True)]


@pytest.mark.backends("local", "ray")
def test_a_wait_for_a_call_that_is_behind_many_is_as_short(own, tmp_path):
    def calls(rollout, folder):
        import threading

        rollout.load_slowly.submit(folder)
        for version in range(10):
            made = [rollout.chat("a") for _ in range(4)] + [rollout.load.submit(version)]
        threading.Timer(1.5, (folder / "gate").touch).start()  # calls are looked at after a second
        return made[-1].result()

    assert own[1].do.options(timeout=DEADLINE)(calls, tmp_path) == [[(0, 0), (1, 0)]]


def test_requests_of_workers_begin_behind_a_failed_call_that_nobody_waits_for(agents, rollout):
    failed = rollout.fail_on.submit(0)
    assert agents.await_.submit(chat_with_rank_0).result(DEADLINE) == [(0, "aa")] * 2
    assert isinstance(failed.exception(DEADLINE), bm.RemoteError)


def test_requests_of_workers_begin_behind_a_call_that_ctrl_c_has_interrupted(agents, rollout, tmp_path, is_in_process):
    if is_in_process:
        pytest.skip("ranks run one after the other, in the thread that calls")

    def press():
        wait_for(tmp_path / "begun 0")
        wait_for(tmp_path / "begun 1")
        signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        rollout.load_slowly(tmp_path)
    thread.join()
    assert agents.await_.submit(chat_with_rank_0).result(DEADLINE) == [(0, "aa")] * 2


@pytest.mark.parametrize("method", ["submit", "stream"])
def test_requests_of_workers_begin_behind_a_call_that_ctrl_c_interrupts_at_any_step(own, backend, method):
    if backend != "local":
        pytest.skip("the steps of the controller are those of backend local")
    rollout, agents = own
    for n in range(1, 1000, 3):
        made = []  # so that no finalizer runs, in which Python loses the exception
        was_pressed = pressed(lambda: made.append(getattr(rollout.fail_on, method)(0)), n)  # noqa: B023
        assert agents.await_.submit(chat_with_rank_0).result(DEADLINE) == [(0, "aa")], n
        if not was_pressed:
            break
    assert n > 20


def test_a_call_that_ctrl_c_interrupts_twice_as_it_is_sent_is_not_watched_for_ever(own, backend):
    if backend != "local":
        pytest.skip("the steps of the controller are those of backend local")
    rollout, _ = own
    for n in range(1, 200):
        for again in range(6, 16):
            was_pressed = pressed(lambda: rollout.load.submit(0), n, again)
        if not was_pressed:
            break
    assert n > 20
    rollout.close()
    until = time.monotonic() + DEADLINE
    while any(thread.name == "bandmaster-progress" for thread in threading.enumerate()):
        assert time.monotonic() < until, "a call is watched"
        time.sleep(0.01)


@pytest.mark.backends("local", "ray")
@pytest.mark.parametrize("method", ["double", "double_by_functions"])
def test_a_call_of_a_worker_passes_a_call_of_the_controller_that_takes_its_rows(own, tmp_path, method):
    rollout, agents = own

    def ask(group, rows, folder, method):
        while not (folder / "gate").exists():
            time.sleep(0.001)
        return getattr(group, method)(rows)

    rows = agents.do_rows.submit(np.arange(4), ask, tmp_path, method)
    doubled = rollout.double.submit(rows)
    (tmp_path / "gate").touch()
    assert np.array_equal(doubled.result(DEADLINE), np.arange(4) * 4)


def plan_slowly(group, folder):
    (folder / "planning").touch()
    wait_for(folder / "plan")
    (folder / "planned").touch()
    return ([folder] * group.world_size,), {}


class SlowlyPlanned(Rollout):
    @register({"dispatch_fn": plan_slowly, "collect_fn": lambda group, values: values})
    def hold_all(self, folder):
        return self.load_slowly(folder)


@pytest.fixture
def planned(backend):
    with bm.ResourcePool([2], backend=backend) as pool:
        yield bm.WorkerGroup(pool, SlowlyPlanned)


@pytest.mark.backends("local")
def test_a_slow_function_of_a_protocol_holds_up_no_other_call_of_workers(own, planned, tmp_path):
    async def both(group, planned, folder):
        held = planned.hold_all.submit(folder)
        while not (folder / "planning").exists():
            await asyncio.sleep(0.001)
        loaded = await group.load.submit(3)
        (folder / "plan").touch()
        (folder / "gate").touch()
        return len(loaded), await held

    assert own[1].await_.options(timeout=DEADLINE)(both, planned, tmp_path) == [(2, [None, None])]


@pytest.mark.backends("local")
def test_a_call_of_a_worker_that_is_cancelled_as_it_is_planned_is_not_left_running(own, planned, tmp_path):
    _, agents = own
    held = agents.await_.submit(_hold_all, planned, tmp_path)
    wait_for(tmp_path / "planning")
    held.cancel()
    assert agents.await_.options(timeout=DEADLINE)(_load) == [2]  # the controller has heard of the cancel before
    (tmp_path / "plan").touch()
    wait_for(tmp_path / "planned")
    for _ in range(3):  # one may overtake a call that is submitted now
        assert planned.load.options(timeout=DEADLINE)(1) == [(0, 0), (1, 0)]
        assert agents.await_.options(timeout=DEADLINE)(_load) == [2]


async def _hold_all(_, planned, folder):
    await planned.hold_all.submit(folder)


async def _load(group):
    return len(await group.load.submit(3))


def test_values_of_calls_of_all_ranks_are_not_kept_in_the_worker(agents):
    def calls(rollout):
        import gc
        import weakref

        known = [weakref.ref(rollout.double(np.arange(5))) for _ in range(5)]
        rollout.load(0)
        gc.collect()
        return [one() is None for one in known]

    assert agents.do(calls) == [[True] * 5] * 2


@pytest.mark.here  # on other hosts the door is an agent's, whose beat stays slow
@pytest.mark.backends("local", "ray")
def test_a_worker_waits_for_a_rank_that_has_much_to_do(make_group, tmp_path, monkeypatch):
    monkeypatch.setattr("bandmaster.callers.door.BEAT_S", 0.1)
    rollout = make_group(1, Rollout)
    agents = make_group(1, Agent, rollout)
    busy = rollout.load_slowly.submit(tmp_path)
    wait_for(tmp_path / "begun 0")
    others = [rollout.load.submit(number) for number in range(2000)]  # more than a lane takes

    def ask(group):
        from bandmaster.callers import reached

        reached.ANSWER_S = 1.0
        return group.chat("a").result()

    asked = agents.do.submit(ask)
    with pytest.raises(bm.CallTimeout):
        asked.result(2)
    (tmp_path / "gate").touch()
    assert asked.result(DEADLINE) == [(0, "aa")]
    assert busy.result(DEADLINE) == [None] and others[-1].result(DEADLINE) == [(0, 0)]


def test_what_a_worker_waits_for_is_told_while_another_thread_is_given_a_group():
    """The thread that tells of it met a change of what it was looking at, and told nothing of the event loop either."""
    given = []

    def be_given_another(frame, *_):
        if frame.f_code.co_filename == weakref.__file__:
            given.append(called._one_of(("a group", len(given)), Future))

    be_given_another(types.SimpleNamespace(f_code=weakref.WeakValueDictionary.values.__code__))
    sys.setprofile(be_given_another)
    try:
        assert called._told_of_calls() == ""
    finally:
        sys.setprofile(None)
    assert len(given) > 1


CLOSES = """
import os, socket
from pathlib import Path
import bandmaster as bm
from test_callers import DEADLINE, Agent, Rollout

with bm.ResourcePool([1], backend="local") as first, bm.ResourcePool([1], backend="local") as second:
    rollout = bm.WorkerGroup(first, Rollout)
    agents = bm.WorkerGroup(second, Agent, rollout)
    door = next(one for one in Path("/proc/net/unix").read_text().split() if f"bandmaster-door-{os.getpid()}-" in one)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect("\\0" + door[1:])
    assert agents.do(lambda group: group.plain(1).result()) == [(0, 1, 0)]  # by a connection that was made later
    rollout.close()
    sock.settimeout(DEADLINE)
    assert sock.recv(1) == b""
    sock.close()
"""


@pytest.mark.backends("local")
def test_the_last_group_that_closes_hangs_up_on_workers_that_have_not_asked_yet():
    command, here = [sys.executable, "-X", "dev", "-c", CLOSES], os.path.dirname(__file__)
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.backends("local", "ray")
def test_an_interrupted_call_of_a_worker_is_cancelled(own, tmp_path):
    _, agents = own
    future = agents.do.submit(lambda rollout, folder: rollout.load_slowly(folder), tmp_path)
    wait_for(tmp_path / "begun 0")
    future.cancel()
    wait_for(tmp_path / "cancelled 0")
    wait_for(tmp_path / "cancelled 1")
    with pytest.raises(bm.CallCancelled):
        future.result(DEADLINE)


async def _read(group):
    stream = group.tokens.options(replica=1).stream(10**9)
    firsts = [await anext(stream) for _ in range(20)]
    stream.close()
    return firsts, [item async for item in group.tokens.options(replica=0, maxsize=3).stream(20)]


def test_a_worker_iterates_over_the_items_of_a_replica(agents, rollout):
    for firsts, items in agents.await_(_read):
        assert (firsts, items) == ([(1, number) for number in range(20)], [(0, number) for number in range(20)])
    assert [inside for _, inside in rollout.load(0)] == [0, 0]
    assert agents.do(lambda group: [number for _, number in group.tokens.stream(5)]) == [[0, 1, 2, 3, 4]] * 2


async def _load_in_between(group, version):
    before = [group.slow_version.submit() for _ in range(9)]
    loads = [group.load.submit(version), group.load.submit(version + 1)]
    after = [group.slow_version.submit() for _ in range(9)]
    again, last = group.load.submit(version + 2), group.slow_version.submit()
    await again
    return [await one for one in before], [len(await one) for one in loads], [await one for one in after], await last


def test_calls_of_one_worker_begin_in_the_order_in_which_they_were_made(agents, rollout):
    rollout.load(0)
    before, loads, after, last = agents.execute_rank_zero_sync("await_", _load_in_between, 1)
    assert (before, loads, after, last) == ([0] * 9, [2, 2], [2] * 9, 3)


async def _ask_the_newest(group, version):
    return (await group.chat.options(min_version=version, timeout=DEADLINE)("a"))[1]


async def _ranks_that_answer(group):
    return {rank for rank, _ in await asyncio.gather(*[group.chat("a") for _ in range(6)])}


def test_workers_hear_that_a_replica_answers_nothing_and_that_it_does_again(own):
    rollout, agents = own
    for load, ranks in ((math.inf, {1}), (0, {0, 1})):
        rollout.rest.options(replica=0)(load).result(DEADLINE)
        deadline = time.monotonic() + DEADLINE
        while agents.await_(_ranks_that_answer) != [ranks]:
            assert time.monotonic() < deadline


def test_workers_hear_of_versions_that_others_have_made(own, is_in_process):
    rollout, agents = own
    rollout.upgrade_all(1)
    assert agents.await_(_ask_the_newest, 1) == ["aa"]
    if is_in_process:
        pytest.skip("a call has ended when it was submitted")
    for version, upgrade in ((2, rollout.upgrade.all), (3, rollout.upgrade_all)):
        asked = agents.await_.submit(_ask_the_newest, version)
        upgraded = upgrade(version)
        assert asked.result(DEADLINE) == ["aa"] and (version == 3 or upgraded.result(DEADLINE))


def test_a_worker_reaches_replicas_with_reports_while_the_controller_computes(own, backend):
    rollout, _ = own
    rollout.upgrade_all(1)
    with bm.ResourcePool(spread([8]), backend=backend) as pool:
        asked = bm.WorkerGroup(pool, Agent, rollout).await_.submit(_ask_the_newest, 1)
        while not asked.done():  # other threads get the interpreter's lock seldom
            for _ in range(20):
                sum(range(10_000))
        assert asked.result() == ["aa"] * 8


def test_calls_of_the_controller_wait_for_requests_of_workers(agents, rollout, tmp_path, is_in_process):
    if is_in_process:
        pytest.skip("calls of the controller run in its own thread")

    async def hold(group, folder):
        return await asyncio.gather(*[group.hold(folder) for _ in range(2)])

    held = agents.await_.submit(hold, tmp_path)
    wait_for(tmp_path / "begun 0")
    wait_for(tmp_path / "begun 1")
    loaded = rollout.load.submit(1)
    assert not loaded.done()
    (tmp_path / "gate").touch()
    assert loaded.result(DEADLINE) == [(0, 0), (1, 0)]
    assert [sorted(ranks) for ranks in held.result(DEADLINE)] == [[0, 1]] * 2


class Pair(bm.Worker):
    def __init__(self):
        self.log = []

    @register(TransferProtocol(Route("dp"), Only(tp=-1)), concurrency=64)
    async def note(self, value):
        self.log.append(value)
        return self.rank

    @register(TransferProtocol(Route("dp"), Only(tp=-1)), concurrency=64)
    async def tokens(self, n):
        for number in range(n):
            yield self.rank, number

    @register(Dispatch.ONE_TO_ALL)
    def take(self):
        return self.log


def test_a_worker_iterates_over_the_items_of_a_replica_of_two_ranks(agents, backend):
    async def read(_, pair):
        stream = pair.tokens.options(maxsize=3).stream(10**9)
        firsts = [await anext(stream) for _ in range(20)]
        stream.close()
        return firsts, [item async for item in pair.tokens.stream(5)], await pair.note.all("value")

    with bm.ResourcePool([2], backend=backend) as pool:
        pair = bm.WorkerGroup(pool, Pair, mesh=Mesh(dp=1, tp=2))
        for firsts, items, noted in agents.await_.options(timeout=DEADLINE)(read, pair):
            assert (firsts, items) == ([(1, n) for n in range(20)], [(1, n) for n in range(5)])
            assert noted == [1]
        assert pair.take() == [["value"] * 2] * 2


def test_ranks_of_one_replica_get_the_requests_of_all_callers_in_one_order(backend, pools):
    async def notes(group, n):
        return await asyncio.gather(*[group.note((n, i)) for i in range(30)])

    with bm.ResourcePool([2], backend=backend) as pool:
        pair = bm.WorkerGroup(pool, Pair, mesh=Mesh(dp=1, tp=2))
        agents = bm.WorkerGroup(pools[1], Agent, pair)
        others = agents.await_.submit(notes, "worker")
        own = [pair.note(("controller", i)) for i in range(30)]
        assert others.result(DEADLINE) == [[1] * 30] * 2 and [future.result(DEADLINE) for future in own] == [1] * 30
        first, second = pair.take()
        assert first == second and len(first) == 90
        agents.close()


def test_a_role_is_an_argument_as_well(backend, agents):
    with bm.ResourcePool([2], backend=backend) as pool:
        roles = bm.colocate(pool, actor=Rollout, critic=Rollout)
        assert agents.with_group(roles.critic, "a") == ["aa", "aa"]
        assert agents.do(lambda _, group: group.load(1), roles.actor) == [[(0, 0), (1, 0)]] * 2


def test_requests_to_two_roles_of_the_same_workers_are_kept_apart(backend, agents):
    async def both(_, actor, critic):
        found = await asyncio.gather(*[role.chat((role is critic, n)) for n in range(50) for role in (actor, critic)])
        await actor.load.submit(1)
        return [value for _, value in found]

    with bm.ResourcePool([2], backend=backend) as pool:
        roles = bm.colocate(pool, actor=Rollout, critic=Rollout)
        for found in agents.await_.options(timeout=DEADLINE)(both, roles.actor, roles.critic):
            assert found == [(is_critic, n) * 2 for n in range(50) for is_critic in (False, True)]


def test_a_caller_that_does_not_read_holds_up_nobody_else(own, tmp_path, is_in_process):
    if is_in_process:
        pytest.skip("a call has ended when it was submitted")
    rollout, agents = own

    def ask_and_stay(group, folder):
        futures = [group.large.options(replica=0)() for _ in range(60)]
        (folder / "begun 0").touch()
        while not (folder / "gate").exists():
            time.sleep(0.001)
        return sum(len(future.result()) for future in futures)

    asked = agents.do.submit(ask_and_stay, tmp_path)
    wait_for(tmp_path / "begun 0")
    assert rollout.load.options(timeout=DEADLINE)(5) == [(0, 0), (1, 0)]
    (tmp_path / "gate").touch()
    assert asked.result(DEADLINE) == [60 * 60_000]


# --- ends ---------------------------------------------------------------------------------------------------------


def test_cancelling_the_caller_cancels_its_requests(own, tmp_path, is_in_process):
    if is_in_process:
        pytest.skip("a call has ended when it was submitted")
    rollout, agents = own

    held = agents.await_.submit(hold_on_zero, tmp_path)
    wait_for(tmp_path / "begun 0")
    assert held.cancel()
    wait_for(tmp_path / "cancelled 0")
    with pytest.raises(bm.CallCancelled):
        held.result(DEADLINE)
    assert agents.with_group(rollout, "a") == ["aa"]


def test_a_thread_that_waits_for_a_request_can_be_interrupted(own, tmp_path, is_in_process):
    if is_in_process:
        pytest.skip("a call has ended when it was submitted")
    rollout, agents = own
    held = agents.do.submit(lambda group, folder: group.hold.options(replica=0)(folder).result(), tmp_path)
    wait_for(tmp_path / "begun 0")
    assert held.cancel()
    with pytest.raises(bm.CallCancelled):
        held.result(DEADLINE)
    assert rollout.healthy and agents.healthy
    assert agents.with_group(rollout, "a") == ["aa"]
    (tmp_path / "gate").touch()


def test_a_deadline_holds_in_a_worker(own, tmp_path):
    _, agents = own

    async def late(group, folder):
        try:
            await group.hold.options(timeout=0.1, replica=0)(folder)
        except bm.CallTimeout as error:
            return error.method

    assert agents.await_(late, tmp_path) == ["Rollout.hold"]
    wait_for(tmp_path / "cancelled 0")


@pytest.mark.backends("local", "ray")
def test_a_deadline_cancels_a_call_of_all_ranks_that_a_worker_makes(own, tmp_path):
    rollout, agents = own

    async def late(group, folder):
        try:
            await group.load_slowly.options(timeout=0.1).submit(folder)
        except bm.CallTimeout as error:
            return str(error), error.future

    ((said, future),) = agents.await_(late, tmp_path)
    assert "within 0.1 s; it was cancelled: make it again" in said and future is None
    assert rollout.load.options(timeout=DEADLINE)(1) == [(0, 0), (1, 0)]


def test_requests_of_a_caller_that_dies_are_cancelled(own, tmp_path, is_in_process):
    if is_in_process:
        pytest.skip("workers share the process of the controller")
    rollout, agents = own

    held = agents.await_.submit(hold_and_die, tmp_path)
    wait_for(tmp_path / "begun 0")
    (tmp_path / "die").touch()
    wait_for(tmp_path / "cancelled 0")
    with pytest.raises(bm.WorkerDied, match="SIGKILL"):
        held.result(DEADLINE)
    assert rollout.load(2) == [(0, 0), (1, 0)]


def test_callers_hear_which_replica_has_died_and_use_the_other_one_until_it_is_replaced(own, is_in_process):
    if is_in_process:
        pytest.skip("workers share the process of the controller")
    rollout, agents = own

    async def die(group):
        try:
            await group.die.options(replica=1)()
        except bm.WorkerDied as error:
            said = str(error)
        return said, [(await group.chat("a"))[0] for _ in range(10)]

    async def ranks(group):
        return {(await group.chat.options(timeout=5)("a"))[0] for _ in range(10)}

    ((said, others),) = agents.await_(die)
    assert "rank 1" in said and "SIGKILL" in said
    assert others == [0] * 10
    rollout.replace(1)

    async def until_both(group):
        while len(await both(group)) < 2:
            await asyncio.sleep(0.01)

    async def both(group):
        return {rank for rank, _ in await asyncio.gather(*[group.chat("a") for _ in range(8)])}

    assert agents.await_.options(timeout=DEADLINE)(until_both) == [None]


@pytest.mark.parametrize("renew", [bm.WorkerGroup.restart, lambda group: group.replace(0)])
def test_callers_go_on_when_the_rank_that_they_know_as_dead_was_renewed(own, tmp_path, is_in_process, renew):
    if is_in_process:
        pytest.skip("the controller calls its own group")
    rollout, agents = own

    async def ask(group):
        return await group.chat.options(replica=0)("b"), await group.load.submit(4)

    held = agents.await_.submit(hold_on_zero, tmp_path)
    wait_for(tmp_path / "begun 0")
    renew(rollout)
    with pytest.raises(bm.RemoteError, match="WorkerDied"):
        held.result(DEADLINE)
    assert agents.await_.options(timeout=DEADLINE)(ask) == [((0, "bb"), [(0, 0), (1, 0)])]


def test_callers_of_a_closed_group_get_closed_error_at_once(own, tmp_path, is_in_process):
    rollout, agents = own

    def closed(group, method):
        try:
            return getattr(group, method)(1).result()
        except bm.ClosedError as error:
            return str(error)

    async def held(group, folder):
        try:
            return await group.hold.options(replica=0)(folder)
        except bm.ClosedError as error:
            return str(error)
        return "no error"

    assert agents.with_group(rollout, "a") == ["aa"]
    waiting = None if is_in_process else agents.await_.submit(held, tmp_path)
    if waiting is not None:
        wait_for(tmp_path / "begun 0")
    rollout.close()
    assert waiting is None or "Rollout" in waiting.result(DEADLINE)[0]
    for method in ("chat", "load"):
        assert "Rollout" in agents.do(closed, method)[0]


def test_a_thread_finds_a_group_again_that_was_restarted(own, is_in_process):
    if is_in_process:
        pytest.skip("the controller calls its own group")
    rollout, agents = own
    for rank in (0, 1):
        with pytest.raises(bm.WorkerDied):
            rollout.die.options(replica=rank)().result(DEADLINE)
    with pytest.raises(bm.RemoteError, match="WorkerDied"):
        while True:
            agents.do(lambda group: group.chat("b").result())
    rollout.restart()
    assert agents.do.options(timeout=DEADLINE)(lambda group: group.chat("b").result()[1]) == ["bb"]


class Partner(bm.Worker):
    """Asks another group from a method that runs alone, once the other one does so, too."""

    def meet(self, folder):
        (folder / f"{self.rank} {os.getpid()}").touch()
        while len(list(folder.iterdir())) < 2:  # or more, if the ranks of a replica do so
            time.sleep(0.001)

    @register(Dispatch.ONE_TO_ALL)
    def ask(self, other, folder, way):
        self.meet(folder)
        if way == "answer_items":
            return list(other.answer_items.stream("a"))
        answer = getattr(other, way)("a")
        return answer if way == "answer_all" else answer.result()

    @register(Dispatch.ONE_TO_ALL)
    def ask_in_two_threads(self, other, folder, way):
        self.meet(folder)
        answer = getattr(other, way)("a")

        def give_up_soon():
            with contextlib.suppress(bm.CallTimeout):
                answer.result(0.5)

        threading.Thread(target=give_up_soon).start()
        return answer.result()

    @register(Dispatch.ONE_TO_ALL)
    def ask_on_a_busy_host(self, other, folder, way):
        def interrupt(workers, tickets, interrupt=ReachedWorkers.interrupt):
            interrupt(workers, tickets)
            time.sleep(0.5)  # the thread loses the processor here

        ReachedWorkers.interrupt = interrupt
        return self.ask(other, folder, way)

    @register(Dispatch.ONE_TO_ALL)
    async def ask_async(self, other, folder, way):
        self.meet(folder)
        return await (other.answer("a") if way == "answer" else other.answer_all.submit("a"))

    @register(Dispatch.REQUEST)
    def ask_alone(self, other, folder):
        self.meet(folder)
        return other.answer("a").result()

    @register(Dispatch.REQUEST, concurrency=4)
    async def answer(self, word):
        return word

    @register(Dispatch.REQUEST, concurrency=4)
    async def answer_items(self, word):
        yield word

    @register(Dispatch.REQUEST)
    def answer_alone(self, word):
        return word

    @register(Dispatch.REQUEST)
    def answer_after(self, seconds):
        time.sleep(seconds)
        return "a"

    @register(Dispatch.ONE_TO_ALL)
    def wait_on_rank_1(self, begun):
        begun.touch()
        time.sleep(4.5 * self.rank)

    @register(Dispatch.ONE_TO_ALL)
    def begin_other(self, other, begun):
        other.wait_on_rank_1.submit(begun)

    @register(Dispatch.ONE_TO_ALL)
    def wait_for_other(self, other, begun):
        other.wait_on_rank_1(begun)

    @register(Dispatch.ONE_TO_ALL)
    def ask_on_rank_0(self, other, seconds):
        return other.answer_after(seconds).result() if self.rank == 0 else None

    @register(Dispatch.ONE_TO_ALL)
    def have(self, other, method, *args):
        getattr(other, method)(*args)

    @register(Dispatch.ONE_TO_ALL)
    def leave(self, other):
        """Make a call that others wait for later."""
        self.left = other.answer_all.submit("a")

    @register(Dispatch.ONE_TO_ALL)
    def ask_behind_what_was_left(self, other):
        return other.answer("b").result(), self.left.result()

    @register(Dispatch.REQUEST, concurrency=4)
    async def answer_late(self, word):
        await asyncio.sleep(3.5)
        return word

    @register(Dispatch.ONE_TO_ALL)
    def ask_behind(self, other, folder, way):
        """Ask behind a call of all ranks."""
        self.meet(folder)
        other.answer_all.submit("a")
        return getattr(other, way)("b").result()

    @register(Dispatch.ONE_TO_ALL)
    def ask_second(self, other, folder):
        self.meet(folder)
        return other.answer_late.options(replica=1)("b").result()

    @register(Dispatch.ONE_TO_ALL)
    def answer_all(self, word):
        return word


@pytest.mark.backends("local")
@pytest.mark.parametrize(
    ("method", "ways"),
    [
        ("ask", ("answer", "answer")),
        ("ask_async", ("answer", "answer_all")),
        ("ask_on_a_busy_host", ("answer_all", "answer_all")),
        ("ask", ("answer_alone", "answer_alone")),
        ("ask", ("answer_items", "answer_items")),
        ("ask_in_two_threads", ("answer", "answer")),
        ("ask_behind", ("answer", "answer")),
    ],
)
def test_two_calls_that_wait_for_each_other_are_found(backend, tmp_path, method, ways):
    with bm.ResourcePool(spread([1]), backend=backend) as one, bm.ResourcePool(spread([1]), backend=backend) as two:
        first, second = bm.WorkerGroup(one, Partner, name="first"), bm.WorkerGroup(two, Partner, name="second")
        asked = [
            getattr(group, method).submit(other, tmp_path, way)
            for group, other, way in zip((first, second), (second, first), ways, strict=True)
        ]
        errors = [one.exception(DEADLINE) for one in asked]
        (error,) = [error for error in errors if error is not None]  # the other one could begin then
        assert isinstance(error, bm.RemoteError) and "as calls that run alone wait for each other: Partner.ask" in str(
            error
        )


@pytest.mark.backends("local")
def test_a_call_that_waits_for_another_replica_is_in_no_circle(backend, tmp_path):
    with bm.ResourcePool([4], backend=backend) as four, bm.ResourcePool([1], backend=backend) as one:
        sharded = bm.WorkerGroup(four, Partner, mesh=Mesh(dp=2, tp=2), name="sharded")
        single = bm.WorkerGroup(one, Partner, name="single")
        first = sharded.ask_alone.options(replica=0)(single, tmp_path)  # waits until the second has ended
        second = single.ask_second.submit(sharded, tmp_path)
        assert (second.result(DEADLINE), first.result(DEADLINE)) == (["b"], "a")


@pytest.mark.backends("local")
def test_a_call_that_has_ended_waits_for_none_that_it_has_left(backend):
    with contextlib.ExitStack() as stack:
        pools = [stack.enter_context(bm.ResourcePool([1], backend=backend)) for _ in range(3)]
        first, middle, last = (bm.WorkerGroup(pool, Partner, name=f"group {n}") for n, pool in enumerate(pools))
        before = last.answer_after(1.0)
        asking = last.ask_on_rank_0.submit(first, 4.5)
        first.have(middle, "leave", last)  # behind that; and `have`, which has called `leave`, ends
        assert middle.ask_behind_what_was_left(last) == [("b", ["a"])]
        assert (before.result(DEADLINE), asking.result(DEADLINE)) == ("a", ["a"])


@pytest.mark.backends("local")
@pytest.mark.parametrize(("method", "seconds"), [("begin_other", 3.5), ("wait_for_other", 0.0)])
def test_a_call_that_waits_for_no_other_or_for_other_ranks_is_in_no_circle(backend, tmp_path, method, seconds):
    with bm.ResourcePool([1], backend=backend) as one, bm.ResourcePool([2], backend=backend) as two:
        first, second = bm.WorkerGroup(one, Partner, name="first"), bm.WorkerGroup(two, Partner, name="second")
        begun = getattr(first, method).submit(second, tmp_path / "begun")
        wait_for(tmp_path / "begun")
        assert second.ask_on_rank_0(first, seconds) == ["a", None]
        begun.result(DEADLINE)


@pytest.mark.backends("inprocess")
def test_ctrl_c_as_a_group_that_was_given_away_is_closed_leaves_nothing(backend):
    def n_loops():
        return sum(thread.name == "bandmaster-async-methods" for thread in threading.enumerate())

    before, variables = n_loops(), dict(os.environ)
    with bm.ResourcePool([1], backend=backend) as pool:
        for n in range(1, 1000):
            group = bm.WorkerGroup(pool, Rollout)
            pickle.dumps(group)
            was_pressed = pressed(group.close, n)
            group.close()
            assert (n_loops(), dict(os.environ)) == (before, variables), n
            if not was_pressed:
                break
        assert n > 20


@pytest.mark.backends("inprocess")
def test_ctrl_c_as_a_group_is_given_away_leaves_nothing_once_it_is_closed(backend):
    with bm.ResourcePool([1], backend=backend) as pool:
        for n in range(1, 1000):
            group = bm.WorkerGroup(pool, Rollout)
            was_pressed = pressed(partial(pickle.dumps, group), n)
            pickle.dumps(group)
            group.close()
            assert Door._open is None or group.name not in [one.name for one in Door._open._groups.values()], n
            if not was_pressed:
                break
        assert n > 5


@pytest.mark.backends("inprocess")
def test_a_group_that_is_closed_as_another_thread_gives_it_away_leaves_nothing(backend):
    with bm.ResourcePool([1], backend=backend) as pool:
        for n in range(1, 1000):
            group = bm.WorkerGroup(pool, Rollout)
            closing = threading.Thread(target=group.close)
            with contextlib.suppress(bm.ClosedError):
                called_with_a_pause(partial(pickle.dumps, group), n, partial(started, closing), "called.py")
            if closing.ident is None:
                group.close()
                break
            closing.join(DEADLINE)
            assert Door._open is None or group.name not in [one.name for one in Door._open._groups.values()], n
        assert n > 5


def test_a_fork_of_the_controller_does_not_hide_that_a_group_was_closed(own, is_in_process):
    if is_in_process:
        pytest.skip("workers share the process of the controller")
    rollout, agents = own
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(theirs)
        os.read(ours, 1)
        os._exit(0)
    try:
        rollout.close()
        for method in ("chat", "load"):
            with pytest.raises(bm.RemoteError, match="ClosedError"):
                agents.do.options(timeout=DEADLINE)(lambda group, name=method: getattr(group, name)(1).result())
    finally:
        os.close(theirs)
        os.close(ours)
        os.waitpid(child, 0)


def test_a_fork_of_a_worker_is_told_to_leave_the_calls_to_it(own, is_in_process):
    if is_in_process:
        pytest.skip("workers share the process of the controller")

    def in_fork(group):
        ours, theirs = os.pipe()
        future = group.chat("b")
        child = os.fork()
        if child == 0:
            for use in (lambda: group.chat("a"), future.result):
                try:
                    use()
                except bm.UsageError as error:
                    os.write(theirs, str(error).encode())
            os._exit(0)
        os.close(theirs)
        with open(ours) as words:
            said = words.read()
        os.waitpid(child, 0)
        return said, group.chat("a").result()[1] + future.result()[1]

    ((said, answer),) = own[1].do.options(timeout=DEADLINE)(in_fork)
    assert said.count("forked") == 2 and answer == "aabb"


def test_a_group_that_a_worker_has_called_is_an_argument_of_a_task_of_a_forked_pool(own, is_in_process):
    if is_in_process:
        pytest.skip("workers share the process of the controller")

    def in_pool(group):
        group.chat("a").result()
        group.load(1)  # by way of the controller
        with multiprocessing.get_context("fork").Pool(1) as pool:
            return pool.apply_async(shown, (cloudpickle.dumps(group),)).get(DEADLINE), repr(group)

    ((there, here),) = own[1].do.options(timeout=2 * DEADLINE)(in_pool)
    assert there == here


def test_several_groups_and_threads_call_at_the_same_time(backend, pools, rollout):
    def from_threads(group):
        found = []

        def ask():
            found.extend(group.chat(n).result()[1] for n in range(20))

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sorted(found)

    with bm.ResourcePool([1], backend=backend) as pool:
        first, second = bm.WorkerGroup(pools[1], Agent, rollout), bm.WorkerGroup(pool, Agent, rollout)
        futures = [first.do.submit(from_threads), second.do.submit(from_threads)]
        for future in futures:
            for found in future.result(DEADLINE):
                assert found == sorted([2 * n for n in range(20)] * 4)
        assert rollout.load(9) == [(0, 0), (1, 0)]
        first.close()


# --- calls that would wait for themselves -------------------------------------------------------------------------


class Ring(bm.Worker):
    """A worker that asks the next group, which may ask the first one in turn."""

    def __init__(self):
        self.next = None

    @register(Dispatch.ONE_TO_ALL)
    def set(self, group):
        self.next = group

    @register(Dispatch.ONE_TO_ALL)
    def alone(self, *methods):
        return self.ask(methods).result() if methods else self.rank

    @register(Dispatch.REQUEST)
    def plain(self, *methods):
        return self.ask(methods).result() if methods else self.rank

    @register(Dispatch.REQUEST, concurrency=8)
    async def beside(self, *methods):
        return await self.ask(methods) if methods else self.rank

    @register(Dispatch.REQUEST, concurrency=8)
    async def after_gate(self, folder, method, *args):
        (folder / "begun").touch()
        while not (folder / "gate").exists():
            await asyncio.sleep(0.001)
        return await getattr(self, method)(*args)

    @register(Dispatch.REQUEST, concurrency=8)
    async def count(self, n):
        for number in range(n):
            yield number

    @register(Dispatch.REQUEST, concurrency=8)
    async def counted(self, n):
        return [number async for number in self.next.count.stream(n)]

    def ask(self, methods):
        return getattr(self.next, methods[0]).submit(*methods[1:])


@pytest.fixture(scope="module")
def ring(backend, is_local):
    if not is_local:
        pytest.skip("such calls run in one thread")
    with bm.ResourcePool([1], backend=backend) as first, bm.ResourcePool([1], backend=backend) as second:
        rings = bm.WorkerGroup(first, Ring, name="first"), bm.WorkerGroup(second, Ring, name="second")
        rings[0].set(rings[1])
        rings[1].set(rings[0])
        for one in rings:
            one.beside("beside").result(DEADLINE)
            one.beside("alone").result(DEADLINE)
        yield rings[0]


@pytest.fixture(scope="module")
def is_local(backend):
    return backend != "inprocess"


@pytest.mark.parametrize("first", ["alone", "plain"])
@pytest.mark.parametrize("second", ["alone", "plain", "beside"])
@pytest.mark.parametrize("third", ["alone", "plain", "beside"])
def test_a_call_that_would_wait_for_itself_is_refused_and_named(ring, first, second, third):
    future = getattr(ring, first).submit(second, third)
    with pytest.raises(bm.RemoteError, match=rf"Ring.{first} on rank 0 waits for Ring.{second} on rank 0"):
        future.result(DEADLINE)
    assert ring.alone() == [0]


def test_requests_that_run_beside_each_other_may_ask_in_a_ring(ring):
    assert ring.beside("beside", "beside", "beside", "beside").result(DEADLINE) == 0
    with pytest.raises(bm.RemoteError, match="waits for"):
        ring.beside("beside", "alone").result(DEADLINE)


@pytest.mark.parametrize("back, value", [(["beside", "beside"], 0), (["counted", 40], list(range(40)))])
def test_a_request_that_calls_back_passes_a_call_that_waits_for_it(ring, tmp_path, back, value):
    asked = ring.beside("after_gate", tmp_path, *back)
    wait_for(tmp_path / "begun")
    alone = ring.alone.submit()
    (tmp_path / "gate").touch()
    assert asked.result(DEADLINE) == value
    assert alone.result(DEADLINE) == [0]


class Peers(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def ask(self, own):
        return own.who().result()

    @register(Dispatch.ONE_TO_ALL)
    def ask_all(self, own):
        return own.who.all().result()

    @register(Dispatch.REQUEST, concurrency=4)
    async def ask_beside(self, own):
        return await asyncio.gather(*[own.who() for _ in range(4)]), await own.who.all()

    @register(Dispatch.REQUEST, concurrency=4)
    async def who(self):
        return self.rank


@pytest.mark.backends("local")
def test_a_group_asks_itself_from_requests_alone(backend):
    with bm.ResourcePool([2], backend=backend) as pool:
        peers = bm.WorkerGroup(pool, Peers)
        for method in (peers.ask, peers.ask_all):
            with pytest.raises(bm.RemoteError, match=r"cannot begin before Peers.ask"):
                method.options(timeout=DEADLINE)(peers)
        found, every = peers.ask_beside(peers).result(DEADLINE)
        assert set(found) <= {0, 1} and every == [0, 1]


@pytest.mark.backends("local")
def test_a_replica_of_two_ranks_may_be_asked_back(backend):
    with bm.ResourcePool([2], backend=backend) as first, bm.ResourcePool([2], backend=backend) as second:
        rings = [bm.WorkerGroup(pool, Ring, mesh=Mesh(dp=1, tp=2)) for pool in (first, second)]
        rings[0].set(rings[1])
        rings[1].set(rings[0])
        assert rings[0].beside("beside", "beside").result(DEADLINE) == 0
        assert rings[0].beside("counted", 40).result(DEADLINE) == list(range(40))


def test_a_chain_that_cannot_be_told_of_is_told_of_later():
    """There was no descriptor, for example; circles are found from then on as well."""
    asked = []

    def ask(wait):
        asked.append(wait.ranks)
        if len(asked) == 1:
            raise bm.ResourceError("no descriptor")
        return Future()

    request = types.SimpleNamespace(is_done=False)
    chains = OpenChains(None, ask)
    waiting = Waiting(chains, Wait((), "method", "key", (0,)), request)
    waiting.since = -math.inf
    chains._waits[waiting] = (), None
    assert [chains.look() for _ in range(3)] == [False] * 3
    assert asked == [(0,)] * 2


class NoLinks:
    """Links to no agent, with a descriptor, perhaps one that cannot be doubled."""

    def __init__(self, fd=-1):
        self.poller, self.agents, self.fileno = self, {}, lambda: fd
        self.told, self.has_told = [], threading.Event()

    def check(self):
        """Nothing arrives."""

    def tell(self, agent, *content, large):
        self.told.append(content)
        self.has_told.set()


def test_a_call_by_way_of_an_agent_is_answered_if_the_controller_has_no_descriptor():
    executor, links = Executor(), NoLinks()
    far = FarCalls(executor)
    try:
        far.take(links, "agent", Message(FrameKind.RELAY, (7, "key/method", ()), {}))
        assert links.has_told.wait(DEADLINE)
        ((kind, number, what, part),) = links.told
        assert (kind, number, what) == (FrameKind.RELAYED, 7, ReplyKind.FAILURE)
        with pytest.raises(bm.ResourceError, match="the controller has no descriptor"):
            raise decode(Payload(*part)).exception
    finally:
        executor.close()


def test_the_descriptor_of_links_that_are_closed_is_closed():
    executor = Executor()
    far, loop = FarCalls(executor), executor.event_loop()
    reading, writing = os.pipe()
    links = NoLinks(reading)
    before = len(os.listdir("/proc/self/fd"))
    try:
        far.take(links, "agent", Message(FrameKind.RELAY, (7, "", ()), {}))
        far.take(links, "agent", None)
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop.loop).result(DEADLINE)
        assert len(os.listdir("/proc/self/fd")) == before and not far._watched
    finally:
        executor.close()
        os.close(reading)
        os.close(writing)


def _held(_):
    gc.collect()
    groups = [one for one in gc.get_objects() if type(one) is CalledGroup]
    return len(os.listdir("/proc/self/fd")), len(groups)


def _call_all(_, group):
    group.load(1)


WAYS = [
    lambda _, group: None,
    lambda _, group: group.chat("a").result() and None,
    _call_all,
    lambda _, group: group.load.submit(1) and None,
]


@pytest.mark.backends("local")
@pytest.mark.parametrize("has_other", [False, True], ids=["alone", "beside another"])
def test_a_worker_keeps_nothing_of_groups_that_were_closed(backend, has_other):
    with bm.ResourcePool([2], backend=backend) as first, bm.ResourcePool([1], backend=backend) as second:
        agents = bm.WorkerGroup(first, Agent, bm.WorkerGroup(first, Rollout) if has_other else None)
        before, found = agents.do(_held)[0], []
        for number in range(24):
            with bm.WorkerGroup(second, Rollout) as rollout:
                agents.do(WAYS[number % len(WAYS)], rollout)
            if number > 15:
                found += agents.do(_held)[:1]
    n_descriptors, n_groups = map(min, zip(*found, strict=True))  # a thread of the worker holds some for a while
    assert n_groups <= before[1] + 3 and n_descriptors < before[0] + 14, (before, found)


@pytest.mark.backends("local")
def test_a_call_goes_on_though_its_worker_has_dropped_the_group_and_the_future(backend, tmp_path):
    def submit(_, group, folder):
        group.load_slowly.submit(folder)

    with bm.ResourcePool([2], backend=backend) as first, bm.ResourcePool([1], backend=backend) as second:
        rollout, agents = bm.WorkerGroup(first, Rollout), bm.WorkerGroup(second, Agent)
        agents.do(submit, rollout, tmp_path)
        for _ in range(3):
            with bm.ResourcePool([1], backend=backend) as third, bm.WorkerGroup(third, Rollout) as other:
                agents.do(_call_all, other)
                agents.do(_held)
        (tmp_path / "gate").touch()
        assert rollout.loaded() == [0, 0] and not list(tmp_path.glob("cancelled*"))


def test_a_call_that_is_too_large_for_an_agent_to_pass_on_is_forgotten():
    def tell(*_, large):
        raise bm.ResourceError("too large")

    passed = PassedCalls(types.SimpleNamespace(tell=tell))
    try:
        with pytest.raises(bm.ResourceError, match="too large"):
            asyncio.run(passed._outcome("key/method", []))
        assert not passed._open
    finally:
        passed.close()
