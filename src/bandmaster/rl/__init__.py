"""Torch in workers: process groups, layouts of weights, the hybrid engine, seeds, checkpoints; and inference engines.

::

    class Actor(bm.Worker):
        def __init__(self):
            rl.seed(self, 0, alike=("tp",))               # ranks of a tensor-parallel group draw the same numbers
            mesh = rl.device_mesh(self)                   # torch's DeviceMesh with the axes of self.mesh
            self.model = fully_shard(Model(), mesh=mesh["dp"])

This package uses only public names of bandmaster, and imports torch on first use. `Layout` and `reshard` need no torch
and no workers; `WeightSync` and `connect` are for the controller, and the rest for the methods of workers. `Engine` is
the base of workers that are inference engines, of which `VLLM` is one.
"""

from bandmaster.rl.checkpoints import Checkpoints, load, save
from bandmaster.rl.connect import Connectable, Connection, connect
from bandmaster.rl.engines.answers import Answer, padded
from bandmaster.rl.engines.completions import (
    Choice,
    Completion,
    CompletionPart,
    Conversation,
    EngineFacts,
    Known,
    Prompt,
    PromptTooLong,
    Reader,
    Rendering,
)
from bandmaster.rl.engines.interface import Engine
from bandmaster.rl.engines.sampling import Sampling
from bandmaster.rl.engines.vllm import VLLM
from bandmaster.rl.exporting import export
from bandmaster.rl.hybrid_engine import HybridEngine
from bandmaster.rl.layout import Box, Layout
from bandmaster.rl.local_tensors import load_tensors, tensor_specs
from bandmaster.rl.meshes import device_mesh, start_torch_distributed
from bandmaster.rl.resharding import Move, Resharding, reshard
from bandmaster.rl.seeds import seed
from bandmaster.rl.weight_sync import WeightSync
from bandmaster.rl.weights import HoldsWeights

__all__ = [
    "VLLM",
    "Answer",
    "Box",
    "Checkpoints",
    "Choice",
    "Completion",
    "CompletionPart",
    "Connectable",
    "Connection",
    "Conversation",
    "Engine",
    "EngineFacts",
    "HoldsWeights",
    "HybridEngine",
    "Known",
    "Layout",
    "Move",
    "Prompt",
    "PromptTooLong",
    "Reader",
    "Rendering",
    "Resharding",
    "Sampling",
    "WeightSync",
    "connect",
    "device_mesh",
    "export",
    "load",
    "load_tensors",
    "padded",
    "reshard",
    "save",
    "seed",
    "start_torch_distributed",
    "tensor_specs",
]
