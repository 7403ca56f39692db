"""Workers that die, and groups that are restarted: in time, with the cause, and nothing is left behind."""

import asyncio
import contextlib
import functools
import gc
import io
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np
import psutil
import pytest
from clock import idle_time
from ctrl_c import done_when
from ends import (
    abort_with_a_dump,
    deadlock,
    exit_three,
    in_another_thread,
    kill_oneself,
    runs,
    segfault,
    until,
    wait_for,
    wait_until_gone,
)

import bandmaster as bm
from bandmaster import Dispatch, WorkerDied, register
from bandmaster.backends.zygote import Zygote
from bandmaster.platform.forks import free_in_forks
from bandmaster.wire.poller import Poller

pytestmark = pytest.mark.backends("local", "ray")

DEADLINE = 60.0  # of whatever must end


def kill_oneself_after_a_look_into(path):
    Path(path).read_text()
    kill_oneself()


def exit_with_an_error(*_):
    sys.exit(1)


class Mortal(bm.Worker):
    def __init__(self, start=0):
        self.count = start
        self.told = []

    @register(Dispatch.ONE_TO_ALL)
    def add(self, n):
        self.count += n
        return self.count

    @register(Dispatch.ONE_TO_ALL)
    def pid(self):
        return os.getpid()

    @register(Dispatch.ONE_TO_ALL)
    def die_on(self, ranks, how):
        if self.rank in ranks:
            print("my last words", file=sys.stderr, flush=True)
            how()
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def exit_on(self, number):
        signal.signal(number, exit_with_an_error)

    @register(Dispatch.ONE_TO_ALL)
    def hang_on(self, ranks):
        if self.rank in ranks:
            time.sleep(300)

    @register(Dispatch.ONE_TO_ALL)
    def stay(self, folder):
        (folder / str(self.rank)).write_text(str(os.getpid()))
        time.sleep(300)

    @register(Dispatch.ONE_TO_ALL)
    def deadlock_on(self, ranks, begun):
        if self.rank in ranks:
            begun.touch()
            deadlock()

    @register(Dispatch.ONE_TO_ALL)
    def all_reduce(self, dying):
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        if self.rank in dying:
            os._exit(3)
        dist.all_reduce(total)
        return total.item()

    @register(Dispatch.ONE_TO_ALL)
    def told_so_far(self):
        return self.told

    def on_restart(self, state):
        self.told.append(("restart", state))
        if state is not None:
            self.count = state["count"]

    def on_replace(self, rank, state):
        self.told.append(("replace", rank, state))


class Pair(Mortal):
    @classmethod
    def why_not_replaced(cls, mesh):
        return f"the {mesh.size} ranks of a pair start together"


