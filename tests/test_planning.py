"""Planning, without a process: which rows go to which rank, what shares a group, whose values come back."""

import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack

from bandmaster import (
    ArgumentError,
    BatchError,
    Broadcast,
    CollectError,
    Concat,
    Dispatch,
    Gather,
    Mesh,
    MeshError,
    Only,
    PerRank,
    ProtocolError,
    Reduce,
    Split,
    TransferProtocol,
    plan,
)
from bandmaster.plan.arguments import BoundArgument as Bound
from bandmaster.plan.arguments import plan_call
from bandmaster.plan.collection import collect
from bandmaster.plan.rows import row_ranges, sources

THREE_D = Mesh(pp=2, dp=2, tp=2)
MICRO_TP = THREE_D.refine(gen_pp=2, gen_tp=1)
MICRO_BOTH = THREE_D.refine(gen_pp=1, gen_tp=1)
PAPER = Mesh(pp=1, dp=2, tp=4).refine(gen_pp=1, gen_tp=2)

SPLIT = Split("dp")
EVERYTHING = [None] * 8
ALL = [0, 1, 2, 3, 4, 5, 6, 7]


# --- the table, by hand -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("protocol", "mesh", "rows", "received", "collected"),
    [
        ("ONE_TO_ALL", THREE_D, 10, EVERYTHING, ALL),
        ("ALL_TO_ALL", THREE_D, 10, EVERYTHING, ALL),
        ("3D_PP_ONLY", THREE_D, 10, EVERYTHING, [0, 4]),
        ("3D_PROTO", THREE_D, 10,
         [(0, 5), (0, 5), (5, 10), (5, 10), (0, 5), (0, 5), (5, 10), (5, 10)], [4, 6]),
        ("3D_PROTO", THREE_D, 8,
         [(0, 4), (0, 4), (4, 8), (4, 8), (0, 4), (0, 4), (4, 8), (4, 8)], [4, 6]),
        ("3D_PROTO", THREE_D, 9,
         [(0, 5), (0, 5), (5, 9), (5, 9), (0, 5), (0, 5), (5, 9), (5, 9)], [4, 6]),
        ("DP_PROTO", THREE_D, 10,
         [(0, 5), (0, 5), (5, 10), (5, 10), (0, 5), (0, 5), (5, 10), (5, 10)], [0, 2]),
        ("DP_PROTO", THREE_D, 8,
         [(0, 4), (0, 4), (4, 8), (4, 8), (0, 4), (0, 4), (4, 8), (4, 8)], [0, 2]),
        ("3D_ALL_MICRO_DP", MICRO_TP, 10,
         [(0, 3), (3, 6), (6, 8), (8, 10), (0, 3), (3, 6), (6, 8), (8, 10)], [0, 1, 2, 3]),
        ("3D_ALL_MICRO_DP", MICRO_TP, 8,
         [(0, 2), (2, 4), (4, 6), (6, 8), (0, 2), (2, 4), (4, 6), (6, 8)], [0, 1, 2, 3]),
        ("3D_ALL_MICRO_DP", MICRO_BOTH, 10,
         [(0, 2), (2, 4), (6, 7), (7, 8), (4, 5), (5, 6), (8, 9), (9, 10)], [0, 1, 4, 5, 2, 3, 6, 7]),
        ("3D_ALL_MICRO_DP", MICRO_BOTH, 8,
         [(0, 1), (1, 2), (4, 5), (5, 6), (2, 3), (3, 4), (6, 7), (7, 8)], [0, 1, 4, 5, 2, 3, 6, 7]),
        ("ONE_TO_ALL", PAPER, 10, EVERYTHING, ALL),
        ("ALL_TO_ALL", PAPER, 8, EVERYTHING, ALL),
        ("3D_PP_ONLY", PAPER, 8, EVERYTHING, [0]),
        ("3D_PROTO", PAPER, 10,
         [(0, 5), (0, 5), (0, 5), (0, 5), (5, 10), (5, 10), (5, 10), (5, 10)], [0, 4]),
        ("3D_PROTO", PAPER, 8,
         [(0, 4), (0, 4), (0, 4), (0, 4), (4, 8), (4, 8), (4, 8), (4, 8)], [0, 4]),
        ("DP_PROTO", PAPER, 10,
         [(0, 5), (0, 5), (0, 5), (0, 5), (5, 10), (5, 10), (5, 10), (5, 10)], [0, 4]),
        ("3D_ALL_MICRO_DP", PAPER, 10,
         [(0, 3), (3, 6), (0, 3), (3, 6), (6, 8), (8, 10), (6, 8), (8, 10)], [0, 1, 4, 5]),
        ("3D_ALL_MICRO_DP", PAPER, 8,
         [(0, 2), (2, 4), (0, 2), (2, 4), (4, 6), (6, 8), (4, 6), (6, 8)], [0, 1, 4, 5]),
    ],
)  # fmt: skip
def test_the_table(protocol, mesh, rows, received, collected):
    planned = plan(protocol, mesh, rows)

    assert list(planned.received) == received
    assert list(planned.collected) == collected
    assert plan(Dispatch.named(protocol), mesh, rows) == planned

    sent = (
        plan_call([Bound(0, "x", list(range(rows)))], planned.protocol.outgoing, {}, mesh, "C.m")
        if received[0]
        else None
    )
    for rank, expected in enumerate(received):
        assert expected is None or arguments(sent, rank) == {0: list(range(*expected))}


