"""Weights from group to group: bit-identical, not through the controller, and all of them at once."""

import os
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import bandmaster as bm
from bandmaster import Dispatch, Mesh, register, rl
from bandmaster.rl.checksums import checksums
from bandmaster.rl.group_sync import GroupSync

DEADLINE_S = 30


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8192, 36), nn.Linear(36, 8192, dtype=torch.bfloat16)
        self.register_buffer("steps", torch.tensor(3))


class Holder(rl.HoldsWeights):
    """A model that is cut along tp, and along dp if it is fully sharded."""

    def __init__(self, seed, is_sharded=False):
        torch.manual_seed(seed)
        self.model = Model()
        if self.mesh.axis_size("tp") > 1:
            mesh = rl.device_mesh(self, "dp", "tp")
            parallelize_module(self.model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            if is_sharded:
                fully_shard(self.model, mesh=mesh["dp"])

    @register(Dispatch.ONE_TO_ALL)
    def seen(self):
        """The whole weights, as far as this rank has them: gathered from its tensor-parallel group."""
        whole = {
            name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            for name, tensor in self.weights().items()
        }
        return {name: tensor.clone() for name, tensor in whole.items()}, self.weights_version

    @register(Dispatch.REQUEST)
    async def ask(self):
        return self.weights_version

    @register(Dispatch.ONE_TO_ALL)
    def change(self):
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.add_(1)

    @register(Dispatch.ONE_TO_ALL)
    def process(self):
        return os.getpid()

    def on_replace(self, rank, state):
        pass


def assert_alike(weights, expected):
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), name


@pytest.fixture(scope="module")
def trainer():
    with bm.ResourcePool([4]) as pool:
        group = bm.WorkerGroup(pool, Holder, 1, mesh=Mesh(dp=2, tp=2))
        group.set_default_options(timeout=DEADLINE_S)
        yield group


@pytest.mark.parametrize("target", [Mesh(dp=3, tp=1), Mesh(dp=1, tp=3)], ids=str)
def test_weights_come_from_any_layout_to_any_layout(trainer, target):
    with bm.ResourcePool([3]) as pool:
        rollout = bm.WorkerGroup(pool, Holder, 2, mesh=target)
        sync = rl.WeightSync(trainer, rollout, bucket_nbytes=400_000)
        assert sync.plan.nbytes == sync.plan.minimum_nbytes
        sync(version="a")
        (expected, _), *_ = trainer.seen()
        for weights, version in rollout.seen():
            assert_alike(weights, expected)
            assert version == "a"
        trainer.change()
        assert sync.submit(version=np.int64(7)).result() == [None] * 3
        assert rollout.ask.options(min_version=7, timeout=DEADLINE_S)().result() == 7, "the workers have reported it"
        assert_alike(rollout.seen()[2][0], trainer.seen()[0][0])


def test_no_weight_goes_through_the_controller(trainer):
    with bm.ResourcePool([1]) as pool:
        rollout = bm.WorkerGroup(pool, Holder, 2, mesh=Mesh(dp=1, tp=1))
        sync = rl.WeightSync(trainer, rollout)
        with bm.trace() as trace:
            sync()
        assert sum(call.returned_nbytes for call in trace.calls) < 10_000
        assert sum(call.sent_nbytes for call in trace.calls) < 10_000
        moved = sum(sum(call.read_nbytes.values()) for call in trace.calls)
        assert sync.plan.nbytes <= moved < 1.01 * sync.plan.nbytes, "each receiver reads what it needs, once"


def test_fully_sharded_weights():
    with bm.ResourcePool([4]) as pool, bm.ResourcePool([1], backend="inprocess") as here:
        trainer = bm.WorkerGroup(pool, Holder, 1, True, mesh=Mesh(dp=2, tp=2))
        rollout = bm.WorkerGroup(here, Holder, 2, mesh=Mesh(dp=1, tp=1))
        rl.WeightSync(trainer, rollout, bucket_nbytes=200_000)()
        assert_alike(rollout.seen()[0][0], trainer.seen()[0][0])


