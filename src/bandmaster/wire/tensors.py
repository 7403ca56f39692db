"""How torch tensors are pickled: one buffer in any dtype, strides kept, grad flag kept, writable on arrival.

Torch is never imported to send anything: `add_reducers` is called once it is loaded.
Sparse, nested and quantized tensors are left to torch's own pickling, whose inner tensors come back here.
A CUDA tensor travels through host memory, and arrives on the receiver's own device, see `arriving_on`.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["add_reducers", "arriving_on"]

_arrival = threading.local()


@contextlib.contextmanager
def arriving_on(device: str) -> Iterator[None]:
    """While it lasts, tensors that this thread unpickles and that were on a GPU are put on ``device``, not the CPU."""
    before, _arrival.device = getattr(_arrival, "device", "cpu"), device
    try:
        yield
    finally:
        _arrival.device = before


def add_reducers(reducers: dict[type, Any]) -> None:
    """Add those for `torch.Tensor` and `torch.nn.Parameter` to the codec's table; torch is loaded."""
    torch = sys.modules["torch"]
    if getattr(torch, "Tensor", None) in reducers or not hasattr(torch, "nn") or not hasattr(torch.nn, "Parameter"):
        return  # done before, or torch is still half imported
    reducers[torch.Tensor] = reduce_tensor
    reducers[torch.nn.Parameter] = reduce_parameter


def reduce_tensor(tensor: Any) -> Any:
    """For `pickle.Pickler.reducer_override`; NotImplemented leaves the tensor to torch."""
    torch = sys.modules["torch"]
    is_plain = tensor.layout is torch.strided and tensor.device.type in ("cpu", "cuda")
    if not is_plain or tensor.is_nested or tensor.is_quantized:
        return NotImplemented
    data = tensor.detach().cpu().resolve_conj().resolve_neg()
    if not _is_dense(data):
        data = data.contiguous()
    dtype = str(data.dtype).removeprefix("torch.")
    was_on_gpu = tensor.device.type == "cuda"
    arguments = (_buffer_of(data), dtype, tuple(data.shape), data.stride(), tensor.requires_grad, was_on_gpu)
    return _with_attributes(tensor, _rebuild, arguments)


def reduce_parameter(parameter: Any) -> Any:
    """The same for a parameter, which arrives as one."""
    return _with_attributes(parameter, _rebuild_parameter, (parameter.data, parameter.requires_grad))


def _with_attributes(tensor: Any, rebuild: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    attributes = vars(tensor)  # what a user set on it, such as a mark for sharding
    return (rebuild, arguments, attributes, None, None, _set_attributes) if attributes else (rebuild, arguments)


def _set_attributes(tensor: Any, attributes: dict[str, Any]) -> None:
    vars(tensor).update(attributes)


def _is_dense(data: Any) -> bool:
    """Whether the elements fill one stretch of memory without holes or overlaps, in whatever order of dims."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(data.stride(), data.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _buffer_of(data: Any) -> pickle.PickleBuffer:
    torch = sys.modules["torch"]
    flat = torch.as_strided(data, (data.numel(),), (1,))
    return pickle.PickleBuffer(flat.view(torch.uint8).numpy())


def _rebuild(
    buffer: Any, dtype: str, shape: tuple[int, ...], stride: tuple[int, ...], requires_grad: bool, was_on_gpu: bool
) -> Any:
    import torch

    element = getattr(torch, dtype)
    size = memoryview(buffer).nbytes
    flat = torch.frombuffer(buffer, dtype=torch.uint8).view(element) if size else torch.empty(0, dtype=element)
    if was_on_gpu:
        flat = flat.to(getattr(_arrival, "device", "cpu"))
    return torch.as_strided(flat, shape, stride).requires_grad_(requires_grad)


def _rebuild_parameter(data: Any, requires_grad: bool) -> Any:
    import torch

    return torch.nn.Parameter(data, requires_grad)