@pytest.mark.parametrize(
    ("protocol", "mesh", "same_on"),
    [
        ("3D_PROTO", Mesh(dp=4), Mesh(pp=1, dp=4, tp=1)),
        ("3D_PROTO", Mesh(tp=2, dp=2), Mesh(pp=1, tp=2, dp=2)),
        ("3D_ALL_MICRO_DP", THREE_D, THREE_D.refine()),
        ("3D_ALL_MICRO_DP", Mesh(dp=2, tp=2).refine(gen_tp=1), Mesh(pp=1, dp=2, tp=2).refine(gen_tp=1)),
        ("3D_PP_ONLY", Mesh(dp=4), Mesh(pp=1, dp=4, tp=1)),
        ("DP_PROTO", Mesh(ep=4), Mesh(dp=1, ep=4)),
        (TransferProtocol(Split("tp"), Concat("tp")), Mesh(dp=4), Mesh(dp=4, tp=1)),
    ],
    ids=str,
)
def test_axes_of_the_table_that_a_mesh_does_not_have_count_as_size_1(protocol, mesh, same_on):
    planned, same = plan(protocol, mesh, 10), plan(protocol, same_on, 10)

    assert (planned.received, planned.collected) == (same.received, same.collected)
    assert f" on {mesh}, 10 rows\nrank" in str(planned)
    assert planned._repr_svg_().count(">rank ") == mesh.size
    sent = [
        plan_call([Bound(0, "x", list(range(10)))], p.protocol.outgoing, {}, p.mesh, "C.m") for p in (planned, same)
    ]
    assert planned.received[0] is None or sent[0] == sent[1]


