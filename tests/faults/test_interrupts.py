"""Ctrl-C returns within a second or so, and the group is usable or cleanly closed: in scripts as a user runs them."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from clock import idle_time
from ctrl_c import interrupted_when, pressed, pressed_when
from ends import wait_for, wait_until_gone

import bandmaster as bm
from bandmaster import Dispatch, register
from bandmaster.calls.open_work import OpenWork
from bandmaster.requests.router import Router
from bandmaster.testing import no_leaks
from bandmaster.wire.lanes import LaneClient

needs_notes = pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes from Python 3.11 on")

SCRIPT = """
import os, signal, sys, time
import bandmaster as bm
from bandmaster import Dispatch, register

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have let its background jobs ignore it

class Slow(bm.Worker):
    def __init__(self, seconds):
        print("worker", os.getpid(), flush=True)
        time.sleep(seconds)

    @register(Dispatch.ONE_TO_ALL)
    def spin(self):
        print("spinning", flush=True)
        while True:
            pass

    @register(Dispatch.ONE_TO_ALL)
    def echo(self, value):
        return value

    @register(Dispatch.ONE_TO_ALL)
    def deaf(self):
        while True:
            try:
                while True:
                    pass
            except KeyboardInterrupt:
                pass

when = sys.argv[1]
try:
    with bm.ResourcePool([2]) as pool:
        group = bm.WorkerGroup(pool, Slow, 300 if when == "start" else 0)
        try:
            group.spin()
        except KeyboardInterrupt:
            if when == "call":
                raise
            if when == "close":
                group.deaf.submit()
                time.sleep(0.2)  # it is inside by then, or is ended before
                print("closing", flush=True)
                group.close()
                time.sleep(60)  # for the second interrupt, if it comes late
            start = time.monotonic()
            assert group.echo(7) == [7, 7]
            print("usable after", time.monotonic() - start, flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize(
    ("when", "sign"), [("start", "worker"), ("call", "spinning"), ("and go on", "spinning"), ("close", "spinning")]
)
def test_a_script_that_is_interrupted(when, sign):
    environment = {**os.environ, "BANDMASTER_PRELOAD": "numpy"}
    with subprocess.Popen(
        [sys.executable, "-u", "-c", SCRIPT, when], stdout=subprocess.PIPE, text=True, env=environment
    ) as script:
        seen = []
        while sum(sign in line for line in seen) < 2:
            seen.append(script.stdout.readline())
            assert seen[-1], seen
        start = idle_time()
        script.send_signal(signal.SIGINT)
        if when == "close":
            while "closing" not in (line := script.stdout.readline()):
                assert line, "it has ended"
            script.send_signal(signal.SIGINT)
        rest = script.stdout.read()
        assert script.wait(timeout=20) == 0, rest
        assert idle_time() - start < 5
    assert ("usable after" if when == "and go on" else "interrupted") in rest
    workers = [int(line.split()[-1]) for line in seen if "worker" in line]
    assert len(workers) == 2
    wait_until_gone(workers)


class Slow(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def spin(self):
        while True:
            pass

    @register(Dispatch.ONE_TO_ALL)
    def fail_beside_spinning(self):
        assert self.rank > 0
        self.spin()

    @register(Dispatch.ONE_TO_ALL)
    def doze(self):
        time.sleep(3)

    @register(Dispatch.ONE_TO_ALL)
    def compute_on_one(self):
        if self.rank == 0:
            sum(range(150_000_000))  # C code that holds the GIL
        time.sleep(3)

    @register(Dispatch.ONE_TO_ALL)
    def nap(self, seconds):
        time.sleep(seconds)
        return seconds

    @register(Dispatch.ONE_TO_ALL)
    def echo(self, value):
        return value


@contextlib.contextmanager
def handler(number, function):
    before = signal.signal(number, function)
    try:
        yield
    finally:
        signal.signal(number, before)


def interrupted_in(seconds):
    threading.Timer(seconds, os.kill, [os.getpid(), signal.SIGINT]).start()


WAYS_TO_CALL = {
    "method": lambda group: group.spin(),
    "execute_all_sync": lambda group: group.execute_all_sync("spin"),
    "execute_rank_zero_sync": lambda group: group.execute_rank_zero_sync("spin"),
}


@pytest.mark.backends("local", "ray")
@pytest.mark.parametrize("way", WAYS_TO_CALL)
def test_an_interrupted_call_frees_the_workers(make_group, way):
    """As in a notebook: the exception comes back, and the next cell can use the group."""
    group = make_group(2, Slow)
    group.echo(1)
    interrupted_in(0.5)
    start = idle_time()
    with pytest.raises(KeyboardInterrupt):
        WAYS_TO_CALL[way](group)
    assert group.echo(7) == [7, 7]
    assert idle_time() - start < 5


@pytest.mark.backends("local", "ray")
def test_who_has_the_future_of_an_interrupted_wait_can_wait_again(make_group):
    group = make_group(2, Slow)
    future = group.nap.submit(1)
    interrupted_in(0.3)
    with pytest.raises(KeyboardInterrupt):
        future.result()
    assert future.result(timeout=20) == [1, 1]


WAYS_TO_WAIT = {
    "method": lambda group: group.doze(),
    "future": lambda group: group.doze.submit().result(),
    "wait": lambda group: bm.wait([group.doze.submit()]),
    "stream": lambda group: list(group.doze.stream()),
}


@needs_notes
@pytest.mark.backends("local", "ray")
@pytest.mark.parametrize("way", WAYS_TO_WAIT)
def test_ctrl_c_tells_where_the_ranks_were(make_group, way):
    group = make_group(2, Slow)
    group.echo(1)
    interrupted_in(0.5)
    start = idle_time()
    with pytest.raises(KeyboardInterrupt) as caught:
        WAYS_TO_WAIT[way](group)
    assert idle_time() - start < 3
    (note,) = caught.value.__notes__
    heading, ranks, *stack = note.split("\n")
    assert heading == "Slow.doze was interrupted before rank 0, 1 had replied"
    assert ranks == "--- stack of rank 0, 1 ---", "ranks with the same stack are named together"
    assert "in doze" in stack[-2] and stack[-1] == "    time.sleep(3)"
    group.cancel()
    assert group.echo(7) == [7, 7]


@needs_notes
@pytest.mark.backends("local")
def test_ctrl_c_tells_where_the_ranks_were_though_c_code_holds_the_gil_on_one(make_group):
    group = make_group(2, Slow)
    group.echo(1)
    interrupted_in(0.5)
    with pytest.raises(KeyboardInterrupt) as caught:
        group.compute_on_one()
    (note,) = caught.value.__notes__
    assert note.count("in compute_on_one") == 2 and note.count("C code holds the GIL, or") == 1
    group.cancel()


@needs_notes
@pytest.mark.backends("local")
def test_a_second_ctrl_c_does_not_wait_for_stacks(make_group):
    """And the first one waits for them two seconds at most, although C code holds the GIL on a rank."""
    group = make_group(2, Slow)
    group.echo(1)
    for n_interrupts in (1, 2):
        to_come = n_interrupts - 1

        def interrupt(*arguments):
            nonlocal to_come
            if to_come:  # the next one comes when this one has been noticed, also where the machine is busy
                to_come -= 1
                interrupted_in(0.2)
            signal.default_int_handler(*arguments)

        call = group.compute_on_one.submit()
        start = time.monotonic()  # first: on a busy machine, the timer may run for a moment before the next line
        interrupted_in(0.2)
        start_idle = idle_time()
        with handler(signal.SIGINT, interrupt), pytest.raises(KeyboardInterrupt) as caught:
            call.result()
        took_s, took_idle_s = time.monotonic() - start, idle_time() - start_idle
        assert took_s > (0.4 if n_interrupts == 2 else 0.9)
        assert took_idle_s < (0.65 if n_interrupts == 2 else 2.2)
        assert isinstance(caught.value.__context__, KeyboardInterrupt) == (n_interrupts == 2)
        call.cancel()
        assert group.echo(7) == [7, 7]


@pytest.mark.backends("local", "ray")
def test_an_interrupted_call_is_not_another_threads(make_group):
    group, newer = make_group(2, Slow), []
    threading.Timer(0.3, lambda: newer.append(group.nap.submit(0.1))).start()
    interrupted_in(1)
    with pytest.raises(KeyboardInterrupt):
        group.spin()
    assert newer[0].result(timeout=20) == [0.1, 0.1]


@pytest.mark.backends("local", "ray")
def test_a_signal_handler_that_uses_the_group_in_the_middle_of_a_call_is_refused(make_group):
    group, seen = make_group(2, Slow), []
    future = group.nap.submit(1)
    attempts = [
        lambda: group.echo(7),
        lambda: group.echo.submit(7),
        lambda: future.result(),
        lambda: future.result(timeout=5),
        lambda: future.cancel(),
        lambda: group.execute_all_async("echo", 7),
        lambda: group.restart(),
        lambda: group.close(),
    ]

    def use(*_):
        start = idle_time()
        for attempt in attempts:
            with pytest.raises(bm.UsageError, match="set a flag in the handler and call between steps"):
                attempt()
        seen.append(idle_time() - start)

    with handler(signal.SIGUSR1, use):
        threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGUSR1]).start()
        assert future.result(timeout=20) == [1, 1]
    assert seen[0] < 0.5, "it waits for nothing"
    assert group.echo(8) == [8, 8]
    assert group.healthy


