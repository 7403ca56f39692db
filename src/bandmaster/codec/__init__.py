"""Values to bytes and back: `encode(value) -> Payload -> decode(payload)`, the same on every backend.

::

    encode(value) ── pickling (pickle protocol 5, cloudpickle where pickle cannot)
                        ├── arrays, tensors      one buffer each, any layout, writable on arrival
                        └── cuda_ipc             memory of a GPU that other processes of the host open
"""

from bandmaster.codec.pickling import Payload, decode, encode

__all__ = ["Payload", "decode", "encode"]
