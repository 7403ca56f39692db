"""Encodes values with pickle protocol 5 and out-of-band buffers; cloudpickle is the fallback.

Every backend uses this codec, so that values are isolated in the same way on all of them::

    encode(value) -> Payload(head, buffers)      buffers are views of the value's memory: not copied
    decode(payload) -> value                     arrays and tensors use the payload's buffers: not copied

The transport between the two copies the buffers once, into writable memory that belongs to the receiver.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable, Sequence
from enum import Enum
from types import CodeType, FunctionType
from typing import Any, ClassVar

import cloudpickle
import numpy as np

from bandmaster.codec import tensors
from bandmaster.codec.arrays import is_bare, reduce_array

OUT_OF_BAND_NBYTES = 4096  # smaller buffers are cheaper inside the pickle stream
MAX_ITEMS = 100  # inspected by `_contents`
MAX_CONTAINER_ITEMS = 1000  # most items of a container that `_large_bytes` searches

np.rec  # noqa: B018  # imported on first use; until then cloudpickle sends recarray by value, and another class arrives

Reducer = Callable[[Any], Any]
_OURS = {"bandmaster.codec.arrays", "bandmaster.codec.tensors"}


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    """Reduce a code object with the name of its file, for tracebacks and debuggers; cloudpickle 3.1.3 drops it."""
    return _code_of_file, (code.co_filename, *cloudpickle.Pickler.dispatch_table[CodeType](code)[1])


def _code_of_file(filename: str, *arguments: Any) -> CodeType:
    return CodeType(*arguments).replace(co_filename=filename)


_reducers: dict[type, Reducer] = {np.ndarray: reduce_array}
_bare: dict[type, Callable[[Any], bool]] = {np.ndarray: is_bare}  # whether pickling the value needs no other reducer


class Payload:
    """One encoded value.

    Attributes:
        head: The pickle stream.
        buffers: The out-of-band buffers of the stream, in order.
    """

    __slots__ = ("buffers", "head")

    def __init__(self, head: Any, buffers: tuple[Any, ...] = ()) -> None:
        self.head = head
        self.buffers = buffers

    @property
    def nbytes(self) -> int:
        """Size of the head and the buffers, in bytes."""
        return len(self.head) + (sum([memoryview(buffer).nbytes for buffer in self.buffers]) if self.buffers else 0)

    def private(self) -> Payload:
        """The payload with buffers in new writable memory, which belongs to the reader."""
        return Payload(self.head, tuple(map(bytearray, self.buffers))) if self.buffers else self

    def __reduce_ex__(self, protocol: Any) -> tuple[object, ...]:
        wrap: Callable[[Any], Any] = pickle.PickleBuffer if protocol >= 5 else bytearray
        return Payload, (self.head, tuple(map(wrap, self.buffers)))


def encode(value: Any) -> Payload:
    """Encode a value. The buffers of the payload share memory with it, so send them before the value changes.

    Args:
        value: Any value that pickle or cloudpickle can handle.

    Raises:
        Exception: Raised by pickling the value; usually `pickle.PicklingError` or `TypeError`.
    """
    if type(value) in _PLAIN:
        return Payload(pickle.dumps(value, protocol=5))
    if "torch" in sys.modules:
        tensors.add_reducers(_reducers, _bare)
    contents = _contents(value)
    if contents is _Contents.PLAIN:
        return Payload(pickle.dumps(value, protocol=5))
    buffers: list[Any] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < OUT_OF_BAND_NBYTES:
            return True
        buffers.append(raw)
        return False

    stream = io.BytesIO()
    if contents is _Contents.BARE:
        pickler = pickle.Pickler(stream, 5, buffer_callback=keep)
        pickler.dispatch_table = _reducers
        pickler.dump(value)
    else:
        main = sys.modules.get("__mp_main__")
        if main is not None and main.__name__ == "__mp_main__":  # the main script, in a spawned process
            cloudpickle.register_pickle_by_value(main)
        encoder = _Encoder(stream, protocol=5, buffer_callback=keep)
        if large := _large_bytes(value):
            buffers += map(memoryview, large)
            prologue, encoder.memo = _prologue(large)
            stream.write(prologue)
        encoder.dump(value)
    return Payload(stream.getvalue(), tuple(buffers))


def add_reducer(kind: type, reducer: Callable[[Any], Any]) -> None:
    """Pickle values of exactly this type by ``reducer(value)``, which returns a tuple like ``__reduce__``."""

    _reducers.setdefault(kind, reducer)


def add_bare(kind: type, is_bare: Callable[[Any], bool]) -> None:
    """Declare that values of exactly this type consist of numbers, strings, bytes and arrays, for a faster `encode`.

    Args:
        kind: The type.
        is_bare: Whether this is so for a value.
    """
    _bare[kind] = is_bare


def decode(payload: Payload, device: str = "cpu") -> Any:
    """Decode a payload. Arrays and tensors of the value share memory with the payload's buffers.

    Args:
        payload: A result of `encode` whose buffers have been copied into memory of the reader.
        device: Device for the tensors that were on a GPU when they were encoded.

    Raises:
        Exception: Raised by unpickling the value.
    """
    if device == "cpu":
        return pickle.loads(payload.head, buffers=payload.buffers)
    with tensors.arriving_on(device):
        return pickle.loads(payload.head, buffers=payload.buffers)


_PLAIN = {int, float, bool, str, type(None), range}
_BYTES = {bytes, bytearray}
_CONTAINERS = {tuple, list, dict}
_MAY_HOLD_BYTES = _BYTES | _CONTAINERS


class _Contents(Enum):
    """The kind of objects in a value, which decides which pickler encodes it."""

    PLAIN = 0  # numbers, strings, small bytes and None: `pickle.dumps`
    BARE = 1  # also arrays and tensors: the C pickler with a dispatch table, which gives the same result as `_Encoder`
    ANY = 2  # perhaps anything: `_Encoder`, which is slower


def _contents(value: Any) -> _Contents:
    """Classify a value and the items of its containers; `ANY` if there are many items."""
    contents = _Contents.PLAIN
    found = [value]  # grows during the loop
    for item in found:
        kind = type(item)
        if kind in _PLAIN or (kind is bytes and len(item) < OUT_OF_BAND_NBYTES):
            continue
        if kind in _bare:
            if not _bare[kind](item):
                return _Contents.ANY
            contents = _Contents.BARE
        elif (kind in _CONTAINERS or _is_named_tuple(kind)) and len(found) + len(item) <= MAX_ITEMS:
            found += item
            if kind is dict:
                found += item.values()
        else:
            return _Contents.ANY
    return contents


def _is_named_tuple(kind: type) -> bool:
    """Whether values of this type have their items alone, and cloudpickle would pickle the type by its name."""
    if not (issubclass(kind, tuple) and hasattr(kind, "_fields") and kind.__dictoffset__ == 0):
        return False
    is_reduced_as_usual = kind.__reduce__ is object.__reduce__ and kind.__reduce_ex__ is object.__reduce_ex__
    is_there = getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is kind
    is_of_main = kind.__module__ in ("__main__", "__mp_main__")  # the second in a spawned process
    is_by_name = is_there and not is_of_main and not cloudpickle.list_registry_pickle_by_value()
    return is_reduced_as_usual and is_by_name


def _large_bytes(value: Any) -> list[bytes | bytearray]:
    """The large bytes and bytearray objects in a value, each once.

    Searches the value itself and the items of tuples, lists and dict values with up to a thousand items. Bytes objects
    in other places stay in the pickle stream.
    """
    large: dict[int, bytes | bytearray] = {}  # by id
    seen: set[int] = set()
    found = [value]  # grows during the loop
    for item in found:
        kind = type(item)
        if kind in _BYTES:
            if len(item) >= OUT_OF_BAND_NBYTES:
                large[id(item)] = item
        elif kind in _CONTAINERS and len(item) <= MAX_CONTAINER_ITEMS and id(item) not in seen:
            seen.add(id(item))
            inside = item.values() if kind is dict else item
            if not _MAY_HOLD_BYTES.isdisjoint(map(type, inside)):
                found += inside
    return list(large.values())


def _prologue(large: Sequence[bytes | bytearray]) -> tuple[bytes, dict[int, tuple[int, Any]]]:
    """The start of a pickle stream that makes bytes objects from the first buffers, and the memo that matches it.

    Pickle has no hook that takes bytes out of band. A pickler with this memo refers to the objects in it wherever it
    meets them, so that bytes shared by several containers stay shared, as in plain pickle.

    Args:
        large: The bytes and bytearray objects, in the order of their buffers.

    Source: CPython, Lib/pickletools.py on the opcodes, Lib/test/pickletester.py on setting ``Pickler.memo``.
    """
    kinds = list(dict.fromkeys(map(type, large)))
    numbers = {kind: number for number, kind in enumerate(kinds)}
    stream = [pickle.PROTO, b"\5"]
    for kind in kinds:
        stream += pickle.GLOBAL, f"builtins\n{kind.__name__}\n".encode(), pickle.MEMOIZE, pickle.POP
    for item in large:
        made = pickle.NEXT_BUFFER + pickle.TUPLE1 + pickle.REDUCE + pickle.MEMOIZE + pickle.POP
        stream += pickle.BINGET, bytes([numbers[type(item)]]), made
    return b"".join(stream), {id(thing): (number, thing) for number, thing in enumerate([*kinds, *large])}


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickles all that cloudpickle can; functions and classes that travel by value keep the names of their files."""

    dispatch_table: ClassVar = ChainMap({CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)

    def reducer_override(self, obj: Any) -> Any:
        """Reduce an object as cloudpickle does; a class that travels by value keeps its slots."""
        reduced = super().reducer_override(obj)
        slots = vars(obj).get("__slots__") if isinstance(obj, type) else None
        if slots and reduced is not NotImplemented:
            function, arguments = reduced[:2]
            if function is cloudpickle.cloudpickle._make_skeleton_class:
                arguments[3]["__slots__"] = slots
        return reduced


class _Encoder(Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is FunctionType and obj.__module__ in _OURS:
            return NotImplemented  # pickled by name, without a search by cloudpickle
        reducer = _reducers.get(type(obj))
        reduced = NotImplemented if reducer is None else reducer(obj)
        return super().reducer_override(obj) if reduced is NotImplemented else reduced
