"""Memory of a GPU that other processes of this host copy from: CUDA's IPC, by the driver's own functions.

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

__all__ = ["Borrowings", "Loan", "can_borrow", "lend"]

_ENABLE_PEER_ACCESS = 1  # from a GPU to another one, where the machine can


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


class Loan(NamedTuple):
    """Where other processes find some memory of a GPU, and that memory, which has to be kept while they copy.

    Attributes:
        handle: Of the allocation that it is part of, as the driver says.
        offset: In bytes, from the beginning of the allocation.
        memory: Flat tensor of bytes.
    """

    handle: bytes
    offset: int
    memory: Any


def lend(memory: Any) -> Loan:
    """Lend flat bytes of a tensor on a GPU. What was written to them before can be copied by others from here on.

    Raises:
        OSError: The driver refuses: memory of torch's "expandable segments" cannot be lent, for one.
    """
    torch, base, handle = sys.modules["torch"], ctypes.c_uint64(), _Handle()
    with torch.cuda.device(memory.device):
        torch.cuda.current_stream().synchronize()  # which makes torch's context this thread's, too
        _call("cuMemGetAddressRange_v2", ctypes.byref(base), None, ctypes.c_uint64(memory.data_ptr()))
        _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
    return Loan(bytes(handle), memory.data_ptr() - base.value, memory)


class Borrowings:
    """What is copied from other processes' GPUs while one message is read."""

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
        """Wait until all is copied; the lender may free its memory then."""
        while self._opened:
            _, (stream, base) = self._opened.popitem()
            try:
                stream.synchronize()
            finally:
                with sys.modules["torch"].cuda.device(stream.device):
                    _call("cuIpcCloseMemHandle", base)


def can_borrow(handle: bytes, offset: int, expected: bytes, device: str) -> bool:
    """Whether what was lent can be copied to ``device`` and reads as expected."""
    if device == "cpu":
        return False
    borrowings = Borrowings()
    try:
        try:
            read = borrowings.copy(handle, offset, len(expected), device)
        finally:
            borrowings.close()
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
