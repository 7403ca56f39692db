"""The laws that a user may build on, on every backend: what goes beyond the contract (test_contract.py)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bandmaster as bm
from bandmaster import Concat, Dispatch, Gather, Mesh, Split, TransferProtocol, register
from bandmaster.testing import held_resources

# --- 1 and 6: what goes out comes back, whole and in order -------------------------------------------------------


@st.composite
def protocols_on_meshes(draw, largest):
    """A mesh of random axes, some refined, and a protocol that splits and joins over the same axes of it."""
    shape = {}
    for axis in draw(st.permutations(["pp", "dp", "tp"]))[: draw(st.integers(1, 3))]:
        room = largest // int(np.prod(list(shape.values()), dtype=int))
        shape[axis] = draw(st.integers(1, max(1, min(4, room))))
    mesh = Mesh(**shape)
    if "tp" in shape and draw(st.booleans()):
        mesh = mesh.refine(gen_tp=draw(st.sampled_from([n for n in range(1, 5) if shape["tp"] % n == 0])))
    axes = draw(st.lists(st.sampled_from(list(shape)), min_size=1, unique=True))
    known = [Dispatch.THREE_D_PROTO, Dispatch.THREE_D_ALL_MICRO_DP, Dispatch.DP_PROTO]
    free = TransferProtocol(Split(*axes, pad=draw(st.booleans())), Concat(*axes))
    return mesh, draw(st.sampled_from([free, *known]))


def batches(rows):
    array = st.sampled_from(["f4", "i8", "?", "c16"]).map(
        lambda dtype: np.arange(rows * 3).reshape(rows, 3).astype(dtype)
    )
    return st.one_of(
        array,
        st.just([f"row {i}" for i in range(rows)]),
        st.fixed_dictionaries({"x": array, "deeper": st.fixed_dictionaries({"y": st.just(list(range(rows)))})}),
    )


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    return type(a) is type(b) and a == b


@pytest.mark.backends("inprocess", "local")
def test_an_identity_method_gives_back_what_it_was_given(make_pool, effort):
    pools = {}

    @settings(max_examples=effort.n_examples)
    @given(st.data())
    def check(data):
        mesh, protocol = data.draw(protocols_on_meshes(effort.n_ranks))
        batch = data.draw(st.integers(0, 23).flatmap(batches))

        class Echo(bm.Worker):
            @register(protocol)
            def echo(self, batch):
                return batch

        if mesh.size not in pools:
            pools[mesh.size] = make_pool([mesh.size])
        with bm.WorkerGroup(pools[mesh.size], Echo, mesh=mesh) as group:
            assert same(group.echo(batch), batch)

    check()


# --- 3: nothing is written twice ---------------------------------------------------------------------------------


class Keeper(bm.Worker):
    """What it keeps lies in memory that is not used again."""

    @register(Dispatch.ONE_TO_ALL)
    def keep(self, value):
        self.kept = value

    @register(TransferProtocol(Split("dp"), Gather("dp")))
    def keep_rows(self, rows):
        self.kept = rows


@pytest.mark.here
@pytest.mark.backends("local", "ray")
def test_a_large_payload_is_written_once_however_many_ranks_of_this_host_read_it(make_group):
    def n_written(n_ranks, method, *args):
        group = make_group(n_ranks, Keeper)
        before = len(held_resources().segments)
        getattr(group, method)(*args)
        return len(held_resources().segments) - before

    large = np.ones(100_000)
    once = n_written(1, "keep", large)
    assert once > 0
    assert n_written(3, "keep", large) == once
    assert n_written(3, "keep_rows", large) == 3 * once, "each rank its own third"


# --- 11: the same program, the same results ----------------------------------------------------------------------


class Program(bm.Worker):
    def __init__(self, seed):
        self.state = np.random.default_rng(seed + self.rank)

    @register(Dispatch.THREE_D_PROTO)
    def step(self, batch, scale=1.0):
        return {"x": batch["x"] * scale, "who": [self.rank] * len(batch["x"])}

    @register(TransferProtocol(Split("dp"), bm.Reduce("mean", "dp", "tp")))
    def loss(self, x):
        return {"loss": float(x.sum()), "rows": len(x)}

    @register("3D_PP_ONLY")
    def names(self):
        return f"stage {self.coordinates['pp']}"

    @register(Dispatch.ALL_TO_ALL)
    def each(self, a, b):
        return a + b + self.rank


def test_the_same_program_gives_the_same_results(make_group):
    group = make_group(Mesh(pp=1, dp=2, tp=2), Program, seed=3)
    out = group.step({"x": np.arange(5.0)}, scale=2.0)
    assert out["x"].tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert out["who"] == [0, 0, 0, 2, 2]
    assert group.loss(np.arange(5.0)) == {"loss": 5.0, "rows": 2.5}
    assert group.names() == ["stage 0"]
    assert group.each([1, 2, 3, 4], b=[10, 20, 30, 40]) == [11, 23, 35, 47]


class Draws(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def draw(self):
        import random

        import torch

        return random.random(), np.random.random(), torch.rand(1, dtype=torch.float64).item()


@pytest.mark.backends("inprocess", "local")
def test_random_streams_differ_between_ranks_and_after_a_restart(make_group):
    """Every worker starts with streams of its own, also where it is forked from a process that has imported torch."""
    group = make_group(2, Draws)
    draws = group.draw()
    group.restart()
    draws += group.draw()
    for stream in zip(*draws, strict=True):
        assert len(set(stream)) == 4, draws
