"""Models through `transformers`, whole or tensor-parallel: a tiny Llama by default, or any causal language model."""

from __future__ import annotations

import fnmatch
from typing import Any

import torch
from addition import Tokenizer
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, LlamaConfig
from transformers.utils.logging import disable_progress_bar

import bandmaster as bm
from bandmaster import rl

__all__ = ["language_model", "parallel", "tiny", "value_model"]


def language_model(name: str | None, seed: int) -> nn.Module:
    """A causal language model: that of a hub name or local path, or a tiny Llama with random weights."""
    disable_progress_bar()  # each rank would draw one
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_pretrained(name) if name else AutoModelForCausalLM.from_config(tiny())


def value_model(name: str | None, seed: int) -> nn.Module:
    """The body of such a model, ``.model``, with a head that gives one value per token, at first 0."""
    disable_progress_bar()
    torch.manual_seed(seed)
    kind = AutoModelForTokenClassification
    model = kind.from_pretrained(name, num_labels=1) if name else kind.from_config(tiny())
    for weight in model.score.parameters():
        nn.init.zeros_(weight)
    return model


def tiny() -> LlamaConfig:
    """The configuration of a tiny Llama."""
    tokenizer = Tokenizer()
    return LlamaConfig(
        vocab_size=tokenizer.SIZE,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        initializer_range=0.1,
        rope_parameters={"rope_type": "default", "rope_theta": 30.0},  # for so few tokens
        attn_implementation="eager",
        pad_token_id=tokenizer.pad,
        bos_token_id=None,
        eos_token_id=tokenizer.end,
        num_labels=1,
        classifier_dropout=0.0,
    )


# torch's styles by the names that a model of `transformers` has for them in its plan for tensor parallelism.
STYLES: dict[str, Any] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
}


def parallel(model: nn.Module, worker: bm.Worker, axis: str) -> nn.Module:
    """Cut a model over the ranks along an axis of the worker's mesh, as the model's own plan says. Collective."""
    if worker.mesh.axis_size(axis) > 1:
        names = [name for name, _ in model.named_modules()]
        plan = {name: style for name, style in model.tp_plan.items() if fnmatch.filter(names, name)}
        parallelize_module(model, rl.device_mesh(worker, axis), {name: STYLES[style]() for name, style in plan.items()})
    return model
