"""How numpy arrays are pickled: any layout, one buffer, writable on arrival whatever they were before."""

from __future__ import annotations

import ctypes
import pickle
from functools import lru_cache
from typing import Any

import numpy as np

__all__ = ["is_bare", "reduce_array"]

_PLAIN_KINDS = "biufcSUmMV"  # dtypes whose items are their bytes; not objects, not variable-width strings


def _has_plain_items(array: Any) -> bool:
    """Whether its items are their bytes."""
    dtype = array.dtype
    return dtype.kind in _PLAIN_KINDS and not dtype.hasobject and dtype.itemsize > 0


def is_bare(array: Any) -> bool:
    """Whether pickling it involves no other object: its dtype may have fields, and those a class of the user's."""
    return _has_plain_items(array) and not array.dtype.fields


def reduce_array(array: Any, export: object) -> Any:
    """For `pickle.Pickler.reducer_override`: the array's bytes as one buffer; NotImplemented leaves it to numpy."""
    if not _has_plain_items(array):
        return NotImplemented
    order = "C"
    if not array.flags.c_contiguous:
        if array.flags.f_contiguous:
            order = "F"
        else:
            array = np.ascontiguousarray(array)
    dtype = array.dtype
    described = dtype if dtype.fields else _described(dtype)
    return _rebuild, (_buffer_of(array.T if order == "F" else array), described, array.shape, order)


@lru_cache(maxsize=256)
def _described(dtype: Any) -> Any:
    """A dtype without fields, shorter where that says it all."""
    return dtype.str if np.dtype(dtype.str) == dtype else dtype


def _buffer_of(array: Any) -> pickle.PickleBuffer:
    if not array.size:
        return pickle.PickleBuffer(bytearray())
    raw = array.reshape(-1).view(np.uint8)
    if raw.flags.writeable:
        return pickle.PickleBuffer(raw)
    # Pickle marks buffers of read-only arrays, and they would be read-only on arrival. Same memory, without the mark.
    alias = (ctypes.c_ubyte * raw.nbytes).from_address(raw.ctypes.data)
    alias._owner = array  # keeps the memory alive as long as the buffer
    return pickle.PickleBuffer(alias)


def _rebuild(buffer: Any, dtype: Any, shape: tuple[int, ...], order: Any) -> Any:
    return np.ndarray(shape, dtype, buffer, order=order)
