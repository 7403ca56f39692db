"""Copies between the host and a GPU, in chunks through pinned memory.

::

    to the host   GPU ── chunk 2 ──► pinned B      at the same time: pinned A ── chunk 1 ──► memory of the host
    to the GPU    host ── chunk 2 ──► pinned B     at the same time: pinned A ── chunk 1 ──► GPU

A copy by torch into memory of the host that is new has the driver pin it page by page, which takes several times as
long as this: 237 ms for 256 MiB on a virtual machine with an H200. One thread copies on the host: those of OpenMP would
wait for each other, as several workers and the controller copy at a time. Torch has to be loaded.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor

CHUNK_NBYTES = 8 << 20
LEAST_NBYTES = 32 << 20  # below, memory of the host is hardly ever new, and a plain copy takes as long

_copying = threading.Lock()
_pinned: list[Tensor] = []  # two chunks, once there were copies


def to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host; one that is there is returned as it is."""
    if not tensor.is_cuda:
        return tensor.cpu()
    import torch

    copied = torch.empty_like(tensor, device="cpu")
    copy(copied, tensor)
    return copied


def to_device(tensor: Tensor, device: str | torch.device) -> Tensor:
    """Copy a tensor to a device; one that is there is returned as it is."""
    import torch

    if torch.device(device).type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    copied = torch.empty_like(tensor, device=device)
    copy(copied, tensor)
    return copied


def copy(target: Tensor, source: Tensor) -> None:
    """Copy a tensor into another one of the same shape, between any devices, and wait until it is there."""
    host, gpu = (source, target) if target.is_cuda else (target, source)
    is_plain = target.is_contiguous() and source.is_contiguous() and target.dtype == source.dtype
    nbytes = target.numel() * target.itemsize
    if not (is_plain and gpu.is_cuda and not host.is_cuda and nbytes >= LEAST_NBYTES) or host.is_pinned():
        target.copy_(source)
        return
    torch = sys.modules["torch"]
    chunks = [one.detach().view(-1).view(torch.uint8).split(CHUNK_NBYTES) for one in (target, source)]
    with _copying, torch.cuda.device(gpu.device):
        if not _pinned:
            _pinned[:] = [torch.empty(CHUNK_NBYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        try:
            (_to_gpu if target.is_cuda else _to_host)(*chunks)
        finally:
            torch.cuda.current_stream().synchronize()  # also if interrupted: the chunks are free for the next copy


def _to_host(host: tuple[Tensor, ...], gpu: tuple[Tensor, ...]) -> None:
    arrived = []
    for number, chunk in enumerate(gpu):
        pinned = _pinned[number % 2][: len(chunk)]
        pinned.copy_(chunk, non_blocking=True)
        arrived.append((_now(), pinned))
        if number:
            _take(host[number - 1], *arrived[number - 1])
    _take(host[-1], *arrived[-1])


def _take(host: Tensor, arrives: torch.cuda.Event, pinned: Tensor) -> None:
    arrives.synchronize()
    np.copyto(host.numpy(), pinned.numpy())


def _to_gpu(gpu: tuple[Tensor, ...], host: tuple[Tensor, ...]) -> None:
    sent: list[torch.cuda.Event] = []
    for number, chunk in enumerate(host):
        if number > 1:
            sent[number - 2].synchronize()
        pinned = _pinned[number % 2][: len(chunk)]
        np.copyto(pinned.numpy(), chunk.numpy())
        gpu[number].copy_(pinned, non_blocking=True)
        sent.append(_now())


def _now() -> torch.cuda.Event:
    """An event after all that the current stream has to do."""
    event: torch.cuda.Event = sys.modules["torch"].cuda.Event()
    event.record()
    return event
