"""Advantages and losses of GRPO and PPO. A loss is a sum over tokens, so that ranks may add theirs up."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["gae", "group_advantages", "kl", "policy_loss", "token_rewards", "value_loss"]


def group_advantages(rewards: Tensor, n_samples: int) -> Tensor:
    """Rewards relative to those of the same prompt, (rows,): less the group's mean, divided by its deviation.

    Rows of the same prompt follow each other. Groups with equal rewards get 0.

    Raises:
        ValueError: A group has a single row, which has nothing to be compared with.

    Example:
        >>> group_advantages(torch.tensor([1.0, 0.0, 1.0, 1.0]), 2)
        tensor([ 0.7071, -0.7071,  0.0000,  0.0000])

    Source: GRPO, DeepSeekMath, arXiv 2402.03300, section 4.1.
    """
    if n_samples < 2:
        raise ValueError(f"group_advantages compares 2 or more answers to a prompt, got n_samples={n_samples}")
    groups = rewards.view(-1, n_samples)
    centred = groups - groups.mean(dim=1, keepdim=True)
    return (centred / (groups.std(dim=1, keepdim=True) + 1e-6)).flatten()


def token_rewards(scores: Tensor, old: Tensor, reference: Tensor, mask: Tensor, kl_weight: float) -> Tensor:
    """PPO's rewards of tokens, (rows, tokens): the score at the last token, less the weighted KL at every token."""
    last = mask.sum(dim=1).long() - 1
    rewards = -kl_weight * (old - reference) * mask
    return rewards.scatter_add(1, last[:, None], scores[:, None])


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates and returns, each (rows, tokens), 0 where the mask is.

    Example:
        >>> rewards, values = torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([[0.5, 0.7, 9.0]])
        >>> advantages, returns = gae(rewards, values, torch.tensor([[1.0, 1.0, 0.0]]), gamma=1.0, lam=1.0)
        >>> advantages, returns
        (tensor([[0.5000, 0.3000, 0.0000]]), tensor([[1., 1., 0.]]))

    Source: Schulman et al., arXiv 1506.02438, equation 16.
    """
    values, running, columns = values * mask, torch.zeros(len(values)), []
    for place in reversed(range(values.shape[1])):
        following = values[:, place + 1] if place + 1 < values.shape[1] else torch.zeros(len(values))
        delta = rewards[:, place] + gamma * following - values[:, place]
        running = (delta + gamma * lam * running) * mask[:, place]
        columns.append(running)
    advantages = torch.stack(columns[::-1], dim=1)
    return advantages, advantages + values


def policy_loss(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, clip: float) -> Tensor:
    """The clipped surrogate loss, summed over the tokens of the mask.

    Args:
        new: Log-probabilities under the policy in training, (rows, tokens).
        old: Those under the policy that sampled.
        advantages: (rows, tokens), or (rows, 1) for the same at all tokens of a row.
        mask: 1 for tokens that count.
        clip: How far the ratio may move from 1 before its gradient is cut.

    Source: PPO, arXiv 1707.06347, equation 7.
    """
    ratio = (new - old).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    return -(surrogate * mask).sum()


def kl(new: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """An estimate of the KL divergence from the reference, never negative, summed over the tokens of the mask.

    Source: k3 of J. Schulman, "Approximating KL divergence", 2020; DeepSeekMath, equation 4.
    """
    difference = reference - new
    return ((difference.exp() - difference - 1) * mask).sum()


def value_loss(new: Tensor, old: Tensor, returns: Tensor, mask: Tensor, clip: float) -> Tensor:
    """Half the squared error of values that are clipped around the old ones, summed over the tokens of the mask."""
    clipped = old + (new - old).clamp(-clip, clip)
    worst = torch.maximum((new - returns) ** 2, (clipped - returns) ** 2)
    return 0.5 * (worst * mask).sum()
