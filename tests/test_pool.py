"""Resource pools as descriptions: sizes, merging and splitting. Nothing here is reserved or started."""

from fractions import Fraction

import numpy as np
import pytest

from bandmaster import (
    ClosedError,
    ResourcePool,
    UsageError,
    Worker,
    WorkerGroup,
    merge_resource_pool,
    split_resource_pool,
)


def nodes(pools):
    return [pool.process_on_nodes for pool in pools]


def test_ranks_are_numbered_node_by_node():
    pool = ResourcePool([4, 2])

    assert (pool.world_size, pool.process_on_nodes) == (6, (4, 2))
    assert pool.local_rank_list() == [0, 1, 2, 3, 0, 1]
    assert pool.local_world_size_list() == [4, 4, 4, 4, 2, 2]


def test_what_was_asked_for():
    pool = ResourcePool([2], backend="inprocess", use_gpu=True, name_prefix="actor", max_colocate_count=3)

    assert (pool.backend, pool.use_gpu, pool.name_prefix) == ("inprocess", True, "actor")
    assert (pool.max_colocate_count, pool.cpus_per_worker) == (3, 1)


def test_numbers_may_be_of_other_types():
    pool = ResourcePool([np.int64(4)], cpus_per_worker=np.float32(1), max_colocate_count=np.int32(2))
    assert pool.process_on_nodes == (4,)
    half = ResourcePool([1], backend="ray", cpus_per_worker=Fraction(1, 2), placement_timeout=Fraction(1, 2))
    assert repr(half.cpus_per_worker) == "0.5"
    assert [part.process_on_nodes for part in split_resource_pool(pool, np.int64(2))] == [(2,), (2,)]


def test_the_callers_list_is_not_kept():
    sizes = [4, 2]
    pool = ResourcePool(sizes)
    sizes.append(7)
    pool.local_rank_list().append(7)

    assert pool.process_on_nodes == (4, 2)
    assert pool.local_rank_list() == [0, 1, 2, 3, 0, 1]


# --- split ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "split_size", "parts"),
    [
        ([4], 2, [(2,), (2,)]),
        ([4], 4, [(4,)]),
        ([2, 4], 3, [(2, 1), (3,)]),
        ([2, 4], [1, 5], [(1,), (1, 4)]),
        ([2, 2], [1, 1, 1, 1], [(1,), (1,), (1,), (1,)]),
        ([4, 4], (6, 2), [(4, 2), (2,)]),
    ],
)
def test_split(sizes, split_size, parts):
    assert nodes(split_resource_pool(ResourcePool(sizes), split_size)) == parts


def test_parts_are_numbered_from_zero_and_keep_everything_else():
    first, second = split_resource_pool(
        ResourcePool([4], backend="inprocess", name_prefix="actor", max_colocate_count=2), 2
    )

    assert first.local_rank_list() == second.local_rank_list() == [0, 1]
    assert second.local_world_size_list() == [2, 2]
    assert (second.backend, second.name_prefix, second.max_colocate_count) == ("inprocess", "actor", 2)


# --- merge ------------------------------------------------------------------------------------------------------


def test_merge_keeps_the_order():
    merged = merge_resource_pool(
        ResourcePool([4], name_prefix="a", max_colocate_count=5), ResourcePool([1, 2], name_prefix="b")
    )

    assert (merged.process_on_nodes, merged.world_size) == ((4, 1, 2), 7)
    assert merged.local_rank_list() == [0, 1, 2, 3, 0, 0, 1]
    assert (merged.name_prefix, merged.max_colocate_count) == ("ab", 5)


def test_merged_pools_can_be_merged_and_split():
    four, two, one = ResourcePool([4]), ResourcePool([2]), ResourcePool([1])
    merged = merge_resource_pool(merge_resource_pool(four, two), one)

    assert merged.process_on_nodes == (4, 2, 1)
    assert nodes(split_resource_pool(merged, [5, 2])) == [(4, 1), (1, 1)]
    assert nodes(split_resource_pool(split_resource_pool(merged, [5, 2])[0], [3, 2])) == [(3,), (1, 1)]


