"""What has rows: how they are counted, cut and joined. Pure: torch, pandas and others are used only if loaded.

A *batch* is a value with a leading row dimension. Which types are batches is decided by type, never by length:

- numpy arrays and torch tensors of at least one dim, ``list``, TensorDict and tensorclasses,
- pandas DataFrames and Series, Hugging Face Datasets,
- every type given to `register_batch_type`,
- mappings, NamedTuples and dataclasses whose values are all batches of one row count. A mapping may be of any type:
  ``dict``, ``UserDict``, or the ``BatchEncoding`` and ``ModelOutput`` of transformers.

A mapping that holds batches beside other values is an error. A NamedTuple or dataclass that does so is a config: it is
no batch, and is broadcast.
"""

from __future__ import annotations

import copy
import sys
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np

from bandmaster.errors import BatchError, UsageError

__all__ = [
    "KNOWN",
    "concat_rows",
    "count_rows",
    "describe",
    "detached",
    "is_same_kind",
    "pad_rows",
    "register_batch_type",
    "slice_rows",
    "split_rows",
]


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
    _find_type.cache_clear()


def count_rows(value: Any) -> int | None:
    """Number of rows of a batch; None when ``value`` is no batch.

    Raises:
        BatchError: A mapping that holds batches beside other values; or a mapping, NamedTuple or dataclass whose
            batches differ in their row counts.
    """
    kind = _kind(value)
    try:
        return None if kind is None else kind.rows(value)
    except RecursionError:  # it holds itself, as no table does
        return None


def slice_rows(value: Any, start: int, stop: int) -> Any:
    """The rows start … stop-1 of a batch; arrays and tensors are views of ``value``.

    Raises:
        BatchError: ``value`` is no batch, or its rows cannot be cut.
    """
    (part,) = split_rows(value, [(start, stop)])
    return part


def split_rows(value: Any, ranges: Sequence[tuple[int, int]]) -> list[Any]:
    """The rows of every ``(start, stop)``, as `slice_rows` cuts them.

    Raises:
        BatchError: ``value`` is no batch, or its rows cannot be cut.
    """
    split = _require(value).split
    try:
        return [split(value, start, stop) for start, stop in ranges]
    except BatchError:
        raise
    except Exception as error:
        raise BatchError(f"cannot cut the rows of {_name(value)}: {error}") from error


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


def is_same_kind(first: Any, second: Any) -> bool:
    """Whether two batches are of types that are handled alike, and so can be joined."""
    return _batch_type(first) is _batch_type(second)


def detached(value: Any) -> Any:
    """``value`` with no tensor that requires grad, and itself where there is none.

    Rows in lists and values of registered types are left as they are; so is all that is no batch, such as a number.
    """
    kind = _kind(value) if "torch" in sys.modules else None
    if kind is _TENSOR or kind is _TENSORDICT:
        return value.detach() if _may_require_grad(value) else value
    if kind is None or kind.rows not in (_mapping_rows, _record_rows):
        return value
    columns = _columns(value)
    without = {key: detached(column) for key, column in columns.items()}
    is_same = all(without[key] is column for key, column in columns.items())
    return value if is_same else _rebuilt(value, without)


def _may_require_grad(value: Any) -> bool:
    try:
        return bool(value.requires_grad)
    except RuntimeError:  # a lazy stack of unequal shapes cannot say
        return True


