"""A tiny model that calls a tool: byte-level BPE, a chat template in the form of ChatML, and a few answers by heart."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
SUMS = [(2, 3), (4, 5), (7, 1)]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
# Only the names of tools are rendered, so that every way to describe them is the same to the model.
CHAT_TEMPLATE = (
    "{%- if tools %}<|im_start|>system\ntools:{% for t in tools %} {{ t.function.name }}{% endfor %}<|im_end|>\n"
    "{% endif -%}"
    "{%- for m in messages if m.role != 'system' -%}"
    "<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{%- for c in m.tool_calls or [] -%}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{%- endfor -%}"
    "<|im_end|>\n"
    "{% endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"
)


def question(a: int, b: int) -> str:
    """What a user asks."""
    return f"what is {a}+{b}?"


def call(a: int, b: int) -> str:
    """What the model answers first."""
    return f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call><|im_end|>'


def conversation(a: int, b: int) -> list[tuple[str, bool]]:
    """A conversation in pieces, and which of them the model says."""
    return [
        (f"<|im_start|>system\ntools: add<|im_end|>\n<|im_start|>user\n{question(a, b)}<|im_end|>\n", False),
        ("<|im_start|>assistant\n", False),
        (call(a, b), True),
        (f"\n<|im_start|>tool\n{a + b}<|im_end|>\n<|im_start|>assistant\n", False),
        (f"it is {a + b}<|im_end|>", True),
    ]


def make(folder: Path) -> str:
    """Write a model to a folder; returns the path."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more of them wait for each other on a busy machine
    corpus = ["".join(text for text, _ in conversation(*one)) for one in SUMS] + [json.dumps(TOOL)] * 3
    own = Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    own.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=384, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=own, pad_token="<|pad|>", eos_token="<|im_end|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=384,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    _learn(model, tokenizer)
    model.save_pretrained(folder)
    return str(folder)


def _learn(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, most_steps: int = 1000) -> None:
    """Learn the conversations by heart."""
    rows = []
    for one in SUMS:
        pieces = [(tokenizer.encode(text, add_special_tokens=False), is_said) for text, is_said in conversation(*one)]
        tokens = [token for piece, _ in pieces for token in piece]
        labels = [token if is_said else -100 for piece, is_said in pieces for token in piece]
        rows.append((tokens, labels))
    width = max(len(tokens) for tokens, _ in rows)
    tokens = torch.tensor([row + [0] * (width - len(row)) for row, _ in rows])
    labels = torch.tensor([row + [-100] * (width - len(row)) for _, row in rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0)
    for _ in range(most_steps):
        loss = model(input_ids=tokens, labels=labels).loss
        if loss < 2e-3:
            return
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    raise AssertionError(f"the model has not learnt its answers: a loss of {loss:.3f}")
