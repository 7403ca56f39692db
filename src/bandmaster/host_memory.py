"""New memory of the host for large tensors, in huge pages where the kernel gives them.

Memory of torch's own comes in pages of 4 KiB, which the kernel makes one by one as they are first written: 256 MiB are
filled in 280 ms, and in 70 ms if the memory is numpy's, which asks for huge pages. Torch has to be loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


def empty(nbytes: int) -> Tensor:
    """Make a tensor for some bytes: uint8 (bytes,)."""
    import torch

    return torch.from_numpy(np.empty(max(nbytes, 1), np.uint8))[:nbytes]  # one of no bytes would have no stride


def empty_like(tensor: Tensor) -> Tensor:
    """Make a contiguous tensor on the host with a tensor's shape and dtype."""
    return empty(tensor.numel() * tensor.itemsize).view(tensor.dtype).view(tensor.shape)


def to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor from a GPU to the host, contiguous; one that is on the host is returned as it is."""
    return empty_like(tensor).copy_(tensor) if tensor.is_cuda else tensor.cpu()