@pytest.mark.parametrize(
    ("rows", "parts", "pad", "ranges"),
    [
        (10, 4, False, [(0, 3), (3, 6), (6, 8), (8, 10)]),
        (8, 4, False, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (2, 4, False, [(0, 1), (1, 2), (2, 2), (2, 2)]),
        (0, 3, False, [(0, 0), (0, 0), (0, 0)]),
        (5, 1, False, [(0, 5)]),
        (10, 4, True, [(0, 3), (3, 6), (6, 9), (9, 10)]),
        (8, 4, True, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (2, 4, True, [(0, 1), (1, 2), (2, 2), (2, 2)]),
        (0, 3, True, [(0, 0), (0, 0), (0, 0)]),
    ],
)
def test_row_ranges(rows, parts, pad, ranges):
    assert list(row_ranges(rows, parts, pad)) == ranges


@given(st.integers(0, 200), st.integers(1, 20), st.booleans())
def test_row_ranges_cover_every_row_once_and_in_order(rows, parts, pad):
    ranges = row_ranges(rows, parts, pad)
    sizes = [stop - start for start, stop in ranges]

    assert [row for start, stop in ranges for row in range(start, stop)] == list(range(rows))
    assert len(ranges) == parts
    assert sizes == sorted(sizes, reverse=True)
    assert pad or max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("incoming", "ranks"),
    [
        (Gather(), [0, 1, 2, 3, 4, 5, 6, 7]),
        (Gather(tp=1), [1, 3, 5, 7]),
        (Gather("pp"), [0, 4]),
        (Gather("tp", "pp", dp=1), [2, 6, 3, 7]),
        (Concat("pp", "dp", tp=-1), [1, 3, 5, 7]),
        ((Concat("dp", pp=-1), Reduce("mean", "pp", "dp")), [4, 6, 0, 2]),
    ],
    ids=repr,
)
def test_the_ranks_that_are_collected(incoming, ranks):
    assert list(sources(THREE_D, incoming)) == ranks


# --- what goes out ----------------------------------------------------------------------------------------------


def arguments(sent_by, rank):
    """What the rank gets, by position or keyword."""
    return {key: value for group in sent_by.groups if rank in group.ranks for key, value in group.items}


def pack_one(value, mesh, outgoing=SPLIT):
    return plan_call([Bound(0, "x", value)], outgoing, {}, mesh, "C.m")


@pytest.mark.parametrize(
    "value",
    [(1, 2), "ab", b"ab", 2, 2.0, None, True, {1, 2}, range(2), np.float32(2), np.array(2), torch.tensor(2),
     TensorDict({"a": torch.zeros(2)}, batch_size=[]), {}, {"lr": 2, "name": "ab"}, {"a": np.array(2)}, {"a": (1, 2)}],
    ids=lambda value: f"{type(value).__name__} {value!s:.15}",
)  # fmt: skip
def test_what_has_no_rows_is_broadcast_beside_a_batch_whatever_its_length(value):
    sent_by = plan_call([Bound(0, "x", value), Bound(1, "rows", [1, 2])], SPLIT, {}, Mesh(dp=2), "C.m")

    assert [arguments(sent_by, rank) for rank in (0, 1)] == [{0: value, 1: [1]}, {0: value, 1: [2]}]
    assert arguments(sent_by, 1)[0] is value


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        ([1, 2, 3], [[1, 2], [3]]),
        ([], [[], []]),
        ({"a": [1, 2, 3], "b": {"c": ["x", "y", "z"]}}, [{"a": [1, 2], "b": {"c": ["x", "y"]}},
                                                        {"a": [3], "b": {"c": ["z"]}}]),
    ],
)  # fmt: skip
def test_batches_are_split(value, parts):
    sent_by = pack_one(value, Mesh(dp=2))

    assert [arguments(sent_by, rank)[0] for rank in (0, 1)] == parts


@pytest.mark.parametrize(
    "batch",
    [np.arange(6).reshape(3, 2), torch.arange(6).reshape(3, 2), np.zeros((0, 2)), torch.zeros(1)],
    ids=lambda batch: f"{type(batch).__name__} {batch.shape}",
)
def test_slices_of_arrays_and_tensors_are_views(batch):
    sent_by = pack_one(batch, Mesh(dp=2))
    half = (len(batch) + 1) // 2

    for rank, expected in enumerate([batch[:half], batch[half:]]):
        part = arguments(sent_by, rank)[0]
        assert part.tolist() == expected.tolist()
        assert (part.base if isinstance(part, np.ndarray) else part._base) is not None


def test_a_tensordict_is_split_by_its_batch_size():
    batch = TensorDict({"a": torch.arange(3), "b": {"c": torch.zeros(3, 2)}}, batch_size=[3])
    sent_by = pack_one(batch, Mesh(dp=2))

    assert [arguments(sent_by, rank)[0].batch_size for rank in (0, 1)] == [(2,), (1,)]
    assert arguments(sent_by, 1)[0]["b", "c"].tolist() == [[0, 0]]
    assert arguments(sent_by, 0)[0]["a"].data_ptr() == batch["a"].data_ptr()


def test_rules_of_single_arguments_come_first():
    bound = [
        Bound(0, "rows", [1, 2, 3, 4]),
        Bound(1, "table", ["a", "b"]),
        Bound("seeds", "seeds", [7, 8, 9, 10]),
        Bound("by_tp", "by_tp", [5, 6]),
    ]
    rules = {"table": Broadcast(), "seeds": PerRank(), "by_tp": Split("tp")}
    sent_by = plan_call(bound, Split("dp"), rules, Mesh(dp=2, tp=2), "C.m")

    assert [arguments(sent_by, rank) for rank in range(4)] == [
        {0: [1, 2], 1: ["a", "b"], "seeds": 7, "by_tp": [5]},
        {0: [1, 2], 1: ["a", "b"], "seeds": 8, "by_tp": [6]},
        {0: [3, 4], 1: ["a", "b"], "seeds": 9, "by_tp": [5]},
        {0: [3, 4], 1: ["a", "b"], "seeds": 10, "by_tp": [6]},
    ]