def test_weights_go_to_a_group_on_another_backend(trainer, ray_cluster):
    with bm.ResourcePool([2], backend="ray") as pool:
        rollout = bm.WorkerGroup(pool, Holder, 2, mesh=Mesh(dp=2, tp=1))
        rl.WeightSync(trainer, rollout, bucket_nbytes=400_000)(version=3)
        (expected, _), *_ = trainer.seen()
        for weights, version in rollout.seen():
            assert_alike(weights, expected)
            assert version == 3


def test_a_sender_that_dies_leaves_the_receivers_as_they_were():
    with bm.ResourcePool([2]) as senders, bm.ResourcePool([2], backend="inprocess") as receivers:
        source = bm.WorkerGroup(senders, Holder, 1, mesh=Mesh(dp=2, tp=1))
        rollout = bm.WorkerGroup(receivers, Holder, 2, mesh=Mesh(dp=2, tp=1))
        sync, before = rl.WeightSync(source, rollout, bucket_nbytes=400_000), rollout.seen()
        os.kill(source.process()[1], signal.SIGKILL)
        with pytest.raises(bm.WorkerDied, match="rank 1"):
            sync(version=1)
        for (weights, version), (expected, _) in zip(rollout.seen(), before, strict=True):
            assert_alike(weights, expected)
            assert version is None
        source.restart()
        rl.WeightSync(source, rollout)(version=2)
        assert_alike(rollout.seen()[0][0], source.seen()[0][0])


class DiesHalfWay(Holder):
    """Its rank 1 dies in the second bucket; `weights` is called for the layout, and then for each bucket.

    That of a sender is called once more, to compare replicas.
    """

    n_calls = 0

    def weights(self):
        self.n_calls += 1
        if self.n_calls == 3 and self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().weights()

    @register(Dispatch.ONE_TO_ALL)
    def set_calls(self, n):
        self.n_calls = n

    def on_replace(self, rank, state):
        self.n_calls = 3  # the new worker lives


def test_a_sender_that_dies_half_way_leaves_the_receivers_as_they_were():
    with bm.ResourcePool([2]) as senders, bm.ResourcePool([2], backend="inprocess") as receivers:
        source = bm.WorkerGroup(senders, DiesHalfWay, 1, mesh=Mesh(dp=2, tp=1))
        source.set_calls(-1)
        rollout = bm.WorkerGroup(receivers, Holder, 2, mesh=Mesh(dp=2, tp=1))
        before = rollout.seen()
        sync = rl.WeightSync(source, rollout, bucket_nbytes=400_000)
        with pytest.raises(bm.WorkerDied, match="rank 1"):
            sync.submit(1).result()
        for (weights, version), (expected, _) in zip(rollout.seen(), before, strict=True):
            assert_alike(weights, expected)
            assert version is None


def assert_all_have_the_weights_of(source, target, version):
    (expected, _), *_ = source.seen()
    for weights, its_version in target.seen():
        assert_alike(weights, expected)
        assert its_version == version


def test_a_receiver_that_dies_in_a_bucket_leaves_the_others_as_they_were(trainer):
    with bm.ResourcePool([3], backend="local") as pool:
        rollout = bm.WorkerGroup(pool, DiesHalfWay, 2, mesh=Mesh(dp=3, tp=1), start_timeout=DEADLINE_S)
        rollout.set_default_options(timeout=DEADLINE_S)
        before = rollout.execute_rank_zero_sync("seen")
        sync = rl.WeightSync(trainer, rollout, bucket_nbytes=1_700_000)  # three buckets
        with pytest.raises(bm.WorkerDied, match="rank 1"):
            sync(version=1)
        rollout.replace(1)
        rollout.switch_weights(2, [])  # of a sync without buckets: what was staged before is not used
        for weights, version in (rollout.seen()[rank] for rank in (0, 2)):
            assert_alike(weights, before[0])
            assert version is None
        sync(version=3)
        assert_all_have_the_weights_of(trainer, rollout, 3)