class Rigid(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def pid(self):
        return os.getpid()


def close_all_descriptors():
    os.closerange(0, 4096)
    time.sleep(300)


def close_output():
    os.close(1)
    os.close(2)


@pytest.fixture
def group(make_group):
    return make_group(3, Mortal, start=10)


def took(start):
    return idle_time() - start


@pytest.mark.parametrize(
    "how",
    [kill_oneself, abort_with_a_dump, close_all_descriptors],
    ids=lambda f: f.__name__,
)
def test_a_death_fails_the_call_and_all_after_it(group, how):
    start = idle_time()
    with pytest.raises(WorkerDied, match=r"(?s)rank 1 \(dp=1, host .*, pid .*my last words") as caught:
        group.die_on([1], how)
    assert took(start) < 8
    assert (caught.value.rank, caught.value.group) == (1, group.name)
    start = idle_time()
    with pytest.raises(WorkerDied, match="rank 1"):
        group.add(1)
    assert took(start) < 1
    assert not group.healthy


@pytest.mark.parametrize(
    ("how", "words"),
    [(exit_three, "exit code 3"), (kill_oneself, "killed by SIGKILL"), (segfault, "killed by SIGSEGV")],
)
def test_a_local_death_is_told_by_exit_code_or_signal(zygote, how, words):
    with bm.ResourcePool([2], backend="local") as pool:
        group = bm.WorkerGroup(pool, Mortal)
        with pytest.raises(WorkerDied, match=rf"(?s)lost its process on rank 1 \(dp=1, .*\): {words}.*my last words"):
            group.die_on([1], how)
        with pytest.raises(WorkerDied, match=words):
            group.add(1)


@pytest.mark.backends("local")
def test_a_value_that_a_rank_has_sent_before_it_died_is_not_lost_to_a_call_that_comes_after_the_death(group, tmp_path):
    done, dying = group.add.submit(1), group.stay.submit(tmp_path)
    end = idle_time() + DEADLINE
    while len(paths := [path for path in tmp_path.iterdir() if path.read_text()]) < 3:  # all have sent that value
        assert idle_time() < end, f"only {len(paths)} ranks have begun"
        time.sleep(0.001)
    pid = int((tmp_path / "1").read_text())
    os.kill(pid, signal.SIGKILL)
    wait_until_gone([pid])
    after = group.add.submit(1)
    assert done.result(DEADLINE) == [11, 11, 11]
    for future in (dying, after):
        with pytest.raises(WorkerDied, match="killed by SIGKILL"):
            future.result(DEADLINE)


def talk_and_kill_oneself(fifo):
    print("first words", file=sys.stderr, flush=True)
    Path(fifo).read_text()  # until the first words are shown
    print("the very last words", file=sys.stderr, flush=True)
    kill_oneself()


@pytest.mark.backends("local")
def test_last_words_are_told_though_a_slow_terminal_has_not_shown_them_yet(make_group, monkeypatch, tmp_path):
    os.mkfifo(fifo := tmp_path / "fifo")

    class SlowTerminal(io.StringIO):
        def write(self, text):
            if "first words" in text:
                fifo.write_text("")
                time.sleep(0.3)
            return super().write(text)

    group = make_group(1, Mortal)
    monkeypatch.setattr(sys, "stderr", SlowTerminal())
    with pytest.raises(WorkerDied, match="the very last words"):
        group.die_on([0], functools.partial(talk_and_kill_oneself, str(fifo)))


@pytest.mark.backends("local", "ray")
def test_a_segmentation_fault_shows_the_python_stack(make_group):
    group = make_group(2, Mortal)
    with pytest.raises(
        WorkerDied, match=r"(?s)Fatal Python error: Segmentation fault.*ends.py\", line \d+ in segfault"
    ):
        group.die_on([1], segfault)


def test_a_death_while_nothing_is_pending_is_told_by_the_next_call(group):
    victim = pids(group)[1]
    os.kill(victim, signal.SIGKILL)
    wait_until_gone([victim], timeout_s=30)
    with pytest.raises(WorkerDied, match="rank 1"):
        group.add(1)


@pytest.mark.backends("local")
def test_a_worker_that_closes_its_output_works_on(group):
    assert group.die_on([1], close_output) == [0, 1, 2]
    assert group.add(1) == [11, 11, 11]


@pytest.mark.backends("local")
def test_a_death_while_others_hang(group):
    pending = group.hang_on.submit([0, 2])
    os.kill(pids(group)[1], signal.SIGKILL)
    start = idle_time()
    with pytest.raises(WorkerDied, match="rank 1"):
        pending.result(timeout=30)
    assert took(start) < 5


def test_a_death_in_the_middle_of_a_collective(group):
    start = idle_time()
    with pytest.raises(WorkerDied, match="rank 1") as caught:
        group.all_reduce([1])
    assert took(start) < 15
    assert next(iter(caught.value.failures)) == 1, "the first cause first"


@pytest.mark.backends("local")
def test_a_thousand_calls_in_flight_all_learn_of_a_death(group):
    futures = [group.add.submit(1) for _ in range(300)]
    futures.append(group.die_on.submit([2], kill_oneself))
    futures += [group.add.submit(1) for _ in range(700)]
    start = idle_time()
    errors = [future.exception(timeout=30) for future in futures]
    assert took(start) < 20
    assert errors[:300] == [None] * 300
    assert {type(error) for error in errors[300:]} == {WorkerDied}


@pytest.mark.backends("local")
def test_replies_from_before_a_death_count_though_the_worker_left_messages_unread(group, tmp_path):
    os.mkfifo(fifo := tmp_path / "fifo")
    before = [group.add.submit(1) for _ in range(5)]
    dying = group.die_on.submit([2], functools.partial(kill_oneself_after_a_look_into, str(fifo)))
    unread = group.add.submit(1)
    fifo.write_text("now")  # waits until the worker reads, and so has replied to the calls before
    wait_until_gone(pids(group)[2:])
    assert [future.result(timeout=30) for future in before] == [[11 + i] * 3 for i in range(5)]
    assert {type(dying.exception(timeout=30)), type(unread.exception(timeout=30))} == {WorkerDied}


def started():
    """The processes that this one has started, and those started by them."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


def pids(group):
    """As `describe` shows them: no call is needed."""
    header, *rows = group.describe().splitlines()[1:]
    column = header.split().index("pid")
    return [int(row.split()[column]) for row in rows]


def test_a_worker_whose_handler_of_a_signal_exits_is_gone(group):
    """Its `SystemExit` is not taken for the method's own, so that what is told to end does."""
    group.exit_on(signal.SIGUSR1)
    sleeping = group.hang_on.submit([1])
    with pytest.raises(bm.CallTimeout):
        sleeping.result(timeout=0.3)
    os.kill(pids(group)[1], signal.SIGUSR1)
    with pytest.raises(WorkerDied, match="rank 1"):
        sleeping.result(timeout=20)


def test_health_and_a_callback_tell_of_a_death_while_nothing_is_called(group):
    assert group.healthy
    told, errors = threading.Event(), []
    group.on_death(lambda error: (errors.append(error), told.set()))
    os.kill(pids(group)[1], signal.SIGKILL)
    assert told.wait(timeout=10)
    assert [type(error) for error in errors] == [WorkerDied]
    assert errors[0].rank == 1
    assert not group.healthy


def test_closing_a_group_is_no_death(group):
    errors = []
    group.on_death(errors.append)
    group.close()
    assert not group.healthy
    assert errors == []


def test_closing_a_group_whose_processes_are_being_looked_at_is_no_death(group, monkeypatch):
    workers, errors = group._ownership.workers(), []
    check = workers.check

    def is_closed_meanwhile(is_thorough=True):
        is_running = check(is_thorough)
        group.close()
        return is_running

    monkeypatch.setattr(workers, "check", is_closed_meanwhile)
    group.on_death(errors.append)
    until = idle_time() + 20
    while any(thread.name == "bandmaster-progress" for thread in threading.enumerate()):
        assert idle_time() < until
        time.sleep(0.01)  # polling the thread of callbacks, which ends with the last of them
    assert errors == []


def test_replacing_a_rank_while_the_processes_are_looked_at_is_no_death(group, monkeypatch):
    workers, errors, pid = group._ownership.workers(), [], pids(group)[1]
    check = workers.check

    def is_ended_meanwhile(is_thorough=True):
        is_running = check(is_thorough)
        monkeypatch.undo()
        group._end_watches()  # as `replace` does before it ends the process
        os.kill(pid, signal.SIGKILL)
        until(lambda: check() and workers.deaths)
        return is_running

    monkeypatch.setattr(workers, "check", is_ended_meanwhile)
    group.on_death(errors.append)
    until(lambda: all(thread.name != "bandmaster-progress" for thread in threading.enumerate()))
    assert errors == []


@pytest.mark.backends("local")
def test_callbacks_of_others_run_although_a_group_was_closed_as_it_was_to_be_waited_for(group, make_group, monkeypatch):
    other, told, fileno = make_group(1, Mortal), threading.Event(), Poller.fileno

    def is_closed_before(poller):
        monkeypatch.setattr(Poller, "fileno", fileno)
        group.close()
        return fileno(poller)

    monkeypatch.setattr(Poller, "fileno", is_closed_before)
    group.on_death(print)
    until = idle_time() + 20
    while Poller.fileno is not fileno:
        assert idle_time() < until
        time.sleep(0.01)  # polling the thread of callbacks
    other.add.submit(1).add_done_callback(lambda _: told.set())
    assert told.wait(20)


def test_a_group_is_restarted_on_the_same_places(group):
    group.add(5)
    before = pids(group)
    with pytest.raises(WorkerDied):
        group.die_on([1], exit_three)
    group.restart()
    assert group.healthy
    assert group.add(1) == [11, 11, 11], "the constructor ran again, with its arguments"
    assert not set(pids(group)) & set(before)
    group.restart(state={"count": 100})
    assert group.add(1) == [101, 101, 101]
    assert group.told_so_far() == [[("restart", {"count": 100})]] * 3


def test_a_restart_ends_what_hangs_and_fails_what_is_pending(group):
    pending = group.hang_on.submit([0, 1, 2])
    start = idle_time()
    group.restart()
    assert took(start) < 20
    with pytest.raises(WorkerDied, match="the group was restarted"):
        pending.result(timeout=5)
    assert group.add(1) == [11, 11, 11]


def test_a_collective_works_again_after_a_restart(group):
    with pytest.raises(WorkerDied):
        group.all_reduce([1])
    group.restart()
    assert group.all_reduce([]) == [9.0, 9.0, 9.0]


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("is_dead", [True, False])
def test_a_single_rank_is_replaced(group, rank, is_dead):
    group.add(5)
    before = pids(group)
    if is_dead:
        with pytest.raises(WorkerDied):
            group.die_on([rank], kill_oneself)
    group.replace(rank, state="s")
    after = pids(group)
    assert [a == b for a, b in zip(before, after, strict=True)] == [r != rank for r in range(3)]
    assert group.add(1) == [11 if r == rank else 16 for r in range(3)]
    assert group.told_so_far() == [[("replace", rank, "s")]] * 3
    assert group.healthy


def test_after_replacements_all_ranks_know_of_the_same_rendezvous(make_group):
    group = make_group(3, Mortal)
    for rank in (0, 2):
        group.replace(rank)
    assert group.all_reduce([]) == [9.0, 9.0, 9.0]


def test_one_of_two_dead_ranks_cannot_be_replaced(group):
    with pytest.raises(WorkerDied):
        group.die_on([1, 2], kill_oneself)
    wait_until_gone(pids(group)[1:], timeout_s=30)
    with pytest.raises(bm.UsageError, match=r"rank 2 is dead too.*restart"):
        group.replace(1)
    group.restart()
    assert group.add(1) == [11, 11, 11]


@pytest.mark.backends("local")
def test_a_rank_is_not_replaced_while_another_is_stuck_for_good(group, tmp_path):
    """`on_replace` would wait for it for ever: it is ended after its grace, and then there is only `restart`."""
    group.set_default_options(grace=0.5)
    stuck = group.deadlock_on.submit([2], tmp_path / "begun")
    wait_for(tmp_path / "begun")
    os.kill(pids(group)[1], signal.SIGKILL)
    with pytest.raises(WorkerDied, match="rank 1"):
        stuck.result(timeout=30)
    start = idle_time()
    with pytest.raises(bm.UsageError, match=r"rank 2 is dead too.*restart"):
        group.replace(1)
    assert took(start) < 10
    group.restart()
    assert group.add(1) == [11, 11, 11]


def test_what_is_pending_is_given_up_for_a_replacement(group):
    pending = group.hang_on.submit([0])
    start = idle_time()
    group.replace(1)
    assert took(start) < 20
    assert isinstance(pending.exception(timeout=5), bm.CallCancelled | WorkerDied)
    assert group.add(1) == [11, 11, 11]


@pytest.mark.backends("local")
def test_a_replacement_does_not_take_back_what_was_answered(group):
    future = group.add.submit(1)
    group.add(0)
    group.replace(1)
    assert future.result(timeout=5) == [11, 11, 11]
    assert not future.cancelled()


def test_workers_do_not_care_what_other_processes_are_called(zygote):
    """One name that is no text must not end the process that all workers are forked from."""
    strange = subprocess.Popen(
        [sys.executable, "-c", r"open('/proc/self/comm', 'wb').write(b'\xff\xfe)'); print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with strange, bm.ResourcePool([1], backend="local") as pool:
        assert strange.stdout.readline()
        stays = bm.WorkerGroup(pool, Mortal)
        bm.WorkerGroup(pool, Mortal).close()
        assert bm.WorkerGroup(pool, Mortal).add(1) == [1]
        assert stays.add(1) == [1]
        strange.communicate(b"\n")


class Busy(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def add(self, n):
        time.sleep(0.002)
        return n + 1

    @register(Dispatch.REQUEST, concurrency=4)
    async def ask(self, n):
        await asyncio.sleep(0.002)
        return n + 1

    @register(Dispatch.ONE_TO_ALL)
    def count(self, n):
        time.sleep(0.002)
        yield n + 1

    def on_replace(self, rank, state): ...


@pytest.mark.backends("inprocess", "local", "ray")
@pytest.mark.parametrize("method", ["add", "ask", "count"])
def test_other_threads_may_call_while_a_rank_is_replaced(make_group, method):
    """What they call at that moment may fail, but says why; and nothing waits for it."""
    group, is_over, wrong = make_group(2, Busy), threading.Event(), []
    expected = 8 if method == "ask" else [8, 8]
    constructed, begun = "not constructed yet; make the call again", "the worker was replaced or restarted; make the"
    words = {"add": (constructed,), "ask": (), "count": (constructed, begun)}[method]

    def call():
        while not is_over.is_set():
            try:
                if method == "count":
                    found = [item.result(DEADLINE) for item in group.count.stream(7)]
                else:
                    found = getattr(group, method).submit(7).result(DEADLINE)
                if found != expected:
                    wrong.append(found)
            except (bm.WorkerDied, bm.CallCancelled):
                pass
            except Exception as error:
                if not any(why in str(error) for why in words):
                    wrong.append(error)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for n in range(6):
            group.replace(n % 2)
    finally:
        is_over.set()
        for thread in threads:
            thread.join(DEADLINE)
    assert wrong == [] and group.add(7) == [8, 8]


@pytest.mark.backends("local")
@pytest.mark.parametrize("moment", ["call", "return"])
def test_a_group_that_another_thread_closes_as_a_rank_is_replaced_leaves_no_worker(make_group, moment):
    group = make_group(2, Mortal)
    before = started().difference(pids(group))

    def is_forked(frame, kind, what):
        return kind == moment and frame.f_code is Zygote.spawn.__code__

    with (
        done_when(is_forked, functools.partial(in_another_thread, group.close)),
        pytest.raises(bm.ClosedError, match="the group was closed"),
    ):
        group.replace(0)
    wait_until_gone(started() - before)


class SlowWhenReplaced(bm.Worker):
    def __init__(self, folder):
        if (folder / "is replaced").exists():
            (folder / "began").touch()
            time.sleep(DEADLINE)

    def on_replace(self, rank, state): ...


@pytest.mark.backends("local")
def test_a_group_that_another_thread_closes_as_a_rank_is_constructed_again_is_closed(make_group, tmp_path):
    group = make_group(1, SlowWhenReplaced, tmp_path)
    (tmp_path / "is replaced").touch()
    with ThreadPoolExecutor(1) as threads:
        replacing = threads.submit(group.replace, 0)
        until((tmp_path / "began").exists)
        group.close()
        with pytest.raises(bm.ClosedError, match="was closed"):
            replacing.result(DEADLINE)


class Sees(bm.Worker):
    @register(Dispatch.REQUEST)
    def see(self, array, folder):
        (folder / f"seen {self.rank}").write_text(f"{array.min()} {array.max()}")

    def on_replace(self, rank, state): ...


@pytest.mark.backends("local")
def test_a_rank_that_is_about_to_be_ended_sees_no_arguments_of_others(make_group, tmp_path):
    group, late = make_group(2, Sees), []
    rank = psutil.Process(group.workers[0].pid)

    def send_one_more():
        rank.suspend()
        late.append(group.see.options(replica=0)(np.full(1 << 18, 1), tmp_path))
        sys.setprofile(call_the_other)

    def call_the_other(frame, kind, what):
        if kind == "call" and frame.f_code is Zygote.end.__code__:
            sys.setprofile(None)
            assert isinstance(late[0].exception(0), bm.WorkerDied), "it is taken for dead"
            for n in range(2, 6):
                group.see.options(replica=1)(np.full(1 << 18, n), tmp_path).result(DEADLINE)
            rank.resume()
            until((tmp_path / "seen 0").exists)

    with done_when(lambda frame, *_: frame.f_code is bm.WorkerGroup._end_watches.__code__, send_one_more):
        group.replace(0)
    until(lambda: (tmp_path / "seen 0").read_text())
    assert (tmp_path / "seen 0").read_text() == "1 1"


@pytest.mark.backends("local")
def test_what_cannot_be_restarted_or_replaced_says_why(make_group):
    group = make_group(2, Rigid)
    before = group.pid()
    with pytest.raises(bm.UsageError, match="on_restart"):
        group.restart(state=1)
    with pytest.raises(bm.UsageError, match="on_replace"):
        group.replace(1)
    with pytest.raises(bm.UsageError, match="0 to 1"):
        group.replace(2)
    pair = make_group(2, Pair)
    with pytest.raises(bm.UsageError, match="the 2 ranks of a pair start together"):
        pair.replace(1)
    with pytest.raises(bm.UsageError, match="the 2 ranks of a pair start together"):
        pair.add.options(on_stall="replace")
    assert group.pid() == before and pair.add(1) == [1, 1]
    group.restart()
    assert group.pid() != before
    group.close()
    with pytest.raises(bm.ClosedError):
        group.restart()


class FailsToStart(bm.Worker):
    def __init__(self, how):
        if self.rank == 1:
            how()
        deadlock()  # as in a collective that rank 1 has not come to


def raise_an_error():
    raise ValueError("no weights here")


def hang():
    time.sleep(300)


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        (raise_an_error, bm.ConstructorError, "no weights here"),
        (exit_three, WorkerDied, "rank 1"),
        (hang, bm.CallTimeout, r"(?s)no reply from rank 0, 1, 2.*in hang"),
    ],
)
def test_a_constructor_that_fails_frees_those_that_wait_for_it(make_pool, backend, how, error, words):
    pool = make_pool([3])
    patience = 4 if error is bm.CallTimeout else 60
    start = idle_time()
    with pytest.raises(error, match=words) as caught:
        bm.WorkerGroup(pool, FailsToStart, how, start_timeout=patience)
    if error is bm.CallTimeout:
        assert caught.value.future is None
        assert "have been ended; give them longer with start_timeout" in str(caught.value)
    assert took(start) < 25
    assert bm.WorkerGroup(pool, Rigid).pid(), "the places are free again"


class Parent(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def start_children(self):
        import subprocess

        near = subprocess.Popen(["sleep", "300"])
        far = subprocess.Popen(["sleep", "300"], start_new_session=True)
        daemon = subprocess.run(
            ["sh", "-c", "setsid sleep 300 >/dev/null & echo $!"], stdout=subprocess.PIPE, check=True
        )
        return [near.pid, far.pid, int(daemon.stdout)]


@pytest.mark.parametrize("end", ["close", "kill"])
def test_children_of_local_workers_end_with_them_whatever_their_session(zygote, end):
    with bm.ResourcePool([2], backend="local") as pool:
        group = bm.WorkerGroup(pool, Parent)
        children = [pid for of_rank in group.start_children() for pid in of_rank]
        assert all(map(runs, children))
        if end == "close":
            group.close()
        else:
            for pid in pids(group):
                os.kill(pid, signal.SIGKILL)
        wait_until_gone(children)


class Leaver(bm.Worker):
    def leave(self):
        os.setpgid(0, os.getppid())
        return os.getpid()

    @register(Dispatch.ONE_TO_ALL)
    def be_deaf(self, fifo):
        while True:
            with contextlib.suppress(BaseException):
                with open(fifo, "w"):  # which waits until the controller opens it
                    pass
                time.sleep(300)


@pytest.mark.parametrize("end", ["close", "cancel"])
def test_a_worker_that_has_left_its_process_group_is_ended_as_others(zygote, tmp_path, end):
    os.mkfifo(fifo := tmp_path / "fifo")
    with bm.ResourcePool([1], backend="local") as pool:
        group = bm.WorkerGroup(pool, Leaver)
        worker = group.execute_all_sync("leave")
        busy = group.be_deaf.options(grace=0.1).submit(fifo)
        with open(fifo):
            pass
        if end == "close":
            group.close()
        else:
            busy.cancel()
            with pytest.raises(bm.CallCancelled):
                busy.result(timeout=10)
        wait_until_gone(worker)


class Sharer(bm.Worker):
    def share(self):
        self.memory = SharedMemory(create=True, size=100)
        return self.memory.name


@pytest.mark.parametrize("end", ["close", "kill"])
def test_shared_memory_that_a_local_worker_has_not_unlinked_is_unlinked_at_its_end(zygote, end):
    with bm.ResourcePool([2], backend="local") as pool:
        group = bm.WorkerGroup(pool, Sharer)
        files = [Path("/dev/shm") / name for name in group.execute_all_sync("share")]
        assert all(file.exists() for file in files)
        if end == "kill":
            for worker in group.workers:
                os.kill(worker.pid, signal.SIGKILL)
        group.close()
        assert not any(file.exists() for file in files)


def test_a_group_is_not_for_forks_of_the_controller(make_pool):
    pool = make_pool([3])
    group = bm.WorkerGroup(pool, Mortal, start=10)
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            group.add(1)
        except bm.UsageError as error:
            os.write(tell, str(error).encode())
            group.close()
            with pool:
                pass
            os.write(tell, b"; closed")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(tell)
    with open(told) as lines:
        said = lines.read()
    assert "belongs to the process from which this one was forked" in said
    assert said.endswith("; closed")
    assert group.add(1) == [11, 11, 11]
    assert make_pool([1]).reserve() is not None


class Quiet(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def close_output(self, how):
        if how == "close":
            sys.stdout.close()
        else:
            sys.stdout = sys.stderr = None


@pytest.mark.backends("local")
@pytest.mark.parametrize("how", ["close", "set to None"])
def test_a_worker_without_output_ends_without_a_traceback(make_group, capfd, how):
    group = make_group(2, Quiet)
    group.close_output(how)
    group.close()
    assert capfd.readouterr().err == ""


def in_fork(step):
    """What a step returns in a fork of this process, or raises, as text."""
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        try:
            said = step()
        except BaseException as error:
            said = error
        os.write(tell, repr(said).encode())
        os._exit(0)
    os.close(tell)
    with open(told) as lines:
        said = lines.read()
    assert os.waitpid(child, 0)[1] == 0, f"the fork hangs, or has ended: {said}"
    return said


class Held(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def number(self):
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def wait(self, path):
        while not os.path.exists(path):
            time.sleep(0.005)  # polling for the file
        return self.rank

    @register(Dispatch.REQUEST, concurrency=4)
    async def ask(self, n, path):
        while not os.path.exists(path):
            await asyncio.sleep(0.005)
        return n

    @register(Dispatch.REQUEST, concurrency=4)
    async def items(self, n, path):
        for i in range(n):
            yield i
            await self.ask(i, path)


async def awaited(future):
    return await future


USES = {
    "result": lambda future: future.result(),
    "exception": lambda future: future.exception(),
    "done": lambda future: (future.done(), future.result()),
    "cancel": lambda future: (future.cancel(), future.result()),
    "wait": lambda future: [one.result() for one in bm.wait([future]).done],
    "as_completed": lambda future: [one.result() for one in bm.as_completed([future])],
    "await": lambda future: asyncio.run(awaited(future)),
}


@pytest.mark.backends("local")
def test_a_future_is_not_for_forks_which_take_no_reply_away(make_group, tmp_path):
    group, go = make_group(2, Held), str(tmp_path / "go")
    had = group.number.submit()
    assert had.result() == [0, 1]
    call, request = group.wait.submit(go), group.ask.options(timeout=DEADLINE)(3, go)
    waiting = threading.Thread(target=call.result)
    waiting.start()
    for name, use in USES.items():
        for future in (call, request):
            said = in_fork(lambda use=use, future=future: use(future))
            assert "UsageError" in said and "belongs to the process from which this one was forked" in said, name
        assert in_fork(lambda use=use: use(had)) == repr(use(had)), name
    Path(go).touch()
    assert (call.result(timeout=DEADLINE), request.result()) == ([0, 1], 3)
    waiting.join()
    assert group.number() == [0, 1]


@pytest.mark.backends("local")
def test_a_fork_in_which_maps_and_streams_are_collected_cancels_nothing(make_group, tmp_path, capfd):
    group, go = make_group(2, Held), str(tmp_path / "go")
    mapped, stream = group.ask.map(list(range(9)), go), group.items.stream(5, go)
    assert next(stream) == 0
    held = [mapped, stream]
    del mapped, stream

    def collect():
        held.clear()
        gc.collect()
        threads = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
        for thread in threads:
            thread.join()
        return threads

    assert in_fork(collect) == "[]"
    Path(go).touch()
    assert held[0].result() == list(range(9))
    assert list(held[1]) == [1, 2, 3, 4]
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("lock", [threading.RLock(), threading.Condition()], ids=["lock", "condition"])
@pytest.mark.backends("local")
def test_a_fork_frees_a_lock_that_another_thread_holds_but_none_of_its_own(lock):
    free_in_forks(lock)
    is_held, may_go = threading.Event(), threading.Event()

    def hold():
        with lock:
            is_held.set()
            may_go.wait(DEADLINE)

    def released():
        lock.release()
        return lock.acquire(blocking=False)

    holder = threading.Thread(target=hold)
    holder.start()
    is_held.wait(DEADLINE)
    assert in_fork(lambda: lock.acquire(blocking=False)) == "True"
    assert not lock.acquire(blocking=False)
    may_go.set()
    holder.join()
    with lock:
        assert in_fork(released) == "True"


@pytest.mark.backends("local")
def test_a_fork_leaves_its_blocks_whatever_other_threads_do_as_it_begins(make_pool):
    is_over = threading.Event()

    def call(group):
        while not is_over.is_set():
            group.number.submit().result()

    def take_turns(group):
        while not is_over.is_set():
            with group.turn():
                pass

    with make_pool([1]) as pool, contextlib.ExitStack() as block:
        held, called = bm.WorkerGroup(block.enter_context(make_pool([1])), Held), bm.WorkerGroup(pool, Held)
        others = [(call, called), (call, called), (take_turns, bm.WorkerGroup(pool, Held))]
        threads = [threading.Thread(target=target, args=[group]) for target, group in others]
        block.enter_context(held.turn())
        for thread in threads:
            thread.start()
        try:
            for _ in range(40):
                assert in_fork(block.close) == "None"
        finally:
            is_over.set()
            for thread in threads:
                thread.join()


FORKS_THAT_END = """
import gc, os, sys
import bandmaster as bm

class Numbered(bm.Worker):
    @bm.register(bm.Dispatch.ONE_TO_ALL)
    def number(self):
        return self.rank

with bm.ResourcePool([2]) as pool:
    group = bm.WorkerGroup(pool, Numbered)
    for how in ("exit", "raise", "collect"):
        if (child := os.fork()) == 0:
            if how == "exit":
                sys.exit(0)
            if how == "raise":
                raise ValueError("in the child")
            del group
            gc.collect()
            os._exit(0)
        os.waitpid(child, 0)
        print(how, group.number(), flush=True)
"""


@pytest.mark.backends("local")
def test_workers_live_on_when_a_fork_of_the_controller_ends(backend):
    command = [sys.executable, "-X", "dev", "-c", FORKS_THAT_END]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.stdout == "exit [0, 1]\nraise [0, 1]\ncollect [0, 1]\n"
    assert (
        done.stderr.count("ValueError: in the child") == done.stderr.count("Error") == 1
        and "Warning" not in done.stderr
    )


def fork_that_leaves_by(how):
    """Fork, as a method does: the child leaves, and its parent returns the exit code of the child."""
    if (child := os.fork()) == 0:
        if how == "exit":
            sys.exit(3)
        if how == "raise":
            sys.excepthook = lambda *_: os._exit(9)  # Ray's waits for threads, which a child does not have
            raise ValueError("in the child")
        return "in the child"
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Forks(bm.Worker):
    @register(execute_mode=bm.Execute.RANK_ZERO)
    def fork(self, how):
        return fork_that_leaves_by(how)

    @register(execute_mode=bm.Execute.RANK_ZERO)
    async def fork_async(self, how):
        return fork_that_leaves_by(how)

    @register(Dispatch.REQUEST, concurrency=4)
    async def fork_in_request(self, how):
        return fork_that_leaves_by(how)


@pytest.mark.backends("inprocess", "local")
def test_a_child_that_a_method_has_forked_ends_where_the_method_does(make_group, capfd):
    group = make_group(1, Forks)
    for method in (group.fork, group.fork_async, group.fork_in_request, group.fork):
        codes = [method.submit(how).result(timeout=20) for how in ("exit", "raise", "return")]
        assert codes == [3, 1, 0], "of the children: the worker itself has answered"
    group.close()
    assert capfd.readouterr().err.count("ValueError: in the child") == 4
