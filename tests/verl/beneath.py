"""What lies under verl's own test files: bandmaster as the single controller, and GPUs that are not there."""

import os

import pytest

if os.environ["VERL_ON"] == "bandmaster":
    import bandmaster.compat.verl  # noqa: F401

import ray
import torch

N_GPUS = int(os.environ["N_FAKE_GPUS"])
torch.cuda.device_count = lambda: N_GPUS  # in this process alone: the tests make their pools so large
DEFAULTS = {"address": "local", "num_cpus": 100, "num_gpus": N_GPUS, "include_dashboard": False}
_init = ray.init
ray.init = lambda *args, **kwargs: _init(*args, **{**DEFAULTS, **kwargs})


@pytest.fixture(autouse=True)
def own_ray():
    """A test that fails leaves its Ray running."""
    yield
    ray.shutdown()
