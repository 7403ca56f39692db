"""A tiny Llama and its tokenizer as a folder that `transformers` and vLLM load, like a model of the hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import models
import torch
from addition import ALPHABET, END
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

__all__ = ["write_model"]

UNKNOWN, PADDING = "<unk>", "<pad>"


def write_model(folder: Path, seed: int = 0, words: Sequence[str] = (), chat_template: str | None = None) -> str:
    """Write a model with random weights to a folder.

    It is the tiny Llama of `models.py` with wider attention heads: vLLM computes no narrower ones on CPUs.

    Args:
        folder: The folder.
        seed: Of the weights.
        words: Texts that are one token each, beside the characters of the task, which have the numbers that they have
            in `addition.ALPHABET`. Of two that begin alike, the longer one comes first.
        chat_template: The template of its tokenizer.

    Returns:
        The folder's path.
    """
    vocabulary = [*ALPHABET, UNKNOWN, PADDING, *words]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(vocabulary)}, unk_token=UNKNOWN))
    pattern = "|".join([*map(_escaped, words), "."])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PADDING, eos_token=ALPHABET[END], unk_token=UNKNOWN
    )
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    disable_progress_bar()
    torch.manual_seed(seed)
    size = -(-len(vocabulary) // 4) * 4  # so that 2 and 4 ranks can share it
    changed = {"vocab_size": size, "head_dim": 32, "max_position_embeddings": 256}
    LlamaForCausalLM(LlamaConfig(**{**models.tiny().to_dict(), **changed})).save_pretrained(folder)
    return str(folder)


def _escaped(word: str) -> str:
    return "".join(f"\\{sign}" if sign in "{}+.|()[]?*^$\\" else sign for sign in word)
