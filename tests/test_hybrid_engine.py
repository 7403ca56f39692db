"""The hybrid engine: the weights of a model in a training and in a generation layout, on the same ranks."""

import contextlib
import copy
import signal
import sys

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import bandmaster as bm
from bandmaster import Dispatch, Mesh, register, rl

ROWS = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    """The pattern of a transformer's layer: a normalisation that all ranks have, and two matrices that are cut."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, rows):
        return rows + self.down(torch.tanh(self.up(self.norm(rows))))


def model(layers=range(4)):
    """Some layers of the one model of four, all its weights the same wherever it is made."""
    torch.manual_seed(0)
    blocks = [Block() for _ in range(4)]
    for block in blocks:
        nn.init.normal_(block.norm.weight)
    return nn.Sequential(*(block if index in layers else nn.Identity() for index, block in enumerate(blocks)))


def cut(model, mesh):
    styles = {"up": ColwiseParallel, "down": RowwiseParallel}
    names = {f"{index}.{name}": style() for index, block in enumerate(model) if isinstance(block, Block)
             for name, style in styles.items()}  # fmt: skip
    return parallelize_module(model, mesh, names) if mesh.size() > 1 else model


class Actor(bm.Worker):
    """Trains in the layout p-d-t of its mesh, and generates in that of the refined axes."""

    def __init__(self, is_sharded=False, bucket_nbytes=1 << 20):
        stage = 4 // self.mesh.axis_size("pp")
        first = stage * self.coordinates["pp"]
        mesh = rl.device_mesh(self, "dp", "tp")
        self.model = cut(model(range(first, first + stage)), mesh["tp"])
        if is_sharded:
            self.model = fully_shard(self.model, mesh=mesh["dp"])
        self.rollout = cut(model(self._generated()), rl.device_mesh(self, "gen_tp"))
        with torch.no_grad():
            for weight in self.rollout.parameters():
                rl.local_tensors.local_tensor(weight).fill_(float("nan"))
        self.engine = rl.HybridEngine(self, self.model, self.rollout, bucket_nbytes)

    def _generated(self):
        stage = 4 // self.mesh.axis_size("gen_pp")
        first = stage * self.coordinates["gen_pp"]
        return range(first, first + stage)

    @register(Dispatch.ONE_TO_ALL)
    def switch(self):
        """Outputs of the generation model beside those of the whole one, and what has moved; None for an output if it
        has some of the layers only."""
        before = self._local()
        with self.engine:
            is_whole = len(self._generated()) == 4
            seen = self.rollout(ROWS).detach() if is_whole else None
            held = _nbytes([*self.model.parameters(), *self.rollout.parameters()])
        after, left = self._local(), _nbytes([*self.model.parameters(), *self.rollout.parameters()])
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        plan = self.engine.plan
        senders = {move.sender for move in plan.moves if move.receiver == self.rank}
        return seen, self.engine.received_nbytes, sorted(senders), held, left

    @register(Dispatch.ONE_TO_ALL)
    def train(self):
        """A step of training, after which the generation model has to know the new weights."""
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.model(ROWS).square().mean().backward()
        optimizer.step()

    @register(Dispatch.ONE_TO_ALL)
    def use_outside(self):
        self.rollout(ROWS)

    @register(Dispatch.ONE_TO_ALL)
    def train_inside(self):
        with self.engine:
            self.model(ROWS)

    @register(Dispatch.ONE_TO_ALL)
    def enter_twice(self):
        with self.engine, self.engine:
            pass

    def _local(self):
        return {name: rl.local_tensors.local_tensor(tensor).detach().clone()
                for name, tensor in self.model.state_dict().items()}  # fmt: skip


def _nbytes(tensors):
    """Bytes of the memory of tensors, counted once."""
    storages = {}
    for tensor in tensors:
        storage = rl.local_tensors.local_tensor(tensor).untyped_storage()
        storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


MATRICES, NORMS = 4 * 2 * 8 * 16 * 4, 4 * 2 * 8 * 4  # bytes of those that are cut, and of those that ranks have alike


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        (Mesh(pp=1, dp=2, tp=2).refine(gen_pp=1, gen_tp=1), {}),
        (Mesh(pp=1, dp=1, tp=4).refine(gen_pp=1, gen_tp=2), {"bucket_nbytes": 300}),
        (Mesh(pp=2, dp=1, tp=2).refine(gen_pp=1, gen_tp=1), {}),
        (Mesh(pp=2, dp=1, tp=2).refine(gen_pp=1, gen_tp=2), {}),
    ],
    ids=str,
)
def test_a_switch_gathers_what_the_paper_says(mesh, options):
    whole = model()(ROWS)
    with bm.ResourcePool([4]) as pool:
        actor = bm.WorkerGroup(pool, Actor, mesh=mesh, **options)
        n_train, n_generate = (mesh.axis_size(f"{g}pp") * mesh.axis_size(f"{g}tp") for g in ("", "gen_"))
        for again in (1, 2):
            for rank, (seen, received, senders, held, left) in enumerate(actor.switch()):
                if seen is not None:
                    torch.testing.assert_close(seen, whole.detach(), atol=1e-5, rtol=0)
                norms = NORMS // mesh.axis_size("gen_pp") - NORMS // mesh.axis_size("pp")
                assert received == (n_train - n_generate) * MATRICES // (n_generate * n_train) + norms, again
                group = next(group for group in mesh.groups("micro_dp") if rank in group)
                assert set(senders) <= set(group)
                assert held == MATRICES // n_generate + NORMS // mesh.axis_size("gen_pp"), "nothing is held twice"
                assert left == MATRICES // n_train + NORMS // mesh.axis_size("pp")


def test_weights_of_fully_sharded_models_after_a_step_of_training():
    mesh = Mesh(pp=1, dp=2, tp=2).refine(gen_pp=1, gen_tp=1)
    with bm.ResourcePool([4]) as pool:
        actor = bm.WorkerGroup(pool, Actor, True, mesh=mesh)
        actor.train()
        whole = copy.deepcopy(model())
        optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
        whole(ROWS).square().mean().backward()
        optimizer.step()
        for seen, received, *_ in actor.switch():
            torch.testing.assert_close(seen, whole(ROWS).detach(), atol=1e-5, rtol=0)
            assert received == MATRICES * 3 // 4 + NORMS // 2, "norms are cut over dp alone"
        actor.train()
        assert all(torch.isfinite(seen).all() for seen, *_ in actor.switch())


def test_models_that_are_used_in_the_wrong_layout_are_refused():
    with bm.ResourcePool([1]) as pool:
        actor = bm.WorkerGroup(pool, Actor, mesh=Mesh(pp=1, dp=1, tp=1).refine(gen_pp=1, gen_tp=1))
        ((seen, received, *_),) = actor.switch()
        assert received == 0
        assert torch.equal(seen, model()(ROWS).detach())
        with pytest.raises(bm.RemoteError, match="no weights outside of `with engine:`"):
            actor.use_outside()
        with pytest.raises(bm.RemoteError, match="leave the `with` block of the engine to train"):
            actor.train_inside()
        with pytest.raises(bm.RemoteError, match="leave its `with` block before entering another"):
            actor.enter_twice()
        assert torch.equal(actor.switch()[0][0], seen), "after an error it is as before"


class Replica(bm.Worker):
    """One rank, which has all tensors alike in both layouts."""

    def __init__(self):
        self.model, self.rollout = nn.Linear(4, 1), nn.Linear(4, 1)
        self.engine = rl.HybridEngine(self, self.model, self.rollout)

    @register(Dispatch.ONE_TO_ALL)
    def outputs_after(self, change):
        """Outputs of both models, after a function has changed the one that is trained."""
        with torch.no_grad():
            change(self.model)
            trained = self.model(torch.ones(1, 4)).item()
            with self.engine:
                return trained, self.rollout(torch.ones(1, 4)).item()

    @register(Dispatch.ONE_TO_ALL)
    def enter_after(self, change):
        change(self.model)
        with self.engine:
            pass

    @register(Dispatch.ONE_TO_ALL)
    def enter_interrupted_at(self, n):
        trace, before = InterruptsAt(n), signal.getsignal(signal.SIGINT)
        try:
            sys.settrace(trace)
            with self.engine:
                sys.settrace(None)
        except KeyboardInterrupt:
            assert trace.has_struck
        finally:
            sys.settrace(None)
            signal.signal(signal.SIGINT, before)  # it also strikes where no signal can: as handlers are put back
        return trace.has_struck


def add_to_data(model):
    for parameter in model.parameters():
        parameter.data = parameter.data + 1


def convert_and_add(model):
    model.to(torch.float64).to(torch.float32)  # as a model that moves to the host and back
    for parameter in model.parameters():
        parameter += 1


def replace_parameters(model):
    for name, parameter in [*model.named_parameters()]:
        setattr(model, name, nn.Parameter(parameter + 1))


def test_the_engine_takes_the_tensors_that_the_models_have_when_it_is_entered():
    with bm.ResourcePool([1], backend="inprocess") as pool:
        replica = bm.WorkerGroup(pool, Replica)
        for change in (add_to_data, convert_and_add, replace_parameters):
            ((trained, generated),) = replica.outputs_after(change)
            assert trained == generated, change.__name__
        with pytest.raises(bm.RemoteError, match=r"'weight' of the training model is float64 .* was float32 of shape"):
            replica.enter_after(nn.Module.double)
        with pytest.raises(bm.RemoteError, match=r"'weight' of the training model is missing"):
            replica.enter_after(lambda model: model.register_parameter("weight", None))


class InterruptsAt:
    """A trace function that raises KeyboardInterrupt at the nth moment of this library's code, as a signal might."""

    def __init__(self, n):
        self.n, self.has_struck = n, False

    def __call__(self, frame, event, argument):
        if "bandmaster/rl/" in frame.f_code.co_filename:
            self.n -= 1
            if self.n < 0:
                self.has_struck = True
                raise KeyboardInterrupt  # tracing ends with that
        return self


