"""Weights from group to group: bit-identical, not through the controller, and all of them at once."""

import os
import signal
import threading

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import bandmaster as bm
from bandmaster import Dispatch, Mesh, register, rl

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
        assert sync.submit(version="b").result() == [None] * 3
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
    """Its rank 1 dies in the second bucket; `weights` is called for the layout, and then for each bucket."""

    n_calls = 0

    def weights(self):
        self.n_calls += 1
        if self.n_calls == 3 and self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().weights()

    def on_replace(self, rank, state):
        self.n_calls = 3  # the new worker lives


def test_a_sender_that_dies_half_way_leaves_the_receivers_as_they_were():
    with bm.ResourcePool([2]) as senders, bm.ResourcePool([2], backend="inprocess") as receivers:
        source = bm.WorkerGroup(senders, DiesHalfWay, 1, mesh=Mesh(dp=2, tp=1))
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
        rl.WeightSync(trainer, rollout, to_ranks=[])(version=2)  # nothing: what was staged before is not used
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
