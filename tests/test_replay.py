"""Recorded calls run again in one process, with the state, the arguments and the random numbers that they had."""

import random
import subprocess
import sys

import numpy as np
import pexpect
import pytest

import bandmaster as bm
from bandmaster import Dispatch, register

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
    def hold_a_lock(self):
        import threading

        self.lock = threading.Lock()


@pytest.fixture
def group(make_group):
    return make_group(2, Model)


def replayed(*arguments):
    command = [sys.executable, "-m", "bandmaster", "replay", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.backends("inprocess", "local", "ray")
def test_a_recorded_call_returns_the_same(group, tmp_path):
    result = group.noisy.options(record=tmp_path)(list(range(4)), scale=3)
    assert len(list(tmp_path.iterdir())) == 2
    for rank in range(2):
        status, said = replayed(tmp_path, "--rank", rank, "--run")
        assert status == 0 and f"Model.noisy on rank {rank} of 2, recorded on host" in said
        assert f"returned {result[2 * rank : 2 * rank + 2]!r}" in said


@pytest.mark.backends("local")
def test_ranks_rows_and_async_methods(group, tmp_path):
    rows = group.noisy.submit([1, 2, 3, 4])
    assert group.later.options(record=tmp_path / "new", record_ranks=[1]).submit(rows).result() == rows.result()
    (file,) = (tmp_path / "new").iterdir()
    assert file.name == "0001-Model.later-rank-1.call"
    assert replayed(file, "--run") == (0, replayed(file)[1])
    assert f"returned {rows.result()[2:]!r}" in replayed(file)[1]
    group.later.options(record=tmp_path / "new", record_ranks=[1])([5, 6])
    assert "returned [6]" in replayed(tmp_path / "new")[1]  # the last one


@pytest.mark.backends("local")
def test_an_error_is_looked_at_where_it_was_raised(group, tmp_path):
    with pytest.raises(bm.RemoteError, match="ZeroDivisionError"):
        group.divide.options(record=tmp_path)([1, 2])
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
def test_what_cannot_be_recorded_is_said(group, tmp_path, capsys):
    group.hold_a_lock()
    with pytest.raises(bm.RemoteError, match=r"Model.noisy cannot be recorded.*lock.*define __getstate__"):
        group.noisy.options(record=tmp_path)([1, 2])
    assert list(tmp_path.iterdir()) == []
    assert len(group.noisy([1, 2])) == 2
    for options, said in (
        ({"record": 3}, "record must be the path of a folder, got 3"),
        ({"record_ranks": [0]}, "set record= as well"),
        ({"record": "x", "record_ranks": [2]}, "record_ranks names rank 2, but Model.noisy runs on ranks 0 to 1"),
        ({"record": "x", "pull": 1}, "cannot be recorded"),
    ):
        with pytest.raises(bm.UsageError, match=said):
            group.noisy.options(**options)
    with pytest.raises(bm.UsageError, match="a stream cannot be recorded"):
        group.noisy.options(record="x").stream([1])


def test_a_folder_without_calls_and_a_rank_that_has_none(tmp_path):
    status, said = replayed(tmp_path)
    assert status == 2 and "there is no recorded call in" in said
    with bm.ResourcePool([2], backend="inprocess") as pool:
        bm.WorkerGroup(pool, Model).later.options(record=tmp_path, record_ranks=[0])([1, 2])
    status, said = replayed(tmp_path, "--rank", 1)
    assert status == 2 and "has no recorded call of rank 1, but of rank 0" in said
