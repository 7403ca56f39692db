"""The axes of a group's mesh as torch's DeviceMesh."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from bandmaster import UsageError, Worker
from bandmaster.rl.gloo_interface import choose_interface

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_made: WeakKeyDictionary[Any, dict[Any, DeviceMesh]] = WeakKeyDictionary()  # by the process group of all ranks
OTHERS = "others"  # name of the dim of a DeviceMesh for the axes that the caller does not name


def start_torch_distributed(worker: Worker) -> None:
    """Initialise ``torch.distributed`` for the ranks of a worker's group, unless it is initialised.

    Collective: all ranks of the group call it. Tensors on the CPU go by gloo, those on GPUs by NCCL.

    Raises:
        UsageError: Several ranks share this process, as on backend ``"inprocess"``.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        return
    backend = "gloo" if worker.device == "cpu" else "cpu:gloo,cuda:nccl"
    if worker.world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    elif os.environ.get("WORLD_SIZE") != str(worker.world_size):
        raise UsageError(
            f"torch.distributed takes a process for each of {worker.world_size} ranks, and these share one; use "
            'backend "local" or "ray", or one rank'
        )
    else:
        choose_interface(os.environ["MASTER_ADDR"])
        dist.init_process_group(backend)


def device_mesh(worker: Worker, *axes: str) -> DeviceMesh:
    """The ranks that differ from a worker only in some axes, as a torch ``DeviceMesh`` with these axes as dims.

    Collective: all ranks of the group call it, with the same axes in the same order. It initialises
    ``torch.distributed`` if it is not initialised. Equal arguments give the same ``DeviceMesh``.

    Args:
        worker: The worker, that is ``self``.
        *axes: Axes of its mesh, also axes of a refined mesh such as ``"gen_tp"`` and ``"micro_dp"``; by default the
            axes given to the constructor of the mesh.

    Raises:
        MeshError: The mesh does not have an axis, or axes overlap.
        UsageError: Several ranks share this process, as on backend ``"inprocess"``.

    Source: ``torch.distributed.device_mesh.DeviceMesh``.
    """
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    names = axes or tuple(worker.mesh.shape)
    groups = worker.mesh.groups(*names)  # raises before anything is initialised
    start_torch_distributed(worker)
    made, kind = _made.setdefault(torch.distributed.group.WORLD, {}), worker.device.partition(":")[0]
    if (kind, worker.mesh, names) not in made:
        sizes = [worker.mesh.axis_size(name) for name in names]
        ranks = torch.tensor(groups).view(len(groups), *sizes)
        whole = DeviceMesh(kind, ranks, mesh_dim_names=(OTHERS, *names))
        made[kind, worker.mesh, names] = whole[names if len(names) > 1 else names[0]]
    return made[kind, worker.mesh, names]