class DiesInTheSwitch(Holder):
    """Its rank 1 dies when all ranks have changed to some of the new weights; rank 0 goes on when it is interrupted."""

    has_come_half_way = is_switching = False

    def __init__(self, seed, fifo):
        super().__init__(seed)
        self.fifo = fifo

    @register(Dispatch.ONE_TO_ALL)
    def switch_weights(self, version, received):
        self.is_switching = True
        super().switch_weights(version, received)

    def weights(self):
        return Watched(super().weights(), self.come_half_way) if self.is_switching else super().weights()

    def come_half_way(self):
        if self.has_come_half_way:
            return
        self.has_come_half_way = True
        if self.rank == 1:
            fifo = os.open(self.fifo, os.O_RDWR)  # has no end while this rank has it open
            for _ in range(self.world_size - 1):
                os.read(fifo, 1)
            os.kill(os.getpid(), signal.SIGKILL)
        with open(self.fifo, "wb") as fifo:
            fifo.write(b"0")
        if self.rank == 0:
            threading.Event().wait(DEADLINE_S)

    def on_replace(self, rank, state):
        self.has_come_half_way = True  # the new worker lives


class Watched(dict):
    """Weights that call a function before the third of them is looked up."""

    def __init__(self, weights, function):
        super().__init__(weights)
        self.function, self.n_lookups = function, 0

    def __getitem__(self, name):
        self.n_lookups += 1
        if self.n_lookups == 3:
            self.function()
        return super().__getitem__(name)


