"""What has rows: how they are counted, cut and joined. Pure: torch and tensordict are used only if loaded.

A *batch* is a value with a leading row dimension. Which types are batches is decided by type, never by length:
numpy arrays and torch tensors of at least one dim, ``list``, TensorDict, a ``dict`` of equally long batches,
and every type given to `register_batch_type`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from bandmaster.errors import BatchError, UsageError

__all__ = ["concat_rows", "count_rows", "is_same_kind", "pad_rows", "register_batch_type", "slice_rows", "split_rows"]


@dataclass(frozen=True)
class BatchType:
    """How the rows of one type are handled."""

    rows: Callable[[Any], int | None]  # None: this value has no row dim after all
    split: Callable[[Any, int, int], Any]
    concat: Callable[[Sequence[Any]], Any]


_registered: dict[type, BatchType] = {}


def register_batch_type(
    cls: type,
    *,
    rows: Callable[[Any], int],
    split: Callable[[Any, int, int], Any],
    concat: Callable[[Sequence[Any]], Any],
) -> None:
    """Make instances of ``cls`` and its subclasses batches. Needed in the controller only.

    Args:
        cls: The type.
        rows: ``rows(value)``, the number of rows.
        split: ``split(value, start, stop)``, the rows start … stop-1; may share memory with ``value``.
        concat: ``concat(values)``, one value with the rows of all, in order; ``values`` is never empty.

    Raises:
        UsageError: ``cls`` is not a class, or one of the three is not callable.

    Example:
        >>> class Prompts:
        ...     def __init__(self, texts): self.texts = texts
        >>> register_batch_type(
        ...     Prompts,
        ...     rows=lambda p: len(p.texts),
        ...     split=lambda p, start, stop: Prompts(p.texts[start:stop]),
        ...     concat=lambda parts: Prompts([t for p in parts for t in p.texts]),
        ... )
        >>> count_rows(Prompts(["a", "b"]))
        2
    """
    if not isinstance(cls, type):
        raise UsageError(f"register_batch_type takes a class, not {cls!r}")
    for name, function in (("rows", rows), ("split", split), ("concat", concat)):
        if not callable(function):
            raise UsageError(f"{name}= of register_batch_type is not callable: {function!r}")
    _registered[cls] = BatchType(rows, split, concat)


def count_rows(value: object) -> int | None:
    """Number of rows of a batch; None when ``value`` is no batch.

    Raises:
        BatchError: A dict that mixes batches with other values, or whose batches differ in length.
    """
    kind = _batch_type(value)
    return None if kind is None else kind.rows(value)


def slice_rows(value: Any, start: int, stop: int) -> Any:
    """The rows start … stop-1 of a batch; arrays and tensors are views of ``value``."""
    return _require(value).split(value, start, stop)


def split_rows(value: Any, ranges: Sequence[tuple[int, int]]) -> list[Any]:
    """The same for every ``(start, stop)``."""
    split = _require(value).split
    return [split(value, start, stop) for start, stop in ranges]


def concat_rows(values: Sequence[Any]) -> Any:
    """One batch with the rows of all ``values`` in order; the result shares no memory with a list of several.

    Raises:
        BatchError: The values are not batches of one type, or cannot be joined (both are named).
    """
    kind = _require(values[0])
    for index, value in enumerate(values):
        if _batch_type(value) is not kind:
            raise BatchError(f"cannot join {_name(values[0])} (part 0) and {_name(value)} (part {index})")
    if len(values) == 1:
        return values[0]
    try:
        return kind.concat(values)
    except BatchError:
        raise
    except Exception as error:
        raise BatchError(f"cannot join {len(values)} values of type {_name(values[0])}: {error}") from error


def is_same_kind(first: object, second: object) -> bool:
    """Whether two batches are of types that are handled alike, and so can be joined."""
    return _batch_type(first) is _batch_type(second)


def pad_rows(value: Any, rows: int) -> Any:
    """``value`` with rows repeated from its start until it has ``rows``; the caller's value is not changed."""
    have = _require(value).rows(value)
    if not have or have >= rows:
        return value
    parts = [value] * (rows // have)
    return concat_rows([*parts, slice_rows(value, 0, rows % have)]) if rows % have else concat_rows(parts)


def _require(value: object) -> BatchType:
    kind = _batch_type(value)
    if kind is None:
        raise BatchError(f"{_name(value)} has no rows; batches are {KNOWN}")
    return kind


def _batch_type(value: object) -> BatchType | None:
    kind = _find_type(type(value))
    return None if kind is None or kind.rows(value) is None else kind


def _find_type(cls: type) -> BatchType | None:
    for base in cls.__mro__:
        if base in _registered:
            return _registered[base]
        if base in _BUILTIN:
            return _BUILTIN[base]
        lazy = _LAZY.get((base.__module__, base.__qualname__))
        if lazy is not None:
            return lazy
    return _TENSORDICT if getattr(cls, "_is_tensorclass", False) else None


# --- the types that are batches from the start -----------------------------------------------------------------


def _slice(value: Any, start: int, stop: int) -> Any:
    return value[start:stop]


def _array_rows(value: Any) -> int | None:
    return int(value.shape[0]) if len(value.shape) else None


def _tensor_concat(values: Sequence[Any]) -> Any:
    return sys.modules["torch"].cat(list(values), 0)


def _nested_split(value: Any, start: int, stop: int) -> Any:
    if not value.is_nested:
        return value[start:stop]
    nested, rows = sys.modules["torch"].nested, value.unbind()[start:stop]
    if not rows and value.layout is sys.modules["torch"].jagged:
        return nested.nested_tensor_from_jagged(value.values()[:0], value.offsets().new_zeros(1))
    return nested.as_nested_tensor(list(rows), dtype=value.dtype, layout=value.layout)


def _nested_concat(values: Sequence[Any]) -> Any:
    if not values[0].is_nested:
        return _tensor_concat(values)
    rows = list(chain.from_iterable(value.unbind() for value in values))
    return sys.modules["torch"].nested.as_nested_tensor(rows, layout=values[0].layout) if rows else values[0]


def _tensor_rows(value: Any) -> int | None:
    return int(value.size(0)) if value.dim() else None


def _tensordict_rows(value: Any) -> int | None:
    return int(value.batch_size[0]) if value.batch_dims else None


def _dict_rows(value: dict[Any, Any]) -> int | None:
    rows = {key: count_rows(item) for key, item in value.items()}
    counts = {key: n for key, n in rows.items() if n is not None}
    if not counts:
        return None
    if len(counts) != len(rows):
        batch, other = next(iter(counts)), next(key for key, n in rows.items() if n is None)
        raise BatchError(
            f"a dict mixes batches with other values: {batch!r} has {counts[batch]} rows, {other!r} is "
            f"{_name(value[other])} without rows"
        )
    first = next(iter(counts))
    for key, n in counts.items():
        if n != counts[first]:
            raise BatchError(
                f"a dict has batches of unequal row counts: {first!r} has {counts[first]}, {key!r} has {n}"
            )
    return counts[first]


def _dict_split(value: dict[Any, Any], start: int, stop: int) -> dict[Any, Any]:
    return {key: slice_rows(item, start, stop) for key, item in value.items()}


def _dict_concat(values: Sequence[dict[Any, Any]]) -> dict[Any, Any]:
    keys = values[0].keys()
    for index, value in enumerate(values):
        if value.keys() != keys:
            raise BatchError(f"cannot join dicts with keys {list(keys)} (part 0) and {list(value)} (part {index})")
    return {key: concat_rows([value[key] for value in values]) for key in keys}


def _array_concat(values: Sequence[Any]) -> Any:
    if any(isinstance(value, np.ma.MaskedArray) for value in values):
        return np.ma.concatenate(values)  # type: ignore[no-untyped-call]  # np.concatenate forgets the masks
    dtype = values[0].dtype
    is_alike = all(value.dtype == dtype for value in values)
    joined = np.concatenate(values, dtype=dtype) if is_alike else np.concatenate(values)  # keeps the byte order
    return joined if type(joined) is type(values[0]) else joined.view(type(values[0]))


def _list_concat(values: Sequence[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(values))


_BUILTIN = {
    np.ndarray: BatchType(_array_rows, _slice, _array_concat),
    list: BatchType(len, _slice, _list_concat),
    dict: BatchType(_dict_rows, _dict_split, _dict_concat),
}
_TENSORDICT = BatchType(_tensordict_rows, _slice, _tensor_concat)
_LAZY = {  # by name, so that nothing is imported to ask the question
    ("torch", "Tensor"): BatchType(_tensor_rows, _nested_split, _nested_concat),
    ("tensordict.base", "TensorDictBase"): _TENSORDICT,
}
KNOWN = "arrays and tensors with a row dim, list, TensorDict, a dict of equally long batches, registered types"


def _name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