def pad_rows(value: Any, rows: int) -> Any:
    """``value`` with rows repeated from its start until it has ``rows``; the caller's value is not changed."""
    have = _require(value).rows(value)
    if not have or have >= rows:
        return value
    parts = [value] * (rows // have)
    return concat_rows([*parts, slice_rows(value, 0, rows % have)]) if rows % have else concat_rows(parts)


def _count(value: Any) -> int | None:
    """`count_rows` of what a mapping, NamedTuple or dataclass holds."""
    kind = _kind(value)
    return None if kind is None else kind.rows(value)


def _require(value: Any) -> BatchType:
    kind = _batch_type(value)
    if kind is None:
        raise BatchError(f"{_name(value)} has no rows; batches are {KNOWN}")
    return kind


def _batch_type(value: Any) -> BatchType | None:
    kind = _kind(value)
    return None if kind is None or kind.rows(value) is None else kind


def _kind(value: Any) -> BatchType | None:
    """How rows are handled in values of this type, of which this one may have none."""
    return _find_type(type(value))  # type: ignore[arg-type]  # classes are hashable


@lru_cache(maxsize=1024)
def _find_type(cls: type) -> BatchType | None:
    for base in cls.__mro__:
        known = _registered.get(base) or _KNOWN_BY_NAME.get((base.__module__, base.__qualname__))
        if known is not None:
            return known
    if getattr(cls, "_is_tensorclass", False):
        return _TENSORDICT
    if issubclass(cls, Mapping):
        return _MAPPING
    return _RECORD if is_dataclass(cls) or _is_named_tuple(cls) else None


# --- the types that are batches from the start -----------------------------------------------------------------


def _slice(value: Any, start: int, stop: int) -> Any:
    return value[start:stop]


def _array_rows(value: Any) -> int | None:
    return int(value.shape[0]) if len(value.shape) else None


def _tensor_split(value: Any, start: int, stop: int) -> Any:
    if value.is_nested:
        return _nested_split(value, start, stop)
    try:
        return value.narrow_copy(0, start, stop - start) if value.is_sparse else value[start:stop]
    except (RuntimeError, NotImplementedError) as error:
        raise _refused([value]) or error from None


def _nested_split(value: Any, start: int, stop: int) -> Any:
    torch, rows = sys.modules["torch"], value.unbind()[start:stop]
    if rows:
        return torch.nested.as_nested_tensor(list(rows), layout=value.layout)
    if value.layout is not torch.jagged:
        raise BatchError(
            f"a nested tensor in the {value.layout} layout cannot be sent without rows, as it would have to be where "
            "there are fewer rows than parts; make it with layout=torch.jagged"
        )
    return torch.nested.nested_tensor_from_jagged(value.values()[:0], value.offsets().new_zeros(1))


def _tensor_concat(values: Sequence[Any]) -> Any:
    torch = sys.modules["torch"]
    if values[0].is_nested:
        rows = list(chain.from_iterable(value.unbind() for value in values))
        return torch.nested.as_nested_tensor(rows, layout=values[0].layout) if rows else values[0]
    try:
        return torch.cat(list(values), 0)
    except (RuntimeError, NotImplementedError) as error:
        raise _refused(values) or error from None


def _refused(tensors: Sequence[Any]) -> BatchError | None:
    """Why torch has refused to cut or join rows, if that is due to how a tensor is stored."""
    torch = sys.modules["torch"]
    for tensor in tensors:
        if tensor.layout not in (torch.strided, torch.sparse_coo):
            return BatchError(
                f"torch cannot cut or join rows in the {tensor.layout} layout; use to_dense() or to_sparse_coo()"
            )
        if tensor.is_quantized:
            return BatchError("torch cannot cut or join rows that are quantized in this way; use dequantize()")
    return None


def _tensor_rows(value: Any) -> int | None:
    return int(value.size(0)) if value.dim() else None


def _tensordict_rows(value: Any) -> int | None:
    return int(value.batch_size[0]) if value.batch_dims else None


def _tensordict_concat(values: Sequence[Any]) -> Any:
    return sys.modules["torch"].cat(list(values), 0)


def _array_concat(values: Sequence[Any]) -> Any:
    if any(isinstance(value, np.ma.MaskedArray) for value in values):
        return np.ma.concatenate(values)  # type: ignore[no-untyped-call]  # np.concatenate forgets the masks
    dtype = values[0].dtype
    is_alike = all(value.dtype == dtype for value in values)
    joined = np.concatenate(values, dtype=dtype) if is_alike else np.concatenate(values)  # keeps the byte order
    return joined if type(joined) is type(values[0]) else joined.view(type(values[0]))


def _list_concat(values: Sequence[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(values))


def _frame_split(value: Any, start: int, stop: int) -> Any:
    return value.iloc[start:stop]


def _frame_concat(values: Sequence[Any]) -> Any:
    return sys.modules["pandas"].concat(list(values))


def _dataset_split(value: Any, start: int, stop: int) -> Any:
    part = value.select(range(start, stop))
    if part.cache_files:
        return part  # of a table in files, only their names and the range are pickled
    table = _compact(part.with_format("arrow")[:])
    made = type(value)(table, info=part.info, split=part.split, fingerprint=part._fingerprint)
    how = part.format
    return made.with_format(how["type"], how["columns"], how["output_all_columns"], **how["format_kwargs"])


def _compact(table: Any) -> Any:
    """The same pyarrow table in memory of its own: a slice is pickled with all the memory that it is a slice of."""
    pyarrow = sys.modules["pyarrow"]
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return pyarrow.ipc.open_stream(sink.getvalue()).read_all()


def _dataset_concat(values: Sequence[Any]) -> Any:
    return sys.modules["datasets"].concatenate_datasets(list(values))


# --- mappings, NamedTuples and dataclasses of columns -------------------------------------------------------------


def _is_named_tuple(cls: type) -> bool:
    return issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple)


def _columns(value: Any) -> Mapping[Any, Any]:
    if isinstance(value, dict | Mapping):  # dict first: the question is quicker than that for the abstract class
        return value
    names = value._fields if _is_named_tuple(type(value)) else [field.name for field in fields(value)]
    return {name: getattr(value, name, None) for name in names}


def _mapping_rows(value: Mapping[Any, Any]) -> int | None:
    try:
        rows = {key: _count(item) for key, item in value.items()}
    except (BatchError, RecursionError):
        raise
    except Exception:
        return None  # a type of its own that cannot be read now, such as a config with values that are missing
    counts = {key: n for key, n in rows.items() if n is not None}
    if not counts:
        return None
    if len(counts) != len(rows):
        batch, other = next(iter(counts)), next(key for key, n in rows.items() if n is None)
        raise BatchError(
            f"a {type(value).__name__} mixes batches with other values: {batch!r} has {counts[batch]} rows, {other!r} "
            f"is {_name(value[other])} without rows"
        )
    return _common_count(value, counts)


def _record_rows(value: Any) -> int | None:
    counts: dict[str, int] = {}
    unclear = None
    for name, column in _columns(value).items():
        try:
            rows = _count(column)
        except BatchError as error:  # to be raised only if all other fields are batches
            unclear = unclear or error
            continue
        if rows is None:
            return None
        counts[name] = rows
    if unclear is not None:
        raise unclear
    return _common_count(value, counts) if counts else None


def _common_count(value: Any, counts: Mapping[Any, int]) -> int:
    first = next(iter(counts))
    for key, n in counts.items():
        if n != counts[first]:
            raise BatchError(
                f"a {type(value).__name__} has batches of unequal row counts: {first!r} has {counts[first]}, {key!r} "
                f"has {n}"
            )
    return counts[first]


def _columns_split(value: Any, start: int, stop: int) -> Any:
    return _rebuilt(value, {key: slice_rows(column, start, stop) for key, column in _columns(value).items()})


def _columns_concat(values: Sequence[Any]) -> Any:
    first, parts = values[0], [_columns(value) for value in values]
    for index, (value, part) in enumerate(zip(values, parts, strict=True)):
        if type(value) is not type(first) and not isinstance(first, Mapping):
            raise BatchError(f"cannot join {_name(first)} (part 0) and {_name(value)} (part {index})")
        if part.keys() != parts[0].keys():
            raise BatchError(f"cannot join dicts with keys {list(parts[0])} (part 0) and {list(part)} (part {index})")
    return _rebuilt(first, {key: concat_rows([part[key] for part in parts]) for key in parts[0]})


def _rebuilt(like: Any, columns: dict[Any, Any]) -> Any:
    """The columns as a value of the type of ``like``; as a dict if it is a mapping of a type that does not allow it."""
    if type(like) is dict:
        return columns
    if isinstance(like, Mapping):
        return _rebuilt_mapping(like, columns)
    if _is_named_tuple(type(like)):
        return like._make(columns.values())
    taken = [field.name for field in fields(like) if field.init]
    made = replace(like, **{name: columns[name] for name in taken})
    for name in columns.keys() - taken:
        object.__setattr__(made, name, columns[name])
    return made


def _rebuilt_mapping(like: Mapping[Any, Any], columns: dict[Any, Any]) -> Mapping[Any, Any]:
    try:
        if isinstance(like, dict | UserDict):  # their copies have items of their own, which keep nothing but attributes
            made: Any = copy.copy(like)
            for key, column in columns.items():
                made[key] = column
        else:
            made = type(like)(columns)  # type: ignore[call-arg]  # as most mappings can be made; else a dict will do
        is_whole = made.keys() == columns.keys() and all(made[key] is column for key, column in columns.items())
    except Exception:
        return columns
    return made if is_whole else columns


def _encoding_split(value: Any, start: int, stop: int) -> Any:
    columns = {key: slice_rows(column, start, stop) for key, column in value.items()}
    known = value.encodings  # what a fast tokenizer has found out about each row
    has_all = known is not None and len(known) == _mapping_rows(value)
    return type(value)(columns, known[start:stop] if has_all else None)


def _encoding_concat(values: Sequence[Any]) -> Any:
    columns = _columns_concat([dict(value) for value in values])
    known = [value.encodings for value in values]
    return type(values[0])(columns, None if None in known else [row for rows in known for row in rows])


_MAPPING = BatchType(_mapping_rows, _columns_split, _columns_concat)
_RECORD = BatchType(_record_rows, _columns_split, _columns_concat)
_TENSOR = BatchType(_tensor_rows, _tensor_split, _tensor_concat)
_TENSORDICT = BatchType(_tensordict_rows, _slice, _tensordict_concat)
_FRAME = BatchType(len, _frame_split, _frame_concat)
_KNOWN_BY_NAME = {  # so that nothing is imported to ask the question
    ("numpy", "ndarray"): BatchType(_array_rows, _slice, _array_concat),
    ("builtins", "list"): BatchType(len, _slice, _list_concat),
    ("builtins", "dict"): _MAPPING,
    ("torch", "Tensor"): _TENSOR,
    ("tensordict.base", "TensorDictBase"): _TENSORDICT,
    ("pandas", "DataFrame"): _FRAME,
    ("pandas", "Series"): _FRAME,
    ("pandas.core.frame", "DataFrame"): _FRAME,  # as they are called before pandas 3
    ("pandas.core.series", "Series"): _FRAME,
    ("datasets.arrow_dataset", "Dataset"): BatchType(len, _dataset_split, _dataset_concat),
    ("transformers.tokenization_utils_base", "BatchEncoding"): BatchType(
        _mapping_rows, _encoding_split, _encoding_concat
    ),
}
KNOWN = (
    "arrays and tensors with a row dim, list, TensorDict, pandas DataFrame and Series, Hugging Face Dataset, "
    "registered types, and mappings, NamedTuples and dataclasses of equally long batches"
)


def describe(value: Any) -> str:
    """The type of a value that is no batch; of a NamedTuple or dataclass also a field that is none, if it has any."""
    columns = _columns(value) if _kind(value) is _RECORD else {}
    for name, column in columns.items():
        with suppress(BatchError):  # of a mapping that holds a batch beside other values
            if count_rows(column) is not None:
                continue
        return f"{_name(value)}, whose field {name!r} is {_name(column)}"
    return _name(value)


def _name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
