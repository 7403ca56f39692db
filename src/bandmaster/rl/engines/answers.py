"""The values that engines take and return: prompts out of rows, `Answer`, and answers as the columns of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import index
from typing import Any, NamedTuple, TypeVar

import numpy as np

from bandmaster import UsageError

T = TypeVar("T")
PROMPT, MASK, SEED = "prompt", "prompt_mask", "seed"  # the columns of rows that `Engine.generate` reads


class Answer(NamedTuple):
    """The answer of an engine to a prompt, or the part of one that has come since the part before.

    Attributes:
        tokens: The ids of its tokens, without the prompt.
        log_probs: The log-probability of each of them among all tokens, at temperature 1; None if not asked for.
        versions: The version of the weights that made each token.
        finish_reason: ``"stop"`` after a stop or the end-of-sequence token, ``"length"`` after the most tokens that may
            be, ``"abort"`` if the engine was told to give it up; None in a part that is not the last.
        text: The tokens as text, without a stop at the end; None if the engine has no tokenizer.
        number: The number of the answer among the ``n`` to one prompt.
        top_logprobs: For each token, the log-probabilities of the most probable tokens there; None if not asked for.
    """

    tokens: list[int]
    log_probs: list[float] | None
    versions: list[int]
    finish_reason: str | None = None
    text: str | None = None
    number: int = 0
    top_logprobs: list[dict[int, float]] | None = None

    @classmethod
    def joined(cls, parts: Sequence[Answer]) -> Answer:
        """Join the parts of one answer, at least one, in order to the whole."""
        return cls(
            _chained([part.tokens for part in parts]) or [],
            _chained([part.log_probs for part in parts]),
            _chained([part.versions for part in parts]) or [],
            parts[-1].finish_reason,
            None if all(part.text is None for part in parts) else "".join(part.text or "" for part in parts),
            parts[-1].number,
            _chained([part.top_logprobs for part in parts]),
        )


def _chained(lists: Sequence[list[T] | None]) -> list[T] | None:
    """The elements of lists, as one list; None if there is no list."""
    there = [one for one in lists if one is not None]
    return list(chain.from_iterable(there)) if there else None


def prompts_of(rows: Any) -> list[list[int]]:
    """The prompts of rows: lists of token ids, without those that ``prompt_mask`` leaves out, in the order of the rows.

    Raises:
        UsageError: The rows have no column ``prompt``, or it does not have a sequence of whole numbers in each row.
    """
    column = _column(rows, PROMPT)
    if column is None:
        raise UsageError(
            f"generate takes rows with a column {PROMPT!r} of token ids, got {type(rows).__name__}"
            + (f" with the columns {sorted(map(str, rows.keys()))}" if hasattr(rows, "keys") else "")
        )
    prompts = column.unbind() if getattr(column, "is_nested", False) else column
    masks = _column(rows, MASK)
    if masks is not None:
        prompts = [np.asarray(prompt)[np.asarray(mask, bool)] for prompt, mask in zip(prompts, masks, strict=True)]
    return [token_ids(prompt, f"prompt {number}") for number, prompt in enumerate(prompts)]


def seeds_of(rows: Any) -> list[int] | None:
    """The column ``seed`` of rows, if they have one."""
    column = _column(rows, SEED)
    return None if column is None else [index(seed) for seed in column]


def _column(rows: Any, name: str) -> Any:
    return rows[name] if hasattr(rows, "keys") and name in rows.keys() else None  # noqa: SIM118  # a TensorDict too


def token_ids(prompt: Any, what: str = "the prompt") -> list[int]:
    """The token ids of a prompt: a list, an array or a tensor of whole numbers in one dim.

    Raises:
        UsageError: It is none of these, or empty.
    """
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(ids, str) or not isinstance(ids, Sequence):
        raise UsageError(f"{what} must be a list of token ids, got {_short(prompt)}")
    try:
        ids = [index(one) for one in ids]
    except TypeError:
        raise UsageError(f"{what} must be a list of token ids, which are whole numbers, got {_short(prompt)}") from None
    if not ids:
        raise UsageError(f"{what} is empty; give the model at least one token to begin with")
    return ids


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def columns_of(answers: Sequence[Answer], has_log_probs: bool) -> dict[str, Any]:
    """Answers as the columns of a batch, one row each: jagged ones are lists of arrays."""
    columns = {
        "answer": [np.array(one.tokens, np.int64) for one in answers],
        "versions": [np.array(one.versions, np.int64) for one in answers],
        "n_tokens": np.array([len(one.tokens) for one in answers], np.int64),
        "finish_reason": [one.finish_reason for one in answers],
    }
    if has_log_probs and all(one.log_probs is not None for one in answers):  # also without rows, as others have them
        columns["log_probs"] = [np.array(one.log_probs, np.float32) for one in answers]
    return columns


def padded(column: Sequence[Any], width: int, value: float = 0, dtype: Any = None) -> np.ndarray[Any, Any]:
    """Make a rectangular array of a jagged column: rows that are shorter than ``width`` get ``value`` at the end.

    Args:
        column: Arrays of one dim and one dtype, such as ``rows["answer"]``.
        width: The length of each row of the result, such as the ``max_tokens`` of all ranks.
        value: The value that fills up shorter rows, such as the padding token.
        dtype: The dtype of the result; by default that of the first row, and int64 without rows.

    Returns:
        A new array (rows, width). ``torch.from_numpy`` makes a tensor of it.

    Raises:
        UsageError: A row is longer than ``width``.

    Example:
        >>> padded([np.array([5, 6, 7]), np.array([8])], 4).tolist()
        [[5, 6, 7, 0], [8, 0, 0, 0]]
    """
    longest = max(map(len, column), default=0)
    if longest > width:
        raise UsageError(f"padded cannot put a row of {longest} elements into {width}; give it a greater width")
    if dtype is None:
        dtype = np.asarray(column[0]).dtype if len(column) else np.int64
    filled = np.full((len(column), width), value, dtype)
    for row, values in zip(filled, column, strict=True):
        row[: len(values)] = values
    return filled


def is_chat(prompt: Any) -> bool:
    """Whether a prompt is a list of chat messages."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and all(isinstance(one, Mapping) for one in prompt)
