"""Mapped memory of a file, without a descriptor; `mmap.mmap` keeps a duplicate of one for as long as it lives.

So the number of arrays that a process holds in shared memory is not bounded by its limit on open files.

Source: mmap(2), "closing the file descriptor does not unmap the region"; madvise(2).
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import numpy as np

__all__ = ["MappedFile"]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FAILED = ctypes.c_void_p(-1).value
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


class MappedFile:
    """A file's first bytes in memory, readable and writable; unmapped with the last array over it.

    Args:
        fd: Descriptor of the file. It may be closed afterwards.
        nbytes: How many bytes, at least 1.
        is_private: Whether writes stay in this process (in copies of the pages) rather than go to the file.

    Raises:
        OSError: The kernel refuses: memory or the number of mappings (``vm.max_map_count``) is exhausted.
    """

    __slots__ = ("__array_interface__", "__weakref__", "_unmap", "address", "nbytes")

    def __init__(self, fd: int, nbytes: int, is_private: bool) -> None:
        self._unmap = _libc.munmap  # kept here: module globals may be gone when this is collected
        self.address = self.nbytes = 0
        address = _libc.mmap(None, nbytes, _READ_WRITE, mmap.MAP_PRIVATE if is_private else mmap.MAP_SHARED, fd, 0)
        if address in (None, _FAILED):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.address, self.nbytes = address, nbytes
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|u1",
            "shape": (nbytes,),
            "data": (address, False),
        }

    def array(self) -> Any:
        """A new array of the bytes. It keeps the mapping, and every array that is made of its memory keeps this array.

        The second holds as the array's base is no array: numpy lets an array keep the base of an array's array instead.
        """
        return np.asarray(self)

    def forget_writes(self) -> None:
        """Drop the pages of a private mapping, so that it shows the file again."""
        _libc.madvise(self.address, self.nbytes, mmap.MADV_DONTNEED)

    def __del__(self) -> None:
        if self.nbytes:
            self._unmap(self.address, self.nbytes)
