"""``bandmaster stack``: the stacks of running ranks, by the group's name."""

import os
import signal
import time

import pytest

import bandmaster as bm
from bandmaster import Dispatch, register
from bandmaster.cli import main
from bandmaster.transport.control_page import stacks


class Waits(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def wait_long(self):
        if self.rank == 1:
            self.wait_elsewhere()
        time.sleep(60)

    def wait_elsewhere(self):
        time.sleep(60)

    @register(Dispatch.ONE_TO_ALL)
    def pid(self):
        return os.getpid()


@pytest.fixture
def waiting(make_pool):
    """A group of three ranks that are in a call: 0 and 2 at the same place."""
    group = bm.WorkerGroup(make_pool([3]), Waits)
    pids, call = group.pid(), group.wait_long.submit()
    deadline = time.monotonic() + 30
    while sum("time.sleep(60)" in stack for stack in stacks(pids).values()) < 3:
        assert time.monotonic() < deadline, "the ranks have not come to where they wait"
    yield group, pids
    call.cancel()


@pytest.mark.backends("local", "ray")
def test_ranks_with_the_same_stack_are_shown_together(waiting, capsys):
    group, _ = waiting
    assert main(["stack", group.name]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    first, second = out.split("--- stack of rank ")[1:]
    assert first.startswith("0, 2 ---\n") and first.endswith("in wait_long\n    time.sleep(60)\n")
    assert second.startswith("1 ---\n") and second.endswith("in wait_elsewhere\n    time.sleep(60)\n")
    assert "bandmaster/worker_process" not in out, "frames of the library are left out"


@pytest.mark.backends("local")
def test_one_rank_and_names_that_select_no_group(waiting, capsys):
    group, pids = waiting
    full_name = f"{group.name}@{os.getpid()}"
    assert main(["stack", full_name, "1"]) == 0
    out = capsys.readouterr().out
    assert out.count("--- stack of rank ") == 1 and "in wait_elsewhere" in out

    assert main(["stack", group.name.lower()]) == 1
    assert capsys.readouterr().err.endswith(f"did you mean {group.name!r}\n")
    assert main(["stack", group.name, "3"]) == 1
    assert capsys.readouterr().err == f"bandmaster stack: group {full_name} has ranks 0 to 2, got rank 3\n"

    os.kill(pids[2], signal.SIGSTOP)
    try:
        assert main(["stack", group.name]) == 1
    finally:
        os.kill(pids[2], signal.SIGCONT)
    out, err = capsys.readouterr()
    assert "--- stack of rank 0 ---" in out and "--- stack of rank 1 ---" in out, "the other ranks are shown"
    assert err.startswith(f"bandmaster stack: rank 2 of {full_name} gave no stack (pid {pids[2]})")
