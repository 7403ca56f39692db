"""Answers of a language model, and how probable it finds them."""

from __future__ import annotations

import torch
from random_rows import uniform
from torch import Tensor, nn

__all__ = ["generate", "log_probs", "mask_of"]


@torch.no_grad()
def generate(
    model: nn.Module, prompts: Tensor, seeds: Tensor, n_tokens: int, end: int, pad: int, temperature: float = 1.0
) -> Tensor:
    """Answer prompts.

    Args:
        model: A causal language model of `transformers`.
        prompts: int64 (rows, tokens of a prompt), all equally long.
        seeds: int64 (rows,); an answer depends on the seed and prompt of its row, not on the other rows.
        n_tokens: The most tokens of an answer.
        end: The token that ends an answer.
        pad: The token that follows it.
        temperature: Logits are divided by it; 0 takes the most probable token.

    Returns:
        int64 (rows, n_tokens): the answers.
    """
    given, cache, answers = prompts, None, []
    is_open = torch.ones(len(prompts), dtype=torch.bool)
    for index in range(n_tokens):
        output = model(input_ids=given, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, scores = output.past_key_values, output.logits[:, -1].double()
        if temperature:  # the largest of logits and Gumbel noise is a sample of the softmax
            scores = scores / temperature - (-uniform(seeds, index, scores.shape[1]).log()).log()
        given = torch.where(is_open, scores.argmax(dim=1), pad)[:, None]
        is_open = is_open & (given[:, 0] != end)
        answers.append(given)
    return torch.cat(answers, dim=1)


def mask_of(answers: Tensor, end: int) -> Tensor:
    """Which tokens of answers count, float32 (rows, tokens): 1 up to and with the end token, 0 for padding."""
    ends = answers == end
    return (ends.cumsum(dim=1) - ends.long() == 0).float()


def log_probs(model: nn.Module, tokens: Tensor, n_tokens: int) -> Tensor:
    """Log-probabilities of the last ``n_tokens`` of each row, float32 (rows, n_tokens).

    Args:
        model: A causal language model of `transformers`.
        tokens: int64 (rows, tokens), prompts and answers.
        n_tokens: How many tokens an answer has, with padding.
    """
    logits = model(input_ids=tokens[:, :-1], use_cache=False, logits_to_keep=n_tokens).logits
    return logits.float().log_softmax(dim=-1).gather(2, tokens[:, -n_tokens:, None])[:, :, 0]
