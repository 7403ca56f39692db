"""Which node takes which part of a pool, decided from an inventory alone."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bandmaster.plan.placement import (
    ANY_NODE,
    Node,
    NodeChoice,
    Request,
    assign_nodes,
    cannot_place,
)


def node(name, cpus, cpus_free, gpus, gpus_free, holders=(), total=None, free=None, **facts):
    total, free = {"CPU": cpus, "GPU": gpus, **(total or {})}, {"CPU": cpus_free, "GPU": gpus_free, **(free or {})}
    return Node(name, total, free, holders, **facts)


def cpu_nodes(*free, total=None):
    return [node(f"10.0.0.{n}", total or amount, amount, 0, 0) for n, amount in enumerate(free)]


def gpu_nodes(*free, total=8, holders=()):
    return [node(f"10.0.0.{n}", 64, 64, total, amount, holders) for n, amount in enumerate(free)]


def cpus(*workers, each=1):
    return Request("pool", workers, each, 0)


def gpus(*workers, each=0):
    return Request("pool", workers, each, 1)


@pytest.mark.parametrize(
    ("workers", "free", "assigned"),
    [
        ([4], [4], (0,)),
        ([4, 2], [2, 4], (1, 0)),
        ([2, 4], [4, 2], (1, 0)),
        ([4, 4], [8, 8], (0, 1)),  # nodes of their own where there are enough
        ([2], [8, 2, 4], (1,)),  # the tightest fit
        ([2, 2, 2], [8, 8, 8, 8], (0, 1, 2)),  # equal sizes in the order of the addresses
        ([4, 4], [8], (0, 0)),  # shared otherwise
        ([3, 3, 2], [8, 2], (0, 0, 1)),
        ([4, 3, 3, 2], [6, 6], (0, 1, 1, 0)),  # only in this way
        ([4], [3, 3], None),  # no part is spread over nodes
        ([3, 3], [5], None),
        ([1], [], None),
    ],
)
def test_assignment(workers, free, assigned):
    assert assign_nodes(gpus(*workers), gpu_nodes(*free)) == assigned
    assert assign_nodes(cpus(*workers), cpu_nodes(*free)) == assigned


def test_whatever_is_scarcer_counts():
    assert assign_nodes(gpus(3, each=8), [node("a", 16, 16, 8, 8), node("b", 64, 64, 4, 4)]) == (1,)
    assert assign_nodes(gpus(3, each=8), [node("a", 16, 16, 8, 8)]) is None


def test_what_is_not_counted_has_no_end():
    here = Node("this process", {"GPU": 2}, {"GPU": 1}, is_many=True)

    assert assign_nodes(cpus(500, 500), [here]) == (0, 0)
    assert assign_nodes(cpus(5, each=0), cpu_nodes(1)) == (0,)
    assert assign_nodes(gpus(1), [here]) == (0,)
    assert assign_nodes(gpus(2), [here]) is None


def test_parts_of_cpus_add_up():
    assert assign_nodes(cpus(10, each=0.1), cpu_nodes(1)) == (0,)
    assert assign_nodes(cpus(11, each=0.1), cpu_nodes(1)) is None


def test_addresses_are_ordered_as_numbers():
    names = ["10.0.0.10", "node-b", "10.0.0.9", "fe80::1", "node-a"]
    nodes = [node(name, 1, 1, 0, 0) for name in names]

    assigned = assign_nodes(cpus(1, 1, 1, 1, 1), nodes)
    assert [names[index] for index in assigned] == ["10.0.0.9", "10.0.0.10", "fe80::1", "node-a", "node-b"]


def test_what_is_held_may_become_free():
    nodes = gpu_nodes(1, total=8)

    assert assign_nodes(gpus(8), nodes) is None
    assert assign_nodes(gpus(8), nodes, free=False) == (0,)
    assert assign_nodes(gpus(9), nodes, free=False) is None


@given(st.integers(1, 6), st.integers(1, 8), st.lists(st.integers(0, 8), max_size=4))
def test_entries_of_one_size_are_placed_whenever_they_fit(size, n_entries, free):
    assigned = assign_nodes(gpus(*[size] * n_entries), gpu_nodes(*free))

    assert (assigned is not None) == (sum(room // size for room in free) >= n_entries)
    assert assigned is None or all(assigned.count(node) * size <= room for node, room in enumerate(free))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_parts_have_nodes_of_their_own_whenever_they_can(workers, free):
    can = any(
        all(n <= free[node] for n, node in zip(workers, choice, strict=True))
        for choice in itertools.permutations(range(len(free)), len(workers))
    )
    assigned = assign_nodes(gpus(*workers), gpu_nodes(*free))

    assert can == (assigned is not None and len(set(assigned)) == len(workers))


# --- entries that may not go everywhere --------------------------------------------------------------------------

ZONES = ("a", "b", None)
CHOICES = (ANY_NODE, NodeChoice(labels=(("zone", ("a",)),)), NodeChoice(labels=(("zone", ("a", "b")),)))


def in_zones(free, zones):
    return [
        node(f"10.0.0.{n}", 64, 64, 8, room, labels={"zone": zone} if zone else {})
        for n, (room, zone) in enumerate(zip(free, zones, strict=True))
    ]


entries = st.lists(st.tuples(st.integers(1, 4), st.sampled_from(CHOICES)), min_size=1, max_size=4)
zoned = st.lists(st.tuples(st.integers(0, 6), st.sampled_from(ZONES)), min_size=1, max_size=4)


@given(entries, zoned, st.sampled_from(["spread", "strict_spread", "pack"]), st.integers(0, 2))
def test_an_assignment_is_one_that_is_allowed(entries, zoned, strategy, n_spares):
    sizes, choices = zip(*entries, strict=True)
    n_spares = min(n_spares, len(sizes) - 1)
    nodes = in_zones(*zip(*zoned, strict=True))
    request = Request("pool", sizes, 0, 1, choices=choices, strategy=strategy, n_spares=n_spares)

    def is_allowed(chosen):
        on = {index: [entry for entry, node in enumerate(chosen) if node == index] for index in chosen}
        return all(
            sum(sizes[entry] for entry in here) <= nodes[index].free["GPU"]
            and all(nodes[index].allows(choices[entry]) for entry in here)
            and (len(here) == 1 or not any(request.is_alone(entry) for entry in here))
            for index, here in on.items()
        )

    assigned = assign_nodes(request, nodes)
    assert assigned is None or is_allowed(assigned)


@pytest.mark.parametrize(
    ("sizes", "choices", "n_spares", "rooms", "assigned"),
    [
        ((8, 4, 4), (ANY_NODE, CHOICES[1], CHOICES[1]), 0, [(8, "a"), (8, "b"), (4, "a")], (1, 0, 2)),
        ((4, 4, 4), (CHOICES[1], ANY_NODE, ANY_NODE), 1, [(4, "a"), (8, "b"), (8, None)], (0, 2, 1)),
        ((4, 4), (NodeChoice("10.0.0.0"), ANY_NODE), 1, [(4, "a"), (8, "b")], (0, 1)),
        ((2, 2, 2), (ANY_NODE,) * 3, 1, [(8, None), (2, None)], (0, 0, 1)),  # a spare entry is alone
        ((3, 3, 2, 2, 2), (ANY_NODE,) * 5, 0, [(6, None), (6, None)], (0, 0, 1, 1, 1)),
    ],
)
def test_entries_that_few_nodes_are_open_to_come_first(sizes, choices, n_spares, rooms, assigned):
    request = Request("pool", sizes, 0, 1, choices=choices, n_spares=n_spares)
    assert assign_nodes(request, in_zones(*zip(*rooms, strict=True))) == assigned


def test_a_puzzle_that_has_a_solution_may_be_given_up():
    assert assign_nodes(gpus(4, 3, 3, 2, 2, 2), gpu_nodes(8, 8)) is None, "4 + 2 + 2 and 3 + 3 + 2 would fit"


def test_a_packed_pool_takes_as_few_nodes_as_it_can():
    assert assign_nodes(Request("pool", (2, 2, 2), 0, 1, strategy="pack"), gpu_nodes(2, 8, 4)) == (1, 1, 1)
    assert assign_nodes(Request("pool", (2, 2), 0, 1, strategy="pack"), gpu_nodes(8, 8)) == (0, 0)
    assert assign_nodes(Request("pool", (2, 2), 0, 1), gpu_nodes(8, 8)) == (0, 1)


def test_custom_resources_count_like_others():
    nodes = [node(f"10.0.0.{n}", 64, 64, 0, 0, total={"trainer": 4}, free={"trainer": n}) for n in range(3)]
    request = Request("pool", (2,), 1, 0, resources_per_worker=(("trainer", 1.0),))

    assert assign_nodes(request, nodes) == (2,)
    wants_all = Request("pool", (4, 4, 4), 1, 0, resources_per_worker=(("trainer", 1.0),))
    assert assign_nodes(wants_all, nodes, free=False) is not None
    assert assign_nodes(Request("pool", (2,), 1, 0, resources_per_worker=(("other", 1.0),)), nodes) is None


def test_a_machine_that_stands_for_all_nodes_has_what_they_are_asked_for():
    here = [Node("this machine", {"GPU": 2}, {"GPU": 2}, is_many=True)]
    wanted = Request("pool", (1, 1), 1, 1, (("trainer", 1.0),), (CHOICES[1],) * 2, "strict_spread", 1)

    assert assign_nodes(wanted, here) == (0, 0)


@pytest.mark.timeout(60)
def test_a_large_cluster_in_zones_is_decided_at_once():
    nodes = in_zones([8] * 128, [ZONES[n % 2] for n in range(128)])
    in_a, in_b = (NodeChoice(labels=(("zone", (zone,)),)) for zone in "ab")

    def fits(n_in_a, n_in_b, **options):
        choices = (in_a,) * n_in_a + (in_b,) * n_in_b
        return assign_nodes(Request("pool", (8,) * len(choices), 0, 1, choices=choices, **options), nodes) is not None

    assert fits(64, 64) and fits(60, 60, strategy="strict_spread", n_spares=2)
    assert not fits(65, 0) and not fits(65, 63)


@pytest.mark.parametrize(
    ("workers", "free", "fits"),
    [
        ([8] * 64, [8] * 64, True),
        ([8] * 65, [8] * 64, False),
        ([4] * 129, [8] * 64, False),
        ([1] * 2048, [32] * 64, True),
        ([5, 3] * 64, [8] * 64, True),
        ([5] * 65, [8] * 64, False),
        ([3] * 97, [n % 9 for n in range(64)], False),
        ([6, 5, 3, 2] * 16, [8] * 31, False),
        ([n % 7 + 1 for n in range(80)], [n % 9 for n in range(64)], False),
    ],
)
@pytest.mark.timeout(60)
def test_large_clusters_are_decided_at_once(workers, free, fits):
    assert (assign_nodes(gpus(*workers), gpu_nodes(*free)) is not None) == fits


# --- what is said when it does not fit --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "nodes", "options", "message"),
    [
        (
            gpus(8),
            [node("node-a", 64, 60, 8, 4), node("node-b", 64, 64, 8, 0, ("group 'critic'",))],
            {},
            "pool 'pool' cannot place 8 GPU workers as [8] (1 GPU each): "
            "node node-a has 4 of 8 GPUs and 60 of 64 CPUs free, room for 4; "
            "node node-b has 0 of 8 GPUs and 64 of 64 CPUs free, room for 0, held by group 'critic'; "
            "ask for [4], or close pools and groups that hold the rest",
        ),
        (
            cpus(3, 3, each=0.5),
            cpu_nodes(1),
            {"waited_s": 2.5},
            "pool 'pool' cannot place 6 workers as [3, 3] (0.5 CPU each) within 2.5 s: "
            "node 10.0.0.0 has 1 of 1 CPUs free, room for 2; ask for [2]",
        ),
        (
            gpus(1),
            cpu_nodes(4),
            {},
            "pool 'pool' cannot place 1 GPU workers as [1] (1 GPU each): "
            "node 10.0.0.0 has 0 of 0 GPUs and 4 of 4 CPUs free, room for 0; "
            "no node has a GPU; make the pool with use_gpu=False",
        ),
        (
            gpus(16),
            gpu_nodes(2, 0, holders=("pool 'other'",)),
            {"free": False},
            "pool 'pool' cannot place 16 GPU workers as [16] (1 GPU each): "
            "node 10.0.0.0 has 8 GPUs and 64 CPUs, room for 8; node 10.0.0.1 has 8 GPUs and 64 CPUs, room for 8; "
            "ask for [8, 8]",
        ),
        (
            Request("pool", (2, 2), 1, 0, choices=CHOICES[1:], strategy="strict_spread", n_spares=1),
            [node("10.0.0.1", 8, 2, 0, 0, labels={"zone": "b"}), node("10.0.0.2", 8, 8, 0, 0)],
            {},
            "pool 'pool' cannot place 2 workers as [2] and spare [2] (1 CPU each), each on a node of its own: "
            "node 10.0.0.1 (zone=b) has 2 of 8 CPUs free, room for 2; "
            "node 10.0.0.2 (zone=(none)) has 8 of 8 CPUs free, room for 8; no node is zone=a",
        ),
        (
            Request("pool", (2,), 1, 0, resources_per_worker=(("trainer", 0.5),), choices=(NodeChoice("node-b"),)),
            [node("10.0.0.1", 8, 8, 0, 0, hostname="node-b", total={"trainer": 1}, free={"trainer": 0.5})],
            {},
            "pool 'pool' cannot place 2 workers as [2] (1 CPU and 0.5 trainer each): "
            "node 10.0.0.1 has 8 of 8 CPUs and 0.5 of 1 trainer free, room for 1; ask for [1]",
        ),
        (
            cpus(1),
            [],
            {},
            "pool 'pool' cannot place 1 workers as [1] (1 CPU each): there are no nodes; no node has room",
        ),
    ],
)
def test_what_does_not_fit_is_told_node_by_node(request_, nodes, options, message):
    assert str(cannot_place(request_, nodes, **options)) == message
