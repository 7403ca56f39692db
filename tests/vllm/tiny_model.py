"""A tiny Llama with random weights and one character per token, as a folder that vLLM and transformers load."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

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


class Reference:
    """The model by transformers."""

    def __init__(self, path: str) -> None:
        self.model = LlamaForCausalLM.from_pretrained(path).eval()

    @torch.no_grad()
    def log_probs(self, prompt: list[int], answer: list[int]) -> torch.Tensor:
        """The log-probabilities of all tokens where those of an answer were chosen: float32 (tokens, vocabulary)."""
        tokens = torch.tensor([[*prompt, *answer]])
        return self.model(tokens[:, :-1]).logits[0, -len(answer) :].float().log_softmax(dim=-1)

    @torch.no_grad()
    def greedy(self, prompt: list[int], n_tokens: int) -> list[int]:
        """The most probable tokens, beyond the end-of-sequence token."""
        tokens = torch.tensor([prompt])
        made = self.model.generate(
            tokens, max_new_tokens=n_tokens, min_new_tokens=n_tokens, do_sample=False, eos_token_id=-1
        )
        return made[0, len(prompt) :].tolist()
