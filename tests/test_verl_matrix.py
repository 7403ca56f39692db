"""The names of verl's single controller that its versions and forks use: `tests/verl/clients/matrix.json`.

Each row names the test of what its callers rely on. Here is that the names are there, and what no other test shows.
"""

import ast
import importlib
import inspect
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

import bandmaster as bm
from bandmaster.single_controller import ray as groups
from bandmaster.single_controller.base import decorator
from bandmaster.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from bandmaster.single_controller.base.megatron.worker import MegatronWorker
from bandmaster.single_controller.base.worker import Worker
from bandmaster.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, base

CLIENTS = Path(__file__).parent / "verl" / "clients"
sys.path.insert(0, str(CLIENTS))

import names  # noqa: E402
import own_tests  # noqa: E402
import run  # noqa: E402
import table  # noqa: E402

MATRIX = names.read()
ROWS = MATRIX["rows"]
inprocess = pytest.mark.backends("inprocess")


def rows_of(kind, are_supported=True):
    return [row for row in ROWS if row["kind"] == kind and (row["unsupported"] is None) == are_supported]


def test_the_page_prints_the_matrix():
    page = table.PAGE.read_text()
    assert table.BEGIN in page and table.END in page
    assert page == table.written(page, MATRIX), "run python tests/verl/clients/table.py --write"


