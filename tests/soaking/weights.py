"""The life of groups with weights: synced from group to group, and moved between two layouts, while ranks are hurt.

All weights of a rank have one value, which is its version: so a mixture of two versions shows.
"""

import contextlib
import os
import signal
import threading
import time

from soaking.expected import Wrong, outcome_of

import bandmaster as bm
from bandmaster import Dispatch, register, rl

N_LAYERS, WIDTH = 4, 48
BUCKET_NBYTES = [1 << 11, 1 << 14, 1 << 20]
GRACE_S = 0.5


class Holder(rl.HoldsWeights):
    """Layers that are whole on each rank, or cut along tp."""

    def __init__(self):
        import torch
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        torch.set_num_threads(1)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(N_LAYERS)))
        self.model.requires_grad_(False)
        if self.mesh.axis_size("tp") > 1:
            styles = {str(number): ColwiseParallel() for number in range(N_LAYERS)}
            parallelize_module(self.model, rl.device_mesh(self, "tp"), styles)
        self.fill(0)

    @register(Dispatch.ONE_TO_ALL)
    def fill(self, value):
        for weight in self.model.parameters():
            local_tensor(weight).fill_(value)

    @register(Dispatch.ONE_TO_ALL)
    def spoil(self, rank):
        """One element on one rank."""
        if rank == self.rank:
            local_tensor(self.model.get_parameter("2.weight"))[3, 5] += 1

    @register(Dispatch.ONE_TO_ALL)
    def seen(self):
        """All values that weights have, and the version."""
        return values_of(self.model.parameters()), self.weights_version

    def pid(self):
        return os.getpid()

    def on_restart(self, state):
        pass

    def on_replace(self, rank, state):
        pass


class Policy(bm.Worker):
    """A model that is trained in parts, and generates as a whole."""

    def __init__(self):
        import torch
        from torch.distributed.tensor import Shard, distribute_tensor

        torch.set_num_threads(1)
        mesh, nn = rl.device_mesh(self, "tp"), torch.nn
        self.training, self.generation = nn.Module(), nn.Module()
        for number in range(N_LAYERS):
            whole = torch.zeros(WIDTH << 4, WIDTH)
            part = distribute_tensor(whole, mesh, [Shard(0)]) if number else whole.clone()
            self.training.register_parameter(f"w{number}", nn.Parameter(part, requires_grad=False))
            self.generation.register_parameter(f"w{number}", nn.Parameter(whole, requires_grad=False))
        self.engine = rl.HybridEngine(self, self.training, self.generation, bucket_nbytes=1 << 15)

    @register(Dispatch.ONE_TO_ALL)
    def generate(self):
        with self.engine:
            return values_of(self.generation.parameters())

    @register(Dispatch.ONE_TO_ALL)
    def train(self, is_in_place):
        for weight in map(local_tensor, self.training.parameters()):
            if is_in_place:
                weight += 1
            else:
                weight.data = weight.data + 1

    @register(Dispatch.ONE_TO_ALL)
    def trained(self):
        return values_of(self.training.parameters())

    def on_restart(self, state):
        pass


def local_tensor(tensor):
    return rl.local_tensors.local_tensor(tensor)


def values_of(weights):
    return sorted({value for weight in weights for value in local_tensor(weight).unique().tolist()})


