"""Where verl's single controller goes wrong without a word, and what happens here instead."""

import copy
import os
import re
from collections.abc import Sequence

import numpy as np
import pytest

import bandmaster as bm
from bandmaster import (
    Broadcast,
    Concat,
    Dispatch,
    Execute,
    Gather,
    Mesh,
    PerRank,
    Split,
    TransferProtocol,
    merge_resource_pool,
    register,
    split_resource_pool,
)
from bandmaster.plan.placement import Node, Request, assign_nodes

PADDED = TransferProtocol(Split("dp", pad=True), Concat("dp"))
PLACE = ("rank", "world_size", "local_rank", "local_world_size", "node_rank")


class Role(bm.Worker):
    @register(PADDED)
    def padded(self, batch):
        return batch

    @register(PADDED, blocking=False)
    def padded_later(self, batch):
        return batch

    @register(PADDED)
    def padded_metric(self, batch):
        return [len(batch)]

    @register(TransferProtocol(Split("dp"), Gather("dp")))
    def metric(self, batch):
        return {"rows": len(batch), "sum": int(sum(batch))}

    @register(Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def lead(self, x):
        return x

    @register(Dispatch.ONE_TO_ALL)
    def tell(self, x):
        return x

    @register(Dispatch.DP_PROTO)
    def rows(self, batch):
        return batch

    @register(Dispatch.ALL_TO_ALL)
    def each(self, x):
        return x

    @register()
    def each_by_default(self, x):
        return x

    @register(TransferProtocol(Split("dp"), Gather()))
    def heat(self, batch, info):
        info["temperature"] += self.rank + 1
        return info

    @register(Dispatch.ONE_TO_ALL)
    def spoil(self, array, items, table):
        array += 1
        items.append(self.rank)
        table["new"] = self.rank
        return array, items, table

    @register({"dispatch_fn": lambda group, x: ((x,), {}), "collect_fn": lambda group, out: sum(out)}, blocking=False)
    def total_later(self, x):
        return x

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def fail_later(self, on):
        if self.rank == on:
            raise KeyError("loss")


@pytest.fixture(scope="module")
def group(backend):
    with bm.ResourcePool([2], backend=backend) as pool:
        yield bm.WorkerGroup(pool, Role)


# --- silent wrong results ---------------------------------------------------------------------------------------


@pytest.mark.backends("inprocess", "local")
def test_padding_leaves_the_callers_batch_alone_however_often_it_is_sent(group):
    """verl pads the caller's own batch, and gives the padding back when the same batch is sent again."""
    batch = {"ids": np.array([7, 8, 9]), "texts": ["a", "b", "c"]}
    for _ in range(3):
        result = group.padded(batch)
        assert result["ids"].tolist() == [7, 8, 9]
        assert result["texts"] == ["a", "b", "c"]
    assert list(batch) == ["ids", "texts"]
    assert batch["ids"].tolist() == [7, 8, 9]


@pytest.mark.parametrize(
    "batch", [["a", "b", "c"], np.array([7, 8, 9]), {"ids": [7, 8, 9]}], ids=["list", "array", "dict"]
)
def test_padding_is_taken_out_of_a_future_too(group, batch):
    """In verl a call that does not wait gives its padding rows to the caller."""
    result = group.padded_later(batch).result(timeout=30)
    assert np.array_equal(result, batch) if isinstance(batch, np.ndarray) else result == batch


def test_one_metric_per_worker_stays_one_per_worker_for_uneven_batches(group):
    """verl cuts as many workers' metrics away as it padded rows in."""
    assert group.metric([1, 2, 3]) == [{"rows": 2, "sum": 3}, {"rows": 1, "sum": 3}]
    with pytest.raises(bm.CollectError, match=r"rank 0 .*returned 1 rows for 2, 0 of them padding"):
        group.padded_metric([1, 2, 3])
    assert group.metric([1]) == [{"rows": 1, "sum": 1}, {"rows": 0, "sum": 0}]


def test_rank_zero_gets_the_argument_itself(group):
    """In verl rank 0 alone is given a list with a copy for every rank."""
    assert group.lead(5) == 5
    assert group.lead([5, 6]) == [5, 6]


@pytest.mark.parametrize("values", [[10, 20], (10, 20), range(1000, 1002)], ids=["list", "tuple", "range"])
def test_any_sequence_is_given_out_one_value_per_rank(group, values):
    """verl checks that tuples have a value for every rank, and then gives every rank the whole tuple."""
    assert group.each(values) == list(values)
    assert group.each_by_default(x=values) == list(values)


def test_a_sequence_that_makes_its_items_anew_is_given_out_right(group):
    """Telling values apart by where they lie in memory is wrong for values that are gone already."""

    class Squares(Sequence):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return np.full(3, index + 10)

    assert [array.tolist() for array in group.each(Squares())] == [[10, 10, 10], [11, 11, 11]]


@pytest.mark.backends("inprocess", "local")
def test_a_tensordict_is_split_like_any_batch(group):
    """verl cuts a TensorDict into a tuple, and then gives every rank the whole tuple."""
    torch, tensordict = pytest.importorskip("torch"), pytest.importorskip("tensordict")
    batch = tensordict.TensorDict({"ids": torch.arange(3)}, batch_size=3)
    assert group.rows(batch)["ids"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("n_values", [1, 2, 3])
def test_the_length_of_a_list_never_decides_where_it_goes(group, n_values):
    """verl gives a list out if it happens to have a value for every rank, and to everybody otherwise."""
    values = list(range(10, 10 + n_values))
    assert group.tell(values) == [values, values]
    assert group.rows(values) == values
    if n_values == 2:
        assert group.each(values) == [10, 11]
    else:
        with pytest.raises(bm.ArgumentError, match=f"has {n_values} values for 2 ranks"):
            group.each(values)


def test_groups_whose_names_run_together_stay_apart(make_pool):
    """verl glues role and method into one name: role "a" with method "b_c" is role "a_b" with method "c"."""

    class a(bm.Worker):
        @register(Dispatch.ONE_TO_ALL)
        def b_c(self):
            return "a's b_c"

    class a_b(bm.Worker):
        @register(Dispatch.ONE_TO_ALL)
        def c(self):
            return "a_b's c"

    pool = make_pool([1])
    one, two = bm.WorkerGroup(pool, a), bm.WorkerGroup(pool, a_b)
    assert (one.b_c(), two.c()) == (["a's b_c"], ["a_b's c"])
    assert not hasattr(one, "c")


def test_what_every_rank_gets_beside_its_rows_is_its_own(group):
    """In verl all parts of a batch share one dict of settings: what one worker writes, all see."""
    info = {"temperature": 1.0}
    assert group.heat([1, 2], info) == [{"temperature": 2.0}, {"temperature": 3.0}]
    assert info == {"temperature": 1.0}


@pytest.mark.backends("inprocess", "local")
def test_every_argument_goes_by_its_own_rule(make_group):
    """verl keeps one rule of several: the last one given."""

    class Mixed(bm.Worker):
        @register(
            TransferProtocol(Split("dp"), Gather()),
            arguments={"columns": Split("tp"), "table": Broadcast(), "seed": PerRank()},
        )
        def take(self, batch, columns, table, seed):
            return batch, columns, table, seed

    group = make_group(Mesh(dp=2, tp=2), Mixed)
    assert group.take([1, 2], ["x", "y"], [5, 6], seed=[10, 11, 12, 13]) == [
        ([1], ["x"], [5, 6], 10),
        ([1], ["y"], [5, 6], 11),
        ([2], ["x"], [5, 6], 12),
        ([2], ["y"], [5, 6], 13),
    ]


def test_a_future_is_collected_by_the_methods_own_function(group):
    """verl's future joins by a function of its own, and forgets the one that was registered."""
    assert group.total_later([1, 10]).result(timeout=30) == 11


@pytest.mark.parametrize("on", [0, 1])
def test_a_future_that_fails_has_the_first_cause_whatever_rank_it_was(group, on):
    """verl's future looks at the first rank to see whether all of them failed."""
    error = group.fail_later(on).exception(timeout=30)
    assert isinstance(error, bm.RemoteError)
    assert (error.rank, type(error.__cause__)) == (on, KeyError)


# --- placement --------------------------------------------------------------------------------------------------


class Placed(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def place(self, controller_pid):
        place = {name: getattr(self, name) for name in PLACE}
        if os.getpid() != controller_pid:
            for name in PLACE[:4]:
                assert os.environ[name.upper()] == str(place[name]), name
        return tuple(place.values())

    @register(Dispatch.ONE_TO_ALL)
    def gpu(self):
        return os.environ["CUDA_VISIBLE_DEVICES"]

    @register(Dispatch.ONE_TO_ALL)
    def variable(self):
        return os.environ.get("ROLE")


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([1, 2], [(0, 3, 0, 1, 0), (1, 3, 0, 2, 1), (2, 3, 1, 2, 1)]),
        ([2, 1], [(0, 3, 0, 2, 0), (1, 3, 1, 2, 0), (2, 3, 0, 1, 1)]),
    ],
    ids=["1 and 2", "2 and 1"],
)
def test_unequal_nodes_have_all_their_workers_and_each_knows_its_node(make_pool, nodes, expected):
    """verl takes every node to be as large as the first: too few workers, which wait for the rest, or an assertion."""
    assert bm.WorkerGroup(make_pool(nodes), Placed).place(os.getpid()) == expected


def test_a_pool_of_unequal_nodes_can_be_split(make_pool):
    """verl looks up a node that the split pool does not have."""
    parts = split_resource_pool(make_pool([2, 4]), 3)
    assert [part.process_on_nodes for part in parts] == [(2, 1), (3,)]
    assert [part.local_world_size_list() for part in parts] == [[2, 2, 1], [3, 3, 3]]


@pytest.mark.backends("inprocess", "local")
def test_workers_of_a_split_pool_count_themselves_and_not_the_whole_node(make_pool):
    """In verl they are told the size of the whole node, and their local rank is never set."""
    parts = split_resource_pool(make_pool([3]), [2, 1])
    groups = [bm.WorkerGroup(part, Placed) for part in parts]
    assert groups[0].place(os.getpid()) == [(0, 2, 0, 2, 0), (1, 2, 1, 2, 0)]
    assert groups[1].place(os.getpid()) == [(0, 1, 0, 1, 0)]


def test_a_pool_that_waits_for_cpus_gives_up_in_time_and_says_who_holds_them(ray_cluster):
    """verl waits for its placement groups without a deadline and without a word."""
    critic = bm.ResourcePool([16], backend="ray", name_prefix="critic", placement_timeout=0.5)
    with bm.ResourcePool([10], backend="ray", name_prefix="actor"), pytest.raises(bm.PlacementError) as refused:
        critic.reserve()
    message = str(refused.value)
    assert message.startswith("pool 'critic' cannot place 16 workers as [16] (1 CPU each) within 0.5 s: node ")
    assert re.search(r"has \d+ of 16 CPUs free, room for \d+, held by pool 'actor' \(10 slots\)", message)
    assert re.search(r"; ask for \[\d+\], or close pools and groups that hold the rest$", message)


def test_a_place_takes_one_cpu_however_many_groups_may_share_it(ray_cluster):
    """verl asks for a CPU for every group that might come, ten for each GPU."""
    with bm.ResourcePool([2], backend="ray", use_gpu=True, name_prefix="frugal"):
        table = ray_cluster.util.placement_group_table().values()
        (bundles,) = [group["bundles"] for group in table if group["name"].startswith("pool 'frugal'")]
        assert list(bundles.values()) == [{"CPU": 2.0, "GPU": 2.0}], "one bundle for both slots, which share a node"


def test_nodes_are_taken_in_the_numeric_order_of_their_addresses():
    """verl sorts addresses as text, where 10.0.0.10 comes before 10.0.0.9."""
    nodes = [Node(address, {"CPU": 8}, {"CPU": 8}) for address in ("10.0.0.10", "10.0.0.9", "10.0.0.100")]
    assert assign_nodes(Request("pool", (8, 8, 8), 1, 0), nodes) == (1, 0, 2)


def test_devices_follow_the_ranks_whatever_part_of_a_pool_is_used_first(ray_cluster):
    """verl's first look at a pool finds its places unsorted, later looks find them sorted."""
    with bm.ResourcePool([4], backend="ray", use_gpu=True) as pool:
        first, second = split_resource_pool(pool, 2)
        of_second = bm.WorkerGroup(second, Placed).gpu()
        of_first = bm.WorkerGroup(first, Placed).gpu()
        devices = [int(device) for device in (*of_first, *of_second)]
        assert devices == sorted(set(devices))


def test_parts_of_a_split_pool_can_be_merged_in_any_order(make_pool):
    """verl cannot merge pools that were split."""
    parts = split_resource_pool(make_pool([1, 2]), 1)
    merged = merge_resource_pool(parts[2], parts[0])
    assert merged.process_on_nodes == (1, 1)
    assert bm.WorkerGroup(merged, Placed).place(os.getpid()) == [(0, 2, 0, 1, 0), (1, 2, 0, 1, 1)]


def test_merged_parts_keep_their_gpus(ray_cluster):
    """verl forgets the kind of its accelerators when pools are merged."""
    with bm.ResourcePool([2], backend="ray", use_gpu=True) as pool:
        whole = bm.WorkerGroup(pool, Placed).gpu()
        merged = merge_resource_pool(*reversed(split_resource_pool(pool, 1)))
        assert merged.use_gpu
        assert bm.WorkerGroup(merged, Placed).gpu() == whole[::-1]


def test_a_merged_pool_takes_its_share_of_every_place(make_pool):
    """Places that different numbers of groups may share are shared as each of them was made."""
    alone, shared = make_pool([1], max_colocate_count=1), make_pool([1], max_colocate_count=2)
    first = bm.WorkerGroup(shared, Placed)
    both = bm.WorkerGroup(merge_resource_pool(alone, shared), Placed)
    assert [len(group.place(os.getpid())) for group in (first, both)] == [1, 2]


@pytest.mark.parametrize(
    "asked", [{"resources": {"NVLink": 1}}, {"accelerator_type": "A100"}, {"memory": 10**6}], ids=repr
)
def test_a_single_resource_that_a_pool_cannot_give_is_refused(ray_cluster, asked):
    """verl ignores additional resources unless there are at least two."""
    wrapped = ray_cluster.remote(**asked)(Placed)
    with (
        bm.ResourcePool([1], backend="ray") as pool,
        pytest.raises(bm.UsageError, match="Placed asks Ray for") as refused,
    ):
        bm.WorkerGroup(pool, wrapped)
    assert next(iter(asked)) in str(refused.value)


def test_options_of_a_class_are_its_own_and_reach_every_group_of_it(ray_cluster):
    """verl drops name, environment and options of groups that share places, and leaves one group's with the next."""
    actor = ray_cluster.remote(runtime_env={"env_vars": {"ROLE": "actor"}}, max_concurrency=1)(Placed)
    critic = ray_cluster.remote(max_restarts=0)(Placed)
    before = copy.deepcopy((actor._default_options, critic._default_options))
    with bm.ResourcePool([1], backend="ray") as pool:
        groups = [bm.WorkerGroup(pool, cls, name_prefix=f"role{n}") for n, cls in enumerate([actor, critic, actor])]
        assert [group.variable() for group in groups] == [["actor"], [None], ["actor"]]
        assert [group.worker_names for group in groups] == [
            ["role0Placed_0:0"],
            ["role1Placed_0:0"],
            ["role2Placed_0:0"],
        ]
        assert (actor._default_options, critic._default_options) == before


def test_a_split_pool_without_gpus_asks_for_none(make_pool):
    """verl splits a pool of CPUs into pools of GPUs."""
    parts = split_resource_pool(make_pool([2]), 1)
    assert [part.use_gpu for part in parts] == [False, False]
    assert bm.WorkerGroup(parts[1], Placed).place(os.getpid()) == [(0, 1, 0, 1, 0)]


# --- what belongs to the caller ---------------------------------------------------------------------------------


def test_a_pool_is_not_changed_by_the_list_it_was_made_from(make_pool):
    """verl keeps the caller's list, and appends to it."""
    nodes, sizes = [2, 1], [1, 2]
    pool = make_pool(nodes)
    parts = split_resource_pool(pool, sizes)
    merge_resource_pool(*parts)
    assert (nodes, sizes) == ([2, 1], [1, 2])
    nodes.append(8)
    assert pool.process_on_nodes == (2, 1)
    pool.local_rank_list().append(8)
    assert pool.local_rank_list() == [0, 1, 0]


def test_arguments_stay_as_the_caller_has_them(group):
    """verl writes into what the caller passes."""
    array, items, table = np.zeros(2), [1], {"lr": 0.1}
    results = group.spoil(array, items=items, table=table)
    assert [(seen.tolist(), *rest) for seen, *rest in results] == [
        ([1.0, 1.0], [1, 0], {"lr": 0.1, "new": 0}),
        ([1.0, 1.0], [1, 1], {"lr": 0.1, "new": 1}),
    ]
    assert (array.tolist(), items, table) == ([0.0, 0.0], [1], {"lr": 0.1})


@pytest.mark.backends("inprocess", "local")
def test_a_class_with_arguments_serves_many_groups_unchanged(make_pool):
    """verl writes each group's settings into the class that the caller gave."""

    class Greedy(bm.Worker):
        def __init__(self, items, **options):
            items.append(self.rank)
            options["more"] = True
            self.items = items

        def look(self):
            return self.items

    items, options = [7], {"lr": 0.1}
    with_arguments = bm.ClassWithInitArgs(Greedy, items, **options)
    pool = make_pool([2])
    for _ in range(2):
        assert bm.WorkerGroup(pool, with_arguments).execute_all_sync("look") == [[7, 0], [7, 1]]
    assert (items, options) == ([7], {"lr": 0.1})
    assert (with_arguments.args, with_arguments.kwargs) == (([7],), {"lr": 0.1})


@pytest.mark.backends("inprocess", "local")
def test_a_method_goes_by_the_rules_it_was_registered_with(make_group):
    """Rules that are kept by reference change under whoever registered them."""
    rules = {"table": Broadcast()}

    class Reader(bm.Worker):
        @register(Dispatch.DP_PROTO, arguments=rules)
        def read(self, batch, table):
            return [table[i] for i in batch]

    rules.clear()
    assert make_group(2, Reader).read([0, 1, 2], [5, 6, 7]) == [5, 6, 7]
