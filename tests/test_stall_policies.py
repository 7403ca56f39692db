"""`on_stall`: a call that makes no progress fails, or its group is renewed, as the user says."""

import asyncio
import concurrent.futures
import os
import pickle
import signal
import threading
import time

import pytest
from hosts import spread

import bandmaster as bm
from bandmaster import Dispatch, UsageError, register
from bandmaster.watching import stall

DEADLINE = 30
AFTER = 0.5
pytestmark = [pytest.mark.backends("local", "ray"), pytest.mark.slow_on("ray")]


class Ranks(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def pid(self):
        return os.getpid()

    @register(Dispatch.ONE_TO_ALL)
    def wait_for(self, gate, rank=None):
        while rank in (None, self.rank) and not gate.exists():
            time.sleep(0.05)
        return self.rank

    @register(Dispatch.REQUEST, concurrency=8)
    async def chat(self, gate):
        while not gate.exists():
            await asyncio.sleep(0.05)
        return self.rank

    @register(Dispatch.REQUEST, concurrency=8)
    async def tell(self):
        return self.rank


class Replaceable(Ranks):
    def on_replace(self, rank, state):
        self.replaced = rank


class SlowToReplace(Replaceable):
    def __init__(self, gate):
        while gate.exists():
            (gate.parent / "begun").touch()
            time.sleep(0.05)


@pytest.fixture
def ranks(backend):
    with bm.ResourcePool(spread([3]), backend=backend) as pool:
        group = bm.WorkerGroup(pool, Replaceable)
        group.set_default_options(stall_after=AFTER, on_stall="raise")
        yield group


def test_a_call_fails_and_the_group_stays_usable(ranks, tmp_path):
    pids = ranks.pid()
    with pytest.raises(bm.Stalled, match=r"Replaceable.wait_for of group .* made no progress for .* s:") as caught:
        ranks.wait_for(tmp_path / "gate", 1)
    assert isinstance(caught.value, TimeoutError) and caught.value.renewal is None
    stall = caught.value.stall
    assert stall in bm.stalls() and (stall.group, stall.method) == (ranks.name, "Replaceable.wait_for")
    assert stall.ranks == stall.guilty == (1,) and "rank 1 (dp=1): in wait_for (" in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).stall == stall
    assert ranks.pid() == pids, "the ranks were interrupted, and not ended"


@pytest.mark.slow
def test_the_calls_behind_it_go_on(ranks, tmp_path):
    stalled, behind = ranks.wait_for.submit(tmp_path / "gate"), ranks.pid.submit()
    assert isinstance(stalled.exception(DEADLINE), bm.Stalled) and stalled.cancelled()
    assert len(behind.result(DEADLINE)) == 3


@pytest.mark.slow
@pytest.mark.here
def test_a_stopped_rank_does_not_keep_the_caller(ranks):
    pid = ranks.pid()[2]
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(bm.Stalled, match="is stopped, by SIGSTOP"):
        ranks.pid.options(grace=0.5)()
    with pytest.raises(bm.WorkerDied, match="as it had not stopped in time"):
        ranks.pid()


def test_requests_fail_alone(ranks, tmp_path):
    waiting = ranks.chat.options(replica=0)(tmp_path / "gate")
    other = ranks.chat.options(replica=0, stall_after=None)(tmp_path / "gate")
    with pytest.raises(bm.Stalled, match=r"rank 0 \(dp=0\): in sleep, called by chat \("):
        waiting.result(DEADLINE)
    assert ranks.tell.options(replica=0)().result(DEADLINE) == 0
    assert not other.done()
    (tmp_path / "gate").touch()
    assert other.result(DEADLINE) == 0


def test_requests_fail_in_an_event_loop(ranks, tmp_path):
    async def main():
        with pytest.raises(bm.Stalled):
            await ranks.chat(tmp_path / "gate")
        return await ranks.tell.options(replica=1)()

    assert asyncio.run(asyncio.wait_for(main(), DEADLINE)) == 1


@pytest.mark.slow
@pytest.mark.here
def test_a_request_to_a_stopped_rank_fails(ranks):
    pid = ranks.pid()[1]
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(bm.Stalled, match="is stopped, by SIGSTOP"):
            ranks.tell.options(replica=1)().result(DEADLINE)

        async def main():
            await ranks.tell.options(replica=1)()

        with pytest.raises(bm.Stalled):
            asyncio.run(asyncio.wait_for(main(), DEADLINE))
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
def test_a_map_has_the_error_of_the_part(ranks, tmp_path):
    (tmp_path / "open").touch()
    gates = [tmp_path / "open", tmp_path / "gate", tmp_path / "open"]
    found = {item.numbers[0]: item.exception() for item in ranks.chat.map(gates, on_error="return")}
    assert found[0] is None and isinstance(found[1], bm.Stalled) and found[2] is None


