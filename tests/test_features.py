"""A feature room can be removed: the path of a call passes its tests without it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import bandmaster

# Read by every Python process whose PYTHONPATH has its folder, the zygote and so its workers included.
REMOVES = """
import os, sys

class Removed:
    rooms = tuple(os.environ["BANDMASTER_TESTS_WITHOUT"].split())

    def find_spec(self, name, path=None, target=None):
        if f"{name}.".startswith(self.rooms):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Removed())
"""

FEATURES = ["flow", "requests", "answering", "output", "debugging", "tracing", "turns", "watching"]
SELECTED = [
    "test_group.py::test_arguments_of_every_kind_arrive",
    "test_group.py::test_constructor_arguments_of_every_kind_arrive",
    "test_group.py::test_async_methods_are_awaited_on_the_worker",
    "test_group.py::test_execute_by_name_scatters_lists_of_world_size_and_broadcasts_the_rest",
    "test_group.py::test_futures_speak_the_words_of_concurrent_futures",
    "test_group.py::test_a_failed_future_has_the_exception",
    "test_group.py::test_group_and_pool_close_in_any_order_and_twice",
    "test_laws.py::test_the_same_program_gives_the_same_results",
    "test_handles.py::test_ranks_of_another_mesh_read_their_own_rows",
    "test_handles.py::test_operations_move_no_rows_and_can_be_chained",
    "test_handles.py::test_a_failed_call_fails_who_uses_its_rows",
    "test_handles.py::test_rows_outlive_the_worker_that_made_them",
]

# What a call does that any room of these might take part in: rows split and joined, handles, an error.
PROGRAM = """
import numpy as np
import bandmaster as bm

class Doubler(bm.Worker):
    @bm.register(bm.Dispatch.DP_PROTO)
    def double(self, rows):
        return {"x": rows["x"] * 2}

    @bm.register(bm.Dispatch.ONE_TO_ALL)
    def fail(self):
        raise ValueError("no")

with bm.ResourcePool([2]) as pool:
    group = bm.WorkerGroup(pool, Doubler)
    rows = group.double.submit({"x": np.arange(60_000.0)})
    assert (group.double(rows[:3].rename(x="x"))["x"] == [0, 4, 8]).all()
    try: group.fail()
    except bm.RemoteError as error: print(error.rank)
"""


def _without(rooms, folder):
    """Environment of processes in which these rooms cannot be imported."""
    (folder / "sitecustomize.py").write_text(REMOVES)
    path = os.pathsep.join([str(folder), str(Path(bandmaster.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    return {
        **os.environ,
        "PYTHONPATH": path,
        "BANDMASTER_TESTS_WITHOUT": " ".join(f"bandmaster.{room}." for room in rooms),
    }


@pytest.mark.slow
def test_the_path_works_without_any_feature(tmp_path):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "inprocess or local"]
    tests = Path(__file__).parent
    run = subprocess.run(
        [*command, *(str(tests / name) for name in SELECTED)],
        env=_without(FEATURES, tmp_path),
        cwd=tests.parent,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize("room", FEATURES)
def test_a_call_works_without_one_feature(room, tmp_path):
    own = _without([room], tmp_path)
    program = f"{PROGRAM}\nimport bandmaster.{room}"
    run = subprocess.run([sys.executable, "-c", program], env=own, capture_output=True, text=True)
    assert run.stdout == "0\n" and f"No module named 'bandmaster.{room}'" in run.stderr, run.stderr


def test_names_of_features_are_imported_when_they_are_used():
    program = "import sys, bandmaster\nassert set(bandmaster.__all__) <= set(dir(bandmaster))\n"
    program += "loaded = set(sys.modules)\nassert not loaded & {'bandmaster.output', 'bandmaster.debugging'}\n"
    program += "from bandmaster import *\nassert Stream.__module__ == 'bandmaster.flow.stream'\n"
    program += "try: bandmaster.nonsense\nexcept AttributeError as error: print(error)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == "module 'bandmaster' has no attribute 'nonsense'\n"