@pytest.mark.backends("local", "ray")
def test_what_a_signal_handler_does_not_catch_ends_the_call_that_it_interrupted(make_group):
    group = make_group(2, Slow)
    with handler(signal.SIGUSR1, lambda *_: group.close()):
        threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGUSR1]).start()
        with pytest.raises(bm.UsageError, match="set a flag"):
            group.nap(60)
    assert group.echo(7) == [7, 7]


@pytest.mark.parametrize("n_others", [0, 1])
def test_calls_of_a_signal_handler_are_refused_or_made_as_any_other(make_group, n_others):
    """Whatever it comes between: the messages, answers and locks of the call that it interrupts, and of other threads'
    calls. No call is lost, and all ranks get all calls in one order."""
    group, seen, array = make_group(2, Ordered), [], np.zeros(10_000)  # which lies in a segment
    is_over = False

    def call_all_the_time():
        while not is_over:
            assert group.note([("other", 0)] * 2) == [("other", 0)] * 2

    def call(*_):
        rows = [("handler", len(seen))] * 2
        try:
            assert group.note(rows) == rows
            seen.append(True)
        except bm.UsageError:
            seen.append(False)
        finally:
            if not is_over:
                signal.setitimer(signal.ITIMER_PROF, 0.002)  # from now on, so that what it interrupts goes on as well

    with handler(signal.SIGPROF, call), ThreadPoolExecutor() as threads:
        others = [threads.submit(call_all_the_time) for _ in range(n_others)]
        signal.setitimer(signal.ITIMER_PROF, 0.002)
        try:
            n, until, slowest = 0, time.monotonic() + 2, 0.0
            while time.monotonic() < until:
                n, start = n + 1, idle_time()
                future = group.note.submit([("main", n)] * 2)
                assert len(group.rows(array)) == len(array)
                assert future.result() == [("main", n)] * 2
                slowest = max(slowest, idle_time() - start)
        finally:
            is_over = True
            signal.setitimer(signal.ITIMER_PROF, 0)
        assert [other.result() for other in others] == [None] * n_others
    assert len(seen) > 10
    assert slowest < 2
    first, second = group.heard()
    assert first == second
    assert [number for who, number in first if who == "main"] == list(range(1, n + 1))