N_ROWS, N_COLUMNS = 7, 16  # so that FSDP2 pads the part of rank 1


class Parts(bm.Worker):
    """A matrix that is cut over two ranks in training, and whole in generation; its memory is a part of more."""

    def __init__(self, kind):
        mesh, ones = rl.device_mesh(self, "tp"), torch.ones(N_ROWS, N_COLUMNS)
        part = ones.chunk(2)[self.rank]
        self.training, self.generation = nn.Module(), nn.Module()
        flat = torch.zeros(3 * N_ROWS * N_COLUMNS)
        if kind == "FSDP2":
            self.training.weight = nn.Parameter(ones.clone())
            fully_shard(self.training, mesh=mesh)
        else:
            own = part if kind == "a view of the whole" else part.clone()
            own = torch.from_numpy(own.numpy()) if kind == "memory of numpy" else own
            own = DTensor.from_local(own, mesh, [Shard(0)], shape=ones.shape, stride=ones.stride())
            self.training.weight = nn.Parameter(own)
        is_flat = kind == "generation in a flat buffer"
        whole = flat[N_ROWS * N_COLUMNS :][: N_ROWS * N_COLUMNS].view(N_ROWS, N_COLUMNS) if is_flat else ones * 0
        self.generation.weight = nn.Parameter(whole)
        self.engine = rl.HybridEngine(self, self.training, self.generation, bucket_nbytes=3 * N_COLUMNS * 4)

    @register(Dispatch.ONE_TO_ALL)
    def enter_interrupted_in_the_middle(self):
        """Rank 0 alone gets an interrupt, before it exchanges the second bucket."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        exchange, n_calls = torch.distributed.batch_isend_irecv, 0

        def interrupted_exchange(operations):
            nonlocal n_calls
            n_calls += 1
            if n_calls == 2 and self.rank == 0:
                signal.raise_signal(signal.SIGINT)
            return exchange(operations)

        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(torch.distributed, "batch_isend_irecv", interrupted_exchange)
            with self.engine:
                return "entered"
        return n_calls

    @register(Dispatch.ONE_TO_ALL)
    def leave_interrupted_at(self, n):
        trace = InterruptsAt(n)
        try:
            with self.engine:
                assert (self.generation.weight == 1).all()
                sys.settrace(trace)
        except KeyboardInterrupt:
            assert trace.has_struck
            assert _nbytes([self.generation.weight]) < N_COLUMNS * 4
        finally:
            sys.settrace(None)
        assert (self.training.weight.to_local() == 1).all()
        assert _nbytes([self.training.weight]) == self.training.weight.to_local().numel() * 4
        return trace.has_struck

    @register(Dispatch.ONE_TO_ALL)
    def save_inside(self, path):
        with self.engine:
            rl.save(path, self.training)

    @register(Dispatch.ONE_TO_ALL)
    def load_inside(self):
        weights = self.training.state_dict()
        with self.engine:
            self.training.load_state_dict(weights)

    @register(Dispatch.ONE_TO_ALL)
    def check(self):
        own = self.training.weight
        held = _nbytes([own])
        for value in (1.0, 2.0, 3.0):
            with self.engine:
                seen = self.generation.weight
                assert _nbytes([seen]) == N_ROWS * N_COLUMNS * 4
                assert (seen == value).all()
            assert _nbytes([own]) == held, "others may refer to all of it"
            assert (own.to_local() == value).all()
            with torch.no_grad():
                own.add_(1)


@pytest.mark.parametrize("kind", ["a view of the whole", "memory of numpy", "generation in a flat buffer", "FSDP2"])
def test_tensors_that_are_a_part_of_more_memory_keep_it(kind):
    with bm.ResourcePool([2]) as pool:
        bm.WorkerGroup(pool, Parts, kind, mesh=Mesh(tp=2)).check()


def test_weights_that_are_not_there_are_neither_saved_nor_loaded(tmp_path):
    with bm.ResourcePool([2]) as pool:
        parts = bm.WorkerGroup(pool, Parts, "plain", mesh=Mesh(tp=2))
        with pytest.raises(bm.RemoteError, match="leave the `with` block of the engine to train, save or load"):
            parts.save_inside(str(tmp_path))
        with pytest.raises(bm.RemoteError, match="leave the `with` block of the engine to train, save or load"):
            parts.load_inside()
        parts.check()


def test_an_interrupt_as_the_generation_layout_is_left_is_raised_when_it_has_been_left():
    with bm.ResourcePool([2]) as pool:
        parts = bm.WorkerGroup(pool, Parts, "plain", mesh=Mesh(tp=2))
        n = 0
        while any(parts.leave_interrupted_at(n)):
            n += 1
        assert n > 10, "it has been interrupted in its first line, and in each of the others"


def test_an_interrupt_as_the_generation_layout_is_entered_leaves_the_training_layout():
    with bm.ResourcePool([1], backend="inprocess") as pool:
        replica, n = bm.WorkerGroup(pool, Replica), 0
        while replica.enter_interrupted_at(n)[0]:
            ((trained, generated),) = replica.outputs_after(add_to_data)
            assert trained == generated
            n += 1
        assert n > 10


def test_a_rank_that_is_interrupted_as_it_enters_exchanges_the_rest_with_the_others():
    with bm.ResourcePool([2]) as pool:
        parts = bm.WorkerGroup(pool, Parts, "plain", mesh=Mesh(tp=2))
        assert parts.enter_interrupted_in_the_middle.options(timeout=30)() == [2, "entered"]
        parts.check.options(timeout=30)()