def test_neighbours_that_were_split_become_one_node_again():
    first, second, third = split_resource_pool(ResourcePool([6]), 2)

    assert merge_resource_pool(first, second, third).process_on_nodes == (6,)
    assert merge_resource_pool(merge_resource_pool(first, second), third).process_on_nodes == (6,)
    assert merge_resource_pool(first, ResourcePool([1]), second).process_on_nodes == (2, 1, 2)


# --- how it looks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ResourcePool([4, 2], backend="inprocess"), "ResourcePool([4, 2], backend='inprocess')"),
        (
            lambda: ResourcePool((1,), backend="inprocess", use_gpu=True, name_prefix="actor"),
            "ResourcePool([1], backend='inprocess', use_gpu=True, name_prefix='actor')",
        ),
        (
            lambda: split_resource_pool(ResourcePool([2, 4], backend="inprocess"), 3)[0],
            "ResourcePool([2, 1], backend='inprocess')",
        ),
    ],
)
def test_repr(make, text):
    assert repr(make()) == text


def test_a_notebook_shows_every_place():
    html = ResourcePool([1, 2])._repr_html_()

    assert "ResourcePool([1, 2]" in html
    assert "<tr><td>2</td><td>1</td><td>1</td><td>-</td></tr>" in html


# --- where nodes are --------------------------------------------------------------------------------------------


ANYWHERE = {"nodes": [{"zone": "a"}, "node-b"], "resources_per_worker": {"trainer": 1}, "strategy": "strict_spread"}


@pytest.mark.parametrize("here", ["inprocess", "local"])
def test_one_machine_is_every_node_that_a_script_asks_for(here):
    with ResourcePool([1, 1], backend=here, spares=[1], **ANYWHERE) as pool:
        group = WorkerGroup(pool, Worker)
        group.restart()
        assert group.world_size == 2
        lines = str(pool.plan()).splitlines()
        assert lines[0].endswith("reserved") and len(lines) == 5
        assert lines[-1].split()[0] == "spare"


def test_a_plan_reserves_nothing():
    pool = ResourcePool([3, 2], backend="inprocess", name_prefix="train", spares=[])
    merged = merge_resource_pool(split_resource_pool(pool, [2, 3])[1], ResourcePool([4], backend="inprocess"))

    assert "not reserved yet" in str(pool.plan())
    assert [(node.ranks, node.n_slots) for node in pool.plan().nodes] == [(range(3), 3), (range(3, 5), 2)]
    assert [node.ranks for node in merged.plan().nodes] == [range(1), range(1, 3), range(3, 7)]
    assert "<td>3-4</td>" in pool.plan()._repr_html_()
    pool.close()
    with pytest.raises(ClosedError):
        pool.plan()