@pytest.mark.backends("inprocess")
def test_a_signal_handler_calls_while_another_thread_runs_a_method(make_group, tmp_path):
    """The method ends while the handler waits for it, wherever the handler has interrupted its thread."""
    group, steps = make_group(2, Leading), 0
    with ThreadPoolExecutor() as threads:
        while True:
            steps += 1
            (folder := tmp_path / str(steps)).mkdir()
            future, other = group.answer.submit(), threads.submit(group.lead, folder)

            def call(*_, folder=folder):
                (folder / "call").touch()
                with contextlib.suppress(bm.UsageError):
                    assert group.answer() == [0, 1]

            wait_for(folder / "running")
            with handler(signal.SIGUSR1, call):
                was_pressed = pressed(future.result, steps, number=signal.SIGUSR1)
            (folder / "call").touch()
            other.result(20)
            if not was_pressed:
                break
    assert steps > 10


class Leading(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def lead(self, folder):
        (folder / "running").touch()
        wait_for(folder / "call")
        time.sleep(0.02)  # so that the handler, which calls now, waits for this method

    @register(Dispatch.ONE_TO_ALL)
    def answer(self):
        return self.rank


class Ordered(bm.Worker):
    def __init__(self):
        self.entries = []

    @register(Dispatch.DP_PROTO)
    def note(self, rows):
        self.entries += rows
        return rows

    @register(Dispatch.DP_PROTO)
    def rows(self, rows):
        return rows

    @register(Dispatch.ONE_TO_ALL)
    def heard(self):
        return self.entries


def test_calls_of_several_threads_reach_all_ranks_in_the_same_order(make_group):
    """Also when each rank gets rows of its own: a collective in them would join those of different calls."""
    group = make_group(3, Ordered)

    def call(name):
        futures = [group.note.submit([(name, n)] * 3) for n in range(100)]
        assert all(future.result() == [(name, n)] * 3 for n, future in enumerate(futures))

    with ThreadPoolExecutor() as threads:
        list(threads.map(call, "abc"))
    first, *others = group.heard()
    assert len(first) == 300
    assert others == [first, first]


class Counts(bm.Worker):
    def __init__(self):
        self.n = 0

    @register(Dispatch.ONE_TO_ALL)
    def add(self):
        before = self.n
        time.sleep(0.001)  # others would come in between here
        self.n = before + 1
        return self.n


def test_a_rank_runs_the_calls_of_several_threads_one_after_the_other(make_group):
    group = make_group(2, Counts)
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda _: [group.add() for _ in range(10)], range(4)))
    assert group.add() == [41, 41]