def test_a_receiver_that_dies_in_the_switch_leaves_the_others_with_all_the_new_weights(trainer, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with bm.ResourcePool([3], backend="local") as pool:
        rollout = bm.WorkerGroup(
            pool, DiesInTheSwitch, 2, tmp_path / "fifo", mesh=Mesh(dp=3, tp=1), start_timeout=DEADLINE_S
        )
        rollout.set_default_options(timeout=DEADLINE_S)
        before = rollout.execute_rank_zero_sync("seen")
        sync = rl.WeightSync(trainer, rollout, bucket_nbytes=1_000_000)
        with pytest.raises(bm.WorkerDied, match="rank 1"):
            sync.submit(version=1).result(DEADLINE_S)
        rollout.replace(1)
        first, replaced, last = rollout.seen()
        for weights, version in first, last:
            assert_alike(weights, trainer.seen()[0][0])
            assert version == 1
        assert_alike(replaced[0], before[0])
        trainer.change()
        sync(version=2)
        assert_all_have_the_weights_of(trainer, rollout, 2)


def test_a_replaced_worker_gets_the_weights_of_its_peers():
    with bm.ResourcePool([3]) as pool:
        rollout = bm.WorkerGroup(pool, Holder, 2, mesh=Mesh(dp=3, tp=1))
        rollout.change()
        os.kill(rollout.process()[1], signal.SIGKILL)
        with pytest.raises(bm.WorkerDied):
            rollout.seen()
        rollout.replace(1)
        first, replaced, _ = rollout.seen()
        assert not torch.equal(first[0]["up.weight"], replaced[0]["up.weight"])
        rl.WeightSync(rollout, rollout, from_ranks=[0, 2], to_ranks=[1])(version=5)
        again = rollout.seen()
        assert_alike(again[1][0], first[0])
        assert [version for _, version in again] == [None, 5, None]
        with pytest.raises(bm.UsageError, match=r"ranks \[0, 1, 2\] of .* would send and receive"):
            rl.WeightSync(rollout, rollout)
        for ranks in ([-1], [3], ["2"]):
            for options in ({"from_ranks": ranks, "to_ranks": [1]}, {"from_ranks": [0], "to_ranks": iter(ranks)}):
                with pytest.raises(bm.UsageError, match=rf"has ranks 0 to 2, not {re.escape(str(ranks))}"):
                    rl.WeightSync(rollout, rollout, **options)


class Rotary(rl.HoldsWeights):
    """Has tensors that torch conjugates and negates only when they are read, behind one of another dtype."""

    def __init__(self, sign):
        angles = torch.polar(torch.ones(64), sign * torch.arange(64.0)).conj()
        self.model = nn.Module()
        for name, tensor in {"mask": torch.ones(3, dtype=torch.uint8), "angles": angles, "sines": angles.imag}.items():
            self.model.register_buffer(name, tensor)

    @register(Dispatch.ONE_TO_ALL)
    def seen(self):
        return self.model.angles.resolve_conj().clone(), self.model.sines.resolve_neg().clone()


@pytest.mark.parametrize("bucket_nbytes", [100, 1 << 20])
def test_conjugate_and_negated_tensors_are_moved_in_buckets_of_any_size(bucket_nbytes):
    with bm.ResourcePool([1], backend="inprocess") as pool, bm.ResourcePool([1], backend="inprocess") as other:
        trainer, rollout = bm.WorkerGroup(pool, Rotary, 1), bm.WorkerGroup(other, Rotary, -1)
        rl.WeightSync(trainer, rollout, bucket_nbytes)()
        for seen, expected in zip(rollout.seen()[0], trainer.seen()[0], strict=True):
            assert torch.equal(seen, expected)


def test_what_cannot_be_moved_is_refused(trainer):
    class Other(Holder):
        def __init__(self):
            self.model = nn.Linear(2, 2)

    with bm.ResourcePool([1], backend="inprocess") as pool:
        with pytest.raises(
            bm.LayoutError, match=r"tensor 'weight', which the source does not have; it has 'steps', 'up\.weight'"
        ):
            rl.WeightSync(trainer, bm.WorkerGroup(pool, Other))
        with pytest.raises(bm.UsageError, match=r"hold no weights; derive them from rl\.HoldsWeights"):
            rl.WeightSync(trainer, bm.WorkerGroup(pool, bm.Worker))
        with pytest.raises(bm.UsageError, match=r"rl\.HoldsWeights; WeightSync takes the trainer first"):
            rl.WeightSync(bm.WorkerGroup(pool, bm.Worker), trainer)
        for one in ({"from_ranks": []}, {"to_ranks": []}):
            with pytest.raises(bm.UsageError, match=r"no rank of .* is chosen; name one or more"):
                rl.WeightSync(trainer, bm.WorkerGroup(pool, Holder, 2, mesh=Mesh(dp=1, tp=1)), **one)


@pytest.mark.parametrize("share", [False, True])
def test_a_weight_that_cannot_be_written_to_is_refused_before_anything_is_sent(share):
    class Masked(rl.HoldsWeights):
        def __init__(self, value, is_expanded):
            self.model = nn.Linear(1, 1, bias=False).requires_grad_(False)
            nn.init.constant_(self.model.weight, value)
            mask = torch.full((1, 3), value).expand(2, 3)
            self.model.register_buffer("mask", mask if is_expanded else mask.clone())

        @register(Dispatch.ONE_TO_ALL)
        def values(self):
            return self.model.weight.item(), self.model.mask.tolist()

    with bm.ResourcePool([1], backend="inprocess") as a, bm.ResourcePool([1], backend="inprocess") as b:
        source = bm.WorkerGroup(a, Masked, 1.0, True)
        target = bm.WorkerGroup(b, Masked, 0.0, True)
        with pytest.raises(bm.RemoteError, match=r"weight 'mask' cannot be written to: it is expanded .*\.clone\(\)"):
            rl.WeightSync(source, target, share=share)(version=1)
        assert target.values() == [(0.0, [[0.0] * 3] * 2)]
        target = bm.WorkerGroup(b, Masked, 0.0, False)
        rl.WeightSync(source, target, share=share)(version=1)
        assert target.values() == [(1.0, [[1.0] * 3] * 2)]


class Constant(rl.HoldsWeights):
    """Four layers whose weights have one value."""

    def __init__(self, value):
        self.model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).requires_grad_(False)
        self.fill(value)

    @register(Dispatch.ONE_TO_ALL)
    def fill(self, value):
        for weight in self.model.parameters():
            nn.init.constant_(weight, value)

    @register(Dispatch.ONE_TO_ALL)
    def values(self):
        return sorted({value for weight in self.model.parameters() for value in weight.unique().tolist()}), (
            self.weights_version
        )

    @register(Dispatch.ONE_TO_ALL)
    def nudge(self, ranks, name, index):
        if self.rank in ranks:
            weight = self.model.get_parameter(name).view(-1)
            weight[index] = torch.nextafter(weight[index], torch.tensor(torch.inf))

    def on_replace(self, rank, state):
        pass


