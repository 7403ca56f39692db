"""The example's language model as an inference engine: the interface of `rl.VLLM`, where no vLLM is installed."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import addition
import models
import sampling as sampled
import torch
from random_rows import hashed, uniform
from torch import Tensor
from workers import LanguageModel

from bandmaster import UsageError, rl

__all__ = ["ToyEngine"]

NOT_DONE = ("min_tokens", "top_p", "top_k", "min_p", "stop", "extra")  # what of `rl.Sampling` this engine does not do


@dataclass(eq=False)
class Open:
    """A request whose answers are being made, one after the other."""

    is_aborted: bool = False


class SumsConversation(rl.Conversation):
    """Chat messages one behind the other, each answer with the end sign: "47+85=231.4+5=".

    Args:
        tokenizer: Has a token for each character.
    """

    def __init__(self, tokenizer: addition.Tokenizer) -> None:
        self._tokenizer, self.ends = tokenizer, (tokenizer.end,)

    async def render(self, messages: Sequence[Mapping[str, Any]], is_open: bool) -> rl.Rendering:
        texts = [str(message.get("content", "")) for message in messages]
        roles = [message["role"] for message in messages]
        ends = [role == "assistant" and not text.endswith(".") for role, text in zip(roles, texts, strict=True)]
        text = "".join(f"{text}." if is_cut else text for text, is_cut in zip(texts, ends, strict=True))
        return rl.Rendering(self.encode(text, is_first=True), text)

    def encode(self, text: str, is_first: bool) -> list[int]:
        text = text.replace("?", addition.ALPHABET[addition.PAD])  # in answers, a token of no character
        unknown = set(text).difference(addition.ALPHABET)
        if unknown:
            raise UsageError(f"the model knows {addition.ALPHABET!r} alone, got {min(unknown)!r}")
        return self._tokenizer.encode(text).tolist() if text else []

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(torch.tensor(list(ids)))


class ToyEngine(LanguageModel, rl.Engine):
    """An engine that makes one token of each open request in turn.

    Args:
        name: A model's hub name or local path; None for the tiny Llama.
        seed: Of its random weights, and of answers without a seed of their own.
        max_model_len: Most tokens of a prompt with its answer.
    """

    def __init__(self, name: str | None = None, seed: int = 0, max_model_len: int = 64) -> None:
        super().__init__(name, seed)
        self._first = name, seed
        self._n_resets = 0
        self.vocab_size, self.max_model_len = self.model.config.vocab_size, max_model_len
        self._seeds = itertools.count(int(hashed(torch.tensor(seed + self.rank))))
        self._open: set[Open] = set()
        self._holds_new = self._holds_all = self._is_asleep = False
        self._news = asyncio.Condition()

    # --- answers ---

    async def answers(self, prompt: list[int], sampling: rl.Sampling) -> list[rl.Answer]:
        parts: dict[int, list[rl.Answer]] = {}
        async for part in self.increments(prompt, sampling):
            parts.setdefault(part.number, []).append(part)
        return [rl.Answer.joined(parts[number]) for number in sorted(parts)]

    async def increments(self, prompt: list[int], sampling: rl.Sampling) -> AsyncGenerator[rl.Answer, None]:
        await self._until(lambda: not (self._holds_new or self._is_asleep))
        seed = next(self._seeds) if sampling.seed is None else sampling.seed
        this = Open()
        self._open.add(this)
        try:
            for number in range(sampling.n):
                async for part in self._parts(this, prompt, replace(sampling, seed=seed + number)):
                    yield part._replace(number=number)
        finally:
            self._open.discard(this)
            await self._tell()

    async def _parts(self, this: Open, prompt: list[int], sampling: rl.Sampling) -> AsyncGenerator[rl.Answer, None]:
        """The tokens of one answer, one at a time."""
        given, cache, n_resets = torch.tensor([prompt]), None, self._n_resets
        n_tokens = min(sampling.max_tokens, self.max_model_len - len(prompt))
        for index in range(n_tokens):
            await asyncio.sleep(0)  # to the other requests
            await self._until(lambda: this.is_aborted or not self._holds_all)
            if this.is_aborted:
                yield rl.Answer([], [], [], "abort", "")
                return
            if n_resets != self._n_resets:  # computed with other weights
                given, cache, n_resets = torch.tensor([prompt]), None, self._n_resets
            with torch.no_grad():
                output = self.model(input_ids=given, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, logits = output.past_key_values, output.logits[0, -1]
            given = self._chosen(logits, sampling, index)[None, None]
            prompt = [*prompt, int(given)]
            part = self._part(int(given), logits, sampling)
            if part.finish_reason is None and index + 1 == n_tokens:
                part = part._replace(finish_reason="length")
            yield part
            if part.finish_reason:
                return

    def _chosen(self, logits: Tensor, sampling: rl.Sampling, index: int) -> Tensor:
        scores = logits.double()
        if sampling.temperature:  # as in `sampling.generate`
            noise = uniform(torch.tensor([sampling.seed]), index, len(scores))[0]
            scores = scores / sampling.temperature - (-noise.log()).log()
        return scores.argmax()

    def _part(self, token: int, logits: Tensor, sampling: rl.Sampling) -> rl.Answer:
        is_end = token in sampling.stop_token_ids or (token == self.tokenizer.end and not sampling.ignore_eos)
        text = self.tokenizer.decode(torch.tensor([token]))
        log_probs = logits.float().log_softmax(dim=-1)
        top = None
        if sampling.logprobs:
            best = log_probs.topk(sampling.logprobs)
            top = [dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))]
        known = None if sampling.logprobs is None else [float(log_probs[token])]
        return rl.Answer([token], known, [self.version], "stop" if is_end else None, text, 0, top)

    async def answer_all(self, prompts: Sequence[list[int]], samplings: Sequence[rl.Sampling]) -> list[rl.Answer]:
        """Equally long prompts together, in one batch of the model."""
        found: dict[int, rl.Answer] = {}
        alike: dict[object, list[int]] = {}
        for number, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
            alike.setdefault((len(prompt), replace(sampling, seed=None)), []).append(number)
        for numbers in alike.values():
            answers = self._batch([prompts[i] for i in numbers], [samplings[i] for i in numbers])
            found.update(zip(numbers, answers, strict=True))
        return [found[number] for number in range(len(prompts))]

    def _batch(self, prompts: Sequence[list[int]], samplings: Sequence[rl.Sampling]) -> list[rl.Answer]:
        """Answers to equally long prompts, by samplings that differ in their seeds alone."""
        first = samplings[0]
        n_tokens = min(first.max_tokens, self.max_model_len - len(prompts[0]))
        seeds = torch.tensor([next(self._seeds) if one.seed is None else one.seed for one in samplings])
        given, end = torch.tensor(prompts), -1 if first.ignore_eos else self.tokenizer.end
        tokens = sampled.generate(self.model, given, seeds, n_tokens, end, self.tokenizer.pad, first.temperature)
        with torch.no_grad():
            log_probs = sampled.log_probs(self.model, torch.cat([given, tokens], dim=1), n_tokens)
        return [self._cut(*row, first) for row in zip(tokens.tolist(), log_probs.tolist(), strict=True)]

    def _cut(self, tokens: list[int], log_probs: list[float], sampling: rl.Sampling) -> rl.Answer:
        """An answer up to its end."""
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (self.tokenizer.end,))}
        n = next((n for n, token in enumerate(tokens, 1) if token in ends), None)
        reason, tokens = "length" if n is None else "stop", tokens[:n]
        known = None if sampling.logprobs is None else log_probs[:n]
        text = self.tokenizer.decode(torch.tensor(tokens))
        return rl.Answer(tokens, known, [self.version] * len(tokens), reason, text)

    def conversation(self, prompt: rl.Prompt) -> rl.Conversation:
        if prompt.tools or prompt.options:
            raise UsageError("the toy engine has neither tools nor response formats; leave them out")
        return SumsConversation(self.tokenizer)

    # --- control ---

    async def pause(self, mode: str = "abort") -> None:
        await super().pause(mode)
        self._holds_new, self._holds_all = True, mode == "keep"
        if mode == "abort":
            await self.abort()
        if mode == "wait":
            await self._until(lambda: not self._open)

    async def resume(self) -> None:
        self._holds_new = self._holds_all = False
        await self._tell()

    async def abort(self) -> None:
        for this in self._open:
            this.is_aborted = True
        await self._tell()

    async def sleep(self) -> None:
        self._is_asleep = True
        await self.abort()

    async def wake(self) -> None:
        self._is_asleep = False
        await self._tell()

    async def reset_cache(self) -> None:
        """Have each open request compute what it has of a prompt and an answer again."""
        self._n_resets += 1

    @property
    def is_ready(self) -> bool:
        return not (self._holds_new or self._is_asleep)

    @property
    def is_asleep(self) -> bool:
        return self._is_asleep

    async def _until(self, holds: Callable[[], bool]) -> None:
        if not holds():
            async with self._news:
                await self._news.wait_for(holds)

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()

    # --- weights ---

    def weights_specs(self) -> dict[str, tuple[tuple[int, ...], str]]:
        return rl.tensor_specs(self.weights())

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        rl.load_tensors(self.weights(), weights)

    def first_weights(self) -> Mapping[str, Tensor]:
        return models.language_model(*self._first).state_dict()

    # --- checks ---

    def check_request(self) -> None:
        if self.mesh.axis_size("tp") > 1:
            raise UsageError(
                "ranks along tp have to make the same tokens at a time; use tp=1 for requests, or generate"
            )

    def check_sampling(self, sampling: rl.Sampling) -> None:
        default = rl.Sampling()
        for name in NOT_DONE:
            if getattr(sampling, name) != getattr(default, name):
                raise UsageError(f"the toy engine does not do {name}={getattr(sampling, name)!r}; leave it out")
