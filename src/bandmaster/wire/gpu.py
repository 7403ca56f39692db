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
        self._opened: list[tuple[Any, ctypes.c_uint64]] = []  # the stream that copies, and the allocation

    def copy(self, handle: bytes, offset: int, nbytes: int, device: str) -> Any:
        """Flat bytes on ``device``, this process's own.

        Raises:
            OSError: The memory cannot be reached from here.
        """
        import torch

        with torch.cuda.device(device):
            own, base = torch.empty(nbytes, dtype=torch.uint8, device=device), ctypes.c_uint64()
            stream, flags = torch.cuda.current_stream(), ctypes.c_uint(_ENABLE_PEER_ACCESS)
            stream.query()  # which makes torch's context this thread's
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(base), _Handle.from_buffer_copy(handle), flags)
            self._opened.append((stream, base))
            source, target = ctypes.c_uint64(base.value + offset), ctypes.c_uint64(own.data_ptr())
            _call("cuMemcpyAsync", target, source, ctypes.c_size_t(nbytes), ctypes.c_void_p(stream.cuda_stream))
        return own

    def close(self) -> None:
        """Wait until all is copied; the lender may free its memory then."""
        while self._opened:
            stream, base = self._opened.pop()
            stream.synchronize()
            with sys.modules["torch"].cuda.device(stream.device):
                _call("cuIpcCloseMemHandle", base)


def can_borrow(handle: bytes, offset: int, expected: bytes, device: str) -> bool:
    """Whether what was lent can be copied to ``device`` and reads as expected."""
    if device == "cpu":
        return False
    borrowings = Borrowings()
    try:
        read = borrowings.copy(handle, offset, len(expected), device)
        borrowings.close()
    except (OSError, RuntimeError):  # the driver's, and torch's
        return False
    return bytes(read.cpu().numpy()) == expected


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
