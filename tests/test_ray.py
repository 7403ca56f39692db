"""What is true of Ray alone. Programs that start a Ray of their own run in a process of their own."""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import ray
from side_by_side import run_side_by_side

import bandmaster as bm
from bandmaster import Dispatch, Mesh, register
from bandmaster.backends.ray import RayBackend
from bandmaster.codec import decode
from bandmaster.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup

PROGRAMS = sorted((Path(__file__).parent / "ray_programs").glob("*.py"))


@pytest.mark.timeout(300)
def test_programs():
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}

    def check(program):
        with tempfile.TemporaryDirectory(prefix="ray") as directory:  # where Ray notes the cluster that runs: one's own
            own = {**environment, "RAY_TMPDIR": directory}
            run = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=110, env=own)
        assert run.returncode == 0, run.stdout + run.stderr

    run_side_by_side(check, PROGRAMS, n_at_once=3)


class Big(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def first(self, array, small):
        return array[0] + small

    @register(Dispatch.DP_PROTO)
    def rows(self, array):
        return array

    @register(Dispatch.THREE_D_PROTO)
    def from_last(self, rows):
        return rows

    @register(Dispatch.ONE_TO_ALL)
    def look(self):
        return os.environ.get("CUDA_VISIBLE_DEVICES"), self.device


@pytest.fixture
def puts(ray_cluster, monkeypatch):
    """How many bytes each `ray.put` was given, the real one."""
    sizes, real = [], ray_cluster.put
    monkeypatch.setattr(
        ray_cluster, "put", lambda value, **kw: sizes.append(getattr(value, "nbytes", 0)) or real(value, **kw)
    )
    return sizes


def test_one_put_for_each_large_payload_and_none_for_small_ones(puts):
    with bm.ResourcePool([4], backend="ray") as pool:
        group = bm.WorkerGroup(pool, Big, mesh=Mesh(dp=2, tp=2))
        assert len(group.workers) == 4  # from here on, calls are Ray's own
        puts.clear()
        array = np.arange(200_000.0)
        assert group.first(array, 1) == [1.0] * 4
        assert len(puts) == 1
        assert (group.rows(array) == array).all()
        assert len(puts) == 3, "one for each dp part, not for each of the four ranks"
        assert group.first([5], 1) == [6] * 4
        assert len(puts) == 3


def test_results_are_fetched_from_collected_ranks_only(ray_cluster):
    with bm.ResourcePool([2], backend="ray") as pool:
        group = bm.WorkerGroup(pool, Big, mesh=Mesh(pp=2, dp=1, tp=1))
        assert len(group.workers) == 2  # from here on, calls are Ray's own
        future = group.from_last.submit(np.zeros(300_000))
        first, last = future._call.tickets.values()
        assert ray_cluster.get(first.reference) is None, "the rank that is not collected sent nothing"
        assert ray_cluster.get(last.reference).n_rows == 300_000
        assert decode(ray_cluster.get(last.rows)).shape == (300_000,)
        assert future.result().shape == (300_000,)


def test_groups_on_one_pool_share_its_devices_in_order(ray_cluster):
    with bm.ResourcePool([3], backend="ray", use_gpu=True, max_colocate_count=2) as pool:
        one, two = bm.WorkerGroup(pool, Big), bm.WorkerGroup(pool, Big)
        devices = [int(device) for device, _ in one.look()]
        assert devices == sorted(set(devices))
        assert two.look() == one.look()
        assert {name for _, name in one.look()} == {"cpu"}, "Ray only pretends to have GPUs here"


class Log(bm.Worker):
    def __init__(self):
        self.entries = []

    @register(Dispatch.ONE_TO_ALL)
    def note(self, entry):
        self.entries.append(entry)
        return list(self.entries)

    def count(self):
        return len(self.entries)


def test_calls_by_lane_and_past_us_run_in_the_order_of_submission(ray_cluster):
    with bm.ResourcePool([2], backend="ray") as pool:
        group = bm.WorkerGroup(pool, Log)
        assert group.describe().count(" lane") == 2, "both workers have a lane"
        futures, by_name = [], []
        for entry in range(12):
            if entry % 3 == 2:
                by_name += group.execute_all_async("note", entry)
            else:
                futures.append(group.note.submit(entry))
        assert by_name[-1].result() == list(range(12))
        raw = group.workers[0].note.remote(12)
        assert group.describe().count(" lane") == 0, "the lanes were left to the raw handles"
        last = group.note.submit(13)
        assert ray_cluster.get(raw) == list(range(13))
        assert last.result() == [list(range(14)), [*range(12), 13]]
        assert [future.result()[0] for future in futures] == [
            list(range(n + 1)) for n in range(12) if n % 3 != 2
        ]  # fmt: skip


def test_an_actor_that_was_found_by_its_name_answers_while_the_group_uses_its_lane(ray_cluster):
    with bm.ResourcePool([2], backend="ray") as pool:
        group = bm.WorkerGroup(pool, Log)
        assert group.note(0) == [[0], [0]]
        found = ray_cluster.get_actor(group.worker_names[1])
        for entry in range(1, 20):
            assert ray_cluster.get(found.note.remote(entry), timeout=20) == list(range(entry + 1))
        references = [found.note.remote(entry) for entry in range(20, 25)]
        start = time.monotonic()
        while ray_cluster.wait(references, num_returns=5, timeout=0)[1]:
            group.note(None)  # the group's calls come all the time
        assert time.monotonic() - start < 20
        assert [entry for entry in group.note(25)[1] if entry is not None] == list(range(26))
        assert group.describe().count(" lane") == 2, "both workers still have a lane"


def test_calls_are_in_order_while_the_lane_is_left_for_calls_of_others(ray_cluster):
    with bm.ResourcePool([2], backend="ray") as pool:
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Log))
        group.note(0)
        others = ray_cluster.get_actor(group.worker_names[0])
        entry, until = 0, time.monotonic() + 2
        while time.monotonic() < until:
            others.count.remote()
            for way in (group.note.submit, group.note, group.note.submit, partial(group.execute_all_async, "note")):
                entry += 1
                way(entry)
        assert group.note(entry + 1) == [list(range(entry + 2))] * 2
        raw = group.workers[1].note.remote(entry + 2)
        assert ray_cluster.get(raw, timeout=20) == list(range(entry + 3))


