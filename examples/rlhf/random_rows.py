"""Random numbers that belong to rows: whoever handles a row, wherever and beside which others, draws the same ones."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["hashed", "row_seeds", "shuffled", "uniform"]


def hashed(numbers: Tensor) -> Tensor:
    """Mix int64 numbers to int64 numbers that look random; equal numbers give equal ones.

    Example:
        >>> hashed(torch.tensor([0, 1])).tolist()
        [-2152535657050944081, -7995527694508729151]

    Source: splitmix64, Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    x = numbers + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """A logical right shift: torch's own repeats the sign."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)


def row_seeds(seed: int, step: int, n_rows: int) -> Tensor:
    """One seed for each row of a step, int64 (n_rows,), from the run's seed, the step and the row's number alone."""
    start = hashed(hashed(torch.tensor(seed)) + step)
    return hashed(start + torch.arange(n_rows))


def uniform(seeds: Tensor, index: int, size: int) -> Tensor:
    """Uniform numbers between 0 and 1, exclusive, float64 (rows, size), that depend on a row's seed and index alone.

    Args:
        seeds: int64 (rows,).
        index: Which draw of the row: the same index gives the same numbers.
        size: Numbers per row.
    """
    counters = index * size + torch.arange(size, device=seeds.device)
    bits = _shifted(hashed(hashed(seeds)[:, None] + counters), 11)
    return (bits + 0.5) * 2.0**-53


def shuffled(n: int, n_rows: int, seed: int, start: int = 0) -> Iterator[Tensor]:
    """Without end, n_rows indices below n at a time; each epoch has each index at most once, in an order of its own.

    Args:
        n: Number of items.
        n_rows: How many to take at a time.
        seed: Of the order.
        start: How many times to skip, as if they had been taken.
    """
    per_epoch, step = n // n_rows, start
    while True:
        order = row_seeds(seed, step // per_epoch, n).argsort()
        for part in range(step % per_epoch, per_epoch):
            yield order[part * n_rows : (part + 1) * n_rows]
            step += 1