def test_a_restart_follows(ranks, tmp_path):
    pids = ranks.pid()
    with pytest.raises(bm.Stalled) as caught:
        ranks.wait_for.options(on_stall="restart")(tmp_path / "gate")
    renewal = caught.value.renewal
    assert isinstance(renewal, concurrent.futures.Future)
    assert renewal.result(DEADLINE) is None
    assert not {*pids} & {*ranks.pid()}


def test_the_guilty_rank_is_replaced(ranks, tmp_path):
    pids = ranks.pid()
    with pytest.raises(bm.Stalled) as caught:
        ranks.wait_for.options(on_stall="replace")(tmp_path / "gate", 1)
    caught.value.renewal.result(DEADLINE)
    after = ranks.pid()
    assert [before == now for before, now in zip(pids, after, strict=True)] == [True, False, True]
    assert ranks.execute_all_sync("__getattribute__", "replaced") == [1] * 3


@pytest.mark.slow
def test_the_replica_of_a_request_is_replaced_while_others_answer(ranks, tmp_path):
    pids = ranks.pid()
    waiting = ranks.chat.options(replica=2, on_stall="replace")(tmp_path / "gate")
    with pytest.raises(bm.Stalled) as caught:
        waiting.result(DEADLINE)
    assert ranks.tell().result(DEADLINE) in (0, 1, 2)
    caught.value.renewal.result(DEADLINE)
    assert [before == now for before, now in zip(pids, ranks.pid(), strict=True)] == [True, True, False]


@pytest.mark.slow
def test_where_several_are_guilty_the_group_is_restarted(ranks, tmp_path):
    pids = ranks.pid()
    with pytest.raises(bm.Stalled) as caught:
        ranks.wait_for.options(on_stall="replace")(tmp_path / "gate")
    assert caught.value.stall.guilty == (0, 1, 2)
    caught.value.renewal.result(DEADLINE)
    assert not {*pids} & {*ranks.pid()}


@pytest.mark.slow
@pytest.mark.here
def test_where_another_rank_stalls_in_the_hook_of_a_replacement_the_group_is_restarted(ranks):
    pids = ranks.pid()
    for pid in pids[1:]:
        os.kill(pid, signal.SIGSTOP)
    ranks.set_default_options(on_stall="replace")
    for future in [ranks.tell.options(replica=rank)() for rank in (1, 2)]:
        with pytest.raises(bm.Stalled, match="is stopped, by SIGSTOP") as caught:
            future.result(DEADLINE)
    caught.value.renewal.result(DEADLINE)
    assert not {*pids} & {*ranks.pid()}


@pytest.mark.parametrize("policy", ["restart", "replace"])
def test_nothing_follows_for_a_call_that_ends_as_its_notice_is_written(ranks, tmp_path, monkeypatch, policy):
    pids, n_before, end = ranks.pid(), len(bm.stalls()), time.monotonic() + DEADLINE
    workers = ranks._ownership.workers()
    read = workers.stacks

    def stacks(tickets):
        found = read(tickets)
        (tmp_path / "gate").touch()
        assert waiting.result(DEADLINE) == [0, 1, 2]
        return found

    waiting = ranks.wait_for.options(on_stall=policy).submit(tmp_path / "gate", 1)
    monkeypatch.setattr(workers, "stacks", stacks)
    while len(bm.stalls()) == n_before:
        assert time.monotonic() < end
        time.sleep(0.05)
    time.sleep(0.5)  # for what would follow
    assert ranks.pid() == pids


@pytest.mark.slow
def test_requests_for_a_replica_that_is_being_replaced_wait_for_it(backend, tmp_path):
    with bm.ResourcePool([2], backend=backend) as pool, concurrent.futures.ThreadPoolExecutor(1) as thread:
        group = bm.WorkerGroup(pool, SlowToReplace, tmp_path / "slow")
        group.set_default_options(stall_after=AFTER, on_stall="replace")
        (tmp_path / "slow").touch()
        with pytest.raises(bm.Stalled) as caught:
            group.chat.options(replica=1)(tmp_path / "gate").result(DEADLINE)
        while not (tmp_path / "begun").exists():
            time.sleep(0.05)
        waiting = thread.submit(lambda: group.tell.options(replica=1)().result(DEADLINE))
        assert not concurrent.futures.wait([caught.value.renewal], 8 * AFTER).done
        (tmp_path / "slow").unlink()
        caught.value.renewal.result(DEADLINE)
        assert waiting.result(DEADLINE) == 1


