"""The shapes of hangs: each is noticed, and its notice names the rank that others wait for, and what it waits for.

Further ones are in `test_stalls.py`. Set BANDMASTER_SHOW_STALLS to a file to which the notices are appended.
"""

import asyncio
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from ends import until
from hosts import spread

import bandmaster as bm
from bandmaster import Dispatch, RemoteError, register, rl
from bandmaster.contract import Signs
from bandmaster.requests.stream import GeneratorRequest
from bandmaster.watching.notice import RankFacts, guilty, mismatches, place_of

DEADLINE = 30
AFTER = 0.5
pytestmark = [pytest.mark.backends("local", "ray"), pytest.mark.slow_on("ray")]


class Ranks(bm.Worker):
    """Waits as the methods say, until a file exists."""

    @register(Dispatch.ONE_TO_ALL)
    def pid(self):
        return os.getpid()

    def until(self, gate):
        while not gate.exists():
            time.sleep(0.3)  # seldom: a rank that looks just then computes, as its notice would say

    def after(self, gate, function):
        threading.Thread(target=lambda: (self.until(gate), function())).start()

    @register(Dispatch.ONE_TO_ALL)
    def full_queue(self, gate):
        items = queue.Queue(1)
        items.put(1)
        self.after(gate, items.get)
        items.put(2)

    @register(Dispatch.ONE_TO_ALL)
    def dead_peer(self, gate):
        ours, theirs = socket.socketpair()
        self.after(gate, lambda: theirs.send(b"1"))
        ours.recv(1)
        ours.close(), theirs.close()

    @register(Dispatch.ONE_TO_ALL)
    def pipe_of_a_dead_child(self, gate):
        read, write = os.pipe()
        with subprocess.Popen([sys.executable, "-c", ""]):
            self.after(gate, lambda: os.write(write, b"1"))
            os.read(read, 1)
        os.close(read), os.close(write)

    @register(Dispatch.ONE_TO_ALL)
    def slow_import(self, gate):
        (folder := gate.parent / f"rank{self.rank}").mkdir()
        text = f"import os, time\nwhile not os.path.exists({str(gate)!r}):\n    time.sleep(0.05)\n"
        (folder / f"slow_{self.rank}.py").write_text(text)
        sys.path.insert(0, str(folder))
        __import__(f"slow_{self.rank}")

    @register(Dispatch.REQUEST, concurrency=1)
    async def items(self):
        for n in range(100):
            yield n

    @register(Dispatch.REQUEST, concurrency=1)
    async def silent_engine(self, gate):
        answered = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()
        self.after(gate, lambda: loop.call_soon_threadsafe(answered.set_result, 1))
        return await answered


class Agent(bm.Worker):
    def __init__(self, ranks):
        self.ranks = ranks

    @register(Dispatch.REQUEST, concurrency=4)
    async def ask(self, gate):
        return await self.ranks.silent_engine.options(replica=1)(gate)

    @register(Dispatch.ONE_TO_ALL)
    def ask_alone(self, gate):
        return self.ranks.silent_engine.options(replica=1)(gate).result()

    @register(Dispatch.ONE_TO_ALL)
    def ask_for_the_first(self, gate):
        (first,) = bm.as_completed([self.ranks.silent_engine.options(replica=1)(gate)])
        return first.result()


