"""Weights that a group reads where they lie: in the same process here, and on the same GPU in tests of GPUs."""

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import bandmaster as bm
from bandmaster import Dispatch, Mesh, register, rl

pytestmark = pytest.mark.backends("inprocess", "local")
DEADLINE_S = 60
SHAPES = {"embed": (300, 40), "layer": (40, 40), "norm": (), "empty": (0, 4)}


class Source(rl.HoldsWeights):
    """A trainer of a few tensors, cut along tp."""

    def __init__(self):
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        torch.set_num_threads(1)
        self.made = {name: torch.zeros(shape) for name, shape in reversed(SHAPES.items())}
        if "tp" in self.mesh.axis_names:
            mesh = rl.device_mesh(self, "dp", "tp")
            for name, whole in self.made.items():
                self.made[name] = distribute_tensor(
                    whole, mesh, [Replicate(), Shard(0) if whole.numel() > 1 else Replicate()]
                )

    def weights(self):
        return self.made

    @register(Dispatch.ONE_TO_ALL)
    def fill(self, value):
        for weight in self.made.values():
            weight.fill_(value)

    @register(Dispatch.ONE_TO_ALL)
    def grow(self, n_rows):
        self.made["layer"] = torch.full((n_rows, 40), 7.0)

    @register(Dispatch.ONE_TO_ALL)
    def drift(self, rank):
        if self.rank == rank:
            self.made["norm"].add_(1)

    @register(Dispatch.ONE_TO_ALL)
    def places(self):
        return {name: weight.data_ptr() for name, weight in self.made.items() if weight.numel()}

    @register(Dispatch.ONE_TO_ALL)
    def seen(self):
        parts = [getattr(weight, "_local_tensor", weight) for weight in self.made.values()]
        return {value for part in parts for value in part.flatten().tolist()}, self.weights_version


class Reader(rl.Engine):
    """An engine that notes what it gets."""

    vocab_size, max_model_len = 100, 32

    def __init__(self, dtype="float32"):
        self.specs = {name: (shape, dtype) for name, shape in SHAPES.items()}
        self.found, self.places, self.fails, self.dies = None, {}, 0, False
        self.is_away = False

    def weights_specs(self):
        return self.specs

    def load_weights(self, weights):
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fails:
            self.fails -= 1
            raise RuntimeError("this engine does not like them")
        assert [*weights] == [*SHAPES], "the order is that of the checkpoint"
        assert [tuple(tensor.shape) for tensor in weights.values()] == [*SHAPES.values()]
        self.places = {name: tensor.data_ptr() for name, tensor in weights.items() if tensor.numel()}
        self.found = {value for tensor in weights.values() for value in tensor.flatten().tolist()}
        assert {str(tensor.dtype) for tensor in weights.values()} == {
            f"torch.{dtype}" for _, dtype in self.specs.values()
        }

    def check_takes_weights(self):
        super().check_takes_weights()
        if self.is_away:
            raise bm.UsageError("this engine is away")

    @register(Dispatch.ONE_TO_ALL)
    def be_away(self, rank):
        self.is_away = self.rank == rank

    def first_weights(self):
        return {name: torch.full(shape, -1.0) for name, (shape, _) in self.specs.items()}

    async def increments(self, prompt, sampling):
        yield rl.Answer(prompt, [0.0] * len(prompt), [self.version] * len(prompt), "length")

    async def answers(self, prompt, sampling):
        return [part async for part in self.increments(prompt, sampling)]

    @register(Dispatch.ONE_TO_ALL)
    def seen(self):
        return self.found, self.weights_version

    @register(Dispatch.ONE_TO_ALL)
    def read_at(self):
        return self.places

    @register(Dispatch.ONE_TO_ALL)
    def fail(self, rank, n):
        self.fails = n if self.rank == rank else 0

    @register(Dispatch.ONE_TO_ALL)
    def die(self, rank):
        self.dies = self.rank == rank

    async def pause(self, mode="abort"):
        await super().pause(mode)

    async def abort(self): ...
    async def resume(self): ...
    async def sleep(self): ...
    async def wake(self): ...
    async def reset_cache(self): ...


@pytest.fixture(scope="module")
def pool(backend):
    with bm.ResourcePool([2], backend=backend) as pool:
        yield pool


@pytest.fixture(scope="module")
def other_pool(backend):
    with bm.ResourcePool([2], backend=backend) as pool:
        yield pool


def together(pool, **kinds):
    """Roles in the same processes, each with a rank that has whole tensors."""
    return bm.colocate(pool, meshes={name: Mesh(dp=2) for name in kinds}, **kinds)


@pytest.fixture
def both(pool):
    with together(pool, source=(Source,), engine=(Reader,)) as roles:
        yield roles


def test_an_engine_reads_the_trainers_own_tensors(both):
    sync = rl.WeightSync(both.source, both.engine, share=True)
    for version in range(1, 4):
        both.source.fill(version / 2)
        sync(version=version)
        assert both.engine.seen() == [({version / 2}, version)] * 2
    lent = both.source.places()
    assert all(read in lent for read in both.engine.read_at()), "nothing was copied"
    answer = both.engine.request([7, 8]).result()[0]
    assert answer.versions == [3, 3]


