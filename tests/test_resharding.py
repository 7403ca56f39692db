"""Layouts and the plans between them: pure, and carried out on numpy arrays here."""

import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bandmaster as bm
from bandmaster import Mesh
from bandmaster.rl import Box, Layout, reshard

SIZES = st.integers(1, 3)
DTYPES = {"float32": np.float32, "bfloat16": np.uint16, "int64": np.int64, "bool": np.uint8}
SPECS = st.tuples(st.lists(st.integers(0, 7), max_size=3).map(tuple), st.sampled_from(sorted(DTYPES)))
TENSORS = st.dictionaries(st.sampled_from("abcd"), SPECS, min_size=1)


@st.composite
def meshes(draw):
    """A mesh for training, and the refinement of it that generates."""
    pp, dp, tp = draw(SIZES), draw(SIZES), draw(SIZES)
    divisors = [[n for n in range(1, size + 1) if size % n == 0] for size in (pp, tp)]
    gen_pp, gen_tp = (draw(st.sampled_from(some)) for some in divisors)
    return Mesh(pp=pp, dp=dp, tp=tp).refine(gen_pp=gen_pp, gen_tp=gen_tp)


@st.composite
def layouts(draw, tensors, mesh=None, stages="pp"):
    """Tensors cut over any axes of a mesh, some of them on one pipeline stage alone."""
    mesh = mesh or draw(meshes())
    dims, at = {}, {}
    for name, (shape, _) in tensors.items():
        over = draw(st.sampled_from([(), ("tp",), ("dp",), ("dp", "tp"), ("gen_tp",), ("micro_dp",)]))
        if shape and over:
            dims[name] = {draw(st.integers(0, len(shape) - 1)): over if len(over) > 1 else over[0]}
        if len(shape) > 1 and over == ("tp",):
            dims[name] = {0: "dp", 1: "tp"}
        if "micro_dp" not in over and draw(st.booleans()):  # these groups span stages
            at[name] = {stages: draw(st.integers(0, mesh.axis_size(stages) - 1))}
    return mesh, Layout.split(mesh, tensors, dims, at)


def whole_arrays(tensors):
    """Arrays of these shapes, each element another value as far as its dtype allows."""
    rng = np.random.default_rng(0)
    return {name: rng.integers(0, 256, shape).astype(DTYPES[dtype]) for name, (shape, dtype) in tensors.items()}


def held(layout, rank, whole):
    """What a rank has of some whole arrays."""
    return {
        name: whole[name][box.slices(Box((0,) * len(box.start), whole[name].shape))].copy()
        for name, box in layout.boxes[rank].items()
    }


def assert_fills(plan, moves):
    """Carry out some moves on arrays: each rank has its rectangles afterwards, and nothing came twice."""
    whole = whole_arrays(plan.source.tensors)
    sources = [held(plan.source, rank, whole) for rank in range(plan.source.n_ranks)]
    wanted = [held(plan.target, rank, whole) for rank in range(plan.target.n_ranks)]
    filled = [{name: np.zeros_like(array) for name, array in arrays.items()} for arrays in wanted]
    times = [{name: np.zeros(array.shape, int) for name, array in arrays.items()} for arrays in wanted]
    for move in moves:
        box, there = plan.source.boxes[move.sender][move.name], plan.target.boxes[move.receiver][move.name]
        piece = sources[move.sender][move.name][move.box.slices(box)]
        assert piece.shape == move.box.shape, "the sender has it"
        assert move.nbytes == move.box.size * plan.source.itemsize(move.name)
        filled[move.receiver][move.name][move.box.slices(there)] = piece
        times[move.receiver][move.name][move.box.slices(there)] += 1
    for got, expected, counts in zip(filled, wanted, times, strict=True):
        for name in expected:
            np.testing.assert_array_equal(got[name], expected[name])
            assert (counts[name] == 1).all()


@given(st.data())
def test_any_layout_is_filled_from_any_other(data):
    tensors = data.draw(TENSORS)
    (_, source), (_, target) = data.draw(layouts(tensors)), data.draw(layouts(tensors))
    plan = reshard(source, target)
    assert_fills(plan, plan.moves)
    assert not any(move.is_local for move in plan.moves)
    assert plan == reshard(source, target), "it is the same each time"
    wanted = sum(target.nbytes(rank) for rank in range(target.n_ranks))
    assert plan.nbytes == plan.minimum_nbytes == wanted
    assert sum(map(plan.sent, range(source.n_ranks))) == sum(map(plan.received, range(target.n_ranks))) == wanted
    assert plan.received(0) == target.nbytes(0)