@pytest.mark.backends("local", "ray")
def test_a_handler_of_ctrl_c_that_does_not_raise_is_called_once_and_the_call_goes_on(make_group):
    group, seen = make_group(2, Slow), []
    with handler(signal.SIGINT, lambda *_: seen.append(1)):
        interrupted_in(0.3)
        assert group.nap(1) == [1, 1]
    assert seen == [1]


FORK = """
import os, signal, threading, time
import bandmaster as bm
from bandmaster import Dispatch, register

signal.signal(signal.SIGINT, signal.default_int_handler)

class Slow(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def nap(self):
        time.sleep(1)

def fork():
    time.sleep(0.3)
    child = os.fork()
    if child == 0:
        try:
            print("child", flush=True)
            time.sleep(30)
        except KeyboardInterrupt:
            os._exit(7)
    time.sleep(0.3)
    os.kill(child, signal.SIGINT)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)

with bm.ResourcePool([1]) as pool:
    group = bm.WorkerGroup(pool, Slow)
    forking = threading.Thread(target=fork)
    forking.start()
    group.nap()
    forking.join()
"""


def test_what_is_forked_while_a_call_is_waited_for_has_its_ctrl_c():
    environment = {**os.environ, "BANDMASTER_PRELOAD": "numpy"}
    done = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, timeout=50, env=environment, check=False
    )
    assert done.stdout.split() == ["child", "7"], done.stderr


def as_given(group, *args):
    return args, {}


class Joined(bm.Worker):
    @register(dispatch_mode={"dispatch_fn": as_given, "collect_fn": lambda group, out: join(out)})
    def echo(self, value):
        return value


joins = []


