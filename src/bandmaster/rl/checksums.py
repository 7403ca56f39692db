"""Checksums of tensors, several times as fast as a copy of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from bandmaster.rl.exchange import bytes_of

if TYPE_CHECKING:
    from torch import Tensor

N_COLUMNS = 256  # of 8-byte words; their sums stay in the cache of a core
GOLDEN, FIRST, SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # as int64


def checksums(tensors: Iterable[Tensor]) -> list[int]:
    """Return a number for each tensor that depends on all bits of its elements.

    The 8-byte words are added up in columns on the tensor's device, and the sums are mixed with their places and added.
    Tensors of one dtype and shape that differ in one word never have equal sums, and random tensors hardly ever.
    Tensors that differ only in the order of whole rows of words have equal sums.

    Source: the constants and steps of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
    """
    import torch

    columns = [_columns(tensor).cpu() for tensor in tensors]
    if not columns:
        return []
    mixed = torch.stack(columns) + torch.arange(N_COLUMNS) * GOLDEN
    for shift, factor in ((30, FIRST), (27, SECOND), (31, 1)):
        mixed ^= mixed >> shift
        mixed *= factor
    sums: list[int] = mixed.sum(1).tolist()
    return sums


def _columns(tensor: Tensor) -> Tensor:
    """The sums of a tensor's 8-byte words in columns, modulo 2⁶⁴: int64 (`N_COLUMNS`,)."""
    import torch

    data = bytes_of(tensor)
    n_in_words = len(data) // 8 * 8
    words = data[:n_in_words]
    if words.storage_offset() % 8:
        words = words.clone()
    words = words.view(torch.int64)
    n_in_rows = len(words) // N_COLUMNS * N_COLUMNS
    columns = words[:n_in_rows].view(-1, N_COLUMNS).sum(0)
    for rest in words[n_in_rows:], data[n_in_words:]:
        columns[: len(rest)] += rest
    return columns
