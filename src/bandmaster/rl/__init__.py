"""Torch in workers: process groups along the axes of a mesh, layouts of weights, the hybrid engine, seeds, checkpoints.

::

    class Actor(bm.Worker):
        def __init__(self):
            rl.seed(self, 0, alike=("tp",))               # ranks of a tensor-parallel group draw the same numbers
            mesh = rl.device_mesh(self)                   # torch's DeviceMesh with the axes of self.mesh
            self.model = fully_shard(Model(), mesh=mesh["dp"])

This package uses only public names of bandmaster, and imports torch on first use. `Layout` and `reshard` need no torch
and no workers; `WeightSync` and `connect` are for the controller, and the rest for the methods of workers.
"""

from bandmaster.rl.checkpoints import load, save
from bandmaster.rl.connect import Connectable, Connection, connect
from bandmaster.rl.engine import HybridEngine
from bandmaster.rl.layout import Box, Layout
from bandmaster.rl.meshes import device_mesh, start_torch_distributed
from bandmaster.rl.resharding import Move, Resharding, reshard
from bandmaster.rl.seeds import seed
from bandmaster.rl.weights import HoldsWeights, WeightSync

__all__ = [
    "Box",
    "Connectable",
    "Connection",
    "HoldsWeights",
    "HybridEngine",
    "Layout",
    "Move",
    "Resharding",
    "WeightSync",
    "connect",
    "device_mesh",
    "load",
    "reshard",
    "save",
    "seed",
    "start_torch_distributed",
]
