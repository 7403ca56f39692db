"""Processes that end when they should not: one error that names the cause in time, and nothing is left behind."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

import bandmaster as bm
from bandmaster import Dispatch, register

CONTROLLER = """
import os, signal, subprocess, sys, time
import bandmaster as bm
from bandmaster import Dispatch, register

class Busy(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def start(self):
        child = subprocess.Popen(["sleep", "300"])
        return [os.getpid(), os.getppid(), child.pid]

    @register(Dispatch.ONE_TO_ALL)
    def work(self):
        while True:
            pass

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have let its background jobs ignore it
pool = bm.ResourcePool([2])
group = bm.WorkerGroup(pool, Busy)
print(*sum(group.start(), []), flush=True)
if sys.argv[1] == "busy":
    group.work.submit()
    print("busy", flush=True)
if sys.argv[1] == "exit":
    sys.exit(0)
if sys.argv[1] == "raise":
    raise ValueError("the script fails")
time.sleep(300)
"""


def wait_until_gone(pids, timeout_s=2.0):
    deadline = time.monotonic() + timeout_s
    while left := [pid for pid in pids if psutil.pid_exists(pid)]:
        assert time.monotonic() < deadline, f"still there after {timeout_s} s: {[psutil.Process(p) for p in left]}"
        time.sleep(0.01)  # polling for the kernel


@pytest.mark.parametrize(
    ("state", "end"),
    [
        ("idle", signal.SIGKILL),
        ("busy", signal.SIGKILL),
        ("idle", signal.SIGTERM),
        ("busy", signal.SIGTERM),
        ("busy", signal.SIGINT),
        ("exit", None),
        ("raise", None),
    ],
)
def test_nothing_outlives_the_controller(state, end):
    controller = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, state],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "BANDMASTER_PRELOAD": "numpy"},
    )
    with controller:
        pids = [int(word) for word in controller.stdout.readline().split()]
        assert len(pids) == 6
        if state == "busy":
            assert controller.stdout.readline().strip() == "busy"
        if end is not None:
            controller.send_signal(end)
        try:
            controller.wait(timeout=10)
        finally:
            controller.kill()
    wait_until_gone(pids)


class Mortal(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def die(self, ranks, how):
        if self.rank in ranks:
            print("my last words", file=sys.stderr)
            sys.stderr.flush()
            how()
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def pid(self):
        return os.getpid()

    @register(Dispatch.ONE_TO_ALL)
    def hang(self):
        if self.rank == 0:
            time.sleep(300)


def exit_three():
    os._exit(3)


def kill_oneself():
    os.kill(os.getpid(), signal.SIGKILL)


def segfault():
    os.kill(os.getpid(), signal.SIGSEGV)


@pytest.fixture
def group(zygote):
    with bm.ResourcePool([2], backend="local") as pool:
        yield bm.WorkerGroup(pool, Mortal)


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("how", "words"),
    [(exit_three, "exit code 3"), (kill_oneself, "killed by SIGKILL"), (segfault, "killed by SIGSEGV")],
)
def test_a_death_during_a_call_names_rank_cause_and_last_words(group, how, words):
    start = time.monotonic()
    with pytest.raises(bm.WorkerDied, match=rf"(?s)lost its process on rank 1 \(dp=1, .*\): {words}.*my last words"):
        group.die([1], how)
    assert time.monotonic() - start < 5
    with pytest.raises(bm.WorkerDied, match=words):
        group.pid()


@pytest.mark.timeout(30)
def test_a_death_while_nothing_was_pending_is_told_by_the_next_call(group):
    os.kill(group.pid()[1], signal.SIGKILL)
    with pytest.raises(bm.WorkerDied, match=r"rank 1.*SIGKILL"):
        for _ in range(1000):
            group.pid()


@pytest.mark.timeout(30)
def test_a_death_ends_the_wait_for_ranks_that_hang(group):
    pending = group.hang.submit()
    os.kill(group.workers[1].pid, signal.SIGKILL)
    with pytest.raises(bm.WorkerDied, match="rank 1"):
        pending.result(timeout=10)


@pytest.mark.timeout(30)
def test_many_calls_in_flight_all_learn_of_a_death(group):
    futures = [group.pid.submit() for _ in range(300)]
    futures.append(group.die.submit([0], kill_oneself))
    futures += [group.pid.submit() for _ in range(700)]
    errors = [future.exception(timeout=10) for future in futures]
    assert errors[:300] == [None] * 300
    assert {type(error) for error in errors[300:]} == {bm.WorkerDied}
