"""What is seen of a start that takes long: a line in a terminal, nothing in a file."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import pathlib, sys, time
import bandmaster as bm

class Slow(bm.Worker):
    def __init__(self, wait_for):
        while self.rank == 1 and not pathlib.Path(wait_for).exists():
            time.sleep(0.01)

with bm.ResourcePool([3], name_prefix="my") as pool:
    bm.WorkerGroup(pool, Slow, sys.argv[1], name_prefix="my")
"""


def test_a_terminal_shows_which_ranks_are_late(tmp_path):
    ours, theirs = os.openpty()
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "go")]
    with subprocess.Popen(command, stderr=theirs, cwd=tmp_path) as program:
        os.close(theirs)
        seen = b""
        while b"late: rank 1" not in seen:
            seen += os.read(ours, 1000)
        (tmp_path / "go").touch()
        assert program.wait(30) == 0
    os.close(ours)
    assert b"starting mySlow: 2 of 3 ranks, " in seen, seen


def test_a_file_gets_nothing(tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "go")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, cwd=tmp_path) as program:
        with pytest.raises(subprocess.TimeoutExpired):
            program.wait(3)
        (tmp_path / "go").touch()
        assert program.communicate(timeout=30)[1] == b""