def test_a_rule_for_var_args_or_var_kwargs_holds_for_all_of_them_and_one_for_a_keyword_for_that_one():
    bound = [
        Bound(0, "args", [1, 2]),
        Bound("a", "options", [3, 4]),
        Bound("b", "options", [5, 6]),
    ]
    sent_by = plan_call(bound, Split("dp"), {"args": Broadcast(), "b": PerRank()}, Mesh(dp=2), "C.m")

    assert [arguments(sent_by, rank) for rank in (0, 1)] == [
        {0: [1, 2], "a": [3], "b": 5},
        {0: [1, 2], "a": [4], "b": 6},
    ]


def test_other_protocols_ask_no_argument_whether_it_has_rows():
    mixed = {"a": [1, 2], "b": 3}

    assert arguments(pack_one(mixed, Mesh(dp=2), Broadcast()), 1) == {0: mixed}
    assert arguments(pack_one([mixed, None], Mesh(dp=2), PerRank()), 1) == {0: None}


# --- parcels: what is encoded once ------------------------------------------------------------------------------


def test_replicas_share_a_parcel():
    sent_by = pack_one(list(range(8)), PAPER, Split("dp", "micro_dp"))

    assert [group.ranks for group in sent_by.groups] == [(0, 2), (1, 3), (4, 6), (5, 7)]


def test_arguments_of_one_rule_share_a_parcel():
    bound = [
        Bound(0, "x", [1, 2]),
        Bound(1, "lr", 0.1),
        Bound("y", "y", [3, 4]),
        Bound("tag", "tag", "t"),
    ]
    sent_by = plan_call(bound, Split("dp"), {}, Mesh(dp=2), "C.m")

    assert sorted((group.names, group.ranks) for group in sent_by.groups) == [
        (("lr", "tag"), (0, 1)), (("x", "y"), (0,)), (("x", "y"), (1,)),
    ]  # fmt: skip


def test_ranks_that_are_given_the_same_object_share_a_parcel():
    big, other = object(), object()
    sent_by = pack_one([big, other, big, big], Mesh(dp=4), PerRank())

    assert [(group.ranks, group.items) for group in sent_by.groups] == [
        ((0, 2, 3), ((0, big),)),
        ((1,), ((0, other),)),
    ]


def test_values_that_are_made_on_the_way_are_not_mixed_up():
    sent_by = pack_one(range(1000, 1064), Mesh(dp=64), PerRank())

    assert [arguments(sent_by, rank)[0] for rank in range(64)] == list(range(1000, 1064))


def test_a_call_without_arguments():
    for outgoing in (Split("dp"), Broadcast(), PerRank()):
        assert not plan_call([], outgoing, {}, Mesh(dp=2), "C.m").groups


@dataclass
class Config:
    rate: float
    stop: list
    parent: object = None


def test_a_dataclass_with_a_field_that_is_no_batch_is_broadcast_beside_a_batch():
    config = Config(0.5, [1, 2, 3])
    config.parent = config
    sent_by = plan_call([Bound(0, "config", config), Bound(1, "rows", [1, 2])], SPLIT, {}, Mesh(dp=2), "C.m")

    assert arguments(sent_by, 0)[0] is arguments(sent_by, 1)[0] is config


NOTHING_TO_SPLIT = {
    "a tuple": ({"x": (1, 2)}, {}, ["'x' is tuple", "arguments={'x': Broadcast()}"]),
    "several": (
        {"x": (1, 2), "rate": 0.5},
        {},
        ["'x' is tuple, 'rate' is float", "arguments={'x': Broadcast(), 'rate': Broadcast()}"],
    ),
    "None": ({"x": None}, {}, ["'x' is NoneType"]),
    "beside what is declared": ({"x": 1, "table": [1, 2]}, {"table": Broadcast()}, ["'x' is int. "]),
    "a dataclass": ({"x": Config(0.5, [1, 2])}, {}, ["'x' is test_planning.Config, whose field 'rate' is float. "]),
}