class Member(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def join(self, group):
        self.group = group

    @register(Dispatch.ONE_TO_ALL)
    def call_own_group(self):
        return self.group.ping()

    @register(Dispatch.REQUEST, concurrency=4)
    async def request_that_calls_alone(self):
        return await self.group.alone()

    @register(Dispatch.REQUEST)
    def alone(self):
        return 1

    @register(Dispatch.ONE_TO_ALL)
    def ping(self):
        return 1


@pytest.fixture(scope="module")
def ranks(backend):
    with bm.ResourcePool(spread([3]), backend=backend) as pool:
        group = bm.WorkerGroup(pool, Ranks, name="actor")
        group.set_default_options(stall_after=AFTER)
        yield group


@pytest.fixture
def groups(backend):
    """Ranks, and agents that were given these."""
    with bm.ResourcePool(spread([2]), backend=backend) as pool, bm.ResourcePool(spread([2]), backend=backend) as other:
        ranks = bm.WorkerGroup(pool, Ranks, name="ranks")
        agents = bm.WorkerGroup(other, Agent, ranks, name="agents")
        agents.set_default_options(stall_after=AFTER)
        yield ranks, agents


@pytest.fixture
def gate(tmp_path):
    return tmp_path / "gate"


@pytest.fixture
def noticed(request):
    """``noticed()`` waits for the next notice, and returns its text."""
    n_before = len(bm.stalls())

    def wait(method):
        deadline = time.monotonic() + DEADLINE
        while not (found := [one for one in bm.stalls()[n_before:] if one.method.endswith(method)]):
            assert time.monotonic() < deadline, "nothing was noticed"
            time.sleep(0.05)
        if path := os.environ.get("BANDMASTER_SHOW_STALLS"):
            with open(path, "a") as file:
                file.write(f"--- {request.node.name}\n{found[0].text}\n")
        return found[0].text

    return wait


@pytest.mark.parametrize(
    "method, words",
    [
        ("full_queue", "in put, called by full_queue (test_stall_shapes.py:"),
        pytest.param("dead_peer", "in dead_peer (test_stall_shapes.py:", marks=pytest.mark.slow),
        pytest.param("pipe_of_a_dead_child", "in pipe_of_a_dead_child (test_stall_s", marks=pytest.mark.slow),
        pytest.param("slow_import", "in <module> (slow_", marks=pytest.mark.slow),
    ],
)
def test_a_method_that_waits(ranks, gate, noticed, method, words):
    waiting = getattr(ranks, method).submit(gate)
    text = noticed(method)
    gate.touch()
    waiting.result(DEADLINE)
    assert words in text


def test_an_engine_that_does_not_answer(ranks, gate, noticed):
    waiting = ranks.silent_engine.options(replica=2)(gate)
    text = noticed("silent_engine")
    gate.touch()
    waiting.result(DEADLINE)
    assert "rank 2 (dp=2): in silent_engine (test_stall_shapes.py:" in text and "return await answered" in text


def test_a_stream_that_nobody_reads_is_no_stall_until_somebody_waits_for_its_place(ranks, noticed, gate):
    n_before = len(bm.stalls())
    with ranks.items.options(replica=0, maxsize=2).stream() as stream:
        assert next(stream) == 0
        with pytest.raises(bm.CallTimeout):
            ranks.silent_engine.options(replica=1, timeout=2.5, stall_after=None)(gate).result()
        assert bm.stalls()[n_before:] == [], "nothing waits for it"
        behind = ranks.pid.submit()
        text = noticed("pid")
        assert "  rank 0 (dp=0): not at this call yet, " in text
        assert "Ranks.items of group 'actor', on rank 0, goes on when its items are taken, and nobody waits" in text
        assert list(stream) == list(range(1, 100))
        assert len(behind.result(DEADLINE)) == 3


@pytest.mark.slow
def test_a_stream_whose_reader_leaves_as_it_is_looked_at_is_no_error(ranks, noticed, monkeypatch, caplog):
    answers = [False]
    with ranks.items.options(replica=0, maxsize=2).stream() as stream:
        assert next(stream) == 0
        monkeypatch.setattr(GeneratorRequest, "is_unread", property(lambda _: answers.pop() if answers else True))
        until(lambda: not answers)
        behind = ranks.pid.submit()
        assert "and nobody waits" in noticed("pid") and "cannot look" not in caplog.text
        assert list(stream) == list(range(1, 100))
        assert len(behind.result(DEADLINE)) == 3


@pytest.mark.slow
def test_a_request_that_waits_for_a_place_is_named_with_what_has_it(ranks, noticed):
    with ranks.items.options(replica=0, maxsize=2).stream() as stream, bm_thread() as thread:
        assert next(stream) == 0
        second = thread.submit(lambda: list(ranks.items.options(replica=0).stream()))
        text = noticed("items")
        assert "Ranks.items of group 'actor' has waited for a place for" in text and "replica 0 runs 1 requests" in text
        assert "on rank 0, goes on when its items are taken" in text
        stream.close()
        assert len(second.result(DEADLINE)) == 100


@pytest.mark.slow
def test_a_version_of_the_weights_that_never_comes(ranks, noticed, gate):
    with bm_thread() as thread:
        waiting = thread.submit(lambda: ranks.silent_engine.options(min_version=3, timeout=5)(gate))
        text = noticed("silent_engine")
        with pytest.raises(bm.CallTimeout):
            waiting.result(DEADLINE)
    assert "has waited for a place" in text and "no replica has version 3 of its weights" in text


@pytest.mark.parametrize("method", ["ask", pytest.param("ask_alone", marks=pytest.mark.slow), "ask_for_the_first"])
def test_the_end_of_a_chain_is_named(groups, gate, noticed, method):
    _, agents = groups
    waiting = agents.ask(gate) if method == "ask" else getattr(agents, method).submit(gate)
    text = noticed(method)
    gate.touch()
    waiting.result(DEADLINE)
    assert f"waiting for Ranks.silent_engine of group 'ranks', rank 1, in {method} (test_stall_shapes.py:" in text
    assert "\n  rank 1 of group 'ranks': in silent_engine (test_stall_shapes.py:" in text


def test_a_chain_leads_to_the_group_of_the_whole_name(groups, make_pool, gate, noticed):
    namesake = bm.WorkerGroup(make_pool([2]), Ranks, name="ranks.5")
    agents = bm.WorkerGroup(make_pool([1]), Agent, namesake, name="agents.5")
    waiting = agents.ask_alone.options(stall_after=AFTER).submit(gate)
    text = noticed("ask_alone")
    gate.touch()
    waiting.result(DEADLINE)
    assert "\n  rank 1 of group 'ranks.5': in silent_engine (test_stall_shapes.py:" in text


@pytest.mark.slow
@pytest.mark.here
def test_the_end_of_a_chain_is_a_stopped_process(groups, gate, noticed):
    ranks, agents = groups
    gate.touch()
    pid = ranks.pid()[1]
    os.kill(pid, signal.SIGSTOP)
    try:
        waiting = agents.ask_alone.submit(gate)
        text = noticed("ask_alone")
    finally:
        os.kill(pid, signal.SIGCONT)
    waiting.result(DEADLINE)
    assert "ranks 0, 1: waiting for Ranks.silent_engine of group 'ranks', rank 1" in text
    assert f"\n  rank 1 of group 'ranks': its process {pid} on host" in text and "is stopped, by SIGSTOP" in text


@pytest.fixture
def rivals(backend):
    with bm.ResourcePool(spread([2]), backend=backend) as pool:
        groups = [bm.WorkerGroup(pool, Member, name=name) for name in ("one", "two")]
        for group in groups:
            group.set_default_options(stall_after=AFTER)
        yield groups


@pytest.fixture
def members(rivals):
    for group in rivals:
        group.join(group)
    return rivals


def test_a_worker_that_would_wait_for_itself_is_refused_at_once(members):
    with pytest.raises(RemoteError, match=r"may wait for ever: Member.call_own_group on rank 0, which calls ping"):
        members[0].call_own_group()
    assert members[0].request_that_calls_alone().result(DEADLINE) == 1, "the other rank runs it"


def test_a_turn_that_is_never_given_back(rivals, noticed):
    one, two = rivals
    has_it, gives_it = threading.Event(), threading.Event()

    def load():
        with one.turn():
            has_it.set()
            gives_it.wait(DEADLINE)

    thread = threading.Thread(target=load, name="loader")
    thread.start()
    has_it.wait(DEADLINE)
    two.set_default_options(on_stall="raise")
    with pytest.raises(bm.Stalled, match="the turn of group 'two' has been waited for in vain"), two.turn():
        pass
    gives_it.set()
    thread.join()
    text = noticed("turn")
    assert "thread 'loader' has the turn of group 'one': in wait, called by load (test_stall_shapes.py:" in text
    with two.turn():
        assert two.ping() == [1, 1]


def test_threads_that_wait_for_each_others_turns_are_told_of_at_once(rivals, backend, noticed):
    one, two = rivals
    with bm.ResourcePool([1], backend=backend) as pool, bm_thread(2) as threads:
        three, four = [bm.WorkerGroup(pool, Member, name=name) for name in ("three", "four")]
        three.set_default_options(on_stall="raise", stall_after=1000)
        two.set_default_options(on_stall="raise", stall_after=1000)
        both = threading.Barrier(2)

        def take(first, second):
            with first.turn():
                both.wait(DEADLINE)
                with second.turn():
                    return True

        taken = [threads.submit(take, one, three), threads.submit(take, four, two)]
        errors = [call.exception(DEADLINE) for call in taken]
    assert {type(error) for error in errors} <= {type(None), bm.Stalled} and errors != [None, None]
    text = noticed("turn")
    assert text.startswith("turns wait for each other, so that none of them ever begins:")
    assert text.count(" has the turn of group '") == 2 and text.count("and waits for that of '") == 2


def bm_thread(n=1):
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(n)


class Trains(bm.Worker):
    def join(self):
        import torch

        rl.start_torch_distributed(self)
        return torch, torch.distributed

    def leave(self, gate):
        while not gate.exists():
            time.sleep(0.05)

    @register(Dispatch.ONE_TO_ALL)
    def skips_one(self, gate):
        torch, distributed = self.join()
        distributed.all_reduce(torch.ones(1))
        if self.rank != 2:
            distributed.all_reduce(torch.ones(1))
        self.leave(gate)

    @register(Dispatch.ONE_TO_ALL)
    def ends_without_others(self, gate):
        torch, distributed = self.join()
        if self.rank != 2:
            distributed.all_reduce(torch.ones(1))

    @register(Dispatch.ONE_TO_ALL)
    def differ(self, gate):
        torch, distributed = self.join()
        if self.rank == 1:
            distributed.broadcast(torch.ones(1), 0)
        else:
            distributed.all_reduce(torch.ones(1))


def test_a_rank_that_had_no_time_to_tell_of_its_operation_is_not_said_to_be_behind():
    def stack(name, told=True):
        line = f"  collective: {name}, number 1 of process group default_pg, not ended\n" if told else ""
        return f'  File "/site-packages/torch/distributed/distributed_c10d.py", line 3000, in {name}\n{line}'

    told = {0: stack("all_reduce"), 1: stack("broadcast"), 2: stack("all_reduce", told=False)}
    lines, late = mismatches(told)
    assert (len(lines), late) == (1, []), lines
    assert lines[0].endswith("rank 0 in all_reduce, rank 1 in broadcast")
    assert mismatches({**told, 3: '  File "agent.py", line 3, in step'})[1] == [3]


@pytest.mark.parametrize("entered", [True, False])
def test_of_several_process_groups_the_rank_that_waits_in_none_is_the_one_that_others_wait_for(entered):
    def stack(waits, **numbers):
        file, name = (
            ("/site-packages/torch/distributed/distributed_c10d.py", "all_reduce") if waits else ("a.py", "load")
        )
        told = [f"  collective: all_reduce, number {n} of process group {group}, ended" for group, n in numbers.items()]
        return "\n".join([f'  File "{file}", line 3, in {name}', *told, ""])

    # Mesh(dp=2, tp=2): rank 2 waits for rank 3, so that rank 0 waits for rank 2.
    stacks = {0: stack(True, tp_0=7, dp_0=3), 1: stack(True, tp_0=7, dp_1=3), 2: stack(True, tp_1=7, dp_0=2)}
    stacks[3] = stack(False, **({"tp_1": 6, "dp_1": 2} if entered else {}))
    assert mismatches(stacks)[1] == ([3] if entered else [])
    assert guilty({rank: RankFacts(Signs("S", 1.0, "step", 9.0), one, "a", 1) for rank, one in stacks.items()}) == (3,)
    assert mismatches({rank: stacks[rank] for rank in (0, 1, 2)})[1] == [2], "all of them wait"


TORCH = "/usr/lib/python3.11/site-packages/torch"
CALL, FSDP = f"{TORCH}/nn/modules/module.py", f"{TORCH}/distributed/fsdp/fully_sharded_data_parallel.py"
GATHER, WAIT = f"{TORCH}/distributed/distributed_c10d.py", "/usr/lib/python3.11/threading.py"
TRANSFORMERS = "/usr/lib/python3.11/site-packages/transformers/models/llama/modeling_llama.py"


@pytest.mark.parametrize(
    "files",
    [
        [CALL, FSDP, CALL, "model.py"],
        [CALL, FSDP, CALL, TRANSFORMERS],
        [CALL, FSDP, CALL, f"{TORCH}/nn/modules/linear.py"],
        ["<frozen importlib._bootstrap>", GATHER],
        [f"/envs{CALL}", f"/envs/torch{FSDP}", f"/envs/torch{TRANSFORMERS}"],
        [f"/envs{CALL}", f"/envs/torch{FSDP}", f"/envs/torch{CALL}"],
    ],
)
def test_a_rank_inside_of_fsdp_or_an_import_is_the_one_that_others_wait_for(files):
    def rank(*files):
        stack = "".join(f'  File "{file}", line 3, in work\n    work(it)\n' for file in ("train.py", *files))
        return RankFacts(Signs("S", 1.0, "step", 9.0), f"{stack}  collective: all_gather, number 1", "host", 1)

    ranks = {0: rank(CALL, FSDP, GATHER, WAIT), 1: rank(*files)}
    assert guilty(ranks) == (1,)
    assert [("waiting for other ranks" in words) for _, words in map(place_of, ranks.values())] == [True, False]


@pytest.mark.slow
@pytest.mark.here  # gloo finds no address where hosts have no names
@pytest.mark.parametrize(
    "method, words",
    [
        ("skips_one", "  rank 2 is not in all_reduce (number 2 of process group default_pg), in which ranks 0, 1 wait"),
        ("ends_without_others", "  rank 2 ended the call without them"),
        (
            "differ",
            "  they are in different operations, number 1 of process group default_pg: ranks 0, 2 in all_reduce, "
            "rank 1 in broadcast",
        ),
    ],
)
def test_ranks_whose_collectives_do_not_match(backend, gate, noticed, method, words):
    with bm.ResourcePool(spread([3]), backend=backend) as pool:
        group = bm.WorkerGroup(pool, Trains, name="actor")
        call = getattr(group, method).options(stall_after=3).submit(gate)
        text = noticed(method)
        gate.touch()
        call.cancel()
    assert words in text.split("\n"), text


@pytest.mark.slow
def test_rows_of_a_dead_producer_and_a_full_disk_are_errors_and_no_hangs(backend):
    class Writes(bm.Worker):
        @register(Dispatch.DP_PROTO)
        def rows(self, n):
            os.kill(os.getpid(), signal.SIGKILL)

        @register(Dispatch.ONE_TO_ALL)
        def save(self):
            with open("/dev/full", "wb", buffering=0) as file:
                file.write(b"checkpoint")

    class Reads(bm.Worker):
        @register(Dispatch.DP_PROTO)
        def read(self, rows):
            return rows

    with bm.ResourcePool([1, 1], backend=backend) as pool:
        writes, reads = bm.WorkerGroup(pool, Writes), bm.WorkerGroup(pool, Reads)
        with pytest.raises(bm.RemoteError, match="No space left on device"):
            writes.save()
        with pytest.raises(bm.WorkerDied):
            reads.read.submit(writes.rows.submit([1, 2])).result(DEADLINE)