class SyncEpisode:
    """Two groups that have weights, and one that gets them."""

    def __init__(self, soak, backend):
        self._soak, self._rng, self._backend = soak, soak.rng, backend
        self._version = 0
        self._allowed = {None: 0}  # the value of the weights by version

    def run(self):
        with contextlib.ExitStack() as stack:
            self._sources = [self._start(stack) for _ in range(2)]
            self._target = self._start(stack)
            self._syncs = [
                rl.WeightSync(source, self._target, self._rng.choice(BUCKET_NBYTES)) for source in self._sources
            ]
            actions = [self.sync] * 3 + [self.submit, self.overlap, self.interrupt, self.kill, self.differ]
            for _ in range(self._rng.randint(2, 8)):
                action = self._rng.choice(actions)
                if action.__name__ not in self._soak.skipped:
                    with self._within(30, f"weights: {action.__name__}"):
                        action()
                        self._soak.stats.done[f"weights: {action.__name__}"] += 1

    def _start(self, stack):
        mesh = self._rng.choice([bm.Mesh(dp=1, tp=1), bm.Mesh(dp=2, tp=1), bm.Mesh(dp=3, tp=1), bm.Mesh(dp=1, tp=2)])
        with self._within(60, f"start of {mesh!r} with weights"):
            pool = stack.enter_context(bm.ResourcePool([mesh.size], backend=self._backend))
            self._soak.stats.n_groups += 1
            return bm.WorkerGroup(pool, Holder, mesh=mesh)

    def _fill(self, index):
        """Give a source new weights.

        Returns:
            Their version.
        """
        self._version += 1
        self._sources[index].fill(self._version)
        self._allowed[self._version] = self._version
        return self._version

    def _check(self, *versions):
        """Each rank of the target has all the weights of its version, which is one of these, if any are given."""
        for values, version in self._target.seen():
            if values != [self._allowed[version]] or (versions and version not in versions):
                raise Wrong(f"a rank of the target has {values} as version {version}, which is none of {versions}")

    def sync(self):
        index = self._rng.randrange(2)
        version = self._fill(index)
        self._syncs[index](version)
        self._check(version)

    def submit(self):
        """Two syncs that follow each other."""
        first, second = (self._syncs[index].submit(self._fill(index)) for index in (0, 1))
        first.result()
        second.result()
        self._check(self._version)

    def overlap(self):
        """Two syncs of two threads: one after the other, or the one that began first fails."""
        versions = [self._fill(index) for index in (0, 1)]
        outcomes = [None, None]

        def work(index):
            outcomes[index] = outcome_of(self._syncs[index], versions[index])

        threads = [threading.Thread(target=work, args=[index]) for index in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        errors = [error for error in outcomes if error is not None]
        if len(errors) > 1 or any("another sync to this group" not in str(error) for error in errors):
            raise Wrong(f"two syncs at once came to {outcomes}")
        self._check(*(version for version, error in zip(versions, outcomes, strict=True) if error is None))

    def interrupt(self):
        """Ctrl-C in a sync: the target has the old or the new weights."""
        index = self._rng.randrange(2)
        version, before = self._fill(index), {version for _, version in self._target.seen()}
        outcome = self._soak.interrupter.run(0.02, self._syncs[index], version)
        if outcome is not None and not isinstance(outcome, KeyboardInterrupt):
            raise Wrong("a sync that was interrupted") from outcome
        self._check(version, *before if outcome else ())

    def kill(self):
        """A rank of the source or the target in the midst of a sync."""
        index = self._rng.randrange(2)
        version, before = self._fill(index), {version for _, version in self._target.seen()}
        group = self._rng.choice([self._sources[index], self._target])
        rank = self._rng.randrange(group.world_size)
        pid = group.execute_all_sync("pid")[rank]
        timer = threading.Timer(self._rng.random() * 0.02, os.kill, [pid, signal.SIGKILL])
        timer.start()
        outcome = outcome_of(self._syncs[index], version)
        timer.join()
        if outcome is not None and not isinstance(outcome, bm.WorkerDied):
            raise Wrong("a sync in which a rank was killed") from outcome
        while not isinstance(error := outcome_of(group.seen), bm.WorkerDied):
            if isinstance(error, Exception):
                raise Wrong("a rank was killed") from error
        if error.rank != rank:
            raise Wrong(f"rank {rank} was killed, and the error names {error.rank}") from error
        if group.mesh.axis_size("tp") > 1 or self._rng.random() < 0.3:
            group.restart()
        else:
            group.replace(rank)
        if group is not self._target:
            group.fill(version)
        self._check(version, None, *before)
        self._syncs[index](version)
        self._check(version)

    def differ(self):
        """Replicas of a source that differ."""
        index = self._rng.randrange(2)
        source, version, before = self._sources[index], self._fill(index), {v for _, v in self._target.seen()}
        if source.mesh.axis_size("dp") == 1:
            return
        rank = self._rng.randrange(1, source.world_size)
        source.spoil(rank)
        error = outcome_of(self._syncs[index], version)
        if not isinstance(error, bm.RemoteError) or error.rank != rank or "'2.weight'" not in str(error):
            raise Wrong(f"the weights of rank {rank} differ, and a sync came to {error!r}")
        self._check(*before)

    def _within(self, seconds, what):
        return self._soak.watchdog.within(seconds if self._backend == "local" else 3 * seconds, what)


class EngineEpisode:
    """A group that trains and generates with one set of weights in two layouts."""

    def __init__(self, soak, backend):
        self._soak, self._rng, self._backend = soak, soak.rng, backend

    def run(self):
        mesh = bm.Mesh(tp=self._rng.choice([1, 2, 2]))
        within = self._soak.watchdog.within
        with within(90, "start of an engine"), bm.ResourcePool([mesh.size], backend=self._backend) as pool:
            self._group = bm.WorkerGroup(pool, Policy, mesh=mesh)
            self._soak.stats.n_groups += 1
            self._value = 0
            for _ in range(self._rng.randint(2, 8)):
                action = self._rng.choice([self.train, self.generate, self.cancel, self.cancel, self.interrupt])
                if action.__name__ not in self._soak.skipped:
                    with within(30, f"engine: {action.__name__}"):
                        action()
                        self._check()
                        self._soak.stats.done[f"engine: {action.__name__}"] += 1

    def _check(self):
        """The training model has its weights, and the call before has left the group alive or ended a rank."""
        trained = outcome_of(self._group.trained)
        if isinstance(trained, bm.WorkerDied) and "was cancelled" in str(trained):
            self._group.restart()  # it sat in an exchange that another rank had not begun
            self._value = 0
        elif trained != [[self._value]] * self._group.world_size:
            raise Wrong(f"the training model has {trained!r} and not {self._value}")

    def train(self):
        self._group.train(self._rng.random() < 0.5)
        self._value += 1

    def generate(self):
        if (generated := self._group.generate()) != [[self._value]] * self._group.world_size:
            raise Wrong(f"the generation model has {generated} and not {self._value}")

    def cancel(self):
        call = self._group.generate.options(grace=GRACE_S).submit()
        time.sleep(self._rng.random() * 0.02)
        call.cancel()
        outcome = outcome_of(call.result, 10.0)
        if outcome != [[self._value]] * self._group.world_size and not isinstance(outcome, bm.CallCancelled):
            raise Wrong(f"generation that was cancelled came to {outcome!r}")

    def interrupt(self):
        outcome = self._soak.interrupter.run(0.02, self._group.generate.options(grace=GRACE_S))
        if outcome != [[self._value]] * self._group.world_size and not isinstance(outcome, KeyboardInterrupt):
            raise Wrong(f"generation that was interrupted came to {outcome!r}")