@pytest.mark.parametrize(("values", "rules", "words"), NOTHING_TO_SPLIT.values(), ids=NOTHING_TO_SPLIT)
@pytest.mark.parametrize("n_ranks", [1, 2])
def test_a_split_that_finds_no_batch_is_refused(values, rules, words, n_ranks):
    bound = [Bound(index, name, value) for index, (name, value) in enumerate(values.items())]

    with pytest.raises(BatchError) as caught:
        plan_call(bound, SPLIT, rules, Mesh(dp=n_ranks), "C.m")
    start = "C.m splits batches by Split('dp'), but no argument is a batch: "
    words = [start, *words, "Pass a batch (arrays", "register_batch_type", "ONE_TO_ALL"]
    assert [word for word in words if word not in str(caught.value)] == []


def test_what_the_user_declared_is_not_asked_for_a_batch():
    everything = plan_call(
        [Bound(0, "x", 1), Bound("y", "z", 2)],
        SPLIT,
        {"x": Broadcast(), "y": Broadcast()},
        Mesh(dp=2),
        "C.m",
    )
    assert [arguments(everything, rank) for rank in (0, 1)] == [{0: 1, "y": 2}] * 2

    per_rank = plan_call([Bound(0, "x", 1), Bound(1, "seed", [7, 8])], SPLIT, {"seed": PerRank()}, Mesh(dp=2), "C.m")
    assert [arguments(per_rank, rank) for rank in (0, 1)] == [{0: 1, 1: 7}, {0: 1, 1: 8}]


# --- padding ----------------------------------------------------------------------------------------------------


def counts_of(sent_by):
    """The rows of each rank without padding, and with it."""
    return tuple(map(len, sent_by.real_rows.numbers)), sent_by.real_rows.padded_to


@pytest.mark.parametrize(
    ("rows", "parts", "counts"),
    [
        ([1, 2, 3, 4, 5], [[1, 2], [3, 4], [5, 1], [1, 2]], ((2, 2, 1, 0), 2)),
        ([1], [[1], [1], [1], [1]], ((1, 0, 0, 0), 1)),
        ([1, 2, 3, 4], [[1], [2], [3], [4]], ((1, 1, 1, 1), 1)),
        ([], [[], [], [], []], ((0, 0, 0, 0), 0)),
    ],
)
def test_padding_repeats_rows_from_the_start(rows, parts, counts):
    before = list(rows)
    sent_by = pack_one(rows, Mesh(dp=4), Split("dp", pad=True))

    assert [arguments(sent_by, rank)[0] for rank in range(4)] == parts
    assert counts_of(sent_by) == counts
    assert rows == before


def test_the_rows_of_each_rank_are_known():
    assert pack_one([1, 2, 3], Mesh(dp=2, tp=2)).real_rows.numbers == (range(2), range(2), range(2, 3), range(2, 3))
    assert pack_one([1, 2, 3], Mesh(dp=2), Broadcast()).real_rows is None


def test_the_rows_that_are_padded_count_where_there_are_several_splits():
    bound = [Bound(0, "x", [1, 2, 3]), Bound(1, "y", [1, 2]), Bound(2, "z", [1])]
    sent_by = plan_call(bound, SPLIT, {"y": Split("tp", pad=True), "z": Split("tp")}, Mesh(dp=2, tp=2), "C.m")

    assert counts_of(sent_by) == ((1, 1, 1, 1), 1)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_in_the_strided_layout_is_split_where_each_rank_gets_a_row():
    nested = torch.nested.nested_tensor([torch.ones(3)])
    sent_by = pack_one(nested, Mesh(dp=2), Split("dp", pad=True))

    assert [arguments(sent_by, rank)[0].unbind()[0].tolist() for rank in (0, 1)] == [[1, 1, 1]] * 2
    with pytest.raises(BatchError, match=r"argument 'x' of C.m: a nested tensor in .* cannot have 0 rows, which .*"):
        pack_one(nested, Mesh(dp=2))


def test_replicas_are_padded_alike():
    sent_by = pack_one(np.arange(3), Mesh(dp=2, tp=2), Split("dp", pad=True))

    assert [arguments(sent_by, rank)[0].tolist() for rank in range(4)] == [[0, 1], [0, 1], [2, 0], [2, 0]]
    assert counts_of(sent_by) == ((2, 2, 1, 1), 2)


@given(st.integers(0, 30), st.integers(1, 3), st.integers(1, 3), st.booleans(), st.sampled_from([list, np.array]))
def test_what_goes_out_comes_back(n_rows, dp, tp, pad, make):
    mesh = Mesh(dp=dp, pp=2, tp=tp)
    batch = make([10 * row for row in range(n_rows)])
    sent_by = pack_one(batch, mesh, Split("dp", "tp", pad=pad))
    incoming = Concat("dp", "tp", pp=-1)
    ranks = sources(mesh, incoming)

    back = collect(incoming, ranks, [arguments(sent_by, rank)[0] for rank in ranks], "C.m", sent_by.real_rows)

    assert type(back) is type(batch)
    assert list(back) == list(batch)