def test_a_reference_that_fails_raises_the_original_exception(ray_cluster):
    class Fails(bm.Worker):
        def fail(self):
            raise FileNotFoundError("weights.bin")

    with bm.ResourcePool([1], backend="ray") as pool:
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Fails))
        with pytest.raises(FileNotFoundError, match=r"weights\.bin"):
            ray_cluster.get(group.execute_all_async("fail"))
        with pytest.raises(FileNotFoundError, match=r"weights\.bin"):
            ray_cluster.get(group.workers[0].fail.remote())


class StopsOnArrival:
    def __reduce__(self):
        return sys.exit, ("on arrival",)


def test_a_result_that_stops_the_program_when_it_arrives_by_rays_own_call_fails_its_call_alone(ray_cluster):
    class Gives(bm.Worker):
        @register(Dispatch.ONE_TO_ALL)
        def give(self, is_poisoned):
            return StopsOnArrival() if is_poisoned else "fine"

    with bm.ResourcePool([1], backend="ray") as pool:
        group = bm.WorkerGroup(pool, Gives)
        assert len(group.workers) == 1  # from here on, calls are Ray's own
        with pytest.raises(bm.CollectError, match=r"Gives\.give failed on rank 0 .*unpickled in .*on arrival"):
            group.give(True)
        assert group.give(False) == group.give(False) == ["fine"]


class Unusual(bm.Worker):
    @staticmethod
    def double(x):
        return 2 * x

    def add(*args, **kwargs):
        self, x = args
        return self.rank + x


def test_actor_handles_take_calls_of_static_methods_and_of_methods_whose_self_is_among_their_arguments(ray_cluster):
    with bm.ResourcePool([1], backend="ray") as pool:
        group = bm.WorkerGroup(pool, Unusual)
        (worker,) = group.workers
        assert ray_cluster.get([worker.double.remote(4), worker.add.remote(4)]) == [8, 4]


@pytest.mark.parametrize("is_connected", [True, False], ids=["connected", "by RAY_ADDRESS"])
def test_ray_client_is_refused(monkeypatch, is_connected):
    from ray.util.client import ray as client

    backend = RayBackend()
    monkeypatch.setattr(client, "is_connected", lambda: is_connected)
    monkeypatch.setattr(ray, "is_initialized", lambda: is_connected)
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(bm.UsageError, match=r"Ray Client .*run the script on a node of the cluster"):
        backend.inventory()