def test_each_row_names_a_test_that_is_there_or_a_reason():
    for row in ROWS:
        assert (row["test"] is None) != (row["unsupported"] is None), row["name"]
        assert row["clients"] and row["relies"], row["name"]
    named, found = {row["test"] for row in ROWS if row["test"]}, set()
    for file in {name.partition("::")[0] for name in named}:
        tree = ast.parse(Path(__file__).with_name(file).read_text())
        found |= {f"{file}::{node.name}" for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert not named - found


def test_reasons_are_on_the_page():
    page = table.PAGE.read_text()
    unsupported = page[page.index("## Not supported") :]
    for row in ROWS:
        module = f"`verl.single_controller.{row['name'].partition(':')[0]}`"
        assert row["unsupported"] is None or module in unsupported, row["name"]


def imported(name):
    module, _, attribute = name.partition(":")
    found = importlib.import_module(".".join(filter(None, ["bandmaster.single_controller", module])))
    return getattr(found, attribute) if attribute else found


def test_a_name_of_the_matrix_is_there():
    for row in rows_of("import"):
        assert imported(row["name"]) is not None
    for row in rows_of("mode"):
        enumeration, _, member = row["name"].partition(".")
        assert getattr(decorator, enumeration)[member].name == member
    for row in rows_of("import", are_supported=False):
        with pytest.raises(ModuleNotFoundError):
            imported(row["name"])
    for name in ("RayClassWithInitArgs", "RayResourcePool", "RayWorkerGroup"):
        assert getattr(groups, name) is getattr(base, name)


@inprocess
def test_a_member_of_the_matrix_is_there(make_pool):
    group = RayWorkerGroup(make_pool([2]), RayClassWithInitArgs(Placed))
    pool = RayResourcePool([2], use_gpu=False, max_colocate_count=3)
    part = set(dir(base.SubRayResourcePool)) | {"start_bundle_index", "subgroup_world_size"}  # set for each part
    there = {
        "Worker": set(dir(Worker())),
        "MegatronWorker": {*dir(MegatronWorker()), "_init_hf_config_and_tf_config"},  # the fork's own
        "RayWorkerGroup": {*dir(group), *dir(RayWorkerGroup), *vars(group)},
        "RayResourcePool": set(dir(pool)) | part,
        "ResourcePoolManager": set(dir(base.ResourcePoolManager)),
        "RayClassWithInitArgs": set(dir(RayClassWithInitArgs(Placed))),
        "handle": {"__ray_call__", "_get_node_ip", "_get_free_port"},  # seen in the test of handles
    }
    for row in rows_of("member"):
        owner, _, member = row["name"].rpartition(".")
        assert member in there[owner], row["name"]
    assert (group.world_size, pool.max_colocate_count) == (2, 3)


CALLABLES = {
    "RayWorkerGroup": RayWorkerGroup,
    "RayResourcePool": RayResourcePool,
    "RayClassWithInitArgs": RayClassWithInitArgs,
    "SubRayResourcePool": base.SubRayResourcePool,
    "ResourcePoolManager": base.ResourcePoolManager,
    "create_colocated_worker_cls": base.create_colocated_worker_cls,
    "split_resource_pool": base.split_resource_pool,
    "get_random_string": base.get_random_string,
    "register": register,
    "spawn": RayWorkerGroup.spawn,
    "from_detached": RayWorkerGroup.from_detached,
    "get_placement_groups": RayResourcePool.get_placement_groups,
    "_register_dispatch_collect_info": Worker._register_dispatch_collect_info,
    "set_dispatch_collect": Worker.set_dispatch_collect,
}


def test_a_keyword_of_the_matrix_is_taken():
    for row in rows_of("keyword"):
        called, _, keyword = row["name"].removesuffix("=)").partition("(")
        assert keyword in inspect.signature(CALLABLES[called]).parameters, row["name"]


class Placed(Worker):
    def __init__(self, bonus=0):
        super().__init__()
        self.bonus = bonus
        self._register_dispatch_collect_info(mesh_name="train", dp_rank=self.rank, is_collect=True)

    @register(make_nd_compute_dataproto_dispatch_fn(mesh_name="train"))
    def same(self, rows):
        return rows

    def add(self, x, y=0):
        return self.bonus + x + y

    @register(Dispatch.ONE_TO_ALL)
    def pid(self):
        return os.getpid()


def test_what_is_no_mode_is_refused():
    decorator._check_dispatch_mode(dispatch_mode=Dispatch.ONE_TO_ALL)
    decorator._check_dispatch_mode(make_nd_compute_dataproto_dispatch_fn("train"))
    with pytest.raises(bm.ProtocolError, match="MOST_TO_ALL"):
        decorator._check_dispatch_mode("MOST_TO_ALL")


@inprocess
def test_a_class_keeps_its_arguments(make_pool):
    given = RayClassWithInitArgs(cls=Placed, bonus=5)
    assert (given.cls, given.args, given.kwargs, given.fused_worker_used) == (Placed, (), {"bonus": 5}, False)
    given.update_options({"runtime_env": {"env_vars": {"A": "1"}}})
    assert given.options == {"runtime_env": {"env_vars": {"A": "1"}}}
    assert RayWorkerGroup(make_pool([1]), RayClassWithInitArgs(Placed, 5)).execute_all_sync("add", 1) == [6]


@inprocess
def test_methods_are_called_by_name(make_pool):
    group = RayWorkerGroup(make_pool([2]), RayClassWithInitArgs(Placed))
    assert group.execute_all_sync("add", [1, 2]) == [1, 2], "a value for each rank"
    assert group.execute_all_sync("add", 1, y=2) == [3, 3]
    assert group.execute_rank_zero_sync("add", x=1) == 1


@inprocess
def test_what_the_group_knows_of_a_mesh_can_be_read_and_set(make_pool):
    """verl's helpers query it and keep it on the group themselves."""
    group = RayWorkerGroup(make_pool([2]), RayClassWithInitArgs(Placed))
    assert "train" not in group._dispatch_info
    group._dispatch_info["train"] = group._query_dispatch_info("train")
    assert group._dispatch_info["train"] == [0, 1]
    assert group.same({"x": np.arange(3)})["x"].tolist() == [0, 1, 2]


def test_nsight_ends_after_the_steps_to_profile():
    from bandmaster.single_controller.ray.inner import nsight_options

    assert nsight_options({"trace": "cuda"}, 2) == {"trace": "cuda", "capture-range-end": "repeat-shutdown:12"}
    assert nsight_options({"capture-range-end": "none"}, 2) == {"capture-range-end": "none"}


@pytest.mark.backends("local")
def test_a_dead_worker_aborts_a_controller_that_asked_for_it(make_pool):
    mine, theirs = socket.socketpair()
    theirs.setblocking(False)
    mine.settimeout(60)
    before = signal.signal(signal.SIGABRT, lambda *_: None), signal.set_wakeup_fd(theirs.fileno())
    try:
        group = RayWorkerGroup(make_pool([1]), RayClassWithInitArgs(Placed))
        group.start_worker_aliveness_check(every_n_seconds=1)
        os.kill(group.pid()[0], signal.SIGKILL)
        assert mine.recv(1) == bytes([signal.SIGABRT])
    finally:
        signal.set_wakeup_fd(before[1])
        signal.signal(signal.SIGABRT, before[0])
        mine.close()
        theirs.close()


def test_the_names_of_a_clients_sources_are_looked_up(tmp_path):
    """The command of the page, on a client that uses what no row has."""
    own = tmp_path / "verl" / "single_controller" / "base"
    own.mkdir(parents=True)
    (own / "worker_group.py").write_text("class WorkerGroup:\n    def regroup(self): pass\n")
    (tmp_path / "verl" / "trainer.py").write_text(
        "from verl.single_controller.base import Worker\n"
        "from verl.single_controller.remote import remote\n"
        "from verl.single_controller.mine import Mine\n"
        "def run(wg):\n    return wg.spawn(prefix_set=['a']), wg.regroup()\n"
    )
    command = [sys.executable, str(CLIENTS / "names.py"), str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.startswith("4 of the ")  # Worker, remote, spawn, prefix_set
    assert "not supported: import remote:remote: verl 0.1 itself has no such module" in run.stdout
    assert "not in the matrix: import mine:Mine" in run.stdout
    assert f"WorkerGroup.regroup, which {tmp_path / 'verl' / 'trainer.py'}:5: wg.regroup seems" in run.stdout


@pytest.fixture
def result(tmp_path):
    def make(name, code=0, said="", **metrics):
        log = tmp_path / name
        log.write_text(said)
        return run.Result(code, 1.0, log, {1: metrics})

    return make


def test_two_runs_of_a_client_are_compared(result, capsys):
    own = result("own", loss=0.5, **{"timing_s/step": 2.0})
    assert run.compared(own, result("same", loss=0.5, **{"timing_s/step": 3.0})) == 0
    assert "1 of 1 metrics that are not times are equal" in capsys.readouterr().out
    assert run.compared(own, result("other", loss=0.25)) == 1
    assert "step 1: loss is 0.5 on its own, 0.25 on bandmaster" in capsys.readouterr().out
    assert run.compared(own, result("less")) == 1, "a metric is missing"
    assert run.compared(result("nothing"), result("nothing either")) == 1, "two runs without metrics show nothing"
    failed = result("failed", 1, "KeyError: 'a'")
    assert run.compared(failed, result("alike", 1, "more\nKeyError: 'a'")) == 0
    assert run.compared(failed, result("otherwise", 1, "ValueError: 3")) == 1
    assert run.compared(own, failed) == 1
    undefined = result("undefined", loss=float("nan"))
    assert run.compared(undefined, result("undefined too", loss=float("nan"))) == 0


def test_a_failure_is_told_by_its_cause(result):
    """Ray and bandmaster pass a worker's error on in words of their own, and forward lines of many processes."""
    own = "\x1b[36m(Task pid=7)\x1b[0m KeyError: 'a'\nray.exceptions.RayTaskError(KeyError): ray::step\n"
    ours = "KeyError: 'a'\nbandmaster.errors.RemoteError: Worker.step failed on rank 1\n  OSError: of another one's\n"
    assert run.cause(result("own", 1, own).log) == "KeyError: 'a'"
    assert run.compared(result("own", 1, own), result("ours", 1, ours)) == 0


def test_what_a_clients_own_test_did_is_read():
    def read(inside):
        return own_tests.outcome(ElementTree.fromstring(f'<testcase name="test_a">{inside}</testcase>'))

    assert read("") == ("test_a", "passed")
    assert read("<skipped/>") == ("test_a", "skipped")
    assert read('<failure message="KeyError: 3&#10;more"/>') == ("test_a", "failed (KeyError: 3)")
    assert read('<error message="ImportError: x"/>') == ("test_a", "failed (ImportError: x)")


def test_clients_are_described_by_what_a_run_knows():
    known = {"source", "package", "module", "call", "config", "settings", "rows", "stubs", "environment"}
    for name, client in run.clients().items():
        assert client.keys() <= known, name
        assert client.get("call", "config") in ("config", "arguments"), name
        assert "source" in client, name


def test_nothing_of_a_run_is_left(tmp_path):
    """Not even a process that has left the session, as Ray's do."""
    ends, starts = socket.socketpair()
    ends.settimeout(60)
    number = starts.fileno()
    child = f"import os; os.write({number}, b'up'); os.read(0, 1)"
    program = (
        "import os, subprocess, sys\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}], stdin=subprocess.PIPE, pass_fds=[{number}],"
        " start_new_session=True)\n"
        "os.read(0, 1)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        env={**os.environ, "CLIENT_METRICS": str(tmp_path / "own.jsonl")},
        pass_fds=[number],
        start_new_session=True,
    )
    starts.close()
    assert ends.recv(2) == b"up"
    run.end(process, f"CLIENT_METRICS={tmp_path / 'own.jsonl'}")
    assert ends.recv(1) == b"", "its end of the socket is closed with it"
    ends.close()
    process.stdin.close()
