"""Memory mappings of files that keep no descriptor; `mmap.mmap` keeps a duplicate for as long as the mapping exists.

The limit on open files therefore does not limit the number of arrays that a process holds in shared memory.

Source: mmap(2), "closing the file descriptor does not unmap the region", and MAP_FIXED; madvise(2).
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FAILED = ctypes.c_void_p(-1).value
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_FIXED = 0x10  # MAP_FIXED of Linux on every architecture


class MappedFile:
    """Maps the first bytes of a file, readable and writable, until the last array over the mapping is collected.

    Args:
        fd: Descriptor of the file. The caller keeps it, and may close it afterwards.
        nbytes: Number of bytes to map, at least 1.
        is_private: Whether writes stay in this process, in copies of the pages, rather than go to the file.
        keeps: An object that is kept alive as long as the mapping is.

    Attributes:
        address: Address of the mapping.
        nbytes: Size of the mapping in bytes.

    Raises:
        OSError: The kernel has no memory or no mapping (``vm.max_map_count``) left.
    """

    __slots__ = ("__array_interface__", "__weakref__", "_keeps", "_place", "address", "nbytes")

    def __init__(self, fd: int, nbytes: int, is_private: bool, keeps: object = None) -> None:
        # The file takes the place of an anonymous mapping, whose object unmaps it in C when it is collected. In a
        # __del__ of Python code, Ctrl-C would be printed and forgotten.
        self._place = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)
        address = np.frombuffer(self._place, np.uint8).__array_interface__["data"][0]
        flags = (mmap.MAP_PRIVATE if is_private else mmap.MAP_SHARED) | _FIXED
        if _libc.mmap(address, nbytes, _READ_WRITE, flags, fd, 0) in (None, _FAILED):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.address, self.nbytes, self._keeps = address, nbytes, keeps
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|u1",
            "shape": (nbytes,),
            "data": (address, False),
        }

    def array(self) -> Any:
        """A new array over the mapping, uint8 of shape ``(nbytes,)``. It keeps the mapping alive.

        Arrays made from its memory keep this very array alive, because its base is not an array. If the base were one,
        numpy would let them refer to that base instead.
        """
        return np.asarray(self)

    def forget_writes(self) -> None:
        """Discard all writes to a private mapping, so that it shows the content of the file again."""
        _libc.madvise(self.address, self.nbytes, mmap.MADV_DONTNEED)
