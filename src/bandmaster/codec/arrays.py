"""Pickles numpy arrays of any layout as one buffer. The decoded array is writable, even if the original is not."""

from __future__ import annotations

import ctypes
import pickle
from functools import lru_cache
from typing import Any

import numpy as np

_PLAIN_KINDS = "biufcSUmMV"  # dtype kinds whose items are raw bytes: no objects, no variable-width strings


def _has_plain_items(dtype: Any) -> bool:
    """Whether the memory of an array of this dtype holds its items themselves, not references to objects."""
    return bool(dtype.kind in _PLAIN_KINDS and not dtype.hasobject and dtype.itemsize > 0)


def is_bare(array: Any) -> bool:
    """Whether pickling the array involves no other object. Fields and metadata may refer to classes of the user."""
    dtype = array.dtype
    return _has_plain_items(dtype) and not (dtype.fields or dtype.metadata)


def reduce_array(array: Any) -> Any:
    """Reduce an array to one buffer, for `pickle.Pickler.reducer_override`; NotImplemented leaves it to numpy."""
    dtype = array.dtype
    if not _has_plain_items(dtype):
        return NotImplemented
    order = "C"
    if not array.flags.c_contiguous:
        if array.flags.f_contiguous:
            order = "F"
        else:
            array = np.ascontiguousarray(array)
    described = dtype if dtype.fields or dtype.metadata else _described(dtype)
    return _rebuild, (_buffer_of(array.T if order == "F" else array), described, array.shape, order)


@lru_cache(maxsize=256)
def _described(dtype: Any) -> Any:
    """The short form of a dtype without fields and metadata, such as ``"<f4"``; the dtype itself if that is lossy."""
    return dtype.str if np.dtype(dtype.str) == dtype else dtype


def _buffer_of(array: Any) -> pickle.PickleBuffer:
    if not array.size:
        return pickle.PickleBuffer(bytearray())
    raw = array.reshape(-1).view(np.uint8)
    if raw.flags.writeable:
        return pickle.PickleBuffer(raw)
    alias = (ctypes.c_ubyte * raw.nbytes).from_address(raw.ctypes.data)  # counts as writable, as the decoded array will
    alias._owner = raw  # keeps the memory alive as long as the buffer
    return pickle.PickleBuffer(alias)


def _rebuild(buffer: Any, dtype: Any, shape: tuple[int, ...], order: Any) -> Any:
    return np.ndarray(shape, dtype, buffer, order=order)
