"""A tiny Llama with random weights and one character per token, as a folder that vLLM and transformers load."""

from __future__ import annotations

import fnmatch
from pathlib import Path

import engine_contract
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import bandmaster as bm
from bandmaster import rl

CHARACTERS = "0123456789+=abcdefghijklmnopqrstuvwxyz ,.?!-*/()"
PAD, BEGIN, END, UNKNOWN = range(4)
VOCAB_SIZE = 64
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}="


def make(folder: Path, seed: int = 0) -> str:
    """Write a model to a folder; returns the path."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,  # so that the most probable token is clearly so
        tie_word_embeddings=False,
        pad_token_id=PAD,
        bos_token_id=BEGIN,
        eos_token_id=END,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    vocabulary = {"<pad>": PAD, "<s>": BEGIN, "</s>": END, "<unk>": UNKNOWN}
    vocabulary.update({character: 4 + number for number, character in enumerate(CHARACTERS)})
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return str(folder)


def load(path: str) -> torch.nn.Module:
    """The model of a folder by transformers."""
    return LlamaForCausalLM.from_pretrained(path)


def cut(model: torch.nn.Module, worker: bm.Worker) -> torch.nn.Module:
    """Cut a model over the ranks of a worker's group: along tp as tensor parallelism, along dp fully sharded."""
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    mesh = rl.device_mesh(worker, "dp", "tp")
    plan = {
        name: styles[kind]()
        for name, _ in model.named_modules()
        for pattern, kind in model.tp_plan.items()
        if kind in styles and fnmatch.fnmatch(name, pattern)
    }
    assert plan, "the model has a plan for tensor parallelism"
    parallelize_module(model, mesh["tp"], plan)
    return fully_shard(model, mesh=mesh["dp"])


class Reference(engine_contract.Reference):
    """The model of a folder by transformers."""

    def __init__(self, path: str) -> None:
        super().__init__(load(path))
