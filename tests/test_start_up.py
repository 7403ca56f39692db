"""How workers start: what they import first, which environment they have, groups that start at the same time."""

import importlib
import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

import bandmaster as bm
from bandmaster import Dispatch, register


class Looks(bm.Worker):
    """What its constructor finds."""

    def __init__(self, *names):
        self.loaded = [name in sys.modules for name in names]
        self.variables = {name: os.environ.get(name) for name in names}

    @register(Dispatch.ONE_TO_ALL)
    def has_loaded(self):
        return self.loaded

    @register(Dispatch.ONE_TO_ALL)
    def environment(self):
        return self.variables

    @register(Dispatch.ONE_TO_ALL)
    def attribute(self, module, name):
        return getattr(importlib.import_module(module), name)


@pytest.fixture
def make_module(tmp_path, monkeypatch):
    """``make_module(name, source)``: a module beside the script, as it were; forgotten after the test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made = []

    def make(name, source):
        (tmp_path / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        made.append(name)
        return tmp_path / f"{name}.py"

    yield make
    for name in made:
        sys.modules.pop(name, None)


def parent_of(group, rank=0):
    return psutil.Process(group.workers[rank].pid).ppid()


# --- preload -------------------------------------------------------------------------------------------------------


def test_modules_are_imported_before_constructors_run(backend, make_pool, make_group, make_module):
    make_module("first_module", "")
    make_module("second_module", "import first_module\nwas_first = True")
    pool = make_pool([2], preload=["first_module", "second_module"])
    group = make_group(pool, Looks, "first_module", "second_module")
    assert group.has_loaded() == [[True, True]] * 2
    assert pool.preload == ("first_module", "second_module")


@pytest.mark.parametrize("source", ["raise OSError('no such device')", "import not_there_either"])
def test_a_module_that_cannot_be_imported_is_named_with_the_cause(backend, make_pool, make_group, make_module, source):
    make_module("broken_module", source)
    with pytest.raises(bm.ConstructorError, match=r"cannot import 'broken_module', which preload= .* names") as caught:
        make_group(make_pool([2], preload=["broken_module"]), Looks)
    assert list(caught.value.failures) == [0, 1]
    assert "no such device" in str(caught.value) or "No module named 'not_there_either'" in str(caught.value)
    assert isinstance(caught.value.__cause__, ImportError)


@pytest.mark.backends("local")
def test_one_process_imports_for_all_workers_of_pools_that_ask_for_the_same(make_pool, make_group, make_module):
    seen = make_module("counted_module", "import os\nopen(__file__ + '.seen', 'a').write(f'{os.getpid()}\\n')")
    pools = [make_pool([2], preload=["counted_module"]) for _ in range(2)]
    groups = [make_group(pool, Looks, "counted_module") for pool in (*pools, pools[0])]
    assert [group.has_loaded() for group in groups] == [[[True]] * 2] * 3
    imported_by = Path(f"{seen}.seen").read_text().split()
    assert len(imported_by) == 1
    assert {parent_of(group, rank) for group in groups for rank in (0, 1)} == {int(imported_by[0])}


@pytest.mark.backends("local")
def test_what_imports_for_a_pool_stays_while_the_pool_does(make_pool, make_group):
    pool, plain = make_pool([1], preload=["colorsys"]), make_pool([1])
    first = make_group(pool, Looks)
    zygote = psutil.Process(parent_of(first))
    assert parent_of(make_group(plain, Looks)) != zygote.pid
    first.close()
    assert parent_of(make_group(pool, Looks)) == zygote.pid
    pool.close()
    assert not zygote.is_running()


@pytest.mark.backends("local")
def test_a_module_that_starts_a_thread_is_imported_by_each_worker(make_pool, make_group, make_module, caplog):
    thread = "import threading\nthreading.Thread(target=threading.Event().wait, name='poller', daemon=True).start()"
    make_module("threaded_module", f"import os\npid = os.getpid()\n{thread}")
    make_module("calm_module", "import os\npid = os.getpid()")
    with caplog.at_level(logging.WARNING):
        group = make_group(make_pool([2], preload=["threaded_module", "calm_module"]), Looks, "threaded_module")
    assert group.has_loaded() == [[True]] * 2
    assert group.attribute("threaded_module", "pid") == [worker.pid for worker in group.workers]
    assert group.attribute("calm_module", "pid") == [parent_of(group)] * 2
    assert "threaded_module starts thread 'poller'" in caplog.text


@pytest.mark.backends("local")
def test_workers_have_a_long_path(make_pool, make_group, make_module, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, *(f"/runfiles/{n:090}" for n in range(2000))])  # as Bazel makes it
    make_module("starts_a_thread", "from threading import *\nThread(target=Event().wait, daemon=True).start()")
    group = make_group(make_pool([1], preload=["starts_a_thread"]), Looks)  # for which the zygote begins anew
    assert group.attribute("sys", "path") == [sys.path]


@pytest.mark.parametrize("preload", ["torch", [1], ["no module"], ["a..b"], 3])
def test_preload_takes_a_list_of_names(preload):
    with pytest.raises(bm.UsageError, match=r"preload must .* got"):
        bm.ResourcePool([1], preload=preload)


# --- env -----------------------------------------------------------------------------------------------------------


def test_variables_are_set_before_modules_are_imported(backend, make_pool, make_group, make_module, monkeypatch):
    monkeypatch.setenv("BANDMASTER_TEST_B", "of the controller")
    make_module("reads_variables", "import os\nfound = os.environ.get('BANDMASTER_TEST_A')")
    variables = {"BANDMASTER_TEST_A": "1", "BANDMASTER_TEST_B": ""}
    pool = make_pool([2], env=variables, preload=["reads_variables"])
    group = make_group(pool, Looks, *variables)
    assert group.environment() == [variables] * 2
    assert group.attribute("reads_variables", "found") == ["1", "1"]
    assert pool.env == variables
    group.restart()
    assert group.environment() == [variables] * 2
    group.close()
    assert os.environ.get("BANDMASTER_TEST_A") is None
    assert os.environ["BANDMASTER_TEST_B"] == "of the controller"


@pytest.mark.backends("local")
def test_variables_reach_what_starts_before_any_python_runs(make_pool, make_group):
    pools = [make_pool([1], env={"PYTHONHASHSEED": "7"}, preload=[]) for _ in range(2)]
    first, second = (make_group(pool, Hashes).hash_of("text") for pool in pools)
    assert first == second


class Hashes(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def hash_of(self, text):
        return hash(text)


FLAGGED = """
import os, pathlib, sys
import bandmaster as bm

