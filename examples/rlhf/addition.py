"""The task: sums of two numbers, with the digits of the answer in reverse. A program can verify each answer.

"47+85=" asks for "231.": the digits of 132, least significant first, and an end sign. A number below 100 has two digits
in a prompt. Answers have 2 to 4 characters.
"""

from __future__ import annotations

import torch
from random_rows import hashed, uniform
from torch import Tensor

__all__ = ["N_PROMPT", "N_RESPONSE", "Tokenizer", "answers", "noisy_sums", "problems", "prompts", "verify"]

N_OPERANDS = 100  # operands are 0 to 99
N_HELD_OUT = 500
N_PROMPT, N_RESPONSE = 6, 4  # characters of "47+85=", and of the longest answer, "891."
ALPHABET = "0123456789+=_."
PLUS, EQUALS, PAD, END = (ALPHABET.index(sign) for sign in "+=_.")


class Tokenizer:
    """Characters as tokens of a model.

    Args:
        name: A model's hub name or local path, whose tokenizer must have a token for each digit and sign; None for a
            vocabulary of these characters alone.

    Attributes:
        pad: The token after the end of an answer.
        end: The last token of an answer.

    Example:
        >>> tokenizer = Tokenizer()
        >>> tokenizer.encode("47+85=231.").tolist()
        [4, 7, 10, 8, 5, 11, 2, 3, 1, 13]
        >>> tokenizer.decode(torch.tensor([2, 3, 1, 13]))
        '231.'
    """

    SIZE = 16  # of the vocabulary without a model: a multiple of 4, so that 2 and 4 ranks can share it

    def __init__(self, name: str | None = None) -> None:
        self.ids = torch.arange(len(ALPHABET)) if name is None else _ids_of(name)
        self.pad, self.end = int(self.ids[PAD]), int(self.ids[END])

    def tokens(self, codes: Tensor) -> Tensor:
        """Tokens of the model for numbers of characters."""
        return self.ids[codes]

    def codes(self, tokens: Tensor) -> Tensor:
        """Numbers of characters for tokens of the model; -1 for other tokens."""
        same = tokens[..., None] == self.ids
        return torch.where(same.any(dim=-1), same.long().argmax(dim=-1), -1)

    def encode(self, text: str) -> Tensor:
        """The tokens of a text, int64 (characters,)."""
        return self.tokens(torch.tensor([ALPHABET.index(character) for character in text]))

    def decode(self, tokens: Tensor) -> str:
        """The text of tokens (tokens,), without padding; "?" for those of no character."""
        codes = self.codes(tokens).tolist()
        return "".join("?" if code < 0 else ALPHABET[code] for code in codes if code != PAD)


def _ids_of(name: str) -> Tensor:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name)
    ids = tokenizer.convert_tokens_to_ids(list(ALPHABET))
    unknown = [sign for sign, token in zip(ALPHABET, ids, strict=True) if token in (None, tokenizer.unk_token_id)]
    if unknown:
        raise ValueError(f"the tokenizer of {name} has no token for {unknown}; this task needs one per character")
    return torch.tensor(ids)


def problems() -> tuple[Tensor, Tensor]:
    """The problems to train on and those held out, each int64 (problems, 2), the same in every run.

    Example:
        >>> train, held_out = problems()
        >>> train.shape, held_out.shape
        (torch.Size([9500, 2]), torch.Size([500, 2]))
    """
    order = hashed(torch.arange(N_OPERANDS**2)).argsort()
    pairs = torch.stack([order // N_OPERANDS, order % N_OPERANDS], dim=1)
    return pairs[N_HELD_OUT:], pairs[:N_HELD_OUT]


def prompts(pairs: Tensor) -> Tensor:
    """The prompts of problems, as numbers of characters, int64 (problems, N_PROMPT): 4 and 85 make "04+85="."""
    digits = torch.stack([pairs // 10, pairs % 10], dim=2)
    plus, equals = (torch.full_like(pairs[:, :1], sign) for sign in (PLUS, EQUALS))
    return torch.cat([digits[:, 0], plus, digits[:, 1], equals], dim=1)


def answers(sums: Tensor) -> Tensor:
    """The answers that state sums, as numbers of characters, int64 (sums, N_RESPONSE), padded after the end sign.

    Example:
        >>> [Tokenizer().decode(row) for row in answers(torch.tensor([132, 70, 0]))]
        ['231.', '07.', '0.']
    """
    digits = torch.stack([sums // 10**place % 10 for place in range(N_RESPONSE)], dim=1)
    n_digits = 1 + (sums >= 10).long() + (sums >= 100).long()
    places = torch.arange(N_RESPONSE)
    padded = torch.where(places < n_digits[:, None], digits, PAD)
    return torch.where(places == n_digits[:, None], END, padded)


def noisy_sums(pairs: Tensor, seeds: Tensor) -> Tensor:
    """Sums as a careless teacher states them: right with probability 0.3, 1 too much with 0.5, 2 too much with 0.2."""
    draw = uniform(seeds, 0, 1)[:, 0]
    return pairs.sum(dim=1) + (draw >= 0.3).long() + (draw >= 0.8).long()


def verify(codes: Tensor) -> Tensor:
    """Rewards, float32 (rows,): 1 for the right answer to a prompt, else 0.

    Args:
        codes: Prompts and answers, as numbers of characters, int64 (rows, N_PROMPT + N_RESPONSE).

    Example:
        >>> tokenizer = Tokenizer()
        >>> verify(torch.stack([tokenizer.encode("47+85=231."), tokenizer.encode("47+85=331.")])).tolist()
        [1.0, 0.0]
    """
    sums = codes[:, 0] * 10 + codes[:, 1] + codes[:, 3] * 10 + codes[:, 4]
    return (codes[:, N_PROMPT:] == answers(sums)).all(dim=1).float()
