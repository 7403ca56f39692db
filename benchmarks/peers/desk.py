"""What a worker does, the same on every peer, and the arrays that it is given."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

N_SAMPLES = 64


def make_rows(nbytes: int) -> np.ndarray:
    """Rows of float32, ``nbytes`` in all; every page was written, for zero pages would flatter everyone."""
    n_rows = 64 if nbytes < 1 << 20 else 1024
    array = np.empty((n_rows, nbytes // 4 // n_rows), np.float32)
    array[:] = np.arange(array.shape[1], dtype=np.float32) % 251
    return array


def sampled(array: np.ndarray) -> np.ndarray:
    """A view of some 64 items, evenly spread."""
    flat = array.reshape(-1)
    return flat[:: flat.size // N_SAMPLES | 1]


def sample_sum(array: np.ndarray) -> float:
    """The sum of the sampled items: exact, as they are small integers."""
    return float(sampled(array).sum(dtype=np.float64))


def full_sum(array: np.ndarray) -> float:
    """The sum of all items, up to what float32 holds."""
    return float(array.sum())


class Desk:
    """The work of one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.held = np.empty(0, np.float32)

    def noop(self, value: Any) -> Any:
        return value

    def load_torch(self) -> bool:
        import torch

        return torch.__name__ == "torch"

    def read(self, array: np.ndarray) -> float:
        return sample_sum(array)

    def read_all(self, array: np.ndarray) -> float:
        return full_sum(array)

    def increment(self, rows: Any) -> Any:
        return rows + 1

    def make(self, nbytes: int, token: int) -> np.ndarray:
        """Rows that hold nothing but the token."""
        n_rows = 8 if nbytes < 1 << 20 else 128
        return np.full((n_rows, nbytes // 4 // n_rows), token, np.float32)

    def make_numbered(self, nbytes: int, n_rows: int, start: int) -> np.ndarray:
        """Rows that hold nothing but their numbers, counted from ``start``."""
        rows = np.empty((n_rows, nbytes // 4 // n_rows), np.float32)
        rows[:] = np.arange(start, start + n_rows, dtype=np.float32)[:, None]
        return rows

    def first_sum(self, rows: np.ndarray) -> float:
        """The sum of the rows' numbers."""
        return float(rows[:, 0].sum(dtype=np.float64))

    def rest(self, seconds: np.ndarray) -> np.ndarray:
        """Sleep for each row as long as it says, as if it took so long; the same rows come back."""
        for each in seconds:
            time.sleep(float(each))
        return seconds

    def increment_joined(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return (np.concatenate(parts) if len(parts) > 1 else parts[0]) + 1

    def exact_sum(self, rows: np.ndarray) -> float:
        return float(rows.sum(dtype=np.float64))

    def give(self, nbytes: int, token: int) -> np.ndarray:
        """An array that this rank has had all along; its first item says which call it answers."""
        if self.held.nbytes != nbytes:
            self.held = np.full(nbytes // 4, self.rank, np.float32)
        self.held[0] = token
        return self.held