BUCKET_NBYTES = 1 << 14  # one layer


@pytest.fixture(scope="module")
def constants():
    """Two sources and a target, on a backend where several threads can call."""
    with bm.ResourcePool([2]) as pool, bm.ResourcePool([2], backend="inprocess") as here:
        one, two = bm.split_resource_pool(pool, [1, 1])
        yield tuple(bm.WorkerGroup(pool, Constant, value) for pool, value in ((one, 1.0), (two, 2.0), (here, 0.0)))


class Overtaken(GroupSync):
    """A sync that has another one run in between two of its buckets."""

    other = None

    def _move(self, index, *args):
        if index == 1 and self.other is not None:
            self.other(version="other")
        return super()._move(index, *args)


def test_a_sync_that_another_one_to_the_same_target_overtakes_is_refused(constants):
    one, two, target = constants
    for is_blocking in (True, False):
        target.fill(0.0)
        sync = Overtaken(one, target, BUCKET_NBYTES, None, None, True)
        sync.other = rl.WeightSync(two, target, BUCKET_NBYTES)
        with pytest.raises(bm.RemoteError, match="another sync to this group has begun since"):
            sync.run(version="first") if is_blocking else sync.submit(version="first").result()
        assert target.values() == [([2.0], "other")] * 2
        sync.other = None
        sync.run(version="again")
        assert target.values() == [([1.0], "again")] * 2


def test_syncs_of_several_threads_do_not_mix_their_weights(constants):
    one, two, target = constants
    syncs = {value: rl.WeightSync(source, target, BUCKET_NBYTES) for value, source in ((1.0, one), (2.0, two))}
    for _ in range(5):
        with ThreadPoolExecutor(2) as threads:
            calls = [threads.submit(sync, version=value) for value, sync in syncs.items()]
            errors = [error for call in calls if (error := call.exception())]
        assert all("another sync to this group has begun since" in str(error) for error in errors)
        ((values, version), other) = target.values()
        assert (values, version) == other
        assert values == [version]


def test_syncs_that_are_submitted_one_after_the_other_follow_each_other(constants):
    one, two, target = constants
    first = rl.WeightSync(one, target, BUCKET_NBYTES).submit(version=1)
    second = rl.WeightSync(two, target, BUCKET_NBYTES).submit(version=2)
    assert first.result() == second.result() == [None, None]
    assert target.values() == [([2.0], 2)] * 2


def test_a_receiver_that_is_replaced_in_a_sync_gets_no_part_of_it():
    class Replacing(GroupSync):
        def _move(self, index, *args):
            moved = super()._move(index, *args)
            if index == 0:
                moved.result()
                self._target.replace(1)
            return moved

    with bm.ResourcePool([1], backend="inprocess") as a, bm.ResourcePool([2]) as b:
        source, target = bm.WorkerGroup(a, Constant, 1.0), bm.WorkerGroup(b, Constant, 0.0)
        with pytest.raises(bm.RemoteError, match="or the rank was replaced") as caught:
            Replacing(source, target, BUCKET_NBYTES, None, None, True).run(None)
        assert caught.value.rank == 1
        assert target.values() == [([0.0], None)] * 2


