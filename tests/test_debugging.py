"""``breakpoint()`` in a worker, on a terminal as a user has it: commands, deadlines that wait, detaching, quitting."""

import asyncio
import bdb
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pexpect
import pytest
from clock import idle_time
from commands import MINE
from debug_adapter import Ide

import bandmaster as bm
from bandmaster import Dispatch, Execute, register
from bandmaster.cli import main
from bandmaster.wire.status_page import DEBUGGER, announcement, find_all, in_debuggers

pytestmark = [pytest.mark.backends("local", "ray"), pytest.mark.here]


class Model(bm.Worker):
    def __init__(self):
        self.met = asyncio.Event()

    @register(Dispatch.ONE_TO_ALL)
    def pids(self):
        return os.getpid()

    @register(Dispatch.ONE_TO_ALL)
    def step(self, x, where):
        doubled = 2 * x
        if self.rank in where:
            breakpoint()
        doubled += self.rank
        return doubled

    @register(Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def count(self, n):
        total = 0
        for _ in range(n):
            breakpoint()
            total = self.one_more(total)
        return total

    def one_more(self, total):
        breakpoint()
        return total + 1

    @register(Dispatch.REQUEST, concurrency=2)
    async def meet(self, is_first):
        breakpoint()
        if is_first:
            await self.met.wait()
        self.met.set()
        return is_first

    @register(Dispatch.ONE_TO_ALL)
    def fail_or_stop(self, gate):
        if self.rank == 0:
            while not os.path.exists(gate):
                time.sleep(0.01)
            raise ValueError("of rank 0")
        breakpoint()
        return self.rank

    @register(Dispatch.DP_PROTO)
    async def episodes(self, rows, where):
        for done in asyncio.as_completed([self.episode(row, where) for row in rows]):
            yield await done

    async def episode(self, row, where):
        await asyncio.sleep(0.01 * int(row))
        if row == where:
            breakpoint()
        doubled = 2 * row
        await asyncio.sleep(0.01)
        doubled += 1
        return int(doubled)


@pytest.fixture(scope="module")
def group(backend):
    with bm.ResourcePool([2], backend=backend) as pool:
        yield bm.WorkerGroup(pool, Model)


def wait_until_in_debugger(group, ranks):
    """Poll what the kernel shows, as there is nothing to wait on. The ranks of a group that are, and no others."""
    pids = [record.pid for record in group._ownership.workers().records]
    deadline = idle_time() + 30
    while (there := in_debuggers(pids)) != {pids[rank] for rank in ranks}:
        assert idle_time() < deadline, f"of {pids}, {there} are in debuggers"
        time.sleep(0.02)


def step(child, n):
    """Go on by some lines, each time until the debugger prompts."""
    for _ in range(n):
        child.sendline("n")
        child.expect_exact("(Pdb) ")


def prompted(*arguments):
    """``bandmaster debug`` on a terminal, at its first prompt."""
    command = ["-m", "bandmaster", "debug", *arguments, *MINE]
    child = pexpect.spawn(sys.executable, command, encoding="utf-8", timeout=100)
    child.expect_exact("(Pdb) ")
    return child


def attached(*arguments):
    """``bandmaster debug`` on a terminal, at its first prompt behind `breakpoint()`, where Python 3.13 has one more."""
    child = prompted(*arguments)
    if "-> breakpoint()" in child.before:
        child.sendline("n")
        child.expect_exact("(Pdb) ")
    return child


def ended(child, said):
    child.expect_exact(said)
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


def test_a_method_is_stepped_through_while_deadlines_wait(group, capsys):
    future = group.step.options(timeout=0.3, grace=0.1).submit(5, [1])
    wait_until_in_debugger(group, [1])
    assert main(["top", "--once", *MINE]) == 0
    assert re.search(r"  1 .*  step \(in a debugger\)  ", capsys.readouterr().out)
    assert main(["stack", group.name, "1", *MINE]) == 0
    assert capsys.readouterr().out.splitlines()[-2].endswith(", in step"), "the user's frame is the innermost"
    assert main(["why", group.name, *MINE]) == 0
    assert re.search(r"rank 1: step for \d+ s, in a debugger, in step \(test_debugging.py:", capsys.readouterr().out)
    child = attached(group.name)  # the rank that waits is found
    assert "doubled += self.rank" in child.before
    child.sendline("p doubled, self.rank")
    child.expect_exact("(10, 1)")
    child.sendline("n")
    child.expect_exact("return doubled")
    child.expect_exact("(Pdb) ")
    child.sendline("w")
    child.expect_exact("(Pdb) ")
    assert "executor.py" not in child.before  # the library's own frames
    with pytest.raises(bm.CallTimeout, match="in a debugger"):
        future.result(timeout=0)  # asks, and does not wait
    behind = group.step.options(timeout=0.3).submit(1, [])
    child.sendline("doubled = 77")
    child.expect_exact("(Pdb) ")
    child.sendline("c")
    ended(child, f"rank 1 of {group.name} goes on without the debugger")
    assert future.result() == [10, 77]
    assert behind.result() == [2, 3]


def test_a_terminal_can_go_and_another_one_come(group):
    future = group.step.submit(1, [0])
    wait_until_in_debugger(group, [0])
    child = attached(group.name, "0")
    child.sendeof()
    ended(child, f"rank 0 of {group.name} still waits")
    child = attached(group.name, "0")
    child.sendintr()  # at the prompt: begins a new line
    child.sendline("c")
    ended(child, "goes on")
    assert future.result(timeout=20) == [2, 3]


def test_a_coroutine_is_stepped_through_while_the_deadline_of_its_stream_waits(group):
    stream = group.episodes.options(timeout=0.3).stream(list(range(6)), 4)
    with ThreadPoolExecutor(1) as threads, stream:
        items = threads.submit(list, stream)
        wait_until_in_debugger(group, [1])
        child = attached(group.name)
        assert "doubled = 2 * row" in child.before
        child.sendline("w")
        child.expect_exact("(Pdb) ")
        assert "asyncio" not in child.before and "executor.py" not in child.before
        child.sendline("p row, self.rank")
        child.expect_exact("(4, 1)")
        for line in ("await asyncio.sleep(0.01)", "doubled += 1", "return int(doubled)"):
            child.sendline("n")  # over an await as well, while other tasks run
            child.expect_exact(line)
            child.expect_exact("(Pdb) ")
        child.sendline("doubled = 99")
        child.expect_exact("(Pdb) ")
        child.sendline("c")
        ended(child, f"rank 1 of {group.name} goes on without the debugger")
        found = [item.result() for item in items.result(timeout=30)]
    assert sorted(found) == [1, 3, 5, 7, 11, 99]


def test_the_end_of_a_coroutine_ends_the_debugger(group):
    stream = group.episodes.stream([1, 2], 2)
    wait_until_in_debugger(group, [1])
    child = attached(group.name)
    step(child, 3)
    child.sendline("n")
    ended(child, f"rank 1 of {group.name} goes on without the debugger")
    assert sorted(item.result() for item in stream) == [3, 5]


def test_a_breakpoint_on_the_way_stops_in_the_method_that_calls_it(group):
    future = group.count.submit(2)
    wait_until_in_debugger(group, [0])
    child, shown = attached(group.name), []
    while len(shown) < 30 and child.sendline("n") and child.expect_exact(["(Pdb) ", "without the debugger"]) == 0:
        shown += [line for line in re.findall(r"-> (.*)\r", child.before) if line not in ("breakpoint()", *shown[-1:])]
    again = ["return total + 1", "for _ in range(n):"]
    assert shown == [*again, "total = self.one_more(total)", *again, "return total"]
    assert future.result(timeout=20) == 2


def test_a_breakpoint_of_another_task_takes_the_debugger(group):
    first, second = [group.meet.options(replica=1)(is_first) for is_first in (True, False)]
    wait_until_in_debugger(group, [1])
    child = attached(group.name)
    step(child, 2)  # over the await
    assert __file__ in child.before
    child.sendline("p is_first")
    child.expect_exact("False")
    child.sendline("c")
    ended(child, "goes on without the debugger")
    assert (first.result(timeout=20), second.result(timeout=20)) == (True, False)


def test_commands_that_need_a_script_or_its_terminal_are_refused(group):
    future = group.step.submit(1, [1])
    wait_until_in_debugger(group, [1])
    child = attached(group.name)
    for command, says in (("interact", "statements at this prompt"), ("run", "q ends it"), ("restart", "q ends it")):
        child.sendline(command)
        child.expect_exact("(Pdb) ")
        assert says in child.before
    child.sendline("c")
    ended(child, "goes on")
    assert future.result(timeout=20) == [2, 3]


def test_each_rank_waits_for_a_terminal_of_its_own(group, capfd):
    future = group.step.submit(1, [0, 1])
    wait_until_in_debugger(group, [0, 1])
    assert main(["debug", group.name, *MINE]) == 1
    assert "ranks 0, 1" in capfd.readouterr().err
    for rank in "10":
        child = attached(group.name, rank)
        child.sendline("c")
        ended(child, f"rank {rank} of {group.name} goes on")
    assert future.result(timeout=20) == [2, 3]


def test_quitting_fails_the_method_and_the_group_stays_usable(group):
    future = group.step.submit(1, [1])
    wait_until_in_debugger(group, [1])
    child = attached(group.name)
    child.sendline("q")
    ended(child, "goes on")
    with pytest.raises(bm.RemoteError, match="BdbQuit") as caught:
        future.result(timeout=20)
    assert isinstance(caught.value.__cause__, bdb.BdbQuit) and caught.value.rank == 1
    assert group.step(1, []) == [2, 3]


def test_the_end_of_the_method_ends_the_debugger(group):
    future = group.step.submit(1, [1])
    wait_until_in_debugger(group, [1])
    child = attached(group.name)
    step(child, 2)
    child.sendline("n")
    ended(child, "goes on")
    assert future.result(timeout=20) == [2, 3]


def test_a_rank_in_a_debugger_is_not_ended_when_another_fails(group, tmp_path):
    pids, gate = group.pids(), tmp_path / "gate"
    future = group.fail_or_stop.options(grace=0.5).submit(str(gate))
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(future.exception)  # who waits also interrupts, and ends who does not stop in time
        wait_until_in_debugger(group, [1])
        child = attached(group.name)
        gate.touch()
        child.sendline("import time; time.sleep(2); self.rank + 41")  # longer than until the end would be due
        child.expect_exact("42")
        child.sendline("c")
        ended(child, "goes on")
        assert "of rank 0" in str(waiting.result(timeout=20))
    assert group.pids() == pids


def test_a_call_that_was_cancelled_leaves_the_debugger_when_it_goes_on(group):
    pids = group.pids()
    future = group.step.submit(1, [1])
    wait_until_in_debugger(group, [1])
    assert future.cancel()
    child = prompted(group.name)
    child.sendline("c")
    ended(child, "goes on")
    with pytest.raises(bm.CallCancelled):
        future.result(timeout=20)
    assert group.pids() == pids and not in_debuggers(pids)


def test_an_ide_attaches_while_deadlines_wait(backend, capfd):
    env = {"PYTHONBREAKPOINT": "debugpy.breakpoint"}
    with bm.ResourcePool([2], backend=backend, env=env, preload=[]) as pool:
        group = bm.WorkerGroup(pool, Model)
        pids = group.pids()
        for _ in range(2):  # the second time the debugger listens already
            future = group.step.options(timeout=0.3, grace=0.1).submit(5, [1])
            wait_until_in_debugger(group, [1])
            address = announcement(pids[1], DEBUGGER)
            assert main(["debug", group.name, *MINE]) == 1
            assert f"waits for an IDE at {address}" in capfd.readouterr().err
            with Ide(int(address.rpartition(":")[2])) as ide:
                stopped = ide.event("stopped")
                top = ide.ask("stackTrace", threadId=stopped["threadId"])["stackFrames"][0]
                assert (top["name"], top["source"]["path"]) == ("step", __file__)
                asked = ide.ask("evaluate", expression="doubled, self.rank", frameId=top["id"], context="repl")
                assert asked["result"] == "(10, 1)"
                ide.ask("evaluate", expression="doubled = 77", frameId=top["id"], context="repl")
                ide.ask("continue", threadId=stopped["threadId"])
                assert future.result() == [10, 78]
                assert in_debuggers(pids) == {pids[1]}  # as long as the IDE is there
            wait_until_in_debugger(group, [])
        assert group.step(1, []) == [2, 3]


class StopsAtFirst(bm.Worker):
    def __init__(self):
        start = 1
        breakpoint()
        self.start = start

    @register(Dispatch.ONE_TO_ALL)
    def started(self):
        return self.start


def test_the_deadline_of_a_constructor_waits(backend):
    with bm.ResourcePool([1], backend=backend) as pool, ThreadPoolExecutor(1) as threads:
        starting = threads.submit(bm.WorkerGroup, pool, StopsAtFirst, name="stops", start_timeout=12)
        deadline = idle_time() + 30
        while not in_debuggers(worker.pid for worker in find_all() if worker.controller == os.getpid()):
            assert idle_time() < deadline and not starting.done()
            time.sleep(0.02)
        child = attached("stops")
        child.sendline("import time; time.sleep(13); 41 + start")  # longer than the start may take
        child.expect_exact("42")
        child.sendline("start = 77")
        child.expect_exact("(Pdb) ")
        child.sendline("c")
        ended(child, "rank 0 of stops goes on without the debugger")
        assert starting.result(timeout=20).started() == [77]


def test_who_does_not_wait_cannot_be_debugged(group, capsys):
    assert main(["debug", group.name, *MINE]) == 1
    assert capsys.readouterr().err == (
        f"bandmaster debug: no rank of {group.name} waits in a debugger on this host; call breakpoint() in a method\n"
    )
    assert main(["debug", group.name, "1", *MINE]) == 1
    assert f"rank 1 of {group.name} does not wait" in capsys.readouterr().err
    assert main(["debug", f"{group.name}x", *MINE]) == 1
    assert f"did you mean '{group.name}'" in capsys.readouterr().err


@pytest.mark.backends("inprocess")
def test_in_process_it_is_that_of_python(make_group, monkeypatch):
    stops = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stops.append(sys._getframe(1).f_code.co_name))
    assert make_group(2, Model).step(1, [1]) == [2, 3]
    assert stops == ["step"]
