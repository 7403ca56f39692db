"""Values to bytes and back: pickle protocol 5, large buffers out of band, cloudpickle where pickle cannot.

The same codec on every backend, so that values are isolated in the same way everywhere::

    encode(value) -> Payload(head, buffers)      buffers are views of the value's own memory: nothing is copied yet
    decode(payload) -> value                     arrays and tensors lie in the payload's buffers: nothing is copied

Whoever carries a payload copies its buffers once, into memory that is the receiver's own and writable.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np

from bandmaster.wire import tensors
from bandmaster.wire.arrays import reduce_array

__all__ = ["Payload", "decode", "encode"]

OUT_OF_BAND_NBYTES = 4096  # smaller buffers are cheaper inside the pickle stream

Reducer = Callable[[Any], Any]
_reducers: dict[type, Reducer] = {np.ndarray: reduce_array}


@dataclass(frozen=True)
class Payload:
    """One encoded value.

    Attributes:
        head: The pickle stream.
        buffers: The large buffers that it refers to, in order.
    """

    head: bytes
    buffers: tuple[Any, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return len(self.head) + sum(memoryview(buffer).nbytes for buffer in self.buffers)

    def private(self) -> Payload:
        """The same payload in fresh memory of its own, which its reader may keep and write."""
        return Payload(self.head, tuple(bytearray(buffer) for buffer in self.buffers))

    def __reduce_ex__(self, protocol: Any) -> tuple[object, ...]:
        wrap: Callable[[Any], Any] = pickle.PickleBuffer if protocol >= 5 else bytearray
        return Payload, (self.head, tuple(map(wrap, self.buffers)))


def encode(value: Any) -> Payload:
    """Encode a value; the payload's buffers share memory with it, so carry them before the value changes.

    Raises:
        Exception: Whatever the value's own pickling raises; `pickle.PicklingError` and `TypeError` mostly.
    """
    if "torch" in sys.modules:
        tensors.add_reducers(_reducers)
    buffers: list[Any] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < OUT_OF_BAND_NBYTES:
            return True
        buffers.append(raw)
        return False

    with io.BytesIO() as stream:
        _Encoder(stream, protocol=5, buffer_callback=keep).dump(value)
        return Payload(stream.getvalue(), tuple(buffers))


def decode(payload: Payload) -> Any:
    """The value; its arrays and tensors lie in the payload's buffers, which must be the reader's own.

    Raises:
        Exception: Whatever the value's own unpickling raises.
    """
    return pickle.loads(payload.head, buffers=payload.buffers)


class _Encoder(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    def reducer_override(self, obj: Any) -> Any:
        reducer = _reducers.get(type(obj))
        if reducer is not None:
            reduced = reducer(obj)
            if reduced is not NotImplemented:
                return reduced
        return super().reducer_override(obj)