# --- costs ------------------------------------------------------------------------------------------------------


def pack_balanced(batch, dp, **options):
    return pack_one(batch, Mesh(dp=dp), Split("dp", balance="cost", **options))


@given(st.lists(st.floats(0, 1e9), max_size=40), st.integers(1, 5), st.booleans())
def test_what_was_split_by_cost_comes_back_in_order(costs, dp, pad):
    sent_by = pack_balanced({"cost": np.array(costs), "row": list(range(len(costs)))}, dp, pad=pad)
    parts = [arguments(sent_by, rank)[0] for rank in range(dp)]

    back = collect(Concat("dp"), range(dp), parts, "C.m", sent_by.real_rows)

    assert back["row"] == list(range(len(costs)))
    assert back["cost"].tolist() == costs
    assert counts_of(sent_by) == counts_of(pack_one(costs, Mesh(dp=dp), Split("dp", pad=pad)))


@given(st.lists(st.integers(0, 100), max_size=40), st.integers(1, 5))
def test_no_rank_has_the_same_row_twice_though_parts_are_padded(costs, dp):
    sent_by = pack_balanced({"cost": costs, "row": list(range(len(costs)))}, dp, pad=True)
    for rank in range(dp):
        rows = arguments(sent_by, rank)[0]["row"]
        assert len(set(rows)) == len(rows)


@given(st.lists(st.integers(0, 100), min_size=1, max_size=60), st.integers(1, 6))
def test_parts_cost_about_the_same(costs, dp):
    sent_by = pack_balanced({"cost": np.array(costs)}, dp)
    loads = [int(arguments(sent_by, rank)[0]["cost"].sum()) for rank in range(dp)]

    assert max(loads) <= sum(costs) / dp + 2 * max(costs)


def test_rows_keep_their_order_within_a_part():
    sent_by = pack_balanced({"cost": [5, 1, 4, 2], "row": [0, 1, 2, 3]}, 2)

    assert [arguments(sent_by, rank)[0]["row"] for rank in (0, 1)] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("dtype", ["u1", "u8", "i1", "f2", "?"])
def test_costs_of_any_dtype_are_numbers(dtype):
    costs = np.array([0, 100, 0, 100, 0, 100, 0, 100]).astype(dtype)
    sent_by = pack_balanced({"cost": costs}, 2)
    assert [np.count_nonzero(arguments(sent_by, rank)[0]["cost"]) for rank in (0, 1)] == [2, 2]


def test_costs_may_be_an_argument_of_their_own():
    bound = [Bound(0, "x", ["a", "b", "c", "d"]), Bound(1, "cost", torch.tensor([9.0, 1, 8, 1]))]
    sent_by = plan_call(bound, Split("dp", balance="cost"), {}, Mesh(dp=2), "C.m")

    assert [arguments(sent_by, rank)[0] for rank in (0, 1)] == [["a", "d"], ["b", "c"]]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"x": [1, 2]},
            r"C.m is split by Split\('dp', balance='cost'\), but neither a column of 'x' nor an argument .*",
        ),
        ([1, 2], r"C.m is split by .*, but neither a column of 'x' nor an argument is called 'cost'; add one .*"),
        ({"cost": [1, -2]}, r".* is not one number of 0 or more for each of 2 rows: it has 2 values of dtype int64"),
        ({"cost": np.ones((2, 3))}, r".* for each of 2 rows: it has 6 values of dtype float64"),
        ({"cost": ["a", "b"]}, r".* for each of 2 rows: it has 2 values of dtype <U1"),
        ({"cost": [1j, 2]}, r".* for each of 2 rows: it has 2 values of dtype complex128"),
        ({"cost": [1, float("nan")]}, r".* is not one number of 0 or more for each of 2 rows.*"),
    ],
)
def test_costs_that_are_none_are_refused(batch, message):
    with pytest.raises(BatchError, match=f"^{message}$"):
        pack_balanced(batch, 2)


