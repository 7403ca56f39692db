"""What needs a CUDA device: where it is, workers have one each and tensors find their way between them."""

import os

import pytest
import torch

import bandmaster as bm
from bandmaster import Dispatch, register

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]


class OnGpu(bm.Worker):
    def __init__(self):
        self.total = torch.zeros(1, device=self.device)

    @register(Dispatch.ONE_TO_ALL)
    def add(self, x):
        self.total += x
        return self.total

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