def test_options_of_a_class_wrapped_by_ray_remote_reach_its_actors(ray_cluster):
    @ray_cluster.remote(num_cpus=3, runtime_env={"env_vars": {"MINE": "yes"}})
    class Wrapped(bm.Worker):
        def mine(self):
            return os.environ.get("MINE")

    with bm.ResourcePool([1], backend="ray") as pool:
        assert bm.WorkerGroup(pool, Wrapped).execute_all_sync("mine") == ["yes"]


@pytest.mark.parametrize("options", [{"concurrency_groups": {"io": 2}}, {"max_restarts": -1, "max_task_retries": 2}])
def test_options_that_break_the_order_of_calls_are_refused(ray_cluster, options):
    class Plain(bm.Worker):
        pass

    with bm.ResourcePool([1], backend="ray") as pool:
        with pytest.raises(bm.UsageError, match=rf"Plain asks Ray for .*{next(iter(options))}.*leave this out"):
            bm.WorkerGroup(pool, ray_cluster.remote(**options)(Plain))
        with pytest.raises(
            bm.UsageError, match=r"Plain asks Ray for max_concurrency=4, but only calls of async methods"
        ):
            bm.WorkerGroup(pool, ray_cluster.remote(max_concurrency=4)(Plain))
        bm.WorkerGroup(pool, ray_cluster.remote(max_concurrency=1)(Plain))


class Meeting(bm.Worker):
    """Whoever comes waits for the others."""

    def __init__(self):
        self.came, self.all_came = [], None

    @register(Dispatch.ONE_TO_ALL)
    async def meet(self, who, n):
        self.all_came = self.all_came or asyncio.Event()
        self.came.append(who)
        if len(self.came) == n:
            self.all_came.set()
        await self.all_came.wait()
        return list(self.came)

    @register(Dispatch.ONE_TO_ALL)
    def who_came(self):
        return list(self.came)

    @register(Dispatch.ONE_TO_ALL)
    def stay(self, seconds):
        time.sleep(seconds)


@pytest.fixture
def meeting(ray_cluster):
    with bm.ResourcePool([1], backend="ray") as pool:
        yield bm.WorkerGroup(pool, ray_cluster.remote(max_concurrency=8)(Meeting))


def test_calls_of_async_methods_overlap_where_ray_is_told_so(ray_cluster, meeting):
    first, second = meeting.meet.submit("a", 5), meeting.meet.submit("b", 5)
    third = meeting.execute_rank_zero_async("meet", "c", 5)
    came = meeting.who_came()[0]  # while those who came wait
    assert set(came) <= {*"abc"}
    handle = meeting.workers[0]
    references = [handle.meet.remote("d", 5), handle.meet.remote("e", 5)]
    everybody = [*"abcde"]
    assert sorted(first.result()[0]) == sorted(second.result()[0]) == sorted(third.result()) == everybody
    assert [sorted(came) for came in ray_cluster.get(references)] == [everybody] * 2


def test_an_actor_whose_calls_overlap_is_told_its_rank_before_it_is_constructed(ray_cluster, monkeypatch):
    nowhere = [f"/nowhere/{number}/{'x' * 2000}" for number in range(100)]  # Ray passes long arguments later
    monkeypatch.setattr(sys, "path", [*sys.path, *nowhere])
    with bm.ResourcePool([1], backend="ray") as pool:
        assert bm.WorkerGroup(pool, ray_cluster.remote(max_concurrency=8)(Meeting)).who_came() == [[]]


def test_items_of_async_generators_overlap_though_the_class_has_no_other_async_method(ray_cluster):
    class Streams(bm.Worker):
        def __init__(self):
            self.begun = []

        @register(Dispatch.ONE_TO_ALL)
        async def items(self, name):
            self.begun.append(name)
            while len(self.begun) < 2:
                await asyncio.sleep(0.01)  # until the other one is at work as well
            yield name

    with bm.ResourcePool([1], backend="ray") as pool:
        group = bm.WorkerGroup(pool, ray_cluster.remote(max_concurrency=4)(Streams))
        first, second = group.items.options(timeout=30).stream("a"), group.items.options(timeout=30).stream("b")
        assert [next(second).result(), next(first).result()] == ["b", "a"]
        first.close(), second.close()


