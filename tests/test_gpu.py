"""What needs a CUDA device: where it is, workers have one each and tensors find their way between them."""

import os

import pytest
import torch

import bandmaster as bm
from bandmaster import Dispatch, register

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


@pytest.fixture
def group(zygote):
    with bm.ResourcePool([1], backend="local", use_gpu=True) as pool:
        yield bm.WorkerGroup(pool, OnGpu)


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
