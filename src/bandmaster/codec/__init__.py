"""Encodes values as payloads and decodes them: `encode(value) -> Payload -> decode(payload)`, for every backend.

::

    encode(value) ── pickling (pickle protocol 5, cloudpickle as the fallback)
                        └── arrays, tensors      one buffer each, any layout, writable when decoded
"""

from bandmaster.codec.pickling import Payload, Pickler, add_bare, add_reducer, decode, encode

__all__ = ["Payload", "Pickler", "add_bare", "add_reducer", "decode", "encode"]