def join(outputs):
    joins.append(outputs)
    if len(joins) == 1:
        raise KeyboardInterrupt
    return outputs


def test_ctrl_c_while_a_result_is_collected_is_nobody_elses(make_group):
    """It comes to who collects, and only there; the result can be asked for again."""
    joins.clear()
    group = make_group(2, Joined)
    first, second = group.echo.submit([1, 2]), group.echo.submit([3, 4])
    with pytest.raises(KeyboardInterrupt):
        second.result()
    assert first.result() == [1, 2]
    assert second.result() == [3, 4]


STORM = """
import os, random, signal, threading, time
import numpy as np
import bandmaster as bm
from bandmaster import Dispatch, register

class Echo(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def echo(self, value):
        return value

signal.signal(signal.SIGINT, signal.default_int_handler)
may_interrupt, is_over = threading.Event(), threading.Event()

def interrupt():
    while may_interrupt.wait() and not is_over.is_set():
        may_interrupt.clear()
        time.sleep(random.uniform(0.001, 0.006))
        os.kill(os.getpid(), signal.SIGINT)

def is_enough():
    left = end - time.monotonic()
    return left <= 0 and (min(n_right, n_interrupted, n_undisturbed) > 100 or left < -30)

def call(group):
    # Small and large values, blocking and not; every answer has to be that of its call.
    global n_right
    while not is_enough():
        value = random.randrange(1 << 30)
        if value % 3 == 0:
            assert group.echo(value) == [value, value]
        elif value % 3 == 1:
            array = np.full(90_000, value % 251, np.uint8)
            assert all((echoed == value % 251).all() for echoed in group.echo(array))
        else:
            futures = [group.echo.submit(value + n) for n in range(3)]
            for n, future in enumerate(futures):
                assert future.result() == [value + n] * 2
        n_right += 1

def call_undisturbed(group):
    # Ctrl-C is the main thread's, so this one's calls all have their answers.
    global n_undisturbed
    while not is_over.is_set():
        assert group.echo(n_undisturbed) == [n_undisturbed] * 2
        n_undisturbed += 1

with bm.ResourcePool([2]) as pool:
    group = bm.WorkerGroup(pool, Echo)
    group.echo(0)
    n_right = n_interrupted = n_undisturbed = 0
    end = time.monotonic() + 4
    other = threading.Thread(target=call_undisturbed, args=[group])
    other.start()
    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    while interrupting.is_alive():
        try:
            may_interrupt.set()  # from here on, once
            call(group)
            is_over.set()
            interrupting.join(1)  # in steps: a signal just before a thread blocks in C does not wake it
        except KeyboardInterrupt:
            n_interrupted += 1
    other.join()
    assert group.healthy
    assert [group.echo(n) for n in range(100)] == [[n, n] for n in range(100)]
    print("right", n_right, "interrupted", n_interrupted, "undisturbed", n_undisturbed)
"""


