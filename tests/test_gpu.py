"""What needs a CUDA device: tensors on GPUs, torch.distributed, weights, checkpoints, turns, commands and Ray."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import bandmaster as bm
from bandmaster import Dispatch, Mesh, register, rl

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]

DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.int64]


class OnGpu(bm.Worker):
    def __init__(self):
        self.total = torch.zeros(1, device=self.device)

    @register(Dispatch.ONE_TO_ALL)
    def add(self, x):
        self.total += x
        return self.total

    @register(Dispatch.ONE_TO_ALL)
    def same(self, tensor):
        assert str(tensor.device) == "cuda:0"
        return tensor

    @register(Dispatch.ONE_TO_ALL)
    def overwrite(self, tensors):
        """Their sums, and where they are; then they are zero here."""
        said = [(tensor.double().sum().item(), str(tensor.device)) for tensor in tensors]
        for tensor in tensors:
            tensor.zero_()
        return said

    @register(Dispatch.ONE_TO_ALL)
    def open_and_look(self, path, tensor):
        with open(path) as file:  # a named pipe: until the other end is opened, too
            file.read()
        return float(tensor.sum())

    @register(Dispatch.ONE_TO_ALL)
    def look(self, tensor):
        return str(tensor.device), float(tensor.sum()), os.environ["CUDA_VISIBLE_DEVICES"]


@pytest.fixture(scope="module", autouse=True)
def context():
    """CUDA in this process, which keeps its descriptors to the end: no test has opened them."""
    torch.zeros(1, device="cuda")


@pytest.fixture
def pool(zygote):
    with bm.ResourcePool([1], backend="local", use_gpu=True) as pool:
        yield pool


@pytest.fixture
def group(pool):
    return bm.WorkerGroup(pool, OnGpu)


def test_results_on_a_gpu_arrive_on_the_cpu_of_the_controller(group):
    (total,) = group.add(10)
    assert (total.device.type, total.item()) == ("cpu", 10.0)


def test_tensors_on_a_gpu_arrive_on_the_device_of_the_worker_and_others_stay_on_the_cpu(group):
    assert group.look(torch.ones(100_000, device="cuda")) == [("cuda:0", 100_000.0, "0")]
    assert group.look(torch.ones(100_000)) == [("cpu", 100_000.0, "0")]


def test_more_gpus_than_the_machine_has_are_refused_with_the_numbers(zygote):
    n = torch.cuda.device_count()
    with pytest.raises(bm.PlacementError, match=rf"{n} of {n} GPUs free"):
        bm.ResourcePool([n + 1], backend="local", use_gpu=True).reserve()


def test_several_tensors_of_one_call_keep_dtype_layout_and_value(group):
    """Small ones share one allocation with others, and so lie somewhere in its middle."""
    tensors = [torch.full((400, 300), n, device="cuda").to(dtype) for n in range(3) for dtype in DTYPES]
    tensors += [tensors[0].t(), tensors[1][::2]]
    sums = [(tensor.double().sum().item(), "cuda:0") for tensor in tensors]
    assert group.overwrite(tensors) == [sums]
    assert [(tensor.double().sum().item(), "cuda:0") for tensor in tensors] == sums


@pytest.mark.parametrize("n", [(32 << 20) - 1, 32 << 20, (32 << 20) + 1, (43 << 20) - 3])
def test_every_byte_of_a_large_tensor_arrives(n, group):
    tensor = torch.randint(256, (n,), dtype=torch.uint8, device="cuda")
    (returned,) = group.same(tensor)
    assert returned.device.type == "cpu" and torch.equal(returned, tensor.cpu())
    with ThreadPoolExecutor(4) as threads:
        shifted = [tensor + k for k in range(4)]
        for sent, (got,) in zip(shifted, threads.map(group.same, shifted), strict=True):
            assert torch.equal(got, sent.cpu())


def test_what_is_written_after_the_call_was_sent_is_not_seen(group, tmp_path):
    path, tensor = tmp_path / "pipe", torch.ones(100_000, device="cuda")
    os.mkfifo(path)
    waiting, looking = group.open_and_look.submit(path, 0.0 * tensor), group.look.submit(tensor)
    tensor.zero_()
    path.write_text("go on")
    assert waiting.result() == [0.0]
    assert looking.result() == [("cuda:0", 100_000.0, "0")]


def test_what_was_exported_is_given_back(group):
    tensor = torch.ones(10_000_000, device="cuda")
    before = torch.cuda.memory_allocated()
    for _ in range(100):
        group.look(tensor)
    assert torch.cuda.memory_allocated() == before


def test_a_new_worker_copies_from_the_gpu_as_well(group):
    tensor = torch.ones(100_000, device="cuda")
    for _ in range(2):
        for _ in range(3):
            assert group.look(tensor) == [("cuda:0", 100_000.0, "0")]
        group.restart()


def test_tensors_on_a_gpu_pass_from_worker_to_worker_and_arrive_on_the_device(pool):
    class Scorer(bm.Worker):
        @register(Dispatch.DP_PROTO)
        def embed(self, rows):
            return rows.to(self.device).float() * 2

        @register(Dispatch.DP_PROTO)
        def where(self, rows):
            return [(str(rows.device), row.sum().item()) for row in rows]

    with bm.ResourcePool([1], backend="local") as cpus:
        first, second, third = (bm.WorkerGroup(one, Scorer) for one in (pool, pool, cpus))
        rows = first.embed.submit(torch.ones(4, 3))
        assert second.where(rows) == [("cuda:0", 6.0)] * 4
        assert third.where(rows) == [("cpu", 6.0)] * 4
        assert rows.result().device.type == "cpu"


# --- torch.distributed, weights, checkpoints and turns on a GPU ---


def layers():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))


class Trainer(rl.HoldsWeights):
    """A model on the worker's GPU, sharded by FSDP2."""

    def __init__(self, seed):
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(seed)
        mesh = rl.device_mesh(self, "dp")
        self.model = fully_shard(layers().to(self.device), mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.kind = mesh.device_type

    @register(Dispatch.ONE_TO_ALL)
    def facts(self):
        import torch.distributed as dist

        total = torch.full((3,), 2.0, device=self.device)
        dist.all_reduce(total)
        return self.kind, dist.get_backend_config(), total.tolist()

    @register(Dispatch.DP_PROTO)
    def step(self, rows):
        loss = self.model(rows.to(self.device)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [loss.item()]

    @register(Dispatch.ONE_TO_ALL)
    def save(self, path):
        rl.save(path, self.model, self.optimizer)

    @register(Dispatch.ONE_TO_ALL)
    def load(self, path):
        rl.load(path, self.model, self.optimizer)

    @register(Dispatch.ONE_TO_ALL)
    def whole(self):
        return {name: weight.full_tensor() for name, weight in self.weights().items()}


class Follower(rl.HoldsWeights):
    """The same model, whole on one GPU."""

    def __init__(self):
        self.model = layers().to(self.device)

    @register(Dispatch.ONE_TO_ALL)
    def whole(self):
        return dict(self.weights())


def test_a_sharded_model_trains_by_nccl_and_comes_back_from_its_checkpoint(pool, tmp_path):
    trainer = bm.WorkerGroup(pool, Trainer, 0, mesh=Mesh(dp=1))
    assert trainer.facts() == [("cuda", "cpu:gloo,cuda:nccl", [2.0] * 3)]
    rows = torch.ones(8, 64)
    losses = [trainer.step(rows)[0] for _ in range(5)]
    assert losses[-1] < losses[0]
    trainer.save(tmp_path / "checkpoint")
    saved, next_loss = trainer.whole()[0], trainer.step(rows)
    trainer.load(tmp_path / "checkpoint")
    found = trainer.whole()[0]
    assert all(torch.equal(found[name], saved[name]) for name in saved)
    assert trainer.step(rows) == next_loss


@pytest.mark.parametrize("share", [False, True])
def test_weights_go_to_another_group_on_the_same_gpu(share, pool):
    trainer, follower = bm.WorkerGroup(pool, Trainer, 0, mesh=Mesh(dp=1)), bm.WorkerGroup(pool, Follower)
    sync = rl.WeightSync(trainer, follower, bucket_nbytes=40_000, share=share)
    for version in range(10):
        trainer.step(torch.ones(8, 64))
        sync(version=version)
        given, got = trainer.whole()[0], follower.whole()[0]
        assert all(torch.equal(given[name], got[name]) for name in given)


class Lender(rl.HoldsWeights):
    """One tensor of 1 GiB, which comes and goes."""

    def __init__(self):
        self.model = nn.Linear(1 << 14, 1 << 14, bias=False, device=self.device).requires_grad_(False)

    @register(Dispatch.ONE_TO_ALL)
    def fill(self, value):
        self.model.weight.fill_(value)

    @register(Dispatch.ONE_TO_ALL)
    def sum(self):
        return self.model.weight.double().sum().item() / self.model.weight.numel()

    @register(Dispatch.ONE_TO_ALL)
    def move(self, device):
        self.model.to(device)
        torch.cuda.empty_cache()


def test_memory_that_was_lent_is_free_when_its_owner_gives_it_up(pool):
    lender, follower = bm.WorkerGroup(pool, Lender), bm.WorkerGroup(pool, Lender)
    sync = rl.WeightSync(lender, follower, share=True)
    for version in range(4):
        lender.fill(float(version))
        sync(version=version)
        assert follower.sum() == [version]
        before = torch.cuda.mem_get_info()[0]
        lender.move("cpu")
        assert torch.cuda.mem_get_info()[0] - before > 0.9 * (1 << 30)
        if version == 1:
            with pytest.raises(bm.RemoteError, match="move the model to the GPU before the sync"):
                sync(version="not this one")
            assert follower.sum() == [version]
        lender.move("cuda")


class Hybrid(bm.Worker):
    def __init__(self):
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        self.training = fully_shard(layers().to(self.device), mesh=rl.device_mesh(self, "dp"))
        self.generation = layers().to(self.device)
        self.engine = rl.HybridEngine(self, self.training, self.generation)

    @register(Dispatch.ONE_TO_ALL)
    def generate(self):
        rows = torch.ones(8, 64, device=self.device)
        with self.engine, torch.no_grad():
            generated = self.generation(rows)
        return (generated - self.training(rows)).abs().max().item()


def test_the_hybrid_engine_generates_with_the_weights_of_training(pool):
    assert bm.WorkerGroup(pool, Hybrid, mesh=Mesh(dp=1)).generate() == [pytest.approx(0, abs=1e-5)]


class Large(bm.Worker):
    """A tensor of 2 GiB, which leaves the GPU in the turns of others."""

    def __init__(self):
        self.data = torch.arange(1 << 29, dtype=torch.float32, device=self.device)

    def on_yield(self):
        self.data = self.data.cpu()
        torch.cuda.empty_cache()

    def on_resume(self):
        self.data = self.data.to(self.device)

    @register(Dispatch.ONE_TO_ALL)
    def look(self):
        return str(self.data.device), self.data[-1].item(), torch.cuda.mem_get_info()[0]


def test_a_turn_has_the_gpu_to_itself(pool):
    first, second = bm.WorkerGroup(pool, Large), bm.WorkerGroup(pool, Large)
    for _ in range(2):
        free = []
        for member in (first, second):
            with member.turn():
                ((device, last, n_free),) = member.look()
                assert (device, last) == ("cuda:0", float(1 << 29))
                free.append(n_free)
        assert abs(free[0] - free[1]) < 1 << 30, "only one of them has its tensor on the GPU"


# --- commands, and Ray ---


def test_commands_show_the_gpu_and_the_memory_that_a_worker_has_there(group):
    group.add(1)
    command = [sys.executable, "-m", "bandmaster"]
    doctor = subprocess.run([*command, "doctor"], capture_output=True, text=True, timeout=60).stdout
    assert "NVML works" in doctor
    top = subprocess.run([*command, "top", "--once"], capture_output=True, text=True, timeout=60).stdout
    assert "GPU 0 " in top, top


def test_a_worker_on_ray_has_the_gpu_that_ray_reserves(zygote):
    ray = pytest.importorskip("ray")
    ray.init("local", include_dashboard=False, log_to_driver=False, object_store_memory=200 << 20)
    try:
        with bm.ResourcePool([1], backend="ray", use_gpu=True) as pool:
            group = bm.WorkerGroup(pool, OnGpu)
            assert group.look(torch.ones(10, device="cuda")) == [("cuda:0", 10.0, "0")]
    finally:
        ray.shutdown()
