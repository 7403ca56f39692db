"""Torch in workers: process groups along the axes of a mesh, the hybrid engine, seeds of ranks, checkpoints.

::

    class Actor(bm.Worker):
        def __init__(self):
            rl.seed(self, 0, alike=("tp",))               # ranks of a tensor-parallel group draw the same numbers
            mesh = rl.device_mesh(self)                   # torch's DeviceMesh with the axes of self.mesh
            self.model = fully_shard(Model(), mesh=mesh["dp"])

Everything here is called in the methods of workers, is built on public names alone, and imports torch when it is used.
"""

from bandmaster.rl.checkpoints import load, save
from bandmaster.rl.connect import Connectable, Connection, connect
from bandmaster.rl.engine import HybridEngine
from bandmaster.rl.meshes import device_mesh, start_torch_distributed
from bandmaster.rl.seeds import seed
from bandmaster.rl.weights import HoldsWeights, WeightSync

__all__ = [
    "Connectable",
    "Connection",
    "HoldsWeights",
    "HybridEngine",
    "WeightSync",
    "connect",
    "device_mesh",
    "load",
    "save",
    "seed",
    "start_torch_distributed",
]
