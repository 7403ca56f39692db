"""Recorded calls run again in one process, with the state, the arguments and the random numbers that they had."""

import random
import subprocess
import sys

import numpy as np
import pexpect
import pytest

import bandmaster as bm
from bandmaster import Dispatch, register
from bandmaster.testing import record

pytestmark = pytest.mark.here


class Model(bm.Worker):
    def __init__(self):
        self.weight = 10 + self.rank

    @register(Dispatch.DP_PROTO)
    def noisy(self, rows, scale=1):
        return [(row * scale * self.weight, random.random(), float(np.random.random())) for row in rows]

    @register(Dispatch.DP_PROTO)
    async def later(self, rows):
        return rows

    @register(Dispatch.DP_PROTO)
    def divide(self, rows):
        divisor = self.weight - 11
        return [rows[0] / divisor]

    @register(Dispatch.ONE_TO_ALL)
    def leave(self, kind):
        raise kind

    @register(Dispatch.ONE_TO_ALL)
    def hold_a_lock(self):
        import threading

        self.lock = threading.Lock()


@pytest.fixture
def group(make_group, make_pool):
    """Workers without torch, whose calls are replayed without it; it takes seconds to import."""
    return make_group(make_pool([2], preload=[]), Model)


def replayed(*arguments):
    command = [sys.executable, "-m", "bandmaster", "replay", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.backends("inprocess", "local", "ray")
def test_a_recorded_call_returns_the_same(group, tmp_path):
    with record(group, tmp_path):
        result = group.noisy(list(range(4)), scale=3)
    group.noisy([1, 2])  # is not recorded
    assert len(list(tmp_path.iterdir())) == 2
    status, said = replayed(tmp_path, "--rank", 1, "--run")
    assert status == 0 and "Model.noisy on rank 1 of 2, recorded on host" in said
    assert f"returned {result[2:]!r}" in said


@pytest.mark.backends("local")
def test_ranks_rows_and_async_methods(group, tmp_path):
    rows = group.noisy.submit([1, 2, 3, 4])
    with record(group, tmp_path / "new", ranks=[1], methods=["later"]):
        later = group.later.submit(rows)
        group.noisy([1, 2])
    group.later([7, 8])
    assert later.result() == rows.result()
    (file,) = (tmp_path / "new").iterdir()
    assert file.name == "0001-Model.later-rank-1.call"
    status, said = replayed(file)  # whatever it raises is looked at in a debugger, but nothing is
    assert status == 0 and f"returned {rows.result()[2:]!r}" in said
    with record(group, tmp_path / "new", ranks=[1]):
        group.later([5, 6])
    assert "returned [6]" in replayed(tmp_path / "new")[1]  # the last one


@pytest.mark.backends("local")
def test_an_error_is_looked_at_where_it_was_raised(group, tmp_path):
    with pytest.raises(bm.RemoteError, match="ZeroDivisionError"), record(group, tmp_path):
        group.divide([1, 2])
    status, said = replayed(tmp_path, "--rank", 1, "--run")
    assert status == 1 and "ZeroDivisionError" in said and "cli/replay.py" not in said
    child = pexpect.spawn(sys.executable, ["-m", "bandmaster", "replay", str(tmp_path), "--rank", "1"], timeout=30)
    child.expect_exact("(Pdb) ")
    child.sendline("p divisor, self.rank")
    child.expect_exact("(0, 1)")
    child.sendline("q")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 1


@pytest.mark.backends("inprocess")
def test_code_that_is_recorded_by_value_is_shown_with_its_lines(make_group, tmp_path):
    class OfAScript(bm.Worker):
        @register(Dispatch.ONE_TO_ALL)
        def divide(self, divisor):
            return 1 // divisor  # this line

    group = make_group(1, OfAScript)
    with pytest.raises(bm.RemoteError, match="# this line"), record(group, tmp_path):
        group.divide(0)
    assert "return 1 // divisor  # this line" in replayed(tmp_path, "--run")[1]


@pytest.mark.backends("inprocess")
def test_what_cannot_be_recorded_is_said(group, tmp_path, capsys):
    group.hold_a_lock()
    with record(group, tmp_path), pytest.raises(bm.RemoteError, match=r"Model.noisy cannot be recorded.*define __gets"):
        group.noisy([1, 2])
    assert list(tmp_path.iterdir()) == []
    assert len(group.noisy([1, 2])) == 2
    for options, said in (
        ({"ranks": [2]}, r"record names rank 2, but .* has ranks 0 to 1"),
        ({"ranks": 1}, r"ranks must be a list of numbers, got 1"),
        ({"methods": ["nosy"]}, "Model has no method 'nosy'.*noisy"),
        ({"methods": "noisy"}, "methods must be a list of names, got 'noisy'"),
        ({"methods": 1}, "methods must be a list of names, got 1"),
    ):
        with pytest.raises(bm.UsageError, match=said), record(group, tmp_path, **options):
            raise AssertionError("it was refused")


@pytest.mark.backends("local")
def test_the_methods_of_one_role_are_recorded(make_pool, tmp_path):
    with bm.colocate(make_pool([2], preload=[]), model=Model, other=Model) as roles:
        with record(roles.model, tmp_path, ranks=[0]):
            result = roles.model.noisy([1, 2])
            roles.other.noisy([1, 2])
        roles.model.noisy([1, 2])
    (file,) = tmp_path.iterdir()
    assert f"returned {result[:1]!r}" in replayed(file, "--run")[1]


@pytest.mark.backends("inprocess")
def test_a_group_may_be_closed_in_the_block(group, tmp_path):
    with record(group, tmp_path):
        group.noisy([1, 2])
        group.close()
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.backends("inprocess")
def test_a_call_may_be_renamed(group, tmp_path):
    with record(group, tmp_path, ranks=[0]):
        group.later([1, 2])
    (file,) = tmp_path.iterdir()
    file.rename(tmp_path / "the-crash.call")
    status, said = replayed(tmp_path, "--run")
    assert status == 0 and "the-crash.call\nreturned [1]\n" in said
    status, said = replayed(tmp_path, "--rank", 1)
    assert status == 2 and "there is no recorded call of rank 1 in" in said


def test_a_folder_without_calls_and_a_rank_that_has_none(tmp_path):
    status, said = replayed(tmp_path)
    assert status == 2 and "there is no recorded call in" in said
    with bm.ResourcePool([2], backend="inprocess") as pool:
        group = bm.WorkerGroup(pool, Model)
        with record(group, tmp_path, ranks=[0]):
            group.later([1, 2])
    status, said = replayed(tmp_path, "--rank", 1)
    assert status == 2 and "has no recorded call of rank 1, but of rank 0" in said
    (file,) = tmp_path.iterdir()
    status, said = replayed(file, "--rank", 1)
    assert status == 2 and "has a call of rank 0, but --rank 1 is given" in said


@pytest.mark.backends("local")  # where an interrupt that a method raises does not look like Ctrl-C
def test_an_exit_and_an_interrupt_that_the_method_raises_are_shown(make_pool, tmp_path):
    group = bm.WorkerGroup(make_pool([1]), Model)
    for kind in (SystemExit, KeyboardInterrupt):
        with record(group, tmp_path), pytest.raises(bm.RemoteError):
            group.leave(kind)
        status, said = replayed(tmp_path, "--run")
        assert status == 1 and f"raise kind\n{kind.__name__}" in said and "bandmaster/cli" not in said
