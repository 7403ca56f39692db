"""Pickles torch tensors of any dtype as one buffer; keeps strides and the grad flag. Decoded tensors are writable.

Encoding never imports torch: the codec calls `add_reducers` if torch is already loaded.
Torch itself pickles nested and quantized tensors, whose inner tensors use the reducers of this module.
A CUDA tensor is sent through host memory, and decoded onto the receiver's own device, see `arriving_on`.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from bandmaster.host_memory import to_host

_arrival = threading.local()
_NUMPYS = {  # numpy's names of dtypes, by their names in torch
    f"torch.{name}": name
    for kind in ("int8 int16 int32 int64 uint8", "float16 float32 float64", "complex64 complex128", "bool")
    for name in kind.split()
}


@contextlib.contextmanager
def arriving_on(device: str) -> Iterator[None]:
    """Context manager in which GPU tensors that the current thread unpickles are placed on ``device``, not the CPU."""
    before, _arrival.device = getattr(_arrival, "device", None), device
    try:
        yield
    finally:
        _arrival.device = before


def add_reducers(reducers: dict[type, Any], bare: dict[type, Callable[[Any], bool]]) -> None:
    """Add `torch.Tensor` and `torch.nn.Parameter` to the codec's tables. Torch must be loaded.

    Args:
        reducers: Reducers by type.
        bare: For each type, a function that returns whether pickling a value needs no other reducer.
    """
    torch = sys.modules["torch"]
    if getattr(torch, "Tensor", None) in reducers or not hasattr(torch, "nn") or not hasattr(torch.nn, "Parameter"):
        return  # already added, or another thread is still importing torch
    reducers[torch.Tensor] = reduce_tensor
    reducers[torch.nn.Parameter] = reduce_parameter
    bare[torch.Tensor] = lambda tensor: _is_plain(tensor) and not vars(tensor)


def _is_plain(tensor: Any) -> bool:
    """Whether the tensor is strided, in the memory of the host or of one GPU."""
    is_strided = tensor.layout is sys.modules["torch"].strided and (tensor.is_cpu or tensor.is_cuda)
    return is_strided and not (tensor.is_nested or tensor.is_quantized)


def _is_like_an_array(tensor: Any) -> bool:
    """Whether shape and elements describe the tensor completely. Dims of size 1 are excluded: their strides vary."""
    if not (tensor.is_cpu and tensor.is_contiguous()) or tensor.requires_grad or tensor.is_conj() or tensor.is_neg():
        return False
    shape = tensor.shape
    return 0 not in shape and 1 not in shape


def reduce_tensor(tensor: Any) -> Any:
    """Reduce a tensor to one buffer, for `pickle.Pickler.reducer_override`.

    Returns NotImplemented for tensors that torch itself has to pickle.
    """
    if not _is_plain(tensor):
        if not str(tensor.layout).startswith("torch.sparse"):
            return NotImplemented
        return _with_attributes(tensor, _rebuild_sparse, tensor._reduce_ex_internal(5)[1])
    dtype = _NUMPYS.get(str(tensor.dtype))
    if dtype and _is_like_an_array(tensor):
        array = tensor.numpy()
        return _with_attributes(tensor, _rebuild_contiguous, (pickle.PickleBuffer(array), dtype, array.shape))
    torch = sys.modules["torch"]
    data = tensor.detach().resolve_conj().resolve_neg()
    if not data.is_contiguous() and not _is_dense(data):
        data = data.contiguous()
    flat = torch.as_strided(data, (data.numel(),), (1,)).view(torch.uint8)
    dtype, layout = str(data.dtype).removeprefix("torch."), (tuple(data.shape), data.stride())
    buffer = pickle.PickleBuffer(to_host(flat).numpy())
    return _with_attributes(tensor, _rebuild, (buffer, dtype, layout, tensor.requires_grad, tensor.is_cuda))


def reduce_parameter(parameter: Any) -> Any:
    """Reduce a parameter to its data, for `pickle.Pickler.reducer_override`; it is decoded as a parameter."""
    return _with_attributes(parameter, _rebuild_parameter, (parameter.data, parameter.requires_grad))


def _with_attributes(tensor: Any, rebuild: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    attributes = vars(tensor)  # set by the user, such as a mark for sharding
    return (rebuild, arguments, attributes, None, None, _set_attributes) if attributes else (rebuild, arguments)


def _set_attributes(tensor: Any, attributes: dict[str, Any]) -> None:
    vars(tensor).update(attributes)


def _is_dense(data: Any) -> bool:
    """Whether the elements fill one range of memory without gaps or overlaps, in any order of dims."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(data.stride(), data.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _rebuild(buffer: Any, dtype: str, layout: tuple[Any, Any], requires_grad: bool, was_on_gpu: bool) -> Any:
    import torch

    has_items = memoryview(buffer).nbytes  # torch makes no tensor of an empty buffer
    flat = torch.frombuffer(buffer, dtype=torch.uint8) if has_items else torch.empty(0, dtype=torch.uint8, device="cpu")
    flat = flat.view(getattr(torch, dtype))
    if was_on_gpu and (device := getattr(_arrival, "device", None)) is not None:
        flat = flat.to(device)
    return torch.as_strided(flat, *layout).requires_grad_(requires_grad)


def _rebuild_contiguous(buffer: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    """Rebuild a contiguous CPU tensor of a numpy dtype; a short path, because most small tensors are like this."""
    import torch  # not from `sys.modules`, where another thread may be importing it

    flat = torch.frombuffer(buffer, dtype=getattr(torch, dtype))
    return flat if len(shape) == 1 else flat.view(shape)


def _rebuild_sparse(layout: Any, data: tuple[Any, ...]) -> Any:
    """Rebuild a sparse tensor. Torch's own function adds each to a list that only `torch.load` empties again."""
    import torch

    if layout != torch.sparse_coo:
        return torch.sparse_compressed_tensor(*data, layout=layout, check_invariants=False)
    *parts, is_coalesced = data
    return torch.sparse_coo_tensor(*parts, check_invariants=False, is_coalesced=is_coalesced)


def _rebuild_parameter(data: Any, requires_grad: bool) -> Any:
    import torch

    return torch.nn.Parameter(data, requires_grad)
