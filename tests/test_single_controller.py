"""What verl's callers rely on under verl's import paths, with and without Ray. verl's own tests: `make test-verl`."""

import asyncio
import copy
import gc
import os
import pickle
import threading

import numpy as np
import pytest
import torch
from clock import idle_time
from tensordict import TensorDict

import bandmaster as bm
from bandmaster import single_controller
from bandmaster.single_controller.base import ClassWithInitArgs, ResourcePool, WorkerGroup, decorator
from bandmaster.single_controller.base.decorator import (
    MAGIC_ATTR,
    Dispatch,
    Execute,
    collect_all_to_all,
    dispatch_one_to_all,
    get_predefined_dispatch_fn,
    get_predefined_execute_fn,
    make_nd_compute_dataproto_dispatch_fn,
    register,
    register_dispatch_mode,
    update_dispatch_mode,
)
from bandmaster.single_controller.base.later import RowsLater
from bandmaster.single_controller.base.worker import DistGlobalInfo, DistRankInfo, Worker
from bandmaster.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from bandmaster.single_controller.ray.base import (
    RayResourcePool,
    ResourcePoolManager,
    SubRayResourcePool,
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
    create_colocated_worker_raw_cls,
    extract_pg_from_exist,
    merge_resource_pool,
    sort_placement_group_by_node_ip,
    split_resource_pool,
)


def split_as_verl_does(group, *args):
    return decorator.dispatch_dp_compute_data_proto(group, *args)


def join_as_verl_does(group, outputs):
    return decorator.collect_dp_compute_data_proto(group, outputs)