@pytest.mark.parametrize("is_blocking", [True, False])
def test_replicas_of_the_source_that_differ_are_refused(is_blocking):
    with bm.ResourcePool([3], backend="inprocess") as a, bm.ResourcePool([1], backend="inprocess") as b:
        source = bm.WorkerGroup(a, Constant, 1.0, mesh=Mesh(dp=3), name="trainer")
        target = bm.WorkerGroup(b, Constant, 0.0)
        sync = rl.WeightSync(source, target, BUCKET_NBYTES)
        unchecked = rl.WeightSync(source, target, BUCKET_NBYTES, is_compared=False)
        move = sync if is_blocking else lambda **version: sync.submit(**version).result()
        move(version=1)
        assert target.values() == [([1.0], 1)]
        source.nudge([2], "3.weight", 4095)
        message = r"send_weights failed on rank 2 \(dp=2, .*trainer\): .*'3\.weight'.* of rank 0 \(dp=0\)"
        with pytest.raises(bm.RemoteError, match=message) as caught:
            move(version=2)
        assert "'0.weight'" not in str(caught.value)
        assert target.values() == [([1.0], 1)]
        unchecked(version=3)
        assert target.values()[0][1] == 3
        rl.WeightSync(source, target, from_ranks=[0, 1])(version=4)
        source.nudge([0, 1], "3.weight", 4095)
        move(version=5)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("n", [1, 7, 1024, 8195])
def test_every_bit_of_a_tensor_counts_in_its_checksum(n, dtype):
    tensor, bits = torch.arange(n).remainder(100).to(dtype), range(8 * n * dtype.itemsize)
    tensors = [tensor, *([tensor.flip(0)] if n > 1 else [])]
    for bit in sorted({*bits[:64], *bits[-64:]}):
        changed = tensor.clone()
        changed.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
        tensors.append(changed)
    sums = checksums(tensors)
    assert sums.count(sums[0]) == 1
    for some in tensor[1:], tensor.expand(3, n).T:
        assert checksums([some]) == checksums([some.clone(memory_format=torch.contiguous_format)])


class Remade(rl.HoldsWeights):
    """A model that can be made again with other rows, or in another dtype."""

    def __init__(self, value):
        self.make(value)

    @register(Dispatch.ONE_TO_ALL)
    def make(self, value, n_rows=4, dtype="float16", rank=None):
        if rank in (None, self.rank):
            self.model = nn.Linear(2, n_rows, dtype=getattr(torch, dtype)).requires_grad_(False)
            for weight in self.model.parameters():
                nn.init.constant_(weight, value)

    @register(Dispatch.ONE_TO_ALL)
    def seen(self):
        return {value for weight in self.weights().values() for value in weight.flatten().tolist()}, (
            self.weights_version
        )


CHANGES = {
    "of another dtype": {"dtype": "bfloat16"},
    "of more rows": {"n_rows": 6},
    "of fewer rows": {"n_rows": 2},
    "on one rank": {"n_rows": 6, "rank": 1},
}


@pytest.mark.parametrize("is_blocking", [True, False])
@pytest.mark.parametrize("is_source", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_has_changed_since_a_sync_was_made_is_refused(change, is_source, is_blocking):
    with bm.ResourcePool([2], backend="inprocess") as pool, bm.ResourcePool([2], backend="inprocess") as other:
        trainer, rollout = bm.WorkerGroup(pool, Remade, 1.0), bm.WorkerGroup(other, Remade, 0.0)
        sync = rl.WeightSync(trainer, rollout, bucket_nbytes=8, is_compared=False)
        sync(version=1)
        (trainer if is_source else rollout).make(2.0, **CHANGES[change])
        before = rollout.seen()
        told = r"weight '(weight|bias)' is .*float16 of shape .* but .* made to move float16 of shape \(4.*a new"
        with pytest.raises(bm.RemoteError, match=told):
            sync(version=2) if is_blocking else sync.submit(version=2).result()
        assert rollout.seen() == before
        for group in (trainer, rollout):
            group.make(3.0, **{**CHANGES[change], "rank": None})
        rl.WeightSync(trainer, rollout)(version=3)
        assert rollout.seen() == [({3.0}, 3)] * 2