class Flagged(bm.Worker):
    @bm.register(bm.Dispatch.ONE_TO_ALL)
    def flags(self):
        return sys.flags.optimize, sys.warnoptions, sys.flags.dev_mode, os.environ["PYTHONWARNINGS"]

sys.path.append(pathlib.Path.home())  # Python ignores it
for variables in ({}, {"PYTHONWARNINGS": "ignore"}):
    with bm.ResourcePool([1], preload=["starts_thread"], env=variables) as pool:
        print(*bm.WorkerGroup(pool, Flagged).flags())
"""


def test_flags_of_the_interpreter_reach_local_workers(make_module, tmp_path):
    make_module("starts_thread", "from threading import *\nThread(target=Event().wait, daemon=True).start()")
    command = [sys.executable, "-O", "-W", "error::FutureWarning", "-X", "dev", "-c", FLAGGED]
    env = {**os.environ, "PYTHONWARNINGS": "error::BytesWarning"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=env)
    assert done.stdout.splitlines() == [
        f"(1, ['default', '{warnings}', 'error::FutureWarning'], True, '{warnings}')"
        for warnings in ("error::BytesWarning", "ignore")
    ], done.stderr
    assert "ResourceWarning" not in done.stderr


@pytest.mark.backends("local")
def test_threads_of_numerical_libraries_can_be_asked_for(make_pool, make_group):
    group = make_group(make_pool([2], env={"OMP_NUM_THREADS": "3"}, preload=["torch"]), Threads)
    assert group.n_threads() == [3, 3]


class Threads(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def n_threads(self):
        import torch

        return torch.get_num_threads()


@pytest.mark.backends("inprocess")
def test_groups_in_one_process_cannot_have_different_values(make_pool, make_group):
    first = make_group(make_pool([1], env={"BANDMASTER_TEST_A": "1"}), Looks)
    also = make_group(make_pool([1], env={"BANDMASTER_TEST_A": "1"}), Looks)
    other = make_pool([1], env={"BANDMASTER_TEST_A": "2"})
    with pytest.raises(bm.UsageError, match="ask for BANDMASTER_TEST_A='1' and '2'"):
        make_group(other, Looks)
    first.close()
    assert os.environ["BANDMASTER_TEST_A"] == "1"
    also.close()
    assert make_group(other, Looks, "BANDMASTER_TEST_A").environment() == [{"BANDMASTER_TEST_A": "2"}]


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"RANK": "3"}, "must not set RANK: bandmaster sets it in each worker"),
        ({"MASTER_PORT": "3"}, "must not set MASTER_PORT"),
        ({"BANDMASTER_PRELOAD": "torch"}, "use preload="),
        ({"N": 3}, "must be a dict of strings, got 'N': 3"),
        ({"A=B": "3"}, "cannot be an environment variable"),
        (["A"], "must be a dict of strings"),
    ],
)
def test_variables_that_would_do_harm_are_refused(env, words):
    with pytest.raises(bm.UsageError, match=words):
        bm.ResourcePool([1], env=env)


def test_a_pool_of_gpus_says_which_gpu_a_worker_sees():
    with pytest.raises(bm.UsageError, match="a GPU of its own by this variable"):
        bm.ResourcePool([1], use_gpu=True, env={"CUDA_VISIBLE_DEVICES": "1"})
    assert bm.ResourcePool([1], env={"CUDA_VISIBLE_DEVICES": ""}).env == {"CUDA_VISIBLE_DEVICES": ""}


def test_merged_pools_agree_on_how_workers_start():
    pools = [bm.ResourcePool([1], env={"A": value}) for value in "112"]
    merged = bm.merge_resource_pool(*pools[:2])
    assert merged.env == {"A": "1"}
    assert bm.split_resource_pool(merged, 1)[1].env == {"A": "1"}
    with pytest.raises(bm.UsageError, match=r"env must be equal, got {'A': '1'} and {'A': '2'}"):
        bm.merge_resource_pool(*pools)


# --- groups that start at the same time ----------------------------------------------------------------------------


class Meets(bm.Worker):
    """Its constructor returns once a worker of each group has begun its own."""

    def __init__(self, folder, name, others):
        import time
        from pathlib import Path

        Path(folder, name).touch()
        while not all(Path(folder, other).exists() for other in others):
            time.sleep(0.01)  # of another process

    @register(Dispatch.ONE_TO_ALL)
    def ping(self):
        return self.rank


class Fails(bm.Worker):
    def __init__(self):
        raise ValueError("no model of that name")


def test_groups_start_at_the_same_time(backend, make_pool, tmp_path):
    names = ["actor", "critic", "reward"]
    pools = [make_pool([2]) for _ in names]  # reserved by the threads
    with ThreadPoolExecutor() as executor:
        started = [
            executor.submit(bm.WorkerGroup, pool, Meets, tmp_path, name, names)
            for pool, name in zip(pools, names, strict=True)
        ]
        groups = [future.result() for future in started]
    assert [group.ping() for group in groups] == [[0, 1]] * 3


def test_groups_on_one_pool_start_at_the_same_time_and_a_failing_one_harms_no_other(backend, make_pool, tmp_path):
    pool = make_pool([2])
    with ThreadPoolExecutor() as executor:
        first = executor.submit(bm.WorkerGroup, pool, Meets, tmp_path, "first", ["second"])
        failing = executor.submit(bm.WorkerGroup, pool, Fails)
        second = executor.submit(bm.WorkerGroup, pool, Meets, tmp_path, "second", ["first"])
    with pytest.raises(bm.ConstructorError, match="no model of that name"):
        failing.result()
    assert first.result().ping() == second.result().ping() == [0, 1]


INTERRUPTED = """
import os, signal
from concurrent.futures import ThreadPoolExecutor
import bandmaster as bm

