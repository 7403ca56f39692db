"""Exported tensors: GPU memory that other processes of the same host open with functions of the CUDA driver.

::

    controller                                   worker
    copy of the tensor, on its GPU ── handle ─► copied into the worker's own memory, on the worker's GPU
    kept until the reply arrives ◄───────────── reply

Source: NVIDIA, CUDA Driver API, Memory Management (``cuIpcGetMemHandle`` and related functions).
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any, NamedTuple

__all__ = ["CAN_OPEN", "ExportedTensor", "OpenedExports", "can_open", "export"]

CAN_OPEN = "bandmaster.can_open"  # name of the built-in method that runs `can_open` in a worker
_ENABLE_PEER_ACCESS = 1  # allows access from another GPU, if the machine supports it


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


class ExportedTensor(NamedTuple):
    """GPU memory together with its address for other processes. Its owner keeps it until they have copied the memory.

    Attributes:
        handle: The driver's IPC handle of the allocation that contains the memory.
        offset: Offset of the memory in the allocation, in bytes.
        memory: The memory, a flat uint8 tensor of shape ``(nbytes,)``.
    """

    handle: bytes
    offset: int
    memory: Any


def export(memory: Any) -> ExportedTensor:
    """Export GPU memory; other processes see all writes that were submitted to the current stream before.

    Args:
        memory: Flat uint8 tensor on a GPU; shared with the result, not copied.

    Raises:
        OSError: The driver cannot export the memory, for example because torch uses "expandable segments".
    """
    torch, base, handle = sys.modules["torch"], ctypes.c_uint64(), _Handle()
    with torch.cuda.device(memory.device):
        torch.cuda.current_stream().synchronize()  # also makes torch's context current in this thread
        _call("cuMemGetAddressRange_v2", ctypes.byref(base), None, ctypes.c_uint64(memory.data_ptr()))
        _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
    return ExportedTensor(bytes(handle), memory.data_ptr() - base.value, memory)


class OpenedExports:
    """The exported tensors of other processes that are open while one message is decoded."""

    def __init__(self) -> None:
        self._opened: dict[bytes, tuple[Any, ctypes.c_uint64]] = {}  # stream and local address of each open handle

    def copy(self, handle: bytes, offset: int, nbytes: int, device: str) -> Any:
        """Copy exported memory into new memory of this process; the copy is asynchronous until `close`.

        Args:
            handle: The driver's IPC handle of the exported allocation.
            offset: Offset in the allocation, in bytes.
            nbytes: Number of bytes to copy.
            device: GPU of this process that the copy is made on, such as ``"cuda:0"``.

        Returns:
            A flat uint8 tensor of shape ``(nbytes,)`` on ``device``.

        Raises:
            OSError: This process cannot open or copy the memory.
        """
        import torch

        with torch.cuda.device(device):
            own, stream = torch.empty(nbytes, dtype=torch.uint8, device=device), torch.cuda.current_stream()
            stream.query()  # makes torch's context current in this thread
            if handle not in self._opened:
                base, flags = ctypes.c_uint64(), ctypes.c_uint(_ENABLE_PEER_ACCESS)
                _call("cuIpcOpenMemHandle_v2", ctypes.byref(base), _Handle.from_buffer_copy(handle), flags)
                self._opened[handle] = stream, base
            source, target = self._opened[handle][1].value + offset, own.data_ptr()
            size, where = ctypes.c_size_t(nbytes), ctypes.c_void_p(stream.cuda_stream)
            _call("cuMemcpyAsync", ctypes.c_uint64(target), ctypes.c_uint64(source), size, where)
        return own

    def close(self) -> None:
        """Wait until all copies are complete, and close the memory. The exporting process may then free it."""
        while self._opened:
            _, (stream, base) = self._opened.popitem()
            try:
                stream.synchronize()
            finally:
                with sys.modules["torch"].cuda.device(stream.device):
                    _call("cuIpcCloseMemHandle", base)


def can_open(device: str, handle: bytes, offset: int, expected: bytes) -> bool:
    """Whether a copy of exported memory to ``device`` succeeds and equals ``expected``; False for ``"cpu"``."""
    if device == "cpu":
        return False
    opened = OpenedExports()
    try:
        try:
            read = opened.copy(handle, offset, len(expected), device)
        finally:
            opened.close()
        return bytes(read.cpu().numpy()) == expected
    except Exception:  # raised by the driver or by torch, or torch is not installed
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
    """The CUDA driver library, which is installed on every machine where torch can use a GPU.

    Raises:
        OSError: The library is not installed.
    """
    return ctypes.CDLL("libcuda.so.1")
