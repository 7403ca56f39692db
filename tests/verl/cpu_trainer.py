"""Has verl's trainers run where the only device is the CPU; a plug-in of verl's beside `cpu_platform`."""

import cpu_platform
import torch
import torch.distributed

_start = torch.distributed.init_process_group


def start(backend=None, *args, **options):
    """Start a process group; verl asks for a backend of CPUs and one of devices, which are the same here."""
    kinds = dict.fromkeys((backend or "").split(","))
    return _start(",".join(kinds) or None, *args, **options)


torch.distributed.init_process_group = start
torch.Tensor.pin_memory = lambda self, *_, **__: self  # which only serves copies to a device
cpu_platform.CpuModule.get_rng_state = staticmethod(lambda *_, **__: torch.get_rng_state())
cpu_platform.CpuModule.set_rng_state = staticmethod(lambda state, *_, **__: torch.set_rng_state(state))
cpu_platform.CpuModule.get_device_name = staticmethod(lambda *_, **__: "CPU")
