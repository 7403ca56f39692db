"""However the controller ends, nothing of it is left behind."""

import os
import signal
import subprocess
import sys

import pytest
from ends import wait_until_gone

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


NESTED = """
import os, signal, subprocess, sys
import bandmaster as bm
from bandmaster import Dispatch, register

class Inner(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def start(self):
        return os.getpid(), subprocess.Popen(["sleep", "300"], start_new_session=True).pid

class Outer(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def make(self):
        self.group = bm.WorkerGroup(bm.ResourcePool([2]), Inner)
        return [os.getpid(), *sum(self.group.start(), ())]

group = bm.WorkerGroup(bm.ResourcePool([1]), Outer)
print(*group.make()[0], flush=True)
if sys.argv[1] == "close":
    group.close()
if sys.argv[1] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["close", "exit", "kill"])
def test_what_workers_of_workers_have_started_ends_with_the_controller(end):
    done = subprocess.run(
        [sys.executable, "-c", NESTED, end],
        stdout=subprocess.PIPE,
        text=True,
        timeout=30,
        env={**os.environ, "BANDMASTER_PRELOAD": "numpy"},
    )
    assert done.returncode == (-signal.SIGKILL if end == "kill" else 0)
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 5
    wait_until_gone(pids, timeout_s=0.5 if end == "close" else 2.0)


OPEN_STREAM = """
import sys
import bandmaster as bm

class Counter(bm.Worker):
    @bm.register("DP_PROTO")
    def endless(self, x):
        while True:
            yield x

if __name__ == "__main__":
    group = bm.WorkerGroup(bm.ResourcePool([2], backend=sys.argv[1]), Counter)
    stream = group.endless.stream([1, 2])
    print(next(stream).rank in (0, 1))
"""


@pytest.mark.backends("inprocess", "local")
def test_a_script_ends_although_a_stream_is_open(tmp_path, backend):
    script = tmp_path / "open_stream.py"
    script.write_text(OPEN_STREAM)
    done = subprocess.run(
        [sys.executable, str(script), backend], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
