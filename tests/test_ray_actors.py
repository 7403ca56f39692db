"""Groups of Ray actors, which verl's callers have: their handles, ObjectRefs, names, and calls that overlap."""

import asyncio
import inspect
import os
import sys
import threading
import time
from functools import partial

import numpy as np
import pytest
from clock import idle_time
from commands import MINE
from ctrl_c import done_when, interrupted_when
from ends import in_another_thread, outstay, until, wait_for, wait_until_gone
from hosts import spread
from ray.util import list_named_actors

import bandmaster as bm
from bandmaster import Dispatch, Mesh, register
from bandmaster.cli import main
from bandmaster.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from bandmaster.single_controller.ray.actor_workers import ActorWorkers, AttachedWorkers

pytestmark = pytest.mark.slow  # each actor is a process of Ray's own


def pool_of(n, **options):
    return RayResourcePool(spread([n]), use_gpu=False, **options)


def group_of(pool, cls, **options):
    return RayWorkerGroup(pool, RayClassWithInitArgs(cls), **options)


def attached_to(group, cls):
    """A group of the same workers whose calls are Ray's own."""
    return RayWorkerGroup.from_detached(worker_handles=group.workers, ray_cls_with_init=cls, mesh=group.mesh)


class Big(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def first(self, array, small):
        return array[0] + small

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
    with pool_of(4) as pool:
        group = attached_to(group_of(pool, Big, mesh=Mesh(dp=2, tp=2)), Big)
        puts.clear()
        array = np.arange(200_000.0)
        assert group.execute_all_sync("first", array, 1) == [1.0] * 4
        assert len(puts) == 1
        one, two = np.split(array, 2)
        assert group.execute_all_sync("first", [one, one, two, two], [1] * 4) == [1.0, 1.0, 100_001.0, 100_001.0]
        assert len(puts) == 3, "one for each part, not for each of the four ranks"
        assert group.execute_all_sync("first", [5], 1) == [6] * 4
        assert len(puts) == 3


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
    with pool_of(2) as pool:
        group = group_of(pool, Log)
        assert group.describe().count(" lane") == 2, "both workers have a lane"
        futures, by_name = [], []
        for entry in range(12):
            if entry % 3 == 2:
                by_name += group.execute_all_async("note", entry)
            else:
                futures.append(group.note.submit(entry))
        assert ray_cluster.get(by_name[-1]) == list(range(12))
        assert [future.result()[0] for future in futures] == [
            list(range(n + 1)) for n in range(12) if n % 3 != 2
        ]  # fmt: skip


def test_an_actor_that_was_found_by_its_name_answers_while_the_group_uses_its_lane(ray_cluster):
    with pool_of(2) as pool:
        group = group_of(pool, Log)
        assert group.note(0) == [[0], [0]]
        found = ray_cluster.get_actor(group.worker_names[1])
        for entry in range(1, 20):
            assert ray_cluster.get(found.note.remote(entry), timeout=20) == list(range(entry + 1))
        references = [found.note.remote(entry) for entry in range(20, 25)]
        start = idle_time()
        while ray_cluster.wait(references, num_returns=5, timeout=0)[1]:
            group.note(None)  # the group's calls come all the time
        assert idle_time() - start < 20
        assert [entry for entry in group.note(25)[1] if entry is not None] == list(range(26))
        assert group.describe().count(" lane") == 2, "both workers still have a lane"


def test_calls_are_in_order_while_the_lane_is_left_for_calls_of_others(ray_cluster):
    with pool_of(2) as pool:
        group = group_of(pool, Log)
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

    with pool_of(1) as pool:
        group = group_of(pool, Fails)
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

    with pool_of(1) as pool:
        group = attached_to(group_of(pool, Gives), Gives)
        with pytest.raises(bm.CollectError, match=r"Gives\.give failed on rank 0 .*unpickled in .*on arrival"):
            group.execute_all_sync("give", True)
        assert group.execute_all_sync("give", False) == ["fine"]


class Unusual(bm.Worker):
    @staticmethod
    def double(x):
        return 2 * x

    def add(*args, **kwargs):
        self, x = args
        return self.rank + x


def test_actor_handles_take_calls_of_static_methods_and_of_methods_whose_self_is_among_their_arguments(ray_cluster):
    with pool_of(1) as pool:
        group = group_of(pool, Unusual)
        (worker,) = group.workers
        assert ray_cluster.get([worker.double.remote(4), worker.add.remote(4)]) == [8, 4]


def test_options_of_a_class_wrapped_by_ray_remote_reach_its_actors(ray_cluster):
    @ray_cluster.remote(num_cpus=3, runtime_env={"env_vars": {"MINE": "yes"}})
    class Wrapped(bm.Worker):
        def mine(self):
            return os.environ.get("MINE")

    with pool_of(1) as pool:
        assert group_of(pool, Wrapped).execute_all_sync("mine") == ["yes"]


@pytest.mark.parametrize("options", [{"concurrency_groups": {"io": 2}}, {"max_restarts": -1, "max_task_retries": 2}])
def test_options_that_break_the_order_of_calls_are_refused(ray_cluster, options):
    class Plain(bm.Worker):
        pass

    with pool_of(1) as pool:
        with pytest.raises(bm.UsageError, match=rf"Plain asks Ray for .*{next(iter(options))}.*leave this out"):
            group_of(pool, ray_cluster.remote(**options)(Plain))
        with pytest.raises(
            bm.UsageError, match=r"Plain asks Ray for max_concurrency=4, but only calls of async methods"
        ):
            group_of(pool, ray_cluster.remote(max_concurrency=4)(Plain))
        group_of(pool, ray_cluster.remote(max_concurrency=1)(Plain))


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
    with pool_of(1) as pool:
        yield group_of(pool, ray_cluster.remote(max_concurrency=8)(Meeting))


def test_calls_of_async_methods_overlap_where_ray_is_told_so(ray_cluster, meeting):
    first, second = meeting.meet.submit("a", 5), meeting.meet.submit("b", 5)
    third = meeting.execute_rank_zero_async("meet", "c", 5)
    came = meeting.who_came()[0]  # while those who came wait
    assert set(came) <= {*"abc"}
    handle = meeting.workers[0]
    references = [handle.meet.remote("d", 5), handle.meet.remote("e", 5)]
    everybody = [*"abcde"]
    assert sorted(first.result()[0]) == sorted(second.result()[0]) == sorted(ray_cluster.get(third)) == everybody
    assert [sorted(came) for came in ray_cluster.get(references)] == [everybody] * 2


def test_an_actor_whose_calls_overlap_is_told_its_rank_before_it_is_constructed(ray_cluster, monkeypatch):
    nowhere = [f"/nowhere/{number}/{'x' * 2000}" for number in range(100)]  # Ray passes long arguments later
    monkeypatch.setattr(sys, "path", [*sys.path, *nowhere])
    with pool_of(1) as pool:
        assert group_of(pool, ray_cluster.remote(max_concurrency=8)(Meeting)).who_came() == [[]]


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

    with pool_of(1) as pool:
        group = group_of(pool, ray_cluster.remote(max_concurrency=4)(Streams))
        first, second = group.items.options(timeout=30).stream("a"), group.items.options(timeout=30).stream("b")
        assert [next(second).result(), next(first).result()] == ["b", "a"]
        first.close(), second.close()


def test_an_actor_whose_async_methods_wait_is_not_idle(meeting, capsys):
    first = meeting.meet.submit("a", 2)
    while not meeting.who_came()[0]:
        pass
    for command in ("stack", "why"):
        assert main([command, meeting.name, *MINE]) == 0
        out = capsys.readouterr().out
        assert "an async method that Ray's event loop runs" in out and "idle" not in out
    assert meeting.meet("b", 2) == first.result()
    assert main(["stack", meeting.name, *MINE]) == 0
    assert "idle: it runs no method" in capsys.readouterr().out


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

    def pid(self):
        return os.getpid()

    @register(Dispatch.ONE_TO_ALL)
    def raise_on(self, rank):
        if self.rank == rank:
            raise ValueError("boom")


def test_a_future_without_a_reply_says_that_the_group_was_closed(ray_cluster):
    with pool_of(1) as pool:
        future = group_of(pool, Naps).nap_on.submit(0, 60)
    with pytest.raises(bm.WorkerDied, match="the group was closed"):
        future.result()


def test_a_rank_that_is_busy_for_others_is_not_ended_with_a_call_that_failed(ray_cluster, tmp_path):
    os.mkfifo(fifo := tmp_path / "fifo")
    with pool_of(2) as pool:
        group = group_of(pool, Naps)
        assert group.nap_on(0, 0) == [0, 1]
        busy = ray_cluster.get_actor(group.worker_names[1]).nap_once_told.remote(fifo, 4)
        with open(fifo):  # once the worker opens it
            pass
        with pytest.raises(bm.RemoteError, match="rank 0"):
            group.raise_on.options(grace=2)(0)  # less than the nap, and enough to reply in afterwards
        assert ray_cluster.get(busy, timeout=20) == 1
        assert group.nap_on(0, 0) == [0, 1]


def test_threads_may_make_the_first_calls_of_an_attached_group_at_once(ray_cluster):
    def takes_the_first_info(frame, kind, what):
        return kind == "call" and (frame.f_code, frame.f_back.f_code) == (
            ActorWorkers.fetch.__code__,
            AttachedWorkers._take_infos.__code__,
        )

    with pool_of(2) as pool:
        group = group_of(pool, Big)
        other = attached_to(group, Big)
        ray_cluster.get([actor.__ray_ready__.remote() for actor in group.workers])
        with done_when(takes_the_first_info, partial(in_another_thread, other.execute_all_sync, "look")):
            assert other.execute_all_sync("look") == group.execute_all_sync("look")
        other.close()


class Replaceable(bm.Worker):
    def on_replace(self, rank, state): ...


def test_a_group_shows_all_ranks_as_and_after_ctrl_c_interrupts_a_replacement(ray_cluster):
    def has_been_ended(frame, kind, what):
        return kind == "call" and frame.f_code is ActorWorkers._begun.__code__

    with pool_of(2) as pool:
        group = group_of(pool, Replaceable)
        before = group.describe().splitlines()
        with interrupted_when(has_been_ended):
            group.replace(0)
        lines = group.describe().splitlines()
        assert len(group.workers) == 2 and len(lines) == len(before) and lines[-1] == before[-1]
        group.replace(0)
        assert len(group.workers) == 2 and group.describe().splitlines()[-1] == before[-1]


def test_handles_can_be_asked_for_as_another_thread_replaces_an_actor(ray_cluster, monkeypatch):
    has_ended, goes_on, kill = threading.Event(), threading.Event(), ray_cluster.kill

    def kill_and_wait(actor):
        kill(actor)
        has_ended.set()
        goes_on.wait(30)

    def leaves_its_lane(frame, kind, what):
        return kind == "c_call" and frame.f_code is ActorWorkers._pause.__code__ and what.__name__ == "remove"

    def let_it_go_on():
        goes_on.set()
        until(lambda: 0 not in workers._serving)

    monkeypatch.setattr(ray_cluster, "kill", kill_and_wait)
    with pool_of(2) as pool:
        group = group_of(pool, Replaceable)
        workers = group._inner._ownership.workers()
        group.execute_all_sync("on_replace", 0, None)
        replacing = threading.Thread(target=group.replace, args=(0,))
        replacing.start()
        try:
            assert has_ended.wait(30)
            with done_when(leaves_its_lane, let_it_go_on):
                assert len(group.workers) == 2
        finally:
            goes_on.set()
            replacing.join()
        assert len(group.execute_all_sync("on_replace", 0, None)) == 2


@pytest.mark.parametrize("step", [ActorWorkers._kill, ActorWorkers._begun, ActorWorkers._open, ActorWorkers._announce])
def test_a_group_that_another_thread_closes_as_an_actor_is_replaced_leaves_no_actor(ray_cluster, step):
    def is_now(frame, kind, what):
        return kind == "call" and frame.f_code is step.__code__

    with pool_of(2) as pool:
        group = group_of(pool, Replaceable)
        names = group.worker_names
        with (
            done_when(is_now, partial(in_another_thread, group.close)),
            pytest.raises(bm.ClosedError, match="the group was closed"),
        ):
            group.replace(0)
        until(lambda: not any(name in names for name in list_named_actors()))


def test_ctrl_c_as_a_group_is_closed_leaves_no_actor_though_its_handle_is_kept(ray_cluster):
    def ends_the_first(frame, kind, what):
        return kind == "call" and frame.f_code is inspect.unwrap(ray_cluster.kill).__code__

    with pool_of(2) as pool:
        group = group_of(pool, Naps)
        pids, handles = group.execute_all_sync("pid"), group.workers
        with interrupted_when(ends_the_first):
            group.close()
        wait_until_gone(pids, timeout_s=10.0)
        assert len(handles) == 2


def test_ctrl_c_as_a_detached_actor_is_started_leaves_no_actor(ray_cluster):
    def has_started(frame, kind, what):
        return kind == "return" and frame.f_code.co_name == "_remote" and "actor.py" in frame.f_code.co_filename

    pool = pool_of(1, detached=True)
    placements = pool.get_placement_groups()
    try:
        with interrupted_when(has_started):
            group_of(pool, Replaceable, name_prefix="detached_", detached=True)
        until(lambda: not any("detached_" in name for name in list_named_actors()))
    finally:
        pool.close()
        for placement in placements:
            ray_cluster.util.remove_placement_group(placement)


def test_worker_names_can_be_taken_once(ray_cluster):
    with pool_of(1) as pool:
        kept, start = group_of(pool, Big, name_prefix="same"), time.monotonic()
        with pytest.raises(bm.UsageError, match="give every group a name of its own"):
            group_of(pool, Big, name_prefix="same")
        assert time.monotonic() - start < 9, "it does not wait for Ray to free the name, as after a group has ended"
        assert len(kept.look()) == 1
        kept.close()
        assert len(group_of(pool, Big, name_prefix="same").look()) == 1


class Rows(bm.Worker):
    """Makes and takes rows, which stay in Ray's object store where the actors are on other hosts."""

    def __init__(self):
        self.log = []

    @register(Dispatch.DP_PROTO)
    def wide(self, rows):
        return {"id": rows, "wide": np.ones((len(rows), 100_000))}

    @register(Dispatch.DP_PROTO)
    def ids(self, rows):
        return rows["id"]

    @register(Dispatch.DP_PROTO)
    def items(self, rows):
        yield from rows

    @register(Dispatch.DP_PROTO)
    def endless(self, rows):
        try:
            while True:
                yield rows
        finally:
            self.log.append("ended")

    @register(Dispatch.ONE_TO_ALL)
    def logged(self):
        return self.log


def test_rows_stay_where_they_are_made(ray_cluster):
    with pool_of(2) as pool, bm.ResourcePool(spread([2]), backend="ray") as other:
        makers, takers = group_of(pool, Rows), bm.WorkerGroup(other, Rows)
        rows = makers.wide.submit(np.arange(7))
        order = np.random.default_rng(0).permutation(7)
        assert takers.ids(rows.shuffle(0)).tolist() == order.tolist()
        assert makers.ids(takers.wide.submit(np.arange(7)).shuffle(0)).tolist() == order.tolist()
    assert rows.result()["id"].tolist() == list(range(7))


def test_calls_are_streamed_and_timed(ray_cluster):
    with pool_of(2) as pool:
        group = group_of(pool, Rows)
        with bm.trace() as trace:
            rows = group.wide.submit(np.arange(5))
            assert group.ids(rows).tolist() == [0, 1, 2, 3, 4]
        assert [sorted(call.ranks) for call in trace.calls] == [[0, 1]] * 2
        inner = group._inner
        assert sorted(item.result() for item in inner.items.stream(np.arange(5))) == [0, 1, 2, 3, 4]
        with inner.endless.stream([1, 2]) as stream:
            begun = {next(stream).rank}
            while len(begun) < 2:  # a generator that has not begun has no block to run at its end
                begun.add(next(stream).rank)
        assert group.logged() == [["ended"]] * 2


def test_async_generators_whose_calls_overlap_lose_no_items(ray_cluster):
    @ray_cluster.remote(max_concurrency=16)
    class Overlapping(bm.Worker):
        @register(Dispatch.ONE_TO_ALL)
        async def ping(self): ...

        @register(Dispatch.DP_PROTO)
        async def items(self, rows):
            for row in rows:
                await asyncio.sleep(0.001)
                yield row

    async def take(group, first, maxsize):
        rows = list(range(first, first + 8))
        assert [item.result() async for item in group.items.options(maxsize=maxsize).stream(rows)] == rows

    async def main(group):
        for maxsize in (1, 4):
            await asyncio.gather(*[take(group, 8 * number, maxsize) for number in range(8)])

    with pool_of(1) as pool:
        asyncio.run(asyncio.wait_for(main(group_of(pool, Overlapping)._inner), 60))


class Meets(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def meet(self):
        if self.rank == 0:
            raise ValueError("boom")
        time.sleep(600)

    @register(Dispatch.ONE_TO_ALL)
    def after(self):
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def stay(self, begun):
        if self.rank == 1:
            outstay(begun)


def test_the_stacks_of_actors_are_shown_by_a_trace_whatever_they_run(ray_cluster, tmp_path):
    with pool_of(2) as pool, bm.trace() as trace:
        group = group_of(pool, Meets)
        call = group.stay.submit(tmp_path / "begun")
        wait_for(tmp_path / "begun")
        stacks = trace.calls[-1].stacks()
        call.cancel()
    assert "idle" in stacks[0] and "in stay" in stacks[1]


def test_a_call_by_actor_task_that_fails_does_not_hold_up_one_by_lane_behind_it(ray_cluster, monkeypatch):
    by_lane = ActorWorkers._by_lane

    def but_meet(self, call):
        return [] if call.method == "meet" else by_lane(self, call)  # as if it took rows of another host

    monkeypatch.setattr(ActorWorkers, "_by_lane", but_meet)
    with pool_of(2) as pool:
        group = group_of(pool, Meets)
        failed = group.meet.submit()
        assert group.after.options(timeout=30)() == [0, 1]
        with pytest.raises(bm.RemoteError, match="boom"):
            failed.result(timeout=30)


def test_a_call_behind_one_whose_cancel_ends_an_actor_tells_of_that_death(ray_cluster, tmp_path):
    with pool_of(2) as pool:
        group = group_of(pool, Meets)
        stays = group.stay.options(grace=0.1).submit(tmp_path / "begun")
        wait_for(tmp_path / "begun")
        stays.cancel()
        with pytest.raises(bm.WorkerDied, match=r"rank 1 .*had not stopped in time after Meets.stay was cancelled"):
            group.meet()
        with pytest.raises(bm.CallCancelled):
            stays.result()