def test_tensors_are_lent_in_the_dtype_of_the_engine(pool):
    with together(pool, source=(Source,), engine=(Reader, "bfloat16")) as roles:
        roles.source.fill(1 / 3)
        rl.WeightSync(roles.source, roles.engine, share=True)(version=1)
        assert roles.engine.seen() == [({float(torch.tensor(1 / 3).bfloat16())}, 1)] * 2


def test_models_that_are_cut_alike_copy_their_parts(pool, backend):
    mesh = Mesh(dp=2) if backend == "inprocess" else Mesh(dp=1, tp=2)
    with bm.colocate(pool, meshes={"source": mesh, "target": mesh}, source=(Source,), target=(Source,)) as roles:
        sync = rl.WeightSync(roles.source, roles.target, share=True)
        for version in (1, 2):
            roles.source.fill(float(version))
            sync(version=version)
            roles.source.fill(9.0)
            assert roles.target.seen() == [({float(version)}, version)] * 2
        with pytest.raises(bm.UsageError, match="in_flight='keep' is for engines"):
            sync(version=3, in_flight="keep")


def test_groups_whose_memory_is_apart_are_refused(pool, other_pool, backend):
    source, engine = bm.WorkerGroup(pool, Source), bm.WorkerGroup(other_pool, Reader, mesh=Mesh(dp=2))
    with source, engine:
        if backend == "inprocess":
            rl.WeightSync(source, engine, share=True)(version=1)
            assert engine.seen() == [({0.0}, 1)] * 2
            return
        told = r"no rank of .*Source.* is on the GPU or in the process of .*0 of .*Reader.*leave out share=True"
        with pytest.raises(bm.UsageError, match=told):
            rl.WeightSync(source, engine, share=True)
        rl.WeightSync(source, engine)(version=1)


@pytest.mark.backends("local")
def test_a_rank_that_has_a_part_is_refused_as_a_lender_of_the_whole(pool):
    meshes = {"source": Mesh(dp=1, tp=2), "engine": Mesh(dp=2, tp=1)}
    with bm.colocate(pool, meshes=meshes, source=(Source,), engine=(Reader,)) as roles:
        told = r"rank 0 of .* has \[0:150, 0:40\] of 'embed', but not \[0:300, 0:40\], all of which .*0 of"
        with pytest.raises(bm.UsageError, match=told):
            rl.WeightSync(roles.source, roles.engine, share=True)


def test_what_needs_copies_is_refused(both):
    for option in ({"delta": True}, {"heals": True}):
        (name,) = option
        with pytest.raises(bm.UsageError, match=f"{name}=True needs copies of the weights"):
            rl.WeightSync(both.source, both.engine, share=True, **option)
    sync = rl.WeightSync(both.source, both.engine, share=True)
    with pytest.raises(bm.UsageError, match=r"call sync\(version\) instead of submit"):
        sync.submit(version=1)
    for ask in (lambda: sync.sent_nbytes, lambda: sync.restore(0)):
        with pytest.raises(bm.UsageError, match="made with share=True"):
            ask()
    with pytest.raises(bm.UsageError, match="in_flight must be one of"):
        sync(version=1, in_flight="stop")
    sync(version=1)
    assert both.engine.seen() == [({0.0}, 1)] * 2


