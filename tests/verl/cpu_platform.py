"""A platform for verl, by its own plug-in point, whose device is the CPU; Ray is told of GPUs that do not exist."""

import contextlib
import os

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


class CpuModule:
    """``torch.cpu``; what else verl asks of a device module is nothing, or 0 bytes."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "mem_get_info":
            return lambda *_: (1 << 33, 1 << 34)
        return getattr(torch.cpu, name, lambda *_, **__: 0 if "memory" in name else None)


def _nothing(self, *args, **kwargs):
    return None


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    device_name = vendor_name = "cpu"
    device_module = CpuModule()

    set_device = synchronize = manual_seed_all = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing

    def is_available(self):
        return True

    def is_platform_available(self, use_smi_check=False):
        return True

    def is_ipc_supported(self):
        return False

    def current_device(self):
        return "cpu"

    def device_count(self):
        return int(os.environ["N_FAKE_GPUS"])

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg):
        yield

    def ray_resource_name(self):
        return "GPU"

    def ray_noset_envvars(self):
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def ray_resource_options(self, num_gpus):
        return {"num_gpus": num_gpus}
