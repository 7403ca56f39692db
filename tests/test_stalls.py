"""Calls and requests that make no progress are noticed, and the notice names the guilty rank and where it is."""

import asyncio
import gc
import logging
import os
import shlex
import signal
import sys
import threading
import time
from functools import partial

import pytest
from commands import MINE
from hosts import spread

import bandmaster as bm
from bandmaster import Dispatch, Execute, UsageError, register, rl
from bandmaster.cli import main
from bandmaster.contract import Signs
from bandmaster.watching.calls import Life
from bandmaster.watching.watch import watch

DEADLINE = 30
AFTER = 0.5


class Ranks(bm.Worker):
    def __init__(self):
        self.lock = threading.Lock()

    @register(Dispatch.ONE_TO_ALL)
    def pid(self):
        return os.getpid()

    @register(Dispatch.ONE_TO_ALL)
    def wait_for(self, gate):
        while not gate.exists():
            time.sleep(0.1)

    @register(Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def wait_alone(self, gate):
        self.wait_for(gate)

    @register(Dispatch.ONE_TO_ALL)
    def lock_twice(self, gate):
        self.lock.acquire()
        threading.Thread(target=self._release, args=(gate,)).start()
        self.lock.acquire()

    def _release(self, gate):
        self.wait_for(gate)
        self.lock.release()

    @register(Dispatch.ONE_TO_ALL)
    def compute(self, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            sum(range(1000))

    @register(Dispatch.REQUEST, concurrency=8)
    async def await_(self, gate):
        while not gate.exists():
            await asyncio.sleep(0.1)

    @register(Dispatch.REQUEST, concurrency=8)
    async def block(self, gate):
        self.wait_for(gate)

    @register(Dispatch.ONE_TO_ALL)
    async def block_on_all(self, gate):
        self.wait_for(gate)

    @register(Dispatch.REQUEST, concurrency=8)
    async def never_yield(self, gate):
        await self.await_(gate)
        yield 1

    @register(Dispatch.ONE_TO_ALL)
    def skip_a_collective(self, gate):
        import torch

        rl.start_torch_distributed(self)
        if self.rank == 1:
            self.wait_for(gate)
        torch.distributed.all_reduce(torch.ones(1))
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(backend):
    with bm.ResourcePool(spread([3]), backend=backend) as pool:
        group = bm.WorkerGroup(pool, Ranks)
        group.set_default_options(stall_after=AFTER)
        yield group


@pytest.fixture
def noticed(ranks):
    """``noticed()`` waits for the next notice."""
    n_before = len(bm.stalls())

    def wait():
        deadline = time.monotonic() + DEADLINE
        while len(bm.stalls()) == n_before:
            assert time.monotonic() < deadline, "nothing was noticed"
            time.sleep(0.1)
        return bm.stalls()[-1]

    return wait


pytestmark = pytest.mark.backends("local", "ray")


@pytest.mark.backends("local")
def test_a_group_that_is_collected_by_the_thread_that_watches_is_closed(backend, monkeypatch):
    look, collected = watch._look, threading.Event()

    def looked(n):
        def collect(frame, kind, _):
            nonlocal n
            n -= 1
            if n == 0:
                gc.collect()
                collected.set()

        found = look()
        if n > 0:
            sys.setprofile(collect)
        return found

    with bm.ResourcePool([1], backend=backend) as pool:
        for n in range(1, 12):
            other, group = bm.WorkerGroup(pool, Ranks), bm.WorkerGroup(pool, Ranks)
            gc.disable()
            try:
                group.itself = group  # so that only a collection finds that nobody has it
                ownership = group._ownership
                del group
                collected.clear()
                monkeypatch.setattr(watch, "_look", partial(looked, n))
                assert collected.wait(DEADLINE)
                monkeypatch.setattr(watch, "_look", lambda: sys.setprofile(None) or look())
                closing = threading.Thread(target=other.close, daemon=True)
                closing.start()
                closing.join(DEADLINE)
                assert not (closing.is_alive() or ownership.is_open), n
            finally:
                gc.enable()


@pytest.mark.here
def test_a_stopped_process_is_named(ranks, noticed):
    pid = ranks.pid()[2]
    os.kill(pid, signal.SIGSTOP)
    try:
        waiting = ranks.pid.submit()
        stall = noticed()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert (stall.group, stall.method, stall.ranks) == (ranks.name, "Ranks.pid", (2,))
    assert f"rank 2 (dp=2): its process {pid} on host" in stall.text and "is stopped, by SIGSTOP" in stall.text
    assert f"kill -CONT {pid}" in stall.text and f"bandmaster stack {ranks.name}" in stall.text
    assert waiting.result(DEADLINE)[2] == pid


@pytest.mark.parametrize(
    "method, words",
    [("wait_for", "in wait_for ("), ("block_on_all", "in wait_for ("), ("lock_twice", "in lock_twice (")],
)
def test_a_method_that_waits_is_noticed_with_its_line(ranks, noticed, tmp_path, method, words):
    waiting = getattr(ranks, method).submit(tmp_path / "gate")
    stall = noticed()
    (tmp_path / "gate").touch()
    waiting.result(DEADLINE)
    assert stall.method == f"Ranks.{method}" and stall.ranks == (0, 1, 2)
    assert "made no progress" in stall.text and f"ranks 0, 1, 2: {words}test_stalls.py:" in stall.text


def test_a_stream_without_its_first_item_is_noticed_though_nobody_reads_it(ranks, noticed, tmp_path):
    with ranks.never_yield.options(replica=1).stream(tmp_path / "gate") as stream:
        stall = noticed()
        (tmp_path / "gate").touch()
        assert list(stream) == [1] and (stall.method, stall.ranks) == ("Ranks.never_yield", (1,))


@pytest.mark.parametrize("method, words", [("await_", "in sleep, called by await_ ("), ("block", "in wait_for (")])
def test_a_request_that_waits_or_blocks_the_event_loop_is_noticed(ranks, noticed, tmp_path, method, words):
    waiting = getattr(ranks, method).options(replica=1)(tmp_path / "gate")
    stall = noticed()
    (tmp_path / "gate").touch()
    waiting.result(DEADLINE)
    assert (stall.method, stall.ranks) == (f"Ranks.{method}", (1,))
    assert f"rank 1 (dp=1): {words}test_stalls.py:" in stall.text


@pytest.mark.backends("local")
def test_the_rank_that_skips_a_collective_comes_first(ranks, noticed, tmp_path):
    waiting = ranks.skip_a_collective.options(stall_after=3).submit(tmp_path / "gate")
    stall = noticed()
    (tmp_path / "gate").touch()
    waiting.result(DEADLINE)
    _, guilty, others, mismatch, _ = stall.text.split("\n")
    assert guilty.startswith("  rank 1 (dp=1): in wait_for (test_stalls.py:")
    assert others.startswith("  ranks 0, 2: waiting for other ranks in ")
    assert "all_reduce, called by skip_a_collective (test_stalls.py:" in others
    expected = "  rank 1 is not in all_reduce (number 1 of process group default_pg), in which ranks 0, 2 wait"
    assert mismatch == expected and stall.guilty == (1,)


def test_the_command_of_a_notice_shows_the_stacks_of_a_role(make_pool, noticed, tmp_path, capsys):
    group = bm.colocate(make_pool([2]), actor=Ranks, critic=Ranks, name="my models")
    waiting = group.actor.wait_for.options(stall_after=AFTER).submit(tmp_path / "gate")
    stall = noticed()
    _, *arguments = shlex.split(stall.text.split("`")[1])
    status = main([*arguments, *MINE])
    (tmp_path / "gate").touch()
    waiting.result(DEADLINE)
    assert stall.group == "my models.actor" and status == 0 and "in wait_for" in capsys.readouterr().out


def test_a_method_that_computes_makes_progress(ranks):
    n_before = len(bm.stalls())
    ranks.compute.options(stall_after=2)(5)
    assert bm.stalls()[n_before:] == []


def test_a_rank_that_computes_in_a_new_process_makes_progress():
    life = Life(Signs("S", 0.0, "work", 0.0), 0.0)
    for began in 0, 100:  # the rank is replaced after 100 s
        for seconds in range(1, 100):
            life.look(Signs("S", seconds, "work", seconds), began + seconds)
            assert life.moved_at == began + seconds


def test_a_notice_comes_once_and_is_withdrawn(ranks, noticed, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "bandmaster"):
        waiting = ranks.wait_for.submit(tmp_path / "gate")
        stall = noticed()
        deadline = time.monotonic() + 1.2
        with pytest.raises(bm.CallTimeout):
            waiting.result(deadline - time.monotonic())
        (tmp_path / "gate").touch()
        waiting.result(DEADLINE)
        end = time.monotonic() + DEADLINE
        while f"Ranks.wait_for of group '{ranks.name}' goes on" not in caplog.text:
            assert time.monotonic() < end, "it was not withdrawn"
            time.sleep(0.1)
    assert bm.stalls()[-1] == stall and caplog.text.count("made no progress") == 1


def test_a_call_that_ends_as_its_notice_is_written_is_no_error(ranks, noticed, tmp_path, monkeypatch, caplog):
    workers = ranks._ownership.workers()
    read = workers.stacks

    def stacks(tickets):
        found = read(tickets)
        (tmp_path / "gate").touch()  # of several ranks, stacks are also read as long as some move
        waiting.result(DEADLINE)
        return found

    with caplog.at_level(logging.ERROR, "bandmaster"):
        monkeypatch.setattr(workers, "stacks", stacks)
        waiting = ranks.wait_alone.submit(tmp_path / "gate")
        assert noticed().method == "Ranks.wait_alone"
    assert caplog.text == ""


def test_a_call_is_looked_at_within_its_own_limit_whatever_that_of_the_one_before(ranks, noticed, tmp_path):
    ranks.compute.options(stall_after=1000)(2.5)  # it is looked at again after a tenth of that
    waiting = ranks.wait_for.submit(tmp_path / "gate")
    stall = noticed()
    (tmp_path / "gate").touch()
    waiting.result(DEADLINE)
    assert stall.method == "Ranks.wait_for"


def test_it_can_be_turned_off_for_a_call(ranks, tmp_path):
    n_before = len(bm.stalls())
    waiting = ranks.wait_for.options(stall_after=None).submit(tmp_path / "gate")
    with pytest.raises(bm.CallTimeout):
        waiting.result(2.5)
    (tmp_path / "gate").touch()
    waiting.result(DEADLINE)
    assert bm.stalls()[n_before:] == []


@pytest.mark.parametrize("value", [-1, "often", True])
def test_wrong_limits_are_refused(ranks, value):
    for method in (ranks.pid, ranks.await_):
        with pytest.raises(UsageError, match="stall_after must be a non-negative number of seconds or None, got"):
            method.options(stall_after=value)


def moved_at(*used, every=6.0):
    """When a rank is seen to have moved last, of which this much processor time is seen at looks in this distance."""
    life = Life(Signs("S", 0.0, "train", 0.0), 0.0)
    for n in range(len(used)):
        life.look(Signs("S", sum(used[: n + 1]), "train", every * (n + 1)), every * (n + 1))
    return life.moved_at


def test_a_rank_that_has_computed_stands_still_from_its_last_use_of_the_processor_on():
    assert moved_at(6.0, 6.0, 6.0, 0.0, 0.0, 0.0) == 18.0


def test_a_rank_that_waits_and_wakes_up_now_and_then_does_not_move():
    assert moved_at(0.0, 0.6, 0.0, 0.0, 0.6, 0.0) == 0.0