@given(st.data())
def test_workers_keep_what_they_have(data):
    tensors = data.draw(TENSORS)
    mesh, source = data.draw(layouts(tensors))
    _, target = data.draw(layouts(tensors, mesh, stages="gen_pp"))
    plan = reshard(source, target, within=mesh.groups("micro_dp"))
    assert_fills(plan, plan.moves)
    for rank in range(mesh.size):
        common = [box & target.boxes[rank][name] for name, box in source.boxes[rank].items()
                  if name in target.boxes[rank]]  # fmt: skip
        local = [move for move in plan.moves if move.is_local and move.receiver == rank]
        assert sum(move.box.size for move in local) == sum(box.size for box in common if box)
        assert all(move.sender == rank for move in local)
        assert plan.received(rank) == target.nbytes(rank) - sum(move.nbytes for move in local)


@given(st.data(), st.integers(1, 300))
def test_buckets_are_the_moves_in_parts_that_are_small(data, nbytes):
    tensors = data.draw(TENSORS)
    (_, source), (_, target) = data.draw(layouts(tensors)), data.draw(layouts(tensors))
    plan = reshard(source, target)
    buckets = plan.buckets(nbytes)
    assert_fills(plan, [move for bucket in buckets for move in bucket])
    for bucket in buckets:
        for end in ("sender", "receiver"):
            for rank in {getattr(move, end) for move in bucket}:
                of_rank = [move for move in bucket if getattr(move, end) == rank]
                if sum(move.nbytes for move in of_rank) > nbytes:
                    assert [row_nbytes(plan, move) > nbytes for move in of_rank] == [True], "one row, alone"
    assert buckets == plan.buckets(nbytes)


def row_nbytes(plan, part):
    """Bytes of a row of the move that a part is of, along the first dim that is longer than 1."""
    whole = next(m for m in plan.moves if (m.name, m.receiver) == (part.name, part.receiver) and m.box & part.box)
    return whole.nbytes // next((size for size in whole.box.shape if size > 1), 1)


@given(meshes(), st.integers(1, 3))
def test_a_switch_within_micro_dp_groups_receives_what_the_paper_says(mesh, n_layers):
    n_train, n_generate = (mesh.axis_size(f"{g}pp") * mesh.axis_size(f"{g}tp") for g in ("", "gen_"))
    n_layers *= mesh.axis_size("pp")
    tensors = {f"{layer}.{name}": ((36, 36), "bfloat16") for layer in range(n_layers) for name in ("up", "down")}
    cuts = {name: 0 if name.endswith("up") else 1 for name in tensors}
    stages = {
        axis: {name: {axis: int(name.split(".")[0]) * mesh.axis_size(axis) // n_layers} for name in tensors}
        for axis in ("pp", "gen_pp")
    }
    train = Layout.split(mesh, tensors, {name: {dim: "tp"} for name, dim in cuts.items()}, stages["pp"])
    generate = Layout.split(mesh, tensors, {name: {dim: "gen_tp"} for name, dim in cuts.items()}, stages["gen_pp"])
    groups = mesh.groups("micro_dp")
    plan = reshard(train, generate, within=groups)
    model_nbytes = sum(math.prod(shape) * 2 for shape, _ in tensors.values())
    for rank in range(mesh.size):
        assert plan.received(rank) * n_generate * n_train == (n_train - n_generate) * model_nbytes
    assert all(any({move.sender, move.receiver} <= {*group} for group in groups) for move in plan.moves)


@pytest.mark.parametrize(("n_senders", "n_receivers"), [(1, 5), (4, 3), (8, 8), (3, 16)])
def test_replicas_share_the_sending(n_senders, n_receivers):
    tensors = {"big": ((4096, 1024), "float32"), **{f"{i}": ((256, 64), "bfloat16") for i in range(50)}}
    source, target = (Layout.split(Mesh(dp=n), tensors, {}) for n in (n_senders, n_receivers))
    plan = reshard(source, target)
    mean = plan.nbytes / n_senders
    assert max(map(plan.sent, range(n_senders))) <= mean + (2 << 20), "a piece is about 1 MiB"


def test_a_plan_of_hundreds_of_tensors_on_many_ranks_takes_about_a_second():
    tensors = {f"layer.{i}.{n}": ((4096, 1024), "bfloat16") for i in range(100) for n in range(7)}
    cuts = {name: int(name[-1]) % 2 for name in tensors}
    train = Layout.split(Mesh(pp=1, dp=8, tp=8), tensors, {name: {dim: "tp"} for name, dim in cuts.items()})
    rollout = Layout.split(Mesh(dp=16, tp=4), tensors, {name: {dim: "tp"} for name, dim in cuts.items()})
    begun = time.process_time()
    plan = reshard(train, rollout)
    assert time.process_time() - begun < 8, "seconds of a busy machine"
    assert plan.nbytes == plan.minimum_nbytes


def test_a_plan_prints_who_sends_how_much_to_whom():
    tensors = {"w": ((4, 2), "float32"), "b": ((), "int64")}
    plan = reshard(Layout.split(Mesh(tp=2), tensors, {"w": {0: "tp"}}), Layout.split(Mesh(dp=1), tensors, {}))
    assert str(plan).splitlines() == [
        "3 moves of 2 tensors, in bytes",
        "          to 0  sent",
        "from 0    24    24",
        "from 1    16    16",
        "received  40    40",
    ]
    assert [(move.name, str(move.box), move.sender) for move in plan.moves] == [
        ("w", "[0:2, 0:2]", 0),
        ("w", "[2:4, 0:2]", 1),
        ("b", "[]", 0),
    ]


@given(st.data())
def test_a_layout_splits_as_torch_chunks(data):
    torch = pytest.importorskip("torch")
    size, n_parts = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 8))
    layout = Layout.split(Mesh(tp=n_parts), {"w": ((size,), "int64")}, {"w": {0: "tp"}})
    chunks = [(part[0].item(), len(part)) for part in torch.arange(size).chunk(n_parts)]
    boxes = [box["w"] for box in layout.boxes if box]
    assert [(box.start[0], box.shape[0]) for box in boxes] == chunks
    assert all(not box for box in layout.boxes[len(chunks) :])


