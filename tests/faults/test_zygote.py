"""The process that local workers are forked from is slow, or stopped: every wait for it ends, and groups go on."""

import os
import subprocess
import sys

from clock import idle_time
from ends import wait_until_gone
from side_by_side import run_side_by_side

COMMON = """
import os, signal, sys, threading, time
import psutil
import bandmaster as bm
from bandmaster import Dispatch, register
from clock import idle_time
from ends import runs, wait_until_gone

class Echo(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def echo(self, value):
        return value

    @register(Dispatch.ONE_TO_ALL)
    def sleep(self, seconds):
        time.sleep(seconds)

    @register(Dispatch.ONE_TO_ALL)
    def start_child(self):
        import subprocess
        return subprocess.Popen(["sleep", "300"], start_new_session=True).pid

def error_of(function, within):
    start = idle_time()
    try:
        function()
    except BaseException as error:
        assert idle_time() - start < within, idle_time() - start
        return error
    raise AssertionError("there was no error")

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have let its background jobs ignore it
"""

SLOW = """
def waits(**options):
    return bm.WorkerGroup(pool, Echo, **options)

def let_it_go_on():
    with open(os.environ["FIFO"], "w"):
        pass

pool = bm.ResourcePool([2])
case = sys.argv[1]
if case == "interrupt":
    assert isinstance(error_of(waits, within=5), KeyboardInterrupt)
if case == "deadline":
    error = error_of(lambda: waits(start_timeout=0.3), within=3)
    assert isinstance(error, bm.CallTimeout), error
    assert error.missing == (0, 1)
    assert "Echo.__init__ got no reply from rank 0, 1 within 0.3 s" in str(error), error
    assert "is still importing slow" in str(error), error
    let_it_go_on()
    assert waits(start_timeout=30).echo(1) == [1, 1]
if case == "another thread":
    groups = []
    thread = threading.Thread(target=lambda: groups.append(waits()), daemon=True)
    thread.start()
    error = error_of(lambda: waits(start_timeout=1), within=6)
    assert isinstance(error, bm.CallTimeout), error
    let_it_go_on()
    thread.join()
    assert groups[0].echo(1) == [1, 1]
    assert waits(start_timeout=30).echo(2) == [2, 2]
if case == "exit":
    error_of(lambda: waits(start_timeout=0.1), within=3)
print("done", flush=True)
"""

STOPPED = """
pool = bm.ResourcePool([2])
group, other = bm.WorkerGroup(pool, Echo), bm.WorkerGroup(pool, Echo)
pids = [worker.pid for worker in group.workers]
children = group.start_child()
zygote = psutil.Process(pids[0]).ppid()
os.kill(zygote, signal.SIGSTOP)
case = sys.argv[1]
if case == "death":
    os.kill(pids[1], signal.SIGKILL)
    error = error_of(lambda: group.echo(1), within=15)
    assert isinstance(error, bm.WorkerDied), error
    assert "lost its process on rank" in str(error), error
    assert "killed, because the process that workers are forked from did not answer for 10 s" in str(error), error
    wait_until_gone([zygote, *pids, *children])
    assert isinstance(error_of(lambda: other.echo(2), within=2), bm.WorkerDied), "its workers are gone, too"
    group.restart()
    assert group.echo(3) == [3, 3]
if case == "deadline":
    error = error_of(lambda: bm.WorkerGroup(pool, Echo, start_timeout=1.5), within=4)
    assert isinstance(error, bm.CallTimeout), error
    assert f"the process that workers are forked from (pid {zygote}) has not answered yet" in str(error), error
    os.kill(zygote, signal.SIGCONT)
    assert group.echo(1) == other.echo(1) == bm.WorkerGroup(pool, Echo).echo(1) == [1, 1]
if case == "start":
    error = error_of(lambda: bm.WorkerGroup(pool, Echo), within=15)
    assert isinstance(error, bm.PlacementError), error
    assert f"forked from (pid {zygote}) did not answer for 10 s and was killed" in str(error), error
    assert isinstance(error_of(lambda: group.echo(1), within=2), bm.WorkerDied)
    assert bm.WorkerGroup(pool, Echo).echo(2) == [2, 2]
if case == "close":
    start = time.monotonic()
    group.close()
    assert time.monotonic() - start < 15
    wait_until_gone([zygote, *pids, *children])
if case == "killed":
    os.kill(zygote, signal.SIGKILL)
    error = error_of(lambda: [group.echo(1) for _ in range(1000)], within=4)
    assert "killed, because the process that workers are forked from has ended" in str(error), error
    assert bm.WorkerGroup(pool, Echo).echo(2) == [2, 2]
    for child in children:
        os.kill(child, signal.SIGKILL)  # in sessions of their own, these stay
print("done", *pids, *children, zygote, flush=True)
"""