# --- mistakes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: ResourcePool([]), "process_on_nodes must be a list with one number per node, such as [4, 2], got []"),
        (lambda: ResourcePool(4), "such as [4, 2], got 4"),
        (lambda: ResourcePool("4"), "such as [4, 2], got '4'"),
        (
            lambda: ResourcePool([4, 0]),
            "every node must have an integer number of slots of at least 1, got 0 in [4, 0]",
        ),
        (lambda: ResourcePool([2.0]), "of slots of at least 1, got 2.0 in [2.0]"),
        (lambda: ResourcePool([True]), "of slots of at least 1, got True in [True]"),
        (lambda: ResourcePool([1], backend="mpi"), "no backend is called 'mpi'; expected '"),
        (
            lambda: ResourcePool([1], max_colocate_count=0),
            "must be an integer of at least 1, the number of groups that may share a slot, got 0",
        ),
        (lambda: ResourcePool([1], cpus_per_worker=-1), "cpus_per_worker must be a non-negative number, got -1"),
        (lambda: ResourcePool([1], placement_timeout="1"), "placement_timeout must be a non-negative number, got '1'"),
        (lambda: ResourcePool([1], use_gpu=2), "use_gpu must be True (GPUs for every slot) or False (none), got 2"),
        (lambda: ResourcePool([1], strategy="STRICT"), "'spread', 'strict_spread', 'pack', got 'STRICT'"),
        (lambda: ResourcePool([1], strategy=[]), "'spread', 'strict_spread', 'pack', got []"),
        (lambda: ResourcePool([1], spares=np.array([1])), "spares must be a list with one number per spare node"),
        (lambda: ResourcePool([1], spares=1), "spares must be a list with one number per spare node"),
        (lambda: ResourcePool([1], spares=[0]), "every spare node must have an integer number of slots of at least 1"),
        (lambda: ResourcePool([1], gpus_per_worker=0), "gpus_per_worker must be an integer of at least 1, got 0"),
        (lambda: ResourcePool([1], gpus_per_worker=2), "gpus_per_worker=2 needs use_gpu=True"),
        (lambda: ResourcePool([1], resources_per_worker=["trainer"]), "such as {'trainer': 1}, got ['trainer']"),
        (lambda: ResourcePool([1], resources_per_worker={"GPU": 1}), "use cpus_per_worker= and use_gpu= for these"),
        (lambda: ResourcePool([1], resources_per_worker={"x": -1}), "resources_per_worker['x'] must be a non-negative"),
        (lambda: ResourcePool([1, 1], nodes=["a"]), "nodes has 1 items, but the pool has 2 nodes: give the address"),
        (lambda: ResourcePool([1], nodes=["a"] * 3, spares=[1]), "has 1 nodes, or 2 with those of the spare nodes"),
        (lambda: ResourcePool([1], nodes=5), "nodes is 5: give the address or the host name of a node"),
        (lambda: ResourcePool([1], nodes=[5]), "nodes has 5: give the address or the host name of a node"),
        (lambda: ResourcePool([1], nodes={"zone": 5}), "nodes has 5 for label 'zone': give a string, or a list"),
        (lambda: split_resource_pool(ResourcePool([4]), 3), "cannot split 4 slots into parts of 3; give a divisor"),
        (lambda: split_resource_pool(ResourcePool([4]), 0), "cannot split 4 slots into parts of 0"),
        (lambda: split_resource_pool(ResourcePool([4]), [1, 2]), "cannot split 4 slots into [1, 2], which are 3"),
        (lambda: split_resource_pool([4], 2), "split_resource_pool takes ResourcePools, got list ([4])"),
        (lambda: merge_resource_pool(ResourcePool([4])), "merge_resource_pool takes two pools or more, got 1"),
        (
            lambda: merge_resource_pool(ResourcePool([4]), None),
            "merge_resource_pool takes ResourcePools, got NoneType (None)",
        ),
        (
            lambda: merge_resource_pool(ResourcePool([1]), ResourcePool([1], use_gpu=True)),
            "use_gpu must be equal, got False and True",
        ),
        (
            lambda: merge_resource_pool(ResourcePool([1]), ResourcePool([1], cpus_per_worker=2)),
            "cpus_per_worker must be equal, got 1 and 2",
        ),
    ],
)
def test_mistakes_say_what_was_asked_and_what_there_is(mistake, message):
    with pytest.raises(UsageError) as caught:
        mistake()
    assert message in str(caught.value)


def test_a_place_is_merged_once():
    pool = ResourcePool([4])
    part = split_resource_pool(pool, 2)[1]

    for pools in [(pool, pool), (pool, part), (merge_resource_pool(pool, ResourcePool([1])), part)]:
        with pytest.raises(UsageError, match="cannot merge pools that share slots"):
            merge_resource_pool(*pools)


def test_a_closed_pool_can_be_closed_again_and_nothing_else():
    pool, other = ResourcePool([2]), ResourcePool([2])
    part = split_resource_pool(pool, 1)[0]
    pool.close()
    pool.close()

    uses = [pool.reserve, part.reserve, lambda: split_resource_pool(part, 1), lambda: merge_resource_pool(other, pool)]
    for use in uses:
        with pytest.raises(ClosedError, match="was closed; make a new pool"):
            use()


def test_closing_a_part_leaves_the_pool():
    pool = ResourcePool([2])
    first, second = split_resource_pool(pool, 1)
    first.close()

    assert merge_resource_pool(second, ResourcePool([1])).process_on_nodes == (1, 1)
    with pytest.raises(ClosedError):
        first.reserve()


def test_halves_of_a_node_are_one_node_again_only_in_the_order_of_its_devices():
    first, second = split_resource_pool(ResourcePool([4]), 2)
    assert merge_resource_pool(first, second).process_on_nodes == (4,)
    backwards = merge_resource_pool(second, first)
    assert backwards.process_on_nodes == (2, 2)
    assert [part.process_on_nodes for part in split_resource_pool(backwards, 4)] == [(2, 2)]