W = {"w": ((4, 2), "float32")}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout({"w": ((2,), "float7")}), r"'w' has dtype 'float7', which is none of bool, "),
        (
            lambda: Layout(W, [{"w": Box((3, 0), (2, 2))}]),
            r"rank 0 holds \[3:5, 0:2\] .* outside of its shape \(4, 2\)",
        ),
        (lambda: Layout(W, [{"w": Box((0,), (2,))}]), r"rank 0 holds \[0:2\] of tensor 'w', .* shape \(4, 2\)"),
        (lambda: Layout(W, [{}, {"v": Box((0,), (2,))}]), r"rank 1 holds a rectangle of 'v', .* only \['w'\]"),
        (lambda: Layout.split(Mesh(tp=2), W, {"v": {0: "tp"}}), r"no tensor 'v', only 'w'"),
        (lambda: Layout.split(Mesh(tp=2), W, {"w": {2: "tp"}}), r"'w' of shape \(4, 2\) has no dim 2"),
        (lambda: Layout.split(Mesh(tp=2), W, {"w": {0: "dp"}}), r"no axis 'dp'"),
        (lambda: Layout.split(Mesh(dp=2), W, {"w": {0: "dp", 1: "dp"}}), r"dp"),
        (lambda: plan_between({"v": ((2,), "int8")}, W), r"tensor 'w', which the source does not have; it has 'v'"),
        (
            lambda: plan_between({"w": ((4, 2), "bfloat16")}, W),
            r"'w' is bfloat16 of shape \(4, 2\) in the source, and float32 of shape \(4, 2\) in the target",
        ),
        (
            lambda: reshard(Layout(W, [{"w": Box((0, 0), (3, 2))}]), Layout.split(Mesh(dp=1), W, {})),
            r"no rank of the source holds \[3:4, 0:2\] of tensor 'w'",
        ),
        (
            lambda: reshard(*(Layout.split(Mesh(dp=n), W, {}) for n in (2, 3)), within=[[0, 1]]),
            r"the source has 2 ranks and the target 3",
        ),
        (lambda: plan_between(W, W).buckets(0), r"at least 1 byte, got 0"),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(bm.BandmasterError, match=message):
        make()


def plan_between(source, target):
    """A plan from one rank to one rank, which have all of these tensors."""
    return reshard(*(Layout.split(Mesh(dp=1), tensors, {}) for tensors in (source, target)))