def run(script, case, folder, **environment):
    """Run a script that can import from a folder; how long that took, and the words of its last line."""
    paths = [str(folder), os.path.dirname(os.path.dirname(__file__)), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment}
    start = idle_time()
    done = subprocess.run(
        [sys.executable, "-c", COMMON + script, case], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout, done.stderr
    return idle_time() - start, done.stdout.splitlines()[-1].split()


MORE_MODULES = """
pool = bm.ResourcePool([1])
first = bm.WorkerGroup(pool, Echo)
os.environ["BANDMASTER_PRELOAD"] = "numpy,colorsys"
other_pool = bm.ResourcePool([1])
second, third = bm.WorkerGroup(other_pool, Echo), bm.WorkerGroup(other_pool, Echo)
zygotes = [psutil.Process(group.workers[0].pid).ppid() for group in (first, second, third)]
assert zygotes[0] != zygotes[1] == zygotes[2], zygotes
assert [group.echo(1) for group in (first, second, third)] == [[1]] * 3
pool.close()
wait_until_gone(zygotes[:1])
assert second.echo(2) == [2]
print("done", flush=True)
"""


def test_more_modules_are_imported_by_another_one_beside_its_workers(tmp_path):
    assert run(MORE_MODULES, "", tmp_path, BANDMASTER_PRELOAD="numpy")[1] == ["done"]


BUSY = """
import bandmaster.backends.zygote
bandmaster.backends.zygote.ANSWER_S = 0.5
pool = bm.ResourcePool([1])
assert bm.WorkerGroup(pool, Echo).echo(1) == [1]
open(os.environ["BUSY"], "w").close()
assert bm.WorkerGroup(pool, Echo).echo(2) == [2]
print("done", flush=True)
"""


def test_a_process_that_has_much_to_compute_is_not_taken_for_silent(tmp_path):
    (tmp_path / "busy.py").write_text(
        """if True:
        import os, time
        def compute():
            began = time.process_time()
            while os.path.exists(os.environ["BUSY"]) and time.process_time() - began < 1.5:
                pass
        os.register_at_fork(before=compute)
        """
    )
    assert run(BUSY, "", tmp_path, BANDMASTER_PRELOAD="busy", BUSY=str(tmp_path / "file"))[1] == ["done"]


def test_slow_imports_hold_nobody_up(tmp_path):
    def check(case):
        (folder := tmp_path / case).mkdir()
        os.mkfifo(folder / "fifo")
        interrupt = "os.kill(os.getppid(), signal.SIGINT)" if case == "interrupt" else ""
        until_it_is_opened_to_write = "open(os.environ['FIFO']).read()"
        (folder / "slow.py").write_text(f"import os, signal\n{interrupt}\n{until_it_is_opened_to_write}\n")
        seconds, words = run(SLOW, case, folder, BANDMASTER_PRELOAD="slow", FIFO=str(folder / "fifo"))
        assert words == ["done"]
        assert seconds < 60

    run_side_by_side(check, ["interrupt", "deadline", "another thread", "exit"], n_at_once=4)


def test_a_process_that_is_stopped_holds_nobody_up(tmp_path):
    def check(case):
        seconds, (word, *pids) = run(STOPPED, case, tmp_path, BANDMASTER_PRELOAD="numpy")
        assert word == "done"
        assert seconds < 80
        wait_until_gone(map(int, pids))

    run_side_by_side(check, ["death", "deadline", "start", "close", "killed", "exit"], n_at_once=6)


EXIT = """
import atexit
pool, errors = bm.ResourcePool([1]), []

def wait():
    try:
        group.sleep(300)
    except bm.WorkerDied as error:
        errors.append(str(error))

def tell():
    thread.join(20)
    print("done", *(part in errors[0] for part in ("was ended at the exit of the controller", "has ended")), flush=True)

atexit.register(tell)  # before there is a group: called when its workers have been ended
group = bm.WorkerGroup(pool, Echo)
thread = threading.Thread(target=wait, daemon=True)
thread.start()
while not group.calls:
    time.sleep(0.01)
"""


def test_a_daemon_thread_that_waits_at_exit_gets_an_error_that_says_so(tmp_path):
    assert run(EXIT, "", tmp_path)[1] == ["done", "True", "False"]
