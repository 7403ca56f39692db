"""Process groups across worker groups."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

import bandmaster as bm
from bandmaster import Dispatch, Mesh, register, rl


class Peer(rl.Connectable):
    def __init__(self, has_default=False):
        if has_default:
            rl.device_mesh(self)

    @register(Dispatch.ONE_TO_ALL)
    def exchange(self, name="connection"):
        """What a broadcast, a gather, a message around the ring and one within the default group have brought."""
        group = self.process_groups[name]
        rank, n_ranks = group.rank(), group.size()
        sent = torch.tensor([rank, 7.0])
        dist.broadcast(sent, n_ranks - 1, group)
        gathered = [None] * n_ranks
        dist.all_gather_object(gathered, {"rank": rank, "of": self.world_size}, group)
        received = torch.zeros(1)
        around = [
            dist.P2POp(dist.isend, torch.tensor([float(rank)]), (rank + 1) % n_ranks, group),
            dist.P2POp(dist.irecv, received, (rank - 1) % n_ranks, group),
        ]
        for request in dist.batch_isend_irecv(around):
            request.wait()
        own = torch.ones(1)
        if dist.is_initialized():
            dist.all_reduce(own)
        return sent.tolist(), gathered, received.item(), own.item()

    @register(Dispatch.ONE_TO_ALL)
    def sum_over_all(self):
        total = torch.ones(1)
        dist.all_reduce(total, group=self.process_groups["connection"])
        return total.item()

    @register(Dispatch.ONE_TO_ALL)
    def n_descriptors(self):
        return len(os.listdir("/proc/self/fd"))

    @register(Dispatch.ONE_TO_ALL)
    def process(self):
        return os.getpid()

    def on_replace(self, rank, state):
        pass


def exchanged(*groups, **options):
    futures = [group.exchange.submit(**options) for group in groups]
    return [value for future in futures for value in future.result()]


@pytest.fixture(scope="module")
def trainer():
    with bm.ResourcePool([2]) as pool:
        yield bm.WorkerGroup(pool, Peer, True, mesh=Mesh(dp=2))


@pytest.fixture(scope="module")
def rollout():
    with bm.ResourcePool([3]) as pool:
        yield bm.WorkerGroup(pool, Peer)


def assert_connected(groups, sums, **options):
    """All ranks of some groups are one process group; ``sums`` are what the default groups of the groups have."""
    sizes = [group.world_size for group in groups for _ in range(group.world_size)]
    n_ranks = len(sizes)
    for rank, (sent, gathered, received, own) in enumerate(exchanged(*groups, **options)):
        assert sent == [n_ranks - 1, 7]
        assert gathered == [{"rank": i, "of": size} for i, size in enumerate(sizes)]
        assert received == (rank - 1) % n_ranks
        assert own == sums[rank]


def test_workers_of_two_groups_are_ranks_of_one_process_group(trainer, rollout):
    with rl.connect(trainer, rollout) as connection:
        assert connection.n_ranks == 5
        assert connection.ranks(trainer) == range(2)
        assert connection.ranks(rollout) == range(2, 5)
        assert connection.backend == "gloo"
        assert_connected([trainer, rollout], [2, 2, 1, 1, 1])
    with pytest.raises(bm.RemoteError, match="KeyError: 'connection'"):
        rollout.exchange()


def test_connections_leave_nothing_and_can_be_made_again(trainer, rollout):
    rl.connect(trainer, rollout).close()  # what torch opens once for a process is open now
    before = trainer.n_descriptors() + rollout.n_descriptors()
    for _ in range(2):
        with rl.connect(rollout, trainer) as one, rl.connect(trainer, name="other") as other:
            assert (one.n_ranks, other.n_ranks) == (5, 2)
            assert_connected([rollout, trainer], [1, 1, 1, 2, 2])
            assert_connected([trainer], [2, 2], name="other")
        one.close()
        assert trainer.n_descriptors() + rollout.n_descriptors() == before


def test_a_rank_that_dies_ends_a_collective_and_its_group_can_be_connected_anew():
    with bm.ResourcePool([1]) as one, bm.ResourcePool([1]) as other:
        trainer, rollout = bm.WorkerGroup(one, Peer), bm.WorkerGroup(other, Peer)
        connection = rl.connect(trainer, rollout)
        (process,) = rollout.process()
        waiting = trainer.sum_over_all.submit()
        os.kill(process, signal.SIGKILL)
        with pytest.raises(bm.RemoteError, match="onnection"):
            waiting.result(timeout=30)
        with pytest.raises(bm.WorkerDied, match="rank 0"):
            rollout.sum_over_all()
        rollout.replace(0)
        connection.close()
        with rl.connect(trainer, rollout):
            assert_connected([trainer, rollout], [1, 1])


def test_groups_of_which_a_rank_died_while_joining_can_be_connected_anew(trainer):
    class DiesOnce(Peer):
        dies = False

        @register(Dispatch.ONE_TO_ALL)
        def die_while_joining(self, rank):
            self.dies = self.rank == rank

        @register(Dispatch.ONE_TO_ALL)
        def join_connection(self, *args):
            if self.dies:
                os._exit(3)
            super().join_connection(*args)

    with bm.ResourcePool([2]) as pool:
        rollout = bm.WorkerGroup(pool, DiesOnce)
        rollout.die_while_joining(1)
        with pytest.raises(bm.WorkerDied, match=r"rank 1 .*exit code 3"):
            rl.connect(trainer, rollout, timeout=2)
        rollout.replace(1)
        with rl.connect(trainer, rollout, timeout=20):
            assert_connected([trainer, rollout], [2, 2, 1, 1])


def test_a_rank_that_dies_while_joining_ends_the_wait_of_the_others(trainer):
    class Dies(Peer):
        @register(Dispatch.ONE_TO_ALL)
        def join_connection(self, *_):
            os._exit(3)

    with bm.ResourcePool([1]) as pool:
        rollout = bm.WorkerGroup(pool, Dies)
        with pytest.raises(bm.WorkerDied, match=r"rank 0 .*exit code 3"):
            rl.connect(trainer, rollout, timeout=2)
        assert trainer.healthy
    with rl.connect(trainer):
        assert_connected([trainer], [2, 2])


def test_a_default_group_that_is_bound_to_a_gpu_stays_so():
    from bandmaster.rl.connect import _unbound_default_group

    class Bound(Peer):
        @register(Dispatch.ONE_TO_ALL)
        def devices(self):
            rl.start_torch_distributed(self)
            default = dist.group.WORLD
            default.bound_device_id = torch.device("cuda:0")
            with _unbound_default_group():
                inside = default.bound_device_id
            return inside, str(default.bound_device_id)

    with bm.ResourcePool([1]) as pool:
        assert bm.WorkerGroup(pool, Bound).devices() == [(None, "cuda:0")]


def test_what_cannot_be_connected_is_refused(trainer, rollout):
    with bm.ResourcePool([2], backend="inprocess") as pool:
        with pytest.raises(bm.UsageError, match=r"derive them from rl\.Connectable"):
            rl.connect(trainer, bm.WorkerGroup(pool, bm.Worker))
        with pytest.raises(bm.UsageError, match=r"a process for each of 4 ranks, .* have 2 of their own"):
            rl.connect(trainer, bm.WorkerGroup(pool, Peer))
    with pytest.raises(bm.UsageError, match=r"a process for each of 4 ranks, .* have 2 of their own"):
        rl.connect(trainer, trainer)
    with rl.connect(trainer) as connection:
        with pytest.raises(bm.UsageError, match="are in a connection 'connection'; close it, or choose another name"):
            rl.connect(trainer, rollout)
        with pytest.raises(bm.UsageError, match="is not part of 'connection'; it has"):
            connection.ranks(rollout)


def test_a_group_on_ray_is_connected_with_a_local_one(rollout, ray_cluster):
    with bm.ResourcePool([2], backend="ray") as pool:
        trainer = bm.WorkerGroup(pool, Peer)
        with rl.connect(rollout, trainer):
            assert_connected([rollout, trainer], [1] * 5)