def test_a_renewal_without_a_thread_fails(ranks, tmp_path, monkeypatch):
    def no_thread(name, *_):
        raise bm.ResourceError(f"cannot start thread {name!r}")

    monkeypatch.setattr(stall, "start_thread", no_thread)
    with pytest.raises(bm.Stalled) as caught:
        ranks.wait_for.options(on_stall="restart")(tmp_path / "gate")
    assert isinstance(caught.value.renewal.exception(DEADLINE), bm.ResourceError)


@pytest.mark.parametrize("policy", ["restart", "replace"])
def test_a_group_that_the_user_closes_is_not_said_to_be_restarted(ranks, tmp_path, monkeypatch, caplog, policy):
    for name in ("restart", "replace"):  # on a busy machine several ranks may be guilty, for which the group restarts
        renew = getattr(ranks, name)
        monkeypatch.setattr(ranks, name, lambda *rank, renew=renew: (ranks.close(), renew(*rank)))
    with pytest.raises(bm.Stalled) as caught:
        ranks.wait_for.options(on_stall=policy)(tmp_path / "gate", 1)
    assert isinstance(caught.value.renewal.exception(DEADLINE), bm.ClosedError)
    assert "restart" not in caplog.text and "has failed" not in caplog.text


@pytest.mark.slow
def test_in_its_turn_a_group_is_restarted(ranks, tmp_path):
    with ranks.turn():
        pids = ranks.pid()
        with pytest.raises(bm.Stalled) as caught:
            ranks.wait_for.options(on_stall="restart")(tmp_path / "gate")
        caught.value.renewal.result(DEADLINE)
        assert not {*pids} & {*ranks.pid()}


def test_a_function_gets_the_stall_once_in_another_thread(ranks, tmp_path):
    got, has_come = [], threading.Event()

    def heal(stall):
        got.append((stall, threading.current_thread()))
        (tmp_path / "gate").touch()
        has_come.set()

    assert ranks.wait_for.options(on_stall=heal)(tmp_path / "gate") == [0, 1, 2]
    assert has_come.wait(DEADLINE)
    ((stall, thread),) = got
    assert stall.method == "Replaceable.wait_for" and thread is not threading.main_thread()


def test_only_groups_that_can_replace_a_rank_take_that_policy(backend):
    with bm.ResourcePool([1], backend=backend) as pool:
        group = bm.WorkerGroup(pool, Ranks)
        for make in (group.pid.options, group.chat.options, group.set_default_options):
            with pytest.raises(UsageError, match="on_stall='replace' is not possible: Ranks does not support the repl"):
                make(on_stall="replace")
        group.set_default_options(on_stall="restart")


@pytest.mark.parametrize("value", ["stop", None, 3])
def test_wrong_policies_are_refused(ranks, value):
    known = "on_stall must be one of 'warn', 'raise', 'restart', 'replace', or a function that takes the Stall, got"
    for make in (ranks.pid.options, ranks.chat.options, ranks.set_default_options, bm.set_default_options):
        with pytest.raises(UsageError, match=known):
            make(on_stall=value)


class Waits(bm.Worker):
    def __init__(self, gate):
        while self.rank == 1 and not gate.exists():
            time.sleep(0.05)

    @register(Dispatch.ONE_TO_ALL)
    def ready(self):
        return True


@pytest.fixture
def library():
    yield bm.set_default_options
    bm.set_default_options(stall_after="usual", on_stall="warn")


def test_a_constructor_that_waits_is_noticed(backend, library, tmp_path):
    library(stall_after=AFTER)
    n_before = len(bm.stalls())
    with bm.ResourcePool(spread([2]), backend=backend) as pool, concurrent.futures.ThreadPoolExecutor(1) as thread:
        making = thread.submit(bm.WorkerGroup, pool, Waits, tmp_path / "gate")
        deadline = time.monotonic() + DEADLINE
        while len(bm.stalls()) == n_before and time.monotonic() < deadline:
            time.sleep(0.05)
        (tmp_path / "gate").touch()
        assert making.result(DEADLINE).ready() == [True] * 2
    stall = bm.stalls()[n_before]
    assert (stall.method, stall.ranks) == ("Waits.__init__", (1,)) and "rank 1 (dp=1): in __init__ (" in stall.text
    assert "start_timeout=... of the group ends such a wait" in stall.text


def test_a_constructor_that_waits_fails_the_group(backend, library, tmp_path):
    library(stall_after=AFTER, on_stall="raise")
    with bm.ResourcePool(spread([2]), backend=backend) as pool:
        with pytest.raises(bm.Stalled, match=r"Waits.__init__ of group 'Waits' has made no progress"):
            bm.WorkerGroup(pool, Waits, tmp_path / "gate")
        (tmp_path / "gate").touch()
        assert bm.WorkerGroup(pool, Waits, tmp_path / "gate").ready() == [True] * 2
