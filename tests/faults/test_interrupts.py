"""Ctrl-C returns within a second or so, and the group is usable or cleanly closed: in scripts as a user runs them."""

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

import bandmaster as bm
from bandmaster import Dispatch, register

pytestmark = pytest.mark.timeout(60)

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
        start = time.monotonic()
        script.send_signal(signal.SIGINT)
        if when == "close":
            while "closing" not in (line := script.stdout.readline()):
                assert line, "it has ended"
            script.send_signal(signal.SIGINT)
        rest = script.stdout.read()
        assert script.wait(timeout=20) == 0, rest
        assert time.monotonic() - start < 5
    assert ("usable after" if when == "and go on" else "interrupted") in rest
    workers = [int(line.split()[-1]) for line in seen if "worker" in line]
    assert len(workers) == 2
    deadline = time.monotonic() + 2
    while left := [pid for pid in workers if psutil.pid_exists(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)  # polling for the kernel


class Slow(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def spin(self):
        while True:
            pass

    @register(Dispatch.ONE_TO_ALL)
    def echo(self, value):
        return value


@pytest.mark.own_processes
def test_an_interrupted_call_frees_the_workers(make_group):
    """As in a notebook: the exception comes back, and the next cell can use the group."""
    group = make_group(2, Slow)
    group.echo(1)
    threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        group.spin()
    assert group.echo(7) == [7, 7]
    assert time.monotonic() - start < 5


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
is_over = threading.Event()

def interrupt():
    while not is_over.is_set():
        time.sleep(random.uniform(0.001, 0.006))
        os.kill(os.getpid(), signal.SIGINT)

def call(group):
    # Small and large values, blocking and not; every answer has to be that of its call.
    global n_right, n_lost
    while time.monotonic() < end:
        value = random.randrange(1 << 30)
        if value % 3 == 0:
            assert group.echo(value) == [value, value]
        elif value % 3 == 1:
            array = np.full(30_000, value % 251, np.uint8)
            assert all((echoed == value % 251).all() for echoed in group.echo(array))
        else:
            futures = [group.echo.submit(value + n) for n in range(3)]
            for n, future in enumerate(futures):
                try:
                    assert future.result() == [value + n] * 2
                except bm.RemoteError as error:
                    assert "its answer was lost" in str(error), error
                    n_lost += 1
        n_right += 1

with bm.ResourcePool([2]) as pool:
    group = bm.WorkerGroup(pool, Echo)
    group.echo(0)
    n_right = n_lost = n_interrupted = 0
    end = time.monotonic() + 4
    threading.Thread(target=interrupt).start()
    while time.monotonic() < end:
        try:
            call(group)
        except KeyboardInterrupt:
            n_interrupted += 1
    while not is_over.is_set():
        try:
            is_over.set()
            time.sleep(0.05)  # the last one may be on its way
        except KeyboardInterrupt:
            pass
    assert group.healthy
    assert [group.echo(n) for n in range(100)] == [[n, n] for n in range(100)]
    print("right", n_right, "interrupted", n_interrupted, "lost", n_lost)
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
