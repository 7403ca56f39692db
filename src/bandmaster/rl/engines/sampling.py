"""`Sampling`: how the tokens of an answer are chosen, and when it ends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from bandmaster import UsageError
from bandmaster.plan.numbers import as_whole

LEAST, MOST = -(1 << 63), (1 << 64) - 1  # of the whole numbers that engines take, which have 64 bits


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The way in which an engine chooses the tokens of an answer, and the ends of the answer. Checked when made.

    Engines that need more take a subclass with further fields; see `VLLM.sampling_params`.

    Args:
        max_tokens: Most tokens of an answer. An answer also ends where the context of the model does.
        min_tokens: Tokens before which neither a stop nor the end-of-sequence token ends the answer.
        temperature: Logits are divided by it; 0 takes the most probable token.
        top_p: Only the most probable tokens that together have this probability are drawn from.
        top_k: Only so many of the most probable tokens are drawn from; 0 sets no limit.
        min_p: Only tokens that are at least so probable, relative to the most probable one, are drawn from.
        stop: Texts that end the answer. They need an engine with a tokenizer.
        stop_token_ids: Tokens that end the answer, beside the model's end-of-sequence token.
        ignore_eos: Whether the answer goes on after the end-of-sequence token.
        seed: Of the random numbers of this answer, which then does not depend on other requests; None draws from those
            of the engine.
        n: Answers to a prompt.
        logprobs: How many of the most probable tokens have their log-probabilities returned at each place, beside
            the chosen token, which always has; None for none at all.
        extra: Further parameters of the engine's own by their names, such as ``{"repetition_penalty": 1.1}`` for
            vLLM's ``SamplingParams``. An engine refuses those that it does not have.

    Raises:
        UsageError: A value is out of its range; the message names both.

    Example:
        >>> Sampling(max_tokens=32, temperature=0.0, stop="\\n").stop
        ('\\n',)
        >>> Sampling(top_p=1.5)
        Traceback (most recent call last):
        bandmaster.errors.UsageError: top_p of Sampling must be above 0 and at most 1, got 1.5
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = 0
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        self._whole("max_tokens", least=1)
        self._whole("min_tokens", least=0)
        self._whole("top_k", least=0)
        self._whole("n", least=1)
        if self.seed is not None:
            self._whole("seed", least=None)
        if self.logprobs is not None:
            self._whole("logprobs", least=0)
        self._number("temperature", lambda value: 0 <= value < math.inf, "a number of 0 or more")
        self._number("top_p", lambda value: 0 < value <= 1, "above 0 and at most 1")
        self._number("min_p", lambda value: 0 <= value <= 1, "from 0 to 1")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        self._sequence("stop", stop, _as_text, "texts that are not empty")
        self._sequence("stop_token_ids", self.stop_token_ids, as_whole, "token ids")
        if not isinstance(self.extra, Mapping) or not all(isinstance(name, str) for name in self.extra):
            raise UsageError(f"extra of Sampling takes parameters by their names, got {self.extra!r}")
        if self.min_tokens > self.max_tokens:
            raise UsageError(f"min_tokens of Sampling is {self.min_tokens}, above max_tokens, {self.max_tokens}")
        if self.n > 1 and self.temperature == 0:
            raise UsageError(f"n of Sampling is {self.n}, but with temperature=0 all answers are equal; ask for one")

    def _whole(self, name: str, least: int | None) -> None:
        value = getattr(self, name)
        whole = as_whole(value, LEAST if least is None else least, MOST)
        if whole is None:
            what = "of 64 bits" if least is None or as_whole(value, MOST) is not None else f"of {least} or more"
            raise UsageError(f"{name} of Sampling must be a whole number {what}, got {value!r}")
        object.__setattr__(self, name, whole)

    def _number(self, name: str, is_valid: Any, what: str) -> None:
        value = getattr(self, name)
        try:
            number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
        except OverflowError:
            number = math.nan
        if not is_valid(number):
            raise UsageError(f"{name} of Sampling must be {what}, got {value!r}")
        object.__setattr__(self, name, number)

    def _sequence(self, name: str, values: Any, as_valid: Any, what: str) -> None:
        listed = values.tolist() if hasattr(values, "tolist") else values
        valid = [as_valid(one) for one in listed] if isinstance(listed, Sequence) else [None]
        if None in valid:
            raise UsageError(f"{name} of Sampling takes {what}, got {values!r}")
        object.__setattr__(self, name, tuple(valid))


def _as_text(value: object) -> str | None:
    """Return a text; None if it is empty, or no text."""
    return value if isinstance(value, str) and value else None