class Interrupts(bm.Worker):
    def __init__(self, controller=0):
        if controller and self.rank == 0:
            os.kill(controller, signal.SIGINT)

    @bm.register(bm.Dispatch.ONE_TO_ALL)
    def ping(self):
        return self.rank

signal.signal(signal.SIGINT, signal.default_int_handler)
with bm.ResourcePool([2]) as pool:
    try:
        with ThreadPoolExecutor() as executor:
            list(executor.map(lambda pid: bm.WorkerGroup(pool, Interrupts, pid), [os.getpid(), 0, 0]))
            signal.pause()
    except KeyboardInterrupt:
        print("interrupted", bm.WorkerGroup(pool, Interrupts).ping())
"""


def test_ctrl_c_while_groups_start(tmp_path):
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "interrupted [0, 1]\n"), done.stderr


INTERRUPTED_FORK = """
import os, signal, subprocess
import bandmaster as bm
from bandmaster.testing import no_leaks

def interrupted(original):
    def method(self, *args):
        found = original(self, *args)
        signal.raise_signal(signal.SIGINT)
        return found
    return method

signal.signal(signal.SIGINT, signal.default_int_handler)
for name in ("_get_devnull", "_execute_child"):
    original = getattr(subprocess.Popen, name)
    with no_leaks(kinds=["processes", "descriptors"], timeout=5), bm.ResourcePool([1], preload=[]) as pool:
        setattr(subprocess.Popen, name, interrupted(original))
        try:
            bm.WorkerGroup(pool, bm.Worker)
        except KeyboardInterrupt:
            print("interrupted")
        setattr(subprocess.Popen, name, original)
"""


def test_ctrl_c_while_the_process_starts_that_workers_are_forked_from(tmp_path):
    command = [sys.executable, "-c", INTERRUPTED_FORK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "interrupted\n" * 2), done.stderr


# --- modules that workers cannot find ------------------------------------------------------------------------------


@pytest.mark.backends("local", "ray")
def test_a_class_whose_module_workers_lack_is_an_error_that_says_what_to_do(
    backend, make_pool, make_group, make_module
):
    file = make_module("only_here", "import bandmaster as bm\nclass Actor(bm.Worker): pass")
    actor = importlib.import_module("only_here").Actor
    file.unlink()
    importlib.invalidate_caches()
    with pytest.raises(bm.ConstructorError, match="No module named 'only_here'") as caught:
        make_group(2, actor)
    assert "install it on that host" in str(caught.value)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    assert caught.value.__cause__.name == "only_here"
