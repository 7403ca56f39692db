"""``bandmaster stack``: the stacks of running ranks, by the group's name."""

import asyncio
import json
import os
import signal
import threading
import time

import pytest
from clock import idle_time
from commands import MINE

import bandmaster as bm
from bandmaster import Dispatch, register, rl
from bandmaster.cli import main
from bandmaster.wire import status_page
from bandmaster.wire.stacks import END, TASKS, TOLD, is_told, readable
from bandmaster.wire.status_page import stacks


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
    deadline = idle_time() + 30
    while sum("time.sleep(60)" in stack for stack in stacks(pids).values()) < 3:
        assert idle_time() < deadline, "the ranks have not come to where they wait"
    yield group, pids
    call.cancel()


@pytest.mark.backends("local", "ray")
def test_ranks_with_the_same_stack_are_shown_together(waiting, capsys):
    group, _ = waiting
    assert main(["stack", group.name, *MINE]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    first, second = out.split("--- stack of rank ")[1:]
    assert first.startswith("0, 2 ---\n") and first.endswith("in wait_long\n    time.sleep(60)\n")
    assert second.startswith("1 ---\n") and second.endswith("in wait_elsewhere\n    time.sleep(60)\n")
    assert "bandmaster/worker_process" not in out, "frames of the library are left out"


@pytest.mark.backends("local")
def test_why_says_what_ranks_run_and_where(waiting, capsys):
    group, pids = waiting
    os.kill(pids[2], signal.SIGSTOP)
    try:
        assert main(["why", group.name, *MINE]) == 0
        text = capsys.readouterr().out
        assert main(["why", "--json", *MINE]) == 0
    finally:
        os.kill(pids[2], signal.SIGCONT)
    head, *lines = text.rstrip("\n").split("\n")
    assert head == f"{group.name}@{os.getpid()}, 3 ranks"
    assert lines[0].startswith("  rank 2: wait_long for ") and f"its process {pids[2]} on host" in lines[0]
    assert "is stopped, by SIGSTOP" in lines[0] and len(lines) == 3
    assert sorted(line.partition(" s, ")[2].partition(" (")[0] for line in lines[1:]) == [
        "in wait_elsewhere",
        "in wait_long",
    ]
    (told,) = [one for one in map(json.loads, capsys.readouterr().out.splitlines()) if one["group"] == group.name]
    assert told["controller"] == os.getpid() and told["places"][0]["ranks"] == [2]
    assert {place["method"] for place in told["places"]} == {"wait_long"}


class Evaluates(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def update(self):
        import torch

        rl.start_torch_distributed(self)
        if self.rank != 1:  # a common mistake
            torch.distributed.all_reduce(torch.ones(1))

    @register(Dispatch.ONE_TO_ALL)
    def evaluate(self):
        time.sleep(60)


@pytest.mark.backends("local")
@pytest.mark.parametrize("methods, first", [(["update", "evaluate"], "evaluate for "), (["update"], "idle")])
def test_why_shows_first_the_rank_that_skips_a_collective(make_pool, capsys, methods, first):
    group = bm.WorkerGroup(make_pool([3]), Evaluates)
    calls = [getattr(group, method).submit() for method in methods]
    deadline, text = idle_time() + 30, ""
    while "rank 0,2: update for " not in text or "all_reduce" not in text or f"rank 1: {first}" not in text:
        assert idle_time() < deadline, text
        assert main(["why", group.name, *MINE]) == 0
        text = capsys.readouterr().out
    assert all(call.cancel() for call in calls)
    assert text.split("\n")[1].startswith(f"  rank 1: {first}"), text


def test_what_a_worker_tells_twice_of_its_tasks_is_shown_once():
    told = f"{TOLD}{TASKS}{json.dumps(['', '--- task of a user', ''])}\n{END}"
    assert readable(f"{told}{told}") == "--- task of a user"
    assert readable(f"{told}{TOLD}") == "--- task of a user", "the second one is just being written"


def test_what_a_worker_tells_is_whole_only_from_its_beginning_which_another_reader_may_remove():
    told = f'{TOLD}Stack (most recent call first):\n  File "user.py", line 3 in step{TASKS}["", "", ""]\n{END}'
    rest = told[told.index(TASKS) :]
    assert not is_told(rest)
    assert is_told(rest + told)
    assert readable(rest + told) == '  File "user.py", line 3, in step'


@pytest.mark.backends("local")
def test_one_rank_and_names_that_select_no_group(waiting, capsys):
    group, pids = waiting
    full_name = f"{group.name}@{os.getpid()}"
    assert main(["stack", full_name, "1", *MINE]) == 0
    out = capsys.readouterr().out
    assert out.count("--- stack of rank ") == 1 and "in wait_elsewhere" in out

    assert main(["stack", group.name.lower(), *MINE]) == 1
    assert capsys.readouterr().err.endswith(f"did you mean {group.name!r}\n")
    assert main(["stack", group.name, "3", *MINE]) == 1
    assert capsys.readouterr().err == f"bandmaster stack: group {full_name} has ranks 0 to 2, got rank 3\n"

    os.kill(pids[2], signal.SIGSTOP)
    try:
        assert main(["stack", group.name, *MINE]) == 1
    finally:
        os.kill(pids[2], signal.SIGCONT)
    out, err = capsys.readouterr()
    assert "--- stack of rank 0 ---" in out and "--- stack of rank 1 ---" in out, "the other ranks are shown"
    assert err.startswith(f"bandmaster stack: rank 2 of {full_name} gave no stack (pid {pids[2]})")


class Engine(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    async def start(self, is_kept):
        serving = asyncio.create_task(self.serve())
        await asyncio.wait([serving])
        self.serving = serving if is_kept else None

    @register(Dispatch.ONE_TO_ALL)
    async def see(self):
        return str(self.serving.exception())

    async def serve(self):
        raise ValueError("the engine has failed")

    @register(Dispatch.ONE_TO_ALL)
    async def watch(self):
        self.watching = asyncio.create_task(self.call_tool())

    @register(Dispatch.ONE_TO_ALL)
    async def generate(self):
        await asyncio.gather(self.episode(), self.episode())

    @register(Dispatch.DP_PROTO)
    async def items(self, rows):
        async for item in self.each_of(rows):
            yield item

    async def each_of(self, rows):
        for _ in rows:
            yield await self.episode()

    async def episode(self):
        await self.call_tool()

    async def call_tool(self):
        await asyncio.Event().wait()

    @register(Dispatch.ONE_TO_ALL)
    def pid(self):
        return os.getpid()


@pytest.fixture
def engine(make_pool):
    return bm.WorkerGroup(make_pool([2]), Engine)


def late(wait, pids):
    """The error of who waits for ranks that have come to `call_tool`."""
    deadline = idle_time() + 30
    while not all("in call_tool" in stacks([pid]).get(pid, "") for pid in pids):
        assert idle_time() < deadline, "the ranks have not come to where they wait"
    with pytest.raises(bm.CallTimeout) as caught:
        wait()
    return caught.value


@pytest.mark.backends("local", "ray")
def test_where_an_async_method_and_the_tasks_of_its_rank_wait(engine, capsys):
    pids, call = engine.pid(), engine.generate.submit()
    error = late(lambda: call.result(timeout=0.1), pids)
    for stack in error.stacks.values():
        method, others = stack.split("  in 2 other tasks:\n")
        assert method.endswith(", in generate\n    await asyncio.gather(self.episode(), self.episode())\n")
        assert others.index(", in episode\n") < others.index(", in call_tool\n    await asyncio.Event().wait()\n")
    assert "bandmaster/" not in str(error) and "waiter.acquire" not in str(error)
    assert main(["stack", engine.name, *MINE]) == 0
    assert capsys.readouterr().out.startswith("--- stack of rank 0, 1 ---\n"), "ranks in the same place are together"
    call.cancel()


@pytest.mark.backends("local")
def test_where_the_item_of_a_stream_waits(engine):
    pids = engine.pid()
    with engine.items.options(timeout=0.1, maxsize=8).stream([1, 2]) as stream:
        error = late(lambda: next(stream), pids)
    for stack in error.stacks.values():
        lines = [line.rpartition(", in ")[2] for line in stack.splitlines() if ", in " in line]
        assert lines[:4] == ["items", "each_of", "episode", "call_tool"]
    assert "has not begun" not in str(error)


@pytest.mark.backends("local")
@pytest.mark.parametrize("is_kept", [True, False])
def test_a_task_that_has_died_is_told_of_until_somebody_has_seen_why(engine, is_kept):
    pids = engine.pid()
    engine.start(is_kept)
    call = engine.generate.submit()
    error = late(lambda: call.result(timeout=0.1), pids)
    assert "a task of Engine.serve has died, and nobody has seen why:\nTraceback" in str(error)
    assert str(error).endswith("ValueError: the engine has failed")
    call.cancel()
    if is_kept:
        assert engine.see() == ["the engine has failed"] * 2
        call = engine.generate.submit()
        assert "has died" not in str(late(lambda: call.result(timeout=0.1), pids))
        call.cancel()


@pytest.mark.backends("local")
def test_the_tasks_of_an_idle_rank(engine, capsys):
    engine.watch()
    deadline = idle_time() + 30
    while True:
        assert main(["stack", engine.name, *MINE]) == 0
        out = capsys.readouterr().out
        if out.startswith("--- stack of rank 0, 1 ---\n  idle: it runs no method\n  in another task:\n"):
            assert ", in call_tool\n" in out
            return
        assert idle_time() < deadline, out


class Computes(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def größe(self, seconds):
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            self.fibonacci(15)

    def fibonacci(self, n):
        return n if n < 2 else self.fibonacci(n - 1) + self.fibonacci(n - 2)

    @register(Dispatch.ONE_TO_ALL)
    def hold_the_gil(self, n):
        return sum(range(n))

    @register(Dispatch.ONE_TO_ALL)
    def start_threads(self, n, n_frames):
        def wait(n_left):
            wait(n_left - 1) if n_left else time.sleep(600)

        for _ in range(n):
            threading.Thread(target=wait, args=(n_frames,), daemon=True).start()

    @register(Dispatch.ONE_TO_ALL)
    def run_code(self, file, change):
        names = {"wait": time.sleep}
        exec(compile("def made():\n    wait(600)", file, "exec"), names)
        names["made"].__code__ = names["made"].__code__.replace(**change)
        names["made"]()

    @register(Dispatch.ONE_TO_ALL)
    def pid(self):
        return os.getpid()


@pytest.fixture
def computing(make_pool):
    """The processes of two ranks whose call runs Python code."""
    group = bm.WorkerGroup(make_pool([2]), Computes)
    pids, call = group.pid(), group.größe.submit(600)
    deadline = idle_time() + 30
    while not all("in gr" in stack for stack in stacks(pids).values()):
        assert idle_time() < deadline, "the ranks have not come to their call"
    yield pids
    call.cancel()


@pytest.mark.slow
@pytest.mark.backends("local")
def test_ranks_that_run_python_code_are_asked_for_their_stacks_three_thousand_times(computing):
    """faulthandler reads frames while they are made, and has ended such a rank about once in 1,500 times."""
    for _ in range(1500):
        found = stacks(computing)
        assert all("in größe" in found[pid] for pid in computing), found


@pytest.mark.backends("local")
def test_ranks_that_run_python_code_tell_their_stacks_themselves(computing):
    found = stacks(computing)
    assert all(found[pid].count("in größe") == 1 for pid in computing), "faulthandler would escape the letters"


@pytest.mark.backends("local")
def test_a_rank_whose_c_code_holds_the_gil_is_shown_where_it_is(make_pool):
    group = bm.WorkerGroup(make_pool([1]), Computes)
    (pid,), call = group.pid(), group.hold_the_gil.submit(150_000_000)
    found = ""
    while not ("in hold_the_gil" in found and "C code holds the GIL" in found):
        assert not call.done(), found
        found = stacks([pid]).get(pid, "")
    assert call.result(timeout=60) == [150_000_000 * 149_999_999 // 2]


@pytest.mark.backends("local")
@pytest.mark.parametrize(
    ("file", "change", "shown"),
    [
        ("a\nb.py", {}, r'File "a\nb.py", line 2, in made'),
        ("a.py", {"co_name": f"f{END}\udcff"}, r'File "a.py", line 2, in f\n\nEnd\n\udcff'),
        ("a.py", {"co_linetable": b""}, 'File "a.py", line ???, in made'),
    ],
)
def test_code_with_odd_names_or_without_lines_is_shown(make_pool, file, change, shown):
    group = bm.WorkerGroup(make_pool([1]), Computes)
    pids, call = group.pid(), group.run_code.submit(file, change)
    found, deadline = "", idle_time() + 30
    while shown not in found:
        assert idle_time() < deadline, found
        found = stacks(pids).get(pids[0], "")
    call.cancel()


@pytest.mark.backends("local")
def test_a_rank_with_many_threads_is_shown_each_time_though_the_reader_is_slow(make_pool, monkeypatch):
    """It removed what others had read, and what it wrote was as long: it counted as one that does not answer."""
    group = bm.WorkerGroup(make_pool([1]), Computes)
    pids = group.pid()
    group.start_threads(80, 40)

    def signal_and_be_suspended(*args):
        send_signal(*args)
        time.sleep(0.3)

    send_signal = status_page._signal
    monkeypatch.setattr(status_page, "_signal", signal_and_be_suspended)
    for _ in range(4):
        (found,) = stacks(pids).values()
        assert len(found) > status_page.MOST_TOLD_NBYTES
        assert "does not answer" not in found