def test_the_order_cannot_be_restored_if_rows_are_missing():
    sent_by = pack_balanced({"cost": [3, 2, 1]}, 2)
    with pytest.raises(CollectError, match=r"returned 1 rows for 2 rows of a batch that was not sent in its order"):
        collect(Concat("dp"), [0, 1], [[1], [2]], "C.m", sent_by.real_rows)


@pytest.mark.parametrize("balance", [1, "", ["cost"]])
def test_a_split_is_balanced_by_a_name(balance):
    with pytest.raises(ProtocolError, match=r"balance of Split must be the name of a column or of an argument, got"):
        Split("dp", balance=balance)
    assert repr(Split("dp", pad=True, balance="n")) == "Split('dp', pad=True, balance='n')"


def test_a_lazy_stack_of_fewer_rows_than_ranks_comes_back():
    batch = lazy_stack([TensorDict({"ids": torch.arange(n)}) for n in (3, 1)])
    sent_by = pack_one(batch, Mesh(dp=4))

    back = collect(Concat("dp"), range(4), [arguments(sent_by, rank)[0] for rank in range(4)], "C.m")

    assert [row["ids"].tolist() for row in back.unbind(0)] == [[0, 1, 2], [0]]


# --- mistakes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bound", "outgoing", "rules", "error", "message"),
    [
        ({"x": [1, 2, 3]}, PerRank(), {}, ArgumentError,
         "argument 'x' of C.m has 3 values for 2 ranks; pass one value per rank"),
        ({"x": 5}, PerRank(), {}, ArgumentError,
         "argument 'x' of C.m must be a sequence with one value per rank, got int; for 2 ranks pass a list of 2 "
         "values"),
        ({"x": "ab"}, PerRank(), {}, ArgumentError, "got str; for 2 ranks pass a list of 2 values"),
        ({"x": np.arange(2)}, PerRank(), {}, ArgumentError, "got ndarray; for 2 ranks pass a list of 2 values"),
        ({"x": [1, 2], "y": [1, 2, 3]}, Split("dp"), {}, BatchError,
         "C.m got batches of unequal row counts: 'x' has 2, 'y' has 3; make them equal, or declare "
         "arguments={'y': Broadcast()}"),
        ({"x": (1, 2)}, Broadcast(), {"x": Split("dp")}, BatchError,
         "argument 'x' of C.m cannot be split: tuple has no rows; pass a batch, or declare "
         "arguments={'x': Broadcast()}"),
        ({"x": {"a": [1], "b": 2}}, Split("dp"), {}, BatchError,
         "argument 'x' of C.m: a dict mixes batches with other values: 'a' has 1 rows, 'b' is int without rows; keep "
         "only batches of equal length in it, or broadcast all of it with register(..., arguments={'x': Broadcast()})"),
        ({"x": {"a": [1], "b": [1, 2]}}, Split("dp"), {}, BatchError,
         "argument 'x' of C.m: a dict has batches of unequal row counts: 'a' has 1, 'b' has 2; keep only batches of "
         "equal length in it, or broadcast all of it with register(..., arguments={'x': Broadcast()})"),
        ({"x": [1]}, Split("ep"), {}, MeshError, "Mesh(dp=2) has no axis 'ep', only 'dp'"),
    ],
)  # fmt: skip
def test_mistakes_name_the_argument_and_both_numbers(bound, outgoing, rules, error, message):
    bound = [Bound(index, name, value) for index, (name, value) in enumerate(bound.items())]

    with pytest.raises(error) as caught:
        plan_call(bound, outgoing, rules, Mesh(dp=2), "C.m")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("mistake", "error", "message"),
    [
        (lambda: plan("DP_PROTO", Mesh(dp=2), -1), BatchError, "rows must be a non-negative number, got -1"),
        (lambda: plan("DP", Mesh(dp=2), 1), ProtocolError, "unknown transfer protocol 'DP'; use one of ONE_TO_ALL"),
        (
            lambda: plan(TransferProtocol(Split("ep"), Gather()), Mesh(dp=2), 1),
            MeshError,
            "Mesh(dp=2) has no axis 'ep'",
        ),
        (lambda: plan(TransferProtocol(Split("micro_tp"), Gather()), THREE_D, 1), MeshError, "gen_tp=...) makes it"),
        (lambda: plan(TransferProtocol(Split("dp"), Only(pp=1)), Mesh(dp=2), 1), MeshError, "which counts as size 1"),
        (lambda: plan(TransferProtocol(Split("tp", "gen_tp"), Gather()), PAPER, 1), MeshError, "overlap"),
        (
            lambda: plan({"dispatch_fn": print, "collect_fn": print}, Mesh(dp=2), 1),
            ProtocolError,
            "a custom protocol cannot be planned, because its dispatch_fn runs at the call; pass a TransferProtocol",
        ),
    ],
)
def test_mistakes_in_a_plan(mistake, error, message):
    with pytest.raises(error) as caught:
        mistake()
    assert message in str(caught.value)


