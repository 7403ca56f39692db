"""A start that takes long is shown: lines in a terminal, log records elsewhere."""

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


HIDDEN = "import sys; sys.modules['rich'] = None"  # as if it was not installed
LOGGED = "import logging; logging.basicConfig(level=logging.INFO)"


@pytest.mark.parametrize("before", ["", HIDDEN], ids=["rich", "plain"])
def test_a_terminal_shows_which_ranks_are_late(before, tmp_path):
    ours, theirs = os.openpty()
    command = [sys.executable, "-c", f"{before}\n{PROGRAM}", str(tmp_path / "go")]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen(command, stderr=theirs, cwd=tmp_path, env=environment) as program:
        os.close(theirs)
        seen = b""
        while b"late: rank 1" not in seen:
            seen += os.read(ours, 1000)
        (tmp_path / "go").touch()
        assert program.wait(30) == 0
    os.close(ours)
    assert b"starting mySlow: 2 of 3 ranks, " in seen, seen
    assert (b"\x1b[?25l" in seen) == (before == ""), "rich hides the cursor"


def test_a_file_gets_nothing(tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "go")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, cwd=tmp_path) as program:
        with pytest.raises(subprocess.TimeoutExpired):
            program.wait(3)
        (tmp_path / "go").touch()
        assert program.communicate(timeout=30)[1] == b""


def test_logging_gets_records_where_there_is_no_terminal(tmp_path):
    command = [sys.executable, "-c", f"{LOGGED}\n{PROGRAM}", str(tmp_path / "go")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as program:
        assert program.stderr is not None
        while "2 of 3 ranks" not in (line := program.stderr.readline()):
            assert line.startswith("INFO:bandmaster.output.screen:starting mySlow: ")
        assert line.endswith(" s; late: rank 1\n")
        (tmp_path / "go").touch()
        assert program.wait(30) == 0
