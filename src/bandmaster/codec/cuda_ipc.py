"""Exported tensors: memory of a GPU that other processes of this host open, by the CUDA driver's own functions.

::

    controller                                   worker
    a copy of the tensor, on its GPU ─ handle ─► copied into memory of the worker's own, on the worker's GPU
    kept until the worker has answered ◄──────── answer

Source: NVIDIA, CUDA Driver API, Memory Management (``cuIpcGetMemHandle`` and its kin).
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any, NamedTuple

__all__ = ["CAN_OPEN", "ExportedTensor", "OpenedExports", "can_open", "export"]

CAN_OPEN = "bandmaster.can_open"  # the method by which a worker is asked `can_open`
_ENABLE_PEER_ACCESS = 1  # from a GPU to another one, where the machine can


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


class ExportedTensor(NamedTuple):
    """Where other processes find some memory of a GPU, and that memory, which has to be kept while they copy from it.

    Attributes:
        handle: Of the allocation that it is part of, as the driver says.
        offset: In bytes, from the beginning of the allocation.
        memory: Flat tensor of bytes.
    """

    handle: bytes
    offset: int
    memory: Any


def export(memory: Any) -> ExportedTensor:
    """Export flat bytes of a tensor on a GPU. Other processes see what was written to them before.

    Raises:
        OSError: The driver refuses: memory of torch's "expandable segments" cannot be exported, for one.
    """
    torch, base, handle = sys.modules["torch"], ctypes.c_uint64(), _Handle()
    with torch.cuda.device(memory.device):
        torch.cuda.current_stream().synchronize()  # which makes torch's context this thread's, too
        _call("cuMemGetAddressRange_v2", ctypes.byref(base), None, ctypes.c_uint64(memory.data_ptr()))
        _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
    return ExportedTensor(bytes(handle), memory.data_ptr() - base.value, memory)


class OpenedExports:
    """Memory of other processes' GPUs that is open while one message is read."""

    def __init__(self) -> None:
        self._opened: dict[bytes, tuple[Any, ctypes.c_uint64]] = {}  # the stream that copies, and where it begins here

    def copy(self, handle: bytes, offset: int, nbytes: int, device: str) -> Any:
        """Flat bytes on ``device``, this process's own.

        Raises:
            OSError: The memory cannot be reached from here.
        """
        import torch

        with torch.cuda.device(device):
            own, stream = torch.empty(nbytes, dtype=torch.uint8, device=device), torch.cuda.current_stream()
            stream.query()  # which makes torch's context this thread's
            if handle not in self._opened:
                base, flags = ctypes.c_uint64(), ctypes.c_uint(_ENABLE_PEER_ACCESS)
                _call("cuIpcOpenMemHandle_v2", ctypes.byref(base), _Handle.from_buffer_copy(handle), flags)
                self._opened[handle] = stream, base
            source, target = self._opened[handle][1].value + offset, own.data_ptr()
            size, where = ctypes.c_size_t(nbytes), ctypes.c_void_p(stream.cuda_stream)
            _call("cuMemcpyAsync", ctypes.c_uint64(target), ctypes.c_uint64(source), size, where)
        return own

    def close(self) -> None:
        """Wait until all is copied; the exporting process may free its memory then."""
        while self._opened:
            _, (stream, base) = self._opened.popitem()
            try:
                stream.synchronize()
            finally:
                with sys.modules["torch"].cuda.device(stream.device):
                    _call("cuIpcCloseMemHandle", base)


def can_open(device: str, handle: bytes, offset: int, expected: bytes) -> bool:
    """Whether exported memory can be opened and copied to ``device``, and reads as expected."""
    if device == "cpu":
        return False
    opened = OpenedExports()
    try:
        try:
            read = opened.copy(handle, offset, len(expected), device)
        finally:
            opened.close()
        return bytes(read.cpu().numpy()) == expected
    except Exception:  # the driver's, torch's, or there is no torch
        return False


def _call(function: str, *args: Any) -> None:
    driver = _driver()
    code = getattr(driver, function)(*args)
    if code:
        name = ctypes.c_char_p()
        driver.cuGetErrorName(code, ctypes.byref(name))
        raise OSError(f"{function}: {(name.value or b'CUDA error').decode()} ({code})")


@functools.cache
def _driver() -> ctypes.CDLL:
    """It is there where torch sees a GPU, with the context that torch uses.

    Raises:
        OSError: It is not there.
    """
    return ctypes.CDLL("libcuda.so.1")