# --- the same, for a person -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("protocol", "mesh", "rows", "lines"),
    [
        (TransferProtocol(Split("dp"), Concat("dp", pp=-1)), Mesh(pp=2, dp=2), 3, [
            "TransferProtocol(outgoing=Split('dp'), incoming=Concat('dp', pp=-1)) on Mesh(pp=2, dp=2), 3 rows",
            "rank  pp  dp  gets      back",
            "0     0   0   rows 0:2  -",
            "1     0   1   rows 2:3  -",
            "2     1   0   rows 0:2  part 0",
            "3     1   1   rows 2:3  part 1",
        ]),
        ("ALL_TO_ALL", Mesh(dp=2), 2, [
            "TransferProtocol(outgoing=PerRank(), incoming=Gather()) on Mesh(dp=2), 2 rows",
            "rank  dp  gets           back",
            "0     0   its own value  item 0",
            "1     1   its own value  item 1",
        ]),
        ("ONE_TO_ALL", Mesh(dp=1), 2, [
            "TransferProtocol(outgoing=Broadcast(), incoming=Gather()) on Mesh(dp=1), 2 rows",
            "rank  dp  gets        back",
            "0     0   everything  item 0",
        ]),
        (TransferProtocol(Split("dp", pad=True), Concat("dp")), Mesh(dp=3), 4, [
            "TransferProtocol(outgoing=Split('dp', pad=True), incoming=Concat('dp')) on Mesh(dp=3), 4 rows",
            "rank  dp  gets                  back",
            "0     0   rows 0:2              part 0",
            "1     1   rows 2:4              part 1",
            "2     2   rows 4:4 + 2 padding  part 2",
        ]),
        (TransferProtocol(Split("dp"), (Concat("dp"), Reduce("mean"), Only(dp=-1))), Mesh(dp=2, tp=2), 3, [
            "TransferProtocol(outgoing=Split('dp'), incoming=(Concat('dp'), Reduce('mean'), Only(dp=-1))) "
            "on Mesh(dp=2, tp=2), 3 rows",
            "rank  dp  tp  gets      back",
            "0     0   0   rows 0:2  part 0, item 0, -",
            "1     0   1   rows 0:2  -, item 1, -",
            "2     1   0   rows 2:3  part 1, item 2, item 0",
            "3     1   1   rows 2:3  -, item 3, -",
        ]),
    ],
)  # fmt: skip
def test_the_printed_plan(protocol, mesh, rows, lines):
    assert str(plan(protocol, mesh, rows)).splitlines() == lines


def test_the_drawn_plan_has_a_band_for_each_collect():
    drawing = plan(TransferProtocol(Split("dp"), (Concat("dp"), Gather())), Mesh(dp=2, tp=2), 3)._repr_svg_()

    assert [drawing.count(text) for text in (">Concat<", ">Gather<", ">part ", ">item ")] == [1, 1, 2, 4]


def test_a_drawing_can_be_read_on_light_and_on_dark_pages():
    drawing = plan("3D_PROTO", Mesh(pp=2, dp=2), 3)._repr_svg_()
    texts = re.findall(r"<text [^>]*fill='(#\w+)'( text-anchor)?", drawing)
    frames = re.findall(r"stroke='(#\w+)' stroke-width", drawing)
    boxes = re.findall(r"<rect [^>]*fill='(#\w+)'", drawing)
    for colour in {*(colour for colour, is_in_box in texts if not is_in_box), *frames}:
        for page in ("#ffffff", "#111111"):
            assert contrast(colour, page) > 3.5, f"{colour} on {page}"
    for colour in {colour for colour, is_in_box in texts if is_in_box}:
        assert all(contrast(colour, box) > 7 for box in boxes)
    assert "#ffffff" not in boxes and "white" not in drawing


def contrast(one, other):
    """The ratio that WCAG 2 defines; 3 is enough for drawings and large text."""
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour):
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[n : n + 2], 16) / 255 for n in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