def test_a_call_that_overlaps_others_is_cancelled_alone(meeting):
    first, second = meeting.meet.submit("a", 3), meeting.meet.submit("b", 3)
    while len(meeting.who_came()[0]) < 2:
        pass
    first.cancel()
    with pytest.raises(bm.CallCancelled):
        first.result(timeout=30)
    assert sorted(meeting.meet("c", 3)[0]) == ["a", "b", "c"] == sorted(second.result()[0])


def test_a_method_that_does_not_stop_is_ended_where_others_overlap(meeting):
    stuck, stacks = meeting.stay.options(grace=0.2).submit(600), ""
    while "in stay" not in stacks:  # it has begun
        with pytest.raises(bm.CallTimeout) as late:
            stuck.result(timeout=0.5)
        stacks = str(late.value)
    stuck.cancel()
    with pytest.raises(bm.CallCancelled):
        stuck.result(timeout=30)
    with pytest.raises(bm.WorkerDied, match=r"had not stopped in time after Meeting.stay was cancelled"):
        meeting.who_came()


def test_a_future_that_was_not_read_says_that_the_group_was_closed(ray_cluster):
    with bm.ResourcePool([1], backend="ray") as pool:
        group = bm.WorkerGroup(pool, Log)
        assert len(group.workers) == 1  # from here on, calls are Ray's own
        future = group.note.submit(1)
    with pytest.raises(bm.WorkerDied, match="the group was closed"):
        future.result()


class Naps(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def nap_on(self, rank, seconds):
        if self.rank == rank:
            time.sleep(seconds)
        return self.rank

    def nap_once_told(self, fifo, seconds):
        with open(fifo, "w"):
            pass
        time.sleep(seconds)
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def raise_on(self, rank):
        if self.rank == rank:
            raise ValueError("boom")


def test_a_rank_that_has_not_come_to_a_call_that_failed_is_not_ended_without_lanes_either(ray_cluster):
    with bm.ResourcePool([2], backend="ray") as pool:
        group = bm.WorkerGroup(pool, Naps)
        assert len(group.workers) == 2  # from here on, calls are Ray's own
        earlier = group.nap_on.submit(1, 3)
        with pytest.raises(bm.RemoteError, match="rank 0"):
            group.raise_on.options(grace=0.1)(0)
        assert earlier.result(timeout=30) == [0, 1]
        assert group.nap_on(0, 0) == [0, 1]


def test_a_rank_that_is_busy_for_others_is_not_ended_with_a_call_that_failed(ray_cluster, tmp_path):
    os.mkfifo(fifo := tmp_path / "fifo")
    with bm.ResourcePool([2], backend="ray") as pool:
        group = bm.WorkerGroup(pool, Naps)
        assert group.nap_on(0, 0) == [0, 1]
        busy = ray_cluster.get_actor(group.worker_names[1]).nap_once_told.remote(fifo, 2)
        with open(fifo):  # once the worker opens it
            pass
        with pytest.raises(bm.RemoteError, match="rank 0"):
            group.raise_on.options(grace=0.1)(0)
        assert ray_cluster.get(busy, timeout=20) == 1
        assert group.nap_on(0, 0) == [0, 1]


def test_a_dead_worker_is_named(ray_cluster):
    class Dies(bm.Worker):
        @register(Dispatch.ONE_TO_ALL)
        def die(self):
            if self.rank == 1:
                os._exit(3)

    with bm.ResourcePool([2], backend="ray") as pool:
        group = bm.WorkerGroup(pool, Dies)
        with pytest.raises(bm.WorkerDied, match=r"Dies\.die lost its process on rank 1 \(dp=1, "):
            group.die()


def test_worker_names_can_be_taken_once(ray_cluster):
    with bm.ResourcePool([1], backend="ray") as pool:
        kept = bm.WorkerGroup(pool, Big, name_prefix="same")
        with pytest.raises(bm.UsageError, match="give every group a name of its own"):
            bm.WorkerGroup(pool, Big, name_prefix="same")
        assert len(kept.look()) == 1
