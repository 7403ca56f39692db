"""The chats of `agent_grpo.py`: words, a chat template with tool calls, and demonstrations to begin with.

A chat reads, with a token for each word, digit and sign::

    <user>47+85+16.<assistant><tool_call>{"name": "add", "arguments": {"a": 47, "b": 85}}</tool_call>.
    <tool>132.<assistant><tool_call>{"name": "add", "arguments": {"a": 132, "b": 16}}</tool_call>.
    <tool>148.<assistant>148.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from random_rows import hashed, uniform
from torch import Tensor
from transformers import AutoTokenizer

from bandmaster import rl

__all__ = ["CHAT_TEMPLATE", "WORDS", "ChatTokenizer", "Question", "ToolConversation", "demonstrations", "questions"]

CALL, AND = '{"name": "add", "arguments": {"a": ', ', "b": '
WORDS = ["<user>", "<assistant>", "<tool>", "<tool_call>", "</tool_call>", CALL, AND, "}}"]
CHAT_TEMPLATE = (
    "{%- for m in messages -%}"
    "<{{ m.role }}>{{ m.content or '' }}"
    "{%- for call in m.tool_calls or [] -%}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}"
    "}</tool_call>"
    "{%- endfor -%}."
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<assistant>{%- endif -%}"
)
LEAST, MOST = 10, 99  # numbers of questions


class Question(NamedTuple):
    """Three numbers to add up."""

    a: int
    b: int
    c: int

    def __str__(self) -> str:
        return f"{self.a}+{self.b}+{self.c}"

    @property
    def answer(self) -> str:
        """The right one."""
        return str(self.a + self.b + self.c)


def questions(seed: int, step: int, n: int) -> list[Question]:
    """The questions of a step."""
    start = hashed(hashed(torch.tensor(seed)) + step)
    numbers = LEAST + (uniform(hashed(start + torch.arange(n)), 0, 3) * (MOST + 1 - LEAST)).long()
    return [Question(*row) for row in numbers.tolist()]


class ChatTokenizer:
    """The tokenizer of a model's folder, as the toy engine reads it."""

    def __init__(self, name: str) -> None:
        self._own = AutoTokenizer.from_pretrained(name)
        self.pad, self.end = self._own.pad_token_id, self._own.eos_token_id

    def rendered(self, messages: Sequence[Mapping[str, Any]], is_open: bool) -> str:
        """The text of messages by the chat template."""
        return str(self._own.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=is_open))

    def encode(self, text: str) -> Tensor:
        """The tokens of a text, int64 (tokens,)."""
        return torch.tensor(self._own.encode(text, add_special_tokens=False), dtype=torch.int64)

    def decode(self, tokens: Tensor) -> str:
        """The text of tokens (tokens,)."""
        return str(self._own.decode(tokens.tolist()))


class ToolConversation(rl.Conversation):
    """What vLLM does by its own code for its engines: the chat template, and tool calls in answers."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer, self.ends = tokenizer, (tokenizer.end,)

    async def render(self, messages: Sequence[Mapping[str, Any]], is_open: bool) -> rl.Rendering:
        text = self._tokenizer.rendered(messages, is_open)
        return rl.Rendering(self.encode(text, is_first=True), text)

    def encode(self, text: str, is_first: bool) -> list[int]:
        return self._tokenizer.encode(text).tolist()

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(torch.tensor(list(ids)))

    def reader(self, ids: Sequence[int]) -> rl.Reader:
        return ToolReader()


class ToolReader(rl.Reader):
    """Finds the tool call of an answer."""

    def message(self, answer: rl.Answer) -> Mapping[str, Any]:
        text = (answer.text or "").removesuffix(".")
        called = re.fullmatch("<tool_call>(.*)</tool_call>", text)
        try:
            call = json.loads(called[1] if called else "")
            function = {"name": str(call["name"]), "arguments": json.dumps(call["arguments"])}
        except (KeyError, TypeError, ValueError):
            return {"content": text}
        return {"content": None, "tool_calls": [{"id": "call", "type": "function", "function": function}]}


def demonstrations(tokenizer: ChatTokenizer, seed: int, step: int, n: int, carelessness: float) -> dict[str, Tensor]:
    """Chats of a careless assistant, who often does not call the tool, and answers with the last number it knows.

    Args:
        tokenizer: The model's.
        seed: Of the questions.
        step: The number of the batch.
        n: Chats in it.
        carelessness: How often it leaves out the first call; and the second one, of those that remain.

    Returns:
        ``tokens``, int64 (chats, tokens); ``mask`` of those that the assistant says, but for the first of all tokens,
        float32 (chats, tokens - 1); ``n_tokens`` of each, int64 (chats,).
    """
    cares = uniform(hashed(torch.tensor(seed) + step) + torch.arange(n), 1, 2) >= carelessness
    rows, masks = [], []
    for question, does_call in zip(questions(seed, step, n), cares.tolist(), strict=True):
        tokens, mask = [], []
        for text, is_said in _chat(question, *does_call):
            piece = tokenizer.encode(text).tolist()
            tokens += piece
            mask += [is_said] * len(piece)
        rows.append(tokens)
        masks.append(mask[1:])
    width = max(map(len, rows))
    said = torch.from_numpy(rl.padded(masks, width - 1)).float()
    return {
        "tokens": torch.from_numpy(rl.padded(rows, width, tokenizer.pad)),
        "mask": said,
        "n_tokens": said.sum(dim=1).long(),
    }


def _chat(question: Question, calls_first: bool, calls_second: bool) -> list[tuple[str, bool]]:
    """The pieces of a chat, and whether the assistant says them."""
    a, b, c = question
    pieces = [(f"<user>{question}.<assistant>", False)]
    if not calls_first:
        return [*pieces, (f"{a}.", True)]
    pieces += [(_call(a, b), True), (f"<tool>{a + b}.<assistant>", False)]
    if not calls_second:
        return [*pieces, (f"{a + b}.", True)]
    return [*pieces, (_call(a + b, c), True), (f"<tool>{a + b + c}.<assistant>", False), (f"{a + b + c}.", True)]


def _call(a: int, b: int) -> str:
    return f"<tool_call>{CALL}{a}{AND}{b}}}}}</tool_call>."