def test_answers_go_to_their_calls_in_a_storm_of_interrupts():
    environment = {**os.environ, "BANDMASTER_PRELOAD": "numpy"}
    done = subprocess.run(
        [sys.executable, "-c", STORM], capture_output=True, text=True, timeout=50, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert int(words[1]) > 100, done.stdout
    assert int(words[3]) > 100, done.stdout
    assert int(words[5]) > 100, done.stdout
    assert "Traceback" not in done.stderr, done.stderr


class Rows(bm.Worker):
    @register(Dispatch.DP_PROTO)
    def slow(self, x):
        time.sleep(0.05)
        return x

    @register(Dispatch.REQUEST)
    def ask_slow(self, x):
        time.sleep(0.05)
        return x

    @register(Dispatch.REQUEST, concurrency=4)
    async def ask(self, x):
        return x

    @register(Dispatch.DP_PROTO)
    def echo_rows(self, x):
        return x

    @register(Dispatch.ONE_TO_ALL)
    def echo(self, x):
        return x


def interrupts_at(monkeypatch, owner, name, is_meant=lambda self: True):
    """Ctrl-C is pressed once, when a function has done what it does."""
    real = getattr(owner, name)

    def interrupted(self, *args):
        found = real(self, *args)
        if is_meant(self):
            monkeypatch.setattr(owner, name, real)
            signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # a file that nobody has closes itself
@pytest.mark.parametrize(
    "where", [("__init__", "eventfd"), ("__init__", "pidfd_open"), ("_add", "append"), ("hold", "add")]
)
def test_ctrl_c_as_a_group_and_its_zygote_start_leaves_nothing(where):
    def is_now(frame, kind, what):
        return kind == "c_return" and (frame.f_code.co_name, what.__name__) == where

    no_leak = no_leaks(kinds=["processes", "descriptors"], timeout=10)
    with no_leak, bm.ResourcePool([1], preload=[]) as pool, interrupted_when(is_now):
        bm.WorkerGroup(pool, bm.Worker)


@pytest.mark.backends("local")
def test_callbacks_run_although_ctrl_c_came_as_their_thread_began(make_group, monkeypatch):
    group, told = make_group(2, Slow), threading.Event()
    interrupts_at(monkeypatch, threading.Thread, "start", lambda thread: "progress" in thread.name)
    with pytest.raises(KeyboardInterrupt):
        group.nap.submit(0.1).add_done_callback(print)
    group.echo.submit(1).add_done_callback(lambda _: told.set())
    assert told.wait(20)


@pytest.mark.backends("local")
def test_a_stream_that_is_interrupted_as_it_is_sent_holds_no_call_up(make_group, monkeypatch):
    group = make_group(2, Slow)
    interrupts_at(monkeypatch, LaneClient, "send_calls", lambda client: True)
    with pytest.raises(KeyboardInterrupt):
        group.nap.stream(60)
    assert group.echo.options(timeout=20)(1) == [1, 1]


@pytest.mark.backends("local")
def test_a_call_that_is_interrupted_as_it_is_sent_hides_none_that_failed_before_it(make_group, monkeypatch):
    group = make_group(2, Slow)
    group.fail_beside_spinning.submit()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupts_at(patch, OpenWork, "send_calls")
        group.echo(0)
    assert group.echo.options(timeout=20)(1) == [1, 1]


class Held:
    """A call that waits for rows until it is let go."""

    parents, is_sent_in_background, is_over = (), True, False

    def advance(self):
        return self.is_over

    def tell(self): ...

    def drive_in_background(self): ...


@pytest.mark.backends("inprocess")
@pytest.mark.parametrize("kind", ["stream", "map"])
def test_a_stream_that_is_interrupted_as_another_call_begins_it_ends(make_group, monkeypatch, kind):
    group, before = make_group(2, Rows), Held()
    work = group._submitter.work
    work.waiting.append(before)
    stream = group.echo_rows.stream(np.arange(4)) if kind == "stream" else group.ask.map(np.arange(4))
    before.is_over = True
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        owner, sends = (type(group._submitter), "submit_shares") if kind == "stream" else (Router, "put")
        interrupts_at(patch, owner, sends)
        work.advance()  # as a thread does that waits for another call
    work.advance()
    with pytest.raises(bm.CallCancelled, match="was interrupted as it was sent"):
        next(stream)
    assert group.echo.options(timeout=5)(1) == [1, 1]


@pytest.mark.backends("local")
def test_a_map_that_is_interrupted_as_it_is_given_up_holds_no_other_up(make_group, monkeypatch):
    group = make_group(2, Rows)
    mapped = group.ask_slow.map(np.arange(8))
    interrupts_at(monkeypatch, bm.Future, "cancel")
    with pytest.raises(KeyboardInterrupt):
        mapped.cancel()
    with pytest.raises(bm.CallCancelled):
        mapped.result()
    assert group.ask_slow.map([0, 1]).result(20) == [0, 1]
    assert group.slow.options(timeout=20)(np.arange(2)).tolist() == [0, 1]


def moments(room):
    """Yield for each moment at which a call of a room's code begins or has ended: in the block, Ctrl-C comes then."""
    n_left = n = 0

    def is_now(frame, kind, what):
        nonlocal n_left
        n_left -= f"/bandmaster/{room}/" in frame.f_code.co_filename and kind in ("call", "c_return")
        return n_left == 0

    @contextlib.contextmanager
    def interrupted():
        nonlocal n_left
        n_left = n
        with contextlib.suppress(KeyboardInterrupt), pressed_when(is_now):
            yield

    while n_left <= 0:  # the last block was interrupted
        n += 1
        yield interrupted()
    assert n > 20, "only these moments were tried"


def test_ctrl_c_as_a_class_is_loaded_forbids_no_other_group():
    n_left = n = 0

    def is_now(frame, kind, what):
        nonlocal n_left
        n_left -= frame.f_code.co_filename.endswith("/bandmaster/worker.py") and kind in ("call", "return")
        return n_left == 0

    while n_left <= 0:  # the last group was interrupted
        n_left = n = n + 1
        pools = [bm.ResourcePool([1], backend="inprocess") for _ in range(2)]
        with contextlib.suppress(KeyboardInterrupt), pressed_when(is_now):
            bm.WorkerGroup(pools[0], bm.Worker)
        bm.WorkerGroup(pools[1], bm.Worker).close()
        for pool in pools:
            pool.close()
    assert n > 5, "only these moments were tried"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # as a generator is closed
@pytest.mark.backends("inprocess", "local")
@pytest.mark.parametrize(
    ("room", "call"),
    [
        ("flow", lambda group: list(group.echo_rows.stream(np.arange(3)))),
        ("requests", lambda group: group.ask.map(np.arange(3), chunk=1).future),
        ("calls", lambda group: group.echo_rows(group.echo_rows.submit(group.echo_rows.submit(np.arange(3))))),
    ],
    ids=["stream", "map", "behind its rows"],
)
def test_a_call_that_is_interrupted_at_any_moment_holds_no_other_up(make_group, room, call):
    group = make_group(2, Rows)
    for interrupted in moments(room):
        with interrupted:
            call(group)
        assert group.echo.options(timeout=5)(1) == [1, 1]
    assert group.ask.map([1, 2]).result(5) == [1, 2]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # as a future ends
@pytest.mark.backends("local")
@pytest.mark.parametrize("timeout", [0, None])
def test_a_wait_that_is_interrupted_at_any_moment_leaves_the_call_to_others(make_group, timeout):
    group = make_group(2, Slow)
    for interrupted in moments("calls"):
        future, told = group.nap.submit(0.01), threading.Event()
        with interrupted, contextlib.suppress(bm.CallTimeout):
            future.result(timeout)
        future.add_done_callback(lambda _, told=told: told.set())
        assert told.wait(10), "the call still belongs to the thread that was interrupted"


class CanBeReplaced(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def my_rank(self):
        return self.rank

    def on_replace(self, rank, state):
        pass


@pytest.mark.backends("inprocess")
def test_a_group_whose_replacement_is_interrupted_at_any_moment_can_be_called_by_other_threads(make_group):
    group = make_group(2, CanBeReplaced)
    with ThreadPoolExecutor(1) as thread:
        for interrupted in moments("backends"):
            with interrupted:
                group.replace(1)
            if 1 in group._ownership.workers().deaths:
                group.replace(1)
            assert thread.submit(group.my_rank.options(timeout=5)).result(10) == [0, 1]


@pytest.mark.parametrize("step", ["_start_process", "add", "call", "wait"])
def test_a_replacement_that_ctrl_c_interrupts_can_be_made_again(monkeypatch, step):
    with bm.ResourcePool([2]) as pool:
        group = bm.WorkerGroup(pool, CanBeReplaced)
        workers = group._ownership.workers()
        real = getattr(workers, step)

        def interrupted(*args):
            signal.raise_signal(signal.SIGINT)
            return real(*args)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(workers, step, interrupted)
            group.replace(1)
        group.replace(1)
        assert group.my_rank() == [0, 1]


MOMENTS = {
    "the rows are made": lambda frame, kind, what: kind == "call" and frame.f_back.f_code.co_name == "_settle",
    "the lock is taken": lambda frame, kind, what: (
        kind == "c_return" and what.__name__ == "acquire" and frame.f_code.co_name == "wait"
    ),
}


@pytest.mark.backends("inprocess", "local")
@pytest.mark.parametrize("moment", MOMENTS)
def test_handles_are_what_they_were_when_ctrl_c_comes_as_rows_are_looked_for(make_group, moment):
    group = make_group(2, Rows)
    rows = group.slow.submit(np.arange(4))
    some = rows[1:3]
    with interrupted_when(MOMENTS[moment]):
        group.slow(some)
    assert some.result().tolist() == [1, 2]
    assert rows.result().tolist() == [0, 1, 2, 3]
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(rows.result, 20).result().tolist() == [0, 1, 2, 3]


class Asked(bm.Worker):
    @register(Dispatch.REQUEST, concurrency=1)
    async def hold(self, seconds):
        await asyncio.sleep(seconds)
        return np.full(2, seconds)


@pytest.mark.backends("inprocess", "local")
def test_a_request_that_is_interrupted_at_any_moment_can_be_cancelled_and_keeps_no_place(make_group):
    group = make_group(1, Asked)
    for interrupted in moments("requests"):
        returned = []
        with interrupted:
            returned.append(group.hold(60))
            returned[0].cancel()
        for future in returned:
            future.cancel()
        assert group.hold.options(timeout=10)(0).result().tolist() == [0, 0]


@pytest.mark.backends("inprocess", "local")
def test_ctrl_c_as_the_value_of_a_request_is_decoded_leaves_the_value(make_group):
    future = make_group(1, Asked).hold(0)
    with interrupted_when(lambda frame, kind, what: kind == "call" and frame.f_code.co_name == "decode"):
        future.result()
    assert future.result(10).tolist() == [0, 0]


class Interrupting:
    """Raises KeyboardInterrupt as it is unpickled, without Ctrl-C."""

    def __reduce__(self):
        return _interrupt, ()


def _interrupt():
    raise KeyboardInterrupt


class Interrupts(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def call(self):
        return Interrupting()

    @register(Dispatch.REQUEST, concurrency=2)
    async def request(self):
        return Interrupting()

    @register(Dispatch.ONE_TO_ALL)
    def echo(self, x):
        return x


@pytest.mark.backends("inprocess", "local")
@pytest.mark.parametrize("name", ["call", "request"])
def test_a_value_that_interrupts_a_thread_where_ctrl_c_cannot_come_is_an_error(make_group, name):
    group, told = make_group(1, Interrupts), threading.Event()
    future = getattr(group, name).submit()
    with ThreadPoolExecutor(1) as thread:  # in which, or in that of callbacks, the value is decoded
        thread.submit(future.add_done_callback, lambda _: told.set()).result(10)
    assert told.wait(10)
    with pytest.raises(bm.CollectError, match="cannot be unpickled in the controller: KeyboardInterrupt"):
        future.result(10)
    told.clear()
    group.echo.submit(1).add_done_callback(lambda _: told.set())
    assert told.wait(10)


class Late(Exception):
    """Raised by the handler of an alarm."""


class AlarmAtPickling:
    """An alarm rings while an object of this class is pickled."""

    def __reduce__(self):
        signal.raise_signal(signal.SIGALRM)
        raise AssertionError("the handler has raised")


class Echo(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def echo(self, value):
        return value


@pytest.mark.backends("local")
def test_what_the_handler_of_an_alarm_raises_as_arguments_are_pickled_is_no_error_of_theirs(make_group):
    def ring(*_):
        raise Late

    group = make_group(2, Echo)
    before = signal.signal(signal.SIGALRM, ring)
    try:
        with pytest.raises(Late):
            group.echo(AlarmAtPickling())
    finally:
        signal.signal(signal.SIGALRM, before)
    assert group.echo(1) == [1, 1]