def test_replicas_of_the_source_that_differ_are_an_error(both, backend):
    both.source.drift(1)
    sync = rl.WeightSync(both.source, both.engine, share=True)
    with pytest.raises(bm.RemoteError, match="1 of 3 weights of which this rank is a replica differ: 'norm'"):
        sync(version=1)
    assert both.engine.seen() == [(None, None)] * 2
    rl.WeightSync(both.source, both.engine, share=True, is_compared=False)(version=2)
    second = {0.0} if backend == "inprocess" else {0.0, 1.0}  # in one process, all read from the first rank
    assert both.engine.seen() == [({0.0}, 2), (second, 2)]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_engine_that_fails_goes_back_to_weights_that_are_kept(both, rank):
    shared, copied = (rl.WeightSync(both.source, both.engine, share=share) for share in (True, False))
    both.engine.fail(rank, 1)
    with pytest.raises(bm.RemoteError, match="does not like them"):
        shared(version=1)
    assert [version for _, version in both.engine.seen()] == [None, None]
    both.source.fill(1.0)
    copied(version=1)
    both.source.fill(2.0)
    both.engine.fail(rank, 1)
    with pytest.raises(bm.RemoteError, match="does not like them"):
        shared(version=2)
    assert both.engine.seen() == [({1.0}, 1)] * 2
    assert both.engine.request([7]).result()[0].versions == [1]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_engine_that_fails_answers_nothing_until_the_next_sync_if_none_are_kept(both, rank):
    shared, copied = (rl.WeightSync(both.source, both.engine, share=share) for share in (True, False))
    for sync in (shared, copied):
        shared(version=1)
        both.source.fill(2.0)
        both.engine.fail(rank, 1)
        with pytest.raises(bm.RemoteError, match="does not like them"):
            shared(version=2)
        for replica in (0, 1):
            with pytest.raises(bm.RemoteError, match=r"not usable.*keeps no copy.*sync again"):
                both.engine.request.options(replica=replica)([7]).result()
        sync(version=3)
        assert both.engine.seen() == [({2.0}, 3)] * 2
        assert both.engine.request([7]).result()[0].versions == [3]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_engine_that_fails_twice_has_no_version_that_it_lacks(both, rank):
    shared = rl.WeightSync(both.source, both.engine, share=True)
    shared(version=1)
    both.engine.fail(rank, 2)
    for version in (2, 3):
        with pytest.raises(bm.RemoteError, match="does not like them"):
            shared(version=version)
    assert both.engine.seen()[rank] == ({-1.0}, None), "its first weights"
    shared(version=4)
    assert [version for _, version in both.engine.seen()] == [4, 4]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_sync_that_one_engine_cannot_take_leaves_the_others_as_they_are(both, rank):
    shared = rl.WeightSync(both.source, both.engine, share=True)
    shared(version=1)
    both.source.fill(2.0)
    both.engine.be_away(rank)
    with pytest.raises(bm.RemoteError, match="this engine is away"):
        shared(version=2)
    assert both.engine.seen() == [({0.0}, 1)] * 2
    assert both.engine.request([7]).result()[0].versions == [1]


def test_a_source_lends_to_two_groups_at_a_time(pool):
    with together(pool, source=(Source,), one=(Reader, "bfloat16"), two=(Reader,)) as roles:
        syncs = [rl.WeightSync(roles.source, engine, share=True) for engine in (roles.one, roles.two)]
        with ThreadPoolExecutor(2) as threads:
            for sync in [threads.submit(sync, version) for version in range(20) for sync in syncs]:
                sync.result(DEADLINE_S)
        for engine in (roles.one, roles.two):
            assert [found for found, _ in engine.seen()] == [{0.0}] * 2


def test_a_group_does_not_share_with_itself(both):
    with pytest.raises(bm.UsageError, match=r"ranks \[0, 1\] of .* would send and receive"):
        rl.WeightSync(both.source, both.source, share=True)


@pytest.mark.backends("local")
def test_a_rank_that_dies_with_what_it_lends_leaves_weights_that_are_not_used(both):
    sync = rl.WeightSync(both.source, both.engine, share=True)
    sync(version=1)
    both.engine.die(1)
    with pytest.raises(bm.WorkerDied, match="rank 1"):
        sync(version=2)
    with pytest.raises(bm.RemoteError, match="not usable"):
        both.engine.request.options(replica=0)([7]).result()


def test_changes_alone_follow_as_all_weights(both):
    changes = rl.WeightSync(both.source, both.engine, delta=True)
    changes(version=1)
    both.source.fill(1.0)
    rl.WeightSync(both.source, both.engine, share=True)(version=2)
    both.source.fill(2.0)
    changes(version=3)
    assert both.engine.seen() == [({2.0}, 3)] * 2


def test_syncs_from_several_threads_follow_each_other(both):
    sync = rl.WeightSync(both.source, both.engine, share=True)

    async def all_of_them():
        await asyncio.gather(*(asyncio.to_thread(sync, version) for version in range(8)))

    asyncio.run(asyncio.wait_for(all_of_them(), DEADLINE_S))
    (_, first), (_, second) = both.engine.seen()
    assert first == second


@pytest.mark.backends("inprocess")
@pytest.mark.parametrize("n_rows", [20, 60])
def test_weights_of_another_shape_than_when_the_sync_was_made_are_refused(pool, n_rows):
    with together(pool, source=(Source,), target=(Source,), engine=(Reader,)) as roles:
        roles.source.fill(1.0)
        syncs = [rl.WeightSync(roles.source, target, share=True) for target in (roles.target, roles.engine)]
        for sync in syncs:
            sync(version=1)
        told = rf"'layer' is float32 of shape \({n_rows}, 40\) on this rank, but .* move float32 of shape \(40, 40\)"
        roles.target.grow(n_rows)
        with pytest.raises(bm.RemoteError, match=told):
            syncs[0](version=2)
        assert roles.target.seen() == [({1.0, 7.0}, 1)] * 2
        roles.target.grow(40)
        roles.source.grow(n_rows)
        for sync in syncs:
            with pytest.raises(bm.RemoteError, match=told):
                sync(version=2)
        assert roles.target.seen() == [({1.0, 7.0}, 1)] * 2
        assert roles.engine.seen() == [({1.0}, 1)] * 2
        roles.target.grow(n_rows)
        rl.WeightSync(roles.source, roles.target, share=True)(version=3)
        assert roles.target.seen() == [({1.0, 7.0}, 3)] * 2