class Actor(Worker):
    def __init__(self, bonus=0, dp=2):
        super().__init__()
        self.bonus = bonus
        inner = max(1, self.world_size // dp)
        self._register_dispatch_collect_info("train", dp_rank=self.rank // inner, is_collect=self.rank % inner == 0)
        self._register_dispatch_collect_info("across", dp_rank=self.rank % dp, is_collect=self.rank >= dp)

    def bare(self, x):
        return self.bonus + x

    @register()
    def by_default(self, x):
        return x, self.rank

    @register(Dispatch.ONE_TO_ALL)
    def add(self, x):
        return x + self.bonus + self._rank

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def add_later(self, x):
        return x + self.rank

    @register(Dispatch.DP_COMPUTE)
    def own(self, x, y=0):
        return x + y

    @register(Dispatch.DP_COMPUTE_PROTO)
    def double(self, rows):
        return rows * 2

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    async def double_later(self, rows):
        await asyncio.sleep(0)
        return rows * 2

    @register(Dispatch.DP_COMPUTE_PROTO)
    def words(self, rows):
        return [str(x) for x in rows["x"]]

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def words_later(self, rows):
        return self.words(rows)

    @register(Dispatch.DP_COMPUTE_METRIC)
    def count(self, rows):
        return len(rows)

    @register(make_nd_compute_dataproto_dispatch_fn("train"))
    def tag(self, rows):
        return {"x": rows["x"], "rank": np.full(len(rows["x"]), self.rank)}

    @register(make_nd_compute_dataproto_dispatch_fn("across"), blocking=False)
    def tag_later(self, rows):
        return rows * 10 + self.rank

    @register("DP_PROTO")
    def by_name(self, rows):
        return rows

    @register({"dispatch_fn": split_as_verl_does, "collect_fn": join_as_verl_does})
    def of_mine(self, rows):
        return rows

    @register(Dispatch.THREE_D_PROTO)
    def over_3d(self, rows):
        return rows

    @register(execute_mode=Execute.RANK_ZERO)
    def on_zero(self, x):
        return x, self.rank

    @register(execute_mode=Execute.RANK_ZERO, blocking=False)
    def on_zero_later(self, x):
        return x, self.rank

    @register(Dispatch.DIRECT_ROLLOUT_METHOD)
    def direct(self, x):
        return x

    @register(Dispatch.ONE_TO_ALL)
    def fail(self, ranks):
        if self.rank in ranks:
            raise KeyError("no such row")

    @register(Dispatch.ONE_TO_ALL)
    def environment(self, *names):
        return [os.environ.get(name) for name in names]

    @register(Dispatch.ONE_TO_ALL)
    def sibling(self):
        critic = self.get_fused_worker_by_name("critic")
        return None if critic is None else critic.bonus


class Critic(Worker):
    def __init__(self, bonus):
        super().__init__()
        self.bonus = bonus

    @register(Dispatch.ONE_TO_ALL)
    def add(self, x):
        return x - self.bonus

    @register(Dispatch.ONE_TO_ALL)
    async def pid(self):
        return os.getpid()


class Meeting(Worker):
    def __init__(self):
        super().__init__()
        self.first = None

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    async def meet(self, name):
        if self.first is None:
            self.first = asyncio.get_running_loop().create_future()
        else:
            self.first.set_result(name)
        return await self.first


@pytest.fixture
def group(make_pool):
    return RayWorkerGroup(make_pool([4]), RayClassWithInitArgs(Actor, bonus=100))


inprocess = pytest.mark.backends("inprocess")
on_ray = pytest.mark.backends("ray")


@inprocess
def test_each_mode_moves_what_it_says(group):
    assert group.by_default([5, 6, 7, 8]) == [(5, 0), (6, 1), (7, 2), (8, 3)]
    assert group.by_default((1, 2, 3, 4)) == [((1, 2, 3, 4), rank) for rank in range(4)]
    assert group.by_default("the same") == [("the same", rank) for rank in range(4)]
    assert group.add(1) == [101, 102, 103, 104]
    assert group.own([1, 2, 3, 4], y=(10, 20, 30, 40)) == [11, 22, 33, 44]
    assert group.double(np.arange(10)).tolist() == list(range(0, 20, 2))
    assert group.count(np.arange(10)) == [3, 3, 2, 2]
    assert group.over_3d([1, 2, 3]) == group.by_name([1, 2, 3]) == [1, 2, 3]
    assert group.on_zero([1, 2]) == ([1, 2], 0)
    assert group.execute_with_func_generator(lambda worker, rows: rows + worker.rank, np.zeros(4)).tolist() == [
        0,
        1,
        2,
        3,
    ]
    assert group.execute_func_rank_zero(max, 3, 4) == 4
    with pytest.raises(NotImplementedError, match="actor handle"):
        group.direct(1)


@inprocess
def test_bad_arguments_are_refused_in_words_and_the_group_stays_usable(group):
    with pytest.raises(bm.ArgumentError, match=r"list of 4 values.* got 3 values"):
        group.own([1, 2, 3])
    with pytest.raises(bm.ArgumentError, match="got int"):
        group.own(7)
    with pytest.raises(bm.BatchError, match="no argument has rows"):
        group.double(7)
    with pytest.raises(bm.BatchError, match=r"returned .*int"):
        group.execute_with_func_generator(lambda worker, rows: 1, np.zeros(4))
    with pytest.raises(bm.ArgumentError, match="needs a function"):
        group.execute_with_func_generator(np.zeros(4))
    with pytest.raises(bm.ArgumentError, match="no method 'nothing'"):
        group.execute_all_sync("nothing")
    with pytest.raises(bm.ArgumentError, match="no method 'tagg'; did you mean 'tag'"):
        group.execute_all_sync("tagg")
    with pytest.raises(AttributeError, match="'nothing'; Actor has add, "):
        _ = group.nothing
    with pytest.raises(AttributeError, match="RayWorkerGroup has no attribute 'doubel'; did you mean 'double'"):
        _ = group.doubel
    with pytest.raises(bm.RemoteError, match=r"Actor\.fail failed on rank 2 .*no such row"):
        group.fail([2])
    assert group.add(1) == [101, 102, 103, 104]


@inprocess
def test_one_group_has_the_meshes_that_its_workers_register(group):
    tagged = group.tag({"x": np.arange(6)})
    assert tagged["x"].tolist() == list(range(6))
    assert tagged["rank"].tolist() == [0, 0, 0, 2, 2, 2]
    assert group._dispatch_info == {"train": [0, 0, 1, 1]}
    assert group.tag_later(np.arange(4)).get().tolist() == [2, 12, 23, 33]
    assert group._query_dispatch_info("across") == [0, 1, 0, 1]
    with pytest.raises(bm.RemoteError, match="has not registered mesh 'other', only 'train', 'across'"):
        group._query_collect_info("other")


class Padded(dict):
    """As a DataProto that asks for padding."""

    def is_padding_enabled(self):
        return True


@inprocess
def test_padding_reaches_the_ranks_but_not_the_caller_nor_the_callers_own_rows(group):
    rows = Padded(x=np.arange(5))
    for call in (group.execute_with_func_generator, group.execute_with_func_generator):
        back = call(lambda worker, rows: {"x": rows["x"], "n": np.full(len(rows["x"]), len(rows["x"]))}, rows)
        assert back["x"].tolist() == [0, 1, 2, 3, 4]
        assert back["n"].tolist() == [2] * 5
    assert len(rows["x"]) == 5
    assert group.of_mine(rows)["x"].tolist() == [0, 1, 2, 3, 4]
    assert group.count(rows) == [1] * 4, "the number of columns of each part: no rank is cut off"
    assert group.words(rows) == group.words_later(rows).get() == list("01234")


async def awaited(later):
    return await later


@inprocess
def test_rows_of_a_call_that_does_not_wait_can_be_passed_on(group):
    later = group.double_later(np.arange(4))
    assert group.double(later).tolist() == [0, 4, 8, 12]
    assert later.get().tolist() == later.result(timeout=10).tolist() == [0, 2, 4, 6]
    first, second = later.chunk(2)
    assert [part.get().tolist() for part in (first, second, *second.chunk(2))] == [[0, 2], [4, 6], [4], [6]]
    assert asyncio.run(awaited(second)).tolist() == [4, 6]
    assert "double_later" in repr(later) and later == later and hash(later)
    columns = RowsLater(group.tag.submit({"x": np.arange(4)}))
    assert [part.get()["x"].tolist() for part in columns.chunk(2)] == [[0, 1], [2, 3]]
    assert pickle.loads(pickle.dumps(later)).tolist() == [0, 2, 4, 6]


class Waits(Worker):
    @register(execute_mode=Execute.RANK_ZERO, blocking=False)
    def wait(self):
        threading.Event().wait()


@pytest.mark.backends("local")
def test_options_hold_for_a_call_of_rank_zero_that_does_not_wait(make_pool):
    waiting = RayWorkerGroup(make_pool([1]), RayClassWithInitArgs(Waits)).wait.options(timeout=0.01, grace=0)()
    with pytest.raises(bm.CallTimeout, match=r"0\.01 s"):
        waiting.result()
    waiting.cancel()


@pytest.mark.backends("local", "inprocess")
def test_a_group_whose_workers_are_no_actors_can_be_copied_and_says_why_it_cannot_be_sent(group):
    assert copy.copy(group).add(1) == copy.deepcopy(group).add(1) == group.add(1)
    with pytest.raises(
        bm.UsageError, match=r"cannot be pickled.* give it a RayResourcePool, or pass a bandmaster\.Work"
    ):
        pickle.dumps(group)


@inprocess
def test_rows_are_waited_for_no_longer_than_asked(make_pool):
    class Slow(bm.Worker):
        @bm.register(bm.Dispatch.REQUEST)
        async def rows(self):
            await asyncio.sleep(60)

    with bm.WorkerGroup(make_pool([1]), Slow) as slow:
        future = slow.rows.submit()
        with pytest.raises(bm.CallTimeout):
            RowsLater(future).result(timeout=0.01)
        future.cancel()


@inprocess
def test_jagged_columns_travel_as_rows(group):
    ids = torch.nested.as_nested_tensor([torch.arange(n) for n in (1, 5, 2, 3, 4)], layout=torch.jagged)
    rows = TensorDict({"ids": ids, "n": torch.tensor([1, 5, 2, 3, 4])}, batch_size=[5])
    back = group.execute_with_func_generator(lambda worker, part: part, rows)
    assert [len(row) for row in back["ids"].unbind()] == back["n"].tolist() == [1, 5, 2, 3, 4]


@inprocess
def test_metrics_without_rows_stand_for_the_whole_batch(group):
    back = group.execute_with_func_generator(
        lambda worker, rows: TensorDict({"loss": torch.tensor(0.5)}, batch_size=[]), np.zeros(4)
    )
    assert back["loss"].item() == 0.5
    assert group.execute_with_func_generator(lambda worker, rows: None, np.zeros(4)) is None


def two_to_all(worker_group, x):
    return ([x[0], x[1]] * (worker_group.world_size // 2),), {}


@inprocess
def test_modes_can_be_added_and_replaced(make_pool):
    register_dispatch_mode("two_to_all", two_to_all, collect_all_to_all)
    try:

        class Custom(Worker):
            @register(Dispatch.TWO_TO_ALL)
            def get(self, x):
                return x

        assert "TWO_TO_ALL" in Dispatch and Dispatch["TWO_TO_ALL"] in list(Dispatch)
        assert pickle.loads(pickle.dumps(Dispatch.TWO_TO_ALL)) is Dispatch.TWO_TO_ALL
        assert RayWorkerGroup(make_pool([4]), Custom).get([1, 2]) == [1, 2, 1, 2]
        update_dispatch_mode(Dispatch.TWO_TO_ALL, dispatch_one_to_all, collect_all_to_all)
        assert RayWorkerGroup(make_pool([4]), Custom).get([1, 2]) == [[1, 2]] * 4
        with pytest.raises(bm.ProtocolError, match="already"):
            register_dispatch_mode("two_to_all", two_to_all, collect_all_to_all)
    finally:
        decorator.DISPATCH_MODE_FN_REGISTRY.pop(Dispatch.remove("TWO_TO_ALL"))
    with pytest.raises(bm.ProtocolError, match="has no dispatch"):
        get_predefined_dispatch_fn(Dispatch.RANK_ZERO)
    with pytest.raises(bm.ProtocolError, match="unknown transfer protocol 'ONE_TO_NONE'"):
        register("ONE_TO_NONE")
    assert get_predefined_execute_fn(Execute.RANK_ZERO) == {"execute_fn_name": "execute_rank_zero"}
    assert get_predefined_execute_fn(Execute.ALL) == {"execute_fn_name": "execute_all"}
    assert Dispatch.from_name("one_to_all") is Dispatch.ONE_TO_ALL and Dispatch.from_name("two_to_all") is None
    assert getattr(Actor.add, MAGIC_ATTR) == {
        "dispatch_mode": Dispatch.ONE_TO_ALL,
        "execute_mode": Execute.ALL,
        "blocking": True,
    }


def test_workers_pass_on_what_they_have_registered(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    ref, both = Worker(), Worker()
    assert (both.rank, both._world_size) == (1, 2)
    ref._register_dispatch_collect_info("actor", dp_rank=3, is_collect=True)
    both.set_dispatch_collect("ref", **ref.get_dispatch_collect())
    assert both.query_collect_info("ref") is True
    assert both._query_dispatch_info("ref") == 3
    with pytest.raises(AssertionError, match="registered already"):
        both.set_dispatch_collect("ref", **ref.get_dispatch_collect())
    with pytest.raises(ValueError, match="registered already"):
        ref._register_dispatch_collect_info("actor", 0, False)
    ref._register_dispatch_collect_info("more", dp_rank=0, is_collect=True)
    with pytest.raises(ValueError, match="actor, more, with different places"):
        both.set_dispatch_collect("third", **ref.get_dispatch_collect())
    both.set_dispatch_collect("more", **ref.get_dispatch_collect())
    assert both._query_dispatch_info("more") == 0, "of several, the one of the same name"


def test_workers_outside_of_a_group_are_described_by_their_environment(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    worker = Worker()
    assert (worker.rank, worker.local_rank, worker.local_world_size) == (0, 0, 1)
    assert worker.get_cuda_visible_devices() == "not set"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert Worker(cuda_visible_devices="3").get_cuda_visible_devices() == "3"


@pytest.mark.backends("inprocess", "local", "ray")
def test_roles_in_one_process(make_pool):
    classes = {"actor": RayClassWithInitArgs(Actor, bonus=1), "critic": RayClassWithInitArgs(Critic, 10)}
    group = RayWorkerGroup(make_pool([2]), create_colocated_worker_cls(classes))
    roles = group.spawn(prefix_set=classes.keys())
    assert roles["actor"].add(1) == [2, 3]
    assert roles["critic"].add(1) == [-9, -9]
    assert roles["actor"].sibling() == [10, 10]
    assert roles["actor"].execute_all_sync("bare", 1) == [2, 2]
    assert group.actor_add(1) == [2, 3]
    assert roles["critic"].pid() == group.critic_pid()
    assert roles["actor"].tag({"x": np.arange(2)})["rank"].tolist() == [0, 1]
    with pytest.raises(bm.RemoteError, match=r"Actor\.fail failed on rank 1"):
        roles["actor"].fail([1])
    with pytest.raises(AttributeError, match=r"no attribute 'tagg'; did you mean 'tag'\?$"):
        _ = roles["actor"].tagg
    with pytest.raises(bm.UsageError, match="its roles are actor, critic"):
        group.spawn(["reward"])
    assert "actor_add" in dir(group) and "add" in dir(roles["critic"])
    assert copy.deepcopy(roles["critic"]).add(1) == [-9, -9]


@inprocess
def test_a_class_of_roles_can_have_methods_of_its_own(make_pool):
    classes = {"actor": RayClassWithInitArgs(Actor, bonus=1), "critic": ClassWithInitArgs(Critic, 10)}

    class Hybrid(create_colocated_worker_raw_cls(classes)):
        @register(Dispatch.ONE_TO_ALL)
        def both(self, x):
            return self.critic.add(self.actor.add(x))

    group = RayWorkerGroup(make_pool([2]), RayClassWithInitArgs(Hybrid))
    group.fuse(classes)
    assert group.both(1) == [value - 10 for value in group.actor.add(1)]
    assert group.fused_worker_used
    fused = create_colocated_worker_cls_fused(classes)
    assert fused.fused_worker_used
    assert RayWorkerGroup(make_pool([2]), fused).spawn(["critic"])["critic"].add(1) == [-9, -9]


@inprocess
def test_wrong_parameters_are_refused(make_pool):
    pool, given = make_pool([2]), RayClassWithInitArgs(Actor)
    with pytest.raises(bm.UsageError, match="bin_pack of RayWorkerGroup must be True or False, got 'prefix'"):
        RayWorkerGroup(pool, given, "prefix")
    with pytest.raises(bm.UsageError, match="not both"):
        RayWorkerGroup(pool, given, worker_names=["a"])
    with pytest.raises(bm.UsageError, match="needs a resource_pool"):
        RayWorkerGroup(None, given)
    with pytest.raises(bm.UsageError, match="use_gpu"):
        RayWorkerGroup(pool, given, use_gpu=True)
    with pytest.raises(ValueError, match="must not set WORLD_SIZE"):
        RayWorkerGroup(pool, given, worker_env={"WORLD_SIZE": "9"})
    with pytest.raises(bm.UsageError, match="dict of strings by name, got 'MINE': 1"):
        RayWorkerGroup(pool, given, worker_env={"MINE": 1})
    with pytest.raises(bm.UsageError, match="processes of their own"):
        RayWorkerGroup(pool, given, worker_env={"MINE": "1"})
    with pytest.raises(bm.UsageError, match="detached=True needs a RayResourcePool"):
        RayWorkerGroup(pool, given, detached=True)
    with pytest.raises(bm.UsageError, match="num_cpus cannot be set here"):
        given.update_options({"num_cpus": 3})
    with pytest.raises(bm.ProtocolError, match=r"gives rank 0 the arguments as they are"):
        register(Dispatch.DP_COMPUTE, Execute.RANK_ZERO)
    with pytest.raises(bm.UsageError, match="only CPUs and GPUs"):
        given.set_additional_resource({"NPU": 1})
    with pytest.raises(bm.UsageError, match="detached must be True or False, got 2"):
        RayResourcePool([2], True, "a", 10, 2)
    with pytest.raises(bm.UsageError, match="accelerator_type"):
        RayResourcePool([2], accelerator_type="H100")

    class Hides(Worker):
        @register(Dispatch.ONE_TO_ALL)
        def spawn(self):
            pass

    with pytest.raises(bm.UsageError, match="registers 'spawn'"):
        RayWorkerGroup(pool, Hides)


def test_names_are_where_verl_has_them():
    assert single_controller.WorkerGroup is WorkerGroup
    assert issubclass(RayWorkerGroup, WorkerGroup)
    assert issubclass(SubRayResourcePool, RayResourcePool) and issubclass(RayResourcePool, ResourcePool)
    assert DistRankInfo(0, 1, 2, 3).dp_rank == DistGlobalInfo(0, 1, 2, 3).dp_size == 1


# --- on Ray ---


@pytest.fixture(scope="module")
def pool(ray_cluster):
    with RayResourcePool([4], use_gpu=True, name_prefix="verls") as pool:
        yield pool


@pytest.fixture(scope="module")
def actor(pool):
    given = RayClassWithInitArgs(Actor, bonus=100)
    group = RayWorkerGroup(pool, given, name_prefix="theirs", device_name="cuda", worker_env={"MINE": "yes"})
    yield group
    del group
    gc.collect()


def test_calls_that_do_not_wait_return_object_refs(actor, ray_cluster):
    ray = ray_cluster
    first, second = actor.add_later(1), actor.add_later(ray.put(2))
    assert ray.get(first + second) == [1, 2, 3, 4, 2, 3, 4, 5]
    assert ray.get(actor.on_zero_later([1, 2])) == ([1, 2], 0)
    with pytest.raises(bm.UsageError, match=r"add_later returns ObjectRefs, to which options\(\) does not apply; use"):
        actor.add_later.options(timeout=1)(1)
    with pytest.raises(
        bm.UsageError, match=r"on_zero_later returns ObjectRefs, to which options\(\) does not apply; use"
    ):
        actor.on_zero_later.options(timeout=1)(1)
    assert ray.get(actor.execute_all_async("bare", [1, 2, 3, 4])) == [101, 102, 103, 104]
    assert ray.get(actor.execute_all("bare", 1)) == [101] * 4
    assert ray.get(actor.execute_rank_zero("bare", 1)) == actor.execute_rank_zero_sync("bare", 1) == 101
    assert actor.own([ray.put(n) for n in range(4)]) == [0, 1, 2, 3]
    assert ray.get(actor.tag_later(np.arange(4)).futures)[0].tolist() == [2, 12, 23, 33]


def test_workers_know_what_verls_workers_know(actor):
    names = ["RAY_LOCAL_WORLD_SIZE", "WG_PREFIX", "WG_BACKEND", "MINE", "WORLD_SIZE", "LOCAL_RANK"]
    for rank, found in enumerate(actor.environment(*names)):
        assert found == ["4", "theirs", "ray", "yes", "4", "0"], f"rank {rank} sees one device"
    assert actor.execute_all_sync("get_cuda_visible_devices") == ["0", "1", "2", "3"]
    assert actor.execute_rank_zero_sync("get_master_addr_port") == (actor.master_address, actor.master_port)
    assert actor.worker_names == [f"theirsActor_0:{rank}" for rank in range(4)]
    assert actor.name_prefix == "theirs"


def test_handles_reach_the_users_object(actor, ray_cluster):
    handle = actor.workers[2]
    assert ray_cluster.get(handle.__ray_call__.remote(lambda self: (type(self).__name__, self.bonus))) == ("Actor", 100)
    assert ray_cluster.get(handle.direct.remote(5)) == 5


def test_async_methods_of_a_role_overlap_where_ray_is_told_so(pool, ray_cluster):
    given = create_colocated_worker_cls({"meeting": RayClassWithInitArgs(Meeting)})
    given.update_options({"max_concurrency": 2})
    with RayWorkerGroup(split_resource_pool(pool, 1)[0], given) as group:
        role = group.spawn(["meeting"])["meeting"]
        met = ray_cluster.get(role.meet("a") + role.meet("b"))
    assert met in (["a", "a"], ["b", "b"])


def test_another_group_can_attach_to_the_workers(actor, ray_cluster):
    ray = ray_cluster
    by_name = RayWorkerGroup.from_detached(
        worker_names=actor.worker_names, ray_cls_with_init=RayClassWithInitArgs(Actor)
    )
    assert by_name.add(1) == actor.add(1)
    with pytest.raises(bm.RemoteError, match=r"Actor\.fail failed on rank 3"):
        by_name.fail([3])
    chosen = RayWorkerGroup(worker_handles=actor.workers[2:], ray_cls_with_init=RayClassWithInitArgs(Actor))
    assert chosen.add(1) == [103, 104]
    with bm.ResourcePool([1], backend="inprocess") as own:
        rows, order = bm.WorkerGroup(own, bm.Worker).put({"x": np.arange(4)}), [3, 0, 2, 1]
        as_handle, as_value = chosen.tag(rows[order]), chosen.tag({"x": np.array(order)})
        assert as_handle["x"].tolist() == as_value["x"].tolist(), "though their own ranks are 2 and 3"

    @ray.remote(num_cpus=0)
    def elsewhere(group):
        return group.add(1), group.tag({"x": np.arange(2)})["rank"].tolist()

    assert ray.get(elsewhere.remote(actor)) == ([101, 102, 103, 104], [0, 2])
    with pytest.raises(bm.UsageError, match="not a worker of a bandmaster group"):
        RayWorkerGroup(worker_handles=[ray.remote(object).remote()], ray_cls_with_init=Actor)
    with pytest.raises(bm.MeshError, match=r"has 2 ranks, but .*4 existing workers"):
        RayWorkerGroup.from_detached(worker_handles=actor.workers, ray_cls_with_init=Actor, mesh=bm.Mesh(dp=2))
    by_name._inner.close()
    del by_name, chosen
    gc.collect()
    assert actor.add(1) == [101, 102, 103, 104]


def test_pools_are_of_verls_classes_and_have_placement_groups(pool, actor):
    assert (pool.store, pool(), pool.detached) == ([4], [4], False)
    (group,) = pool.get_placement_groups(strategy="PACK", device_name="cuda")
    assert pool.pgs == [group] and group.bundle_count == 4
    with pytest.raises(bm.UsageError, match=r"cannot use other slots while there are groups on its own: .*Actor"):
        pool.pgs = [group]
    first, second = split_resource_pool(pool, [1, 3])
    assert isinstance(second, SubRayResourcePool)
    assert (second.start_bundle_index, second.subgroup_world_size, second.world_size) == (1, 3, 3)
    assert (second.store, second.pgs) == ([4], [group])
    inner = split_resource_pool(second, 1)[2]
    assert inner.start_bundle_index == 3
    assert RayWorkerGroup(inner, Actor).execute_all_sync("get_cuda_visible_devices") == ["3"]
    both = merge_resource_pool(first, second)
    assert type(both) is RayResourcePool and both.world_size == 4
    assert sort_placement_group_by_node_ip(pool.pgs) == [group]
    given = SubRayResourcePool([group], 2, 2, process_on_nodes=[4], use_gpu=True, max_colocate_count=10)
    assert given.start_bundle_index == 2
    assert RayWorkerGroup(given, Actor).world_size == 2
    small = RayResourcePool([2], use_gpu=True)
    small.pgs = extract_pg_from_exist({"actor": pool}, ["actor"], small)
    assert RayWorkerGroup(small, Actor).add(0) == [0, 1]
    with pytest.raises(bm.UsageError, match=r"\[5\] bundles, got \[4\]"):
        RayResourcePool([5]).pgs = [group]
    with pytest.raises(bm.UsageError, match="are those of the pools that it was made of"):
        second.pgs = [group]


def test_a_manager_has_the_pool_of_each_role(ray_cluster):
    manager = ResourcePoolManager({"main": [2], "more": [1]}, {"actor": "main", "critic": "more"})
    manager.create_resource_pool()
    assert manager.get_resource_pool("critic").store == [1]
    assert manager.get_n_gpus() == 3
    too_many = ResourcePoolManager({"main": [99]}, {})
    with pytest.raises(bm.PlacementError, match="need 99 GPUs, but"):
        too_many.create_resource_pool()


@inprocess
def test_streams_and_chunks_are_not_for_verls_dispatch(actor):
    with pytest.raises(bm.UsageError, match=r"Actor.double cannot be streamed from a RayWorkerGroup; use a bandmaster"):
        actor.double.stream(np.arange(4))
    with pytest.raises(bm.UsageError, match="pull= was removed"):
        actor.double.options(pull=2)(np.arange(4))


def test_a_group_is_freed_as_soon_as_nobody_has_it(make_pool):
    pool = make_pool([2], max_colocate_count=1)
    for _ in range(2):
        group = RayWorkerGroup(pool, Actor)
        group.add(1)
        del group


def test_workers_whose_handles_are_kept_outlive_their_group(ray_cluster):
    with RayResourcePool([2], use_gpu=False) as pool:
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Actor, bonus=7, dp=1))
        handles = group.workers
        del group
        gc.collect()
        assert ray_cluster.get([handle.bare.remote(1) for handle in handles]) == [8] * 2
        with RayWorkerGroup(pool, RayClassWithInitArgs(Actor, dp=1)) as closed:
            handle, deadline = closed.workers[0], idle_time() + 30
        with pytest.raises(ray_cluster.exceptions.RayActorError):
            while idle_time() < deadline:  # Ray ends actors a moment later
                ray_cluster.get(handle.bare.remote(1))


def test_detached_workers_outlive_the_process(ray_cluster):
    pool = RayResourcePool([1], use_gpu=False, detached=True)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Actor, bonus=7, dp=1), detached=True)
    (placement,), (handle,) = pool.pgs, group.workers
    names = group.worker_names
    del group
    pool.close()
    again = RayWorkerGroup.from_detached(worker_names=names, ray_cls_with_init=RayClassWithInitArgs(Actor))
    assert again.add(0) == [7]
    ray_cluster.kill(handle)
    ray_cluster.util.remove_placement_group(placement)


def test_verls_register_and_modes_do_not_pass_for_bandmasters():
    with pytest.raises(bm.ProtocolError, match=r"a member of bandmaster\.Dispatch, .* got <Dispatch\.DP_COMPUTE_PROTO"):
        bm.register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    with bm.ResourcePool([1], backend="inprocess") as pool:
        group = bm.WorkerGroup(pool, Actor)
        with pytest.raises(
            AttributeError, match=r"Actor\.double is not registered: put @bandmaster\.register\(\.\.\.\) above"
        ):
            _ = group.double
