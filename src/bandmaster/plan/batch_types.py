"""The built-in batch types, which count, split and concatenate rows: `KNOWN_BY_NAME`. Imports no package of a type."""

from __future__ import annotations

import copy
import sys
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from operator import getitem
from typing import Any

import numpy as np

from bandmaster.errors import BatchError

Index = range | np.ndarray  # numbers of rows, in order; a range has step 1


@dataclass(frozen=True, eq=False)
class BatchType:
    """The functions that count, split, concatenate and take by number the rows of one type of values.

    It is equal to itself alone, so that it can be hashed whatever the functions are.

    Attributes:
        rows: ``rows(value)`` returns the number of rows, None for a value of the type without a row dim.
        split: ``split(value, start, stop)`` returns the rows start … stop-1.
        concat: ``concat(values)`` returns one value with the rows of all ``values`` in order.
        take: ``take(value, numbers)`` returns the rows with these numbers, an int64 array, in that order; None for a
            type of which only ranges of rows can be split off.
        column: ``column(value, name)`` returns a column as an array; raises KeyError if there is none. None for a type
            without names for columns.
        row: ``row(value, number)`` returns a row without the row dim; None for a type without such rows.
        is_elsewhere: Whether a value stands for rows that lie elsewhere, so that ranks are sent portions of it.
    """

    rows: Callable[[Any], int | None]
    split: Callable[[Any, int, int], Any]
    concat: Callable[[Sequence[Any]], Any]
    take: Callable[[Any, np.ndarray[Any, Any]], Any] | None = None
    column: Callable[[Any, str], Any] | None = None
    row: Callable[[Any, int], Any] | None = None
    is_elsewhere: bool = False


@dataclass(frozen=True)
class ColumnsType:
    """The functions that rebuild values made of columns: mappings, NamedTuples and dataclasses.

    Attributes:
        is_record: Whether a single field that is not a batch makes the value a config, which is not a batch.
        make: ``make(values, columns, numbers)`` returns a value of the type of ``values`` with ``columns``, which hold
            the rows with these numbers of each of them, one after the other; all rows if ``numbers`` is None.
    """

    is_record: bool
    make: Callable[[Sequence[Any], dict[Any, Any], Sequence[Index] | None], Any]


def _tensor_split(value: Any, start: int, stop: int) -> Any:
    if value.is_nested:
        return _nested(value, value.unbind()[start:stop])
    try:
        return value.narrow_copy(0, start, stop - start) if value.is_sparse else value[start:stop]
    except (RuntimeError, NotImplementedError) as error:
        raise _refused([value]) or error from None


def _tensor_take(value: Any, numbers: np.ndarray[Any, Any]) -> Any:
    torch = sys.modules["torch"]
    if value.is_nested:
        return _nested(value, list(map(value.unbind().__getitem__, numbers.tolist())))
    index = torch.from_numpy(numbers).to(value.device)
    try:
        return value.index_select(0, index)
    except (RuntimeError, NotImplementedError):
        if error := _refused([value]):
            raise error from None
        return value[index]  # of a dtype that `index_select` lacks, such as uint16


def _nested(like: Any, rows: Sequence[Any]) -> Any:
    """A nested tensor of some rows, in the layout of another one."""
    torch = sys.modules["torch"]
    if rows:
        return torch.nested.as_nested_tensor(list(rows), layout=like.layout)
    if like.layout is not torch.jagged:
        raise BatchError(
            f"a nested tensor in the {like.layout} layout cannot have 0 rows, which a part gets when there are "
            "fewer rows than parts; make the tensor with layout=torch.jagged"
        )
    return torch.nested.nested_tensor_from_jagged(like.values()[:0], like.offsets().new_zeros(1))


def _tensor_concat(values: Sequence[Any]) -> Any:
    torch = sys.modules["torch"]
    if values[0].is_nested:
        rows = list(chain.from_iterable(value.unbind() for value in values))
        return _nested(values[0], rows) if rows else values[0]
    try:
        return torch.cat(list(values), 0)
    except (RuntimeError, NotImplementedError) as error:
        raise _refused(values) or error from None


def _refused(tensors: Sequence[Any]) -> BatchError | None:
    """The error for tensors whose storage torch cannot split or concatenate; None if the storage is not the cause."""
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


def _tensordict_split(value: Any, start: int, stop: int) -> Any:
    return _with_nested(
        [value], lambda values: values[0][start:stop], lambda values: _tensor_split(values[0], start, stop)
    )


def _tensordict_take(value: Any, numbers: np.ndarray[Any, Any]) -> Any:
    index = sys.modules["torch"].from_numpy(numbers)
    return _with_nested([value], lambda values: values[0][index], lambda values: _tensor_take(values[0], numbers))


def _tensordict_concat(values: Sequence[Any]) -> Any:
    return _with_nested(values, lambda values: sys.modules["torch"].cat(list(values), 0), _tensor_concat)


def _with_nested(
    values: Sequence[Any], make: Callable[[Sequence[Any]], Any], make_nested: Callable[[Sequence[Any]], Any]
) -> Any:
    """Make a TensorDict of others; columns that are nested tensors are made one by one."""
    nested = _nested_keys(values[0])
    if not nested:
        return make(values)
    made = make([value.exclude(*nested) for value in values])
    for key in nested:
        made.set(key, make_nested([value.get(key) for value in values]))
    return made


def _nested_keys(value: Any) -> list[Any]:
    """Keys of the columns that are nested tensors, in which a TensorDict itself can neither cut nor join rows."""
    if type(value).__name__ != "TensorDict":
        return []  # the columns of a lazy stack, for example, cannot be looked at without stacking them
    return [key for key, column in value.items(True, True) if getattr(column, "is_nested", False)]


def _array_concat(values: Sequence[Any]) -> Any:
    masked = sys.modules.get("numpy.ma")  # numpy imports it on first use
    if masked is not None and any(issubclass(kind, masked.MaskedArray) for kind in set(map(type, values))):
        joined = masked.concatenate(values)  # np.concatenate drops the masks
        joined.fill_value = next(value.fill_value for value in values if isinstance(value, masked.MaskedArray))
        return joined
    dtypes = {value.dtype for value in values}
    joined = np.concatenate(values, dtype=dtypes.pop() if len(dtypes) == 1 else None)  # dtype= keeps the byte order
    if type(joined) is not type(values[0]):
        joined = joined.view(type(values[0]))
        joined.__array_finalize__(values[0])  # for its attributes
    return joined


def _dataset_split(value: Any, start: int, stop: int) -> Any:
    part = value.select(range(start, stop))
    if part.cache_files:
        return part  # a table in files is pickled as the names of the files and the range of rows
    table = _compact(part.with_format("arrow")[:])
    made = type(value)(table, info=part.info, split=part.split, fingerprint=part._fingerprint)
    how = part.format
    return made.with_format(how["type"], how["columns"], how["output_all_columns"], **how["format_kwargs"])


def _compact(table: Any) -> Any:
    """A copy of a pyarrow table. A slice is pickled together with all memory of the table that it was cut from."""
    pyarrow = sys.modules["pyarrow"]
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return pyarrow.ipc.open_stream(sink.getvalue()).read_all()


def _proto_rows(value: Any) -> int:  # verl 0.1 cannot count those of a DataProto that has only meta_info
    return len(value) if value.batch is not None or value.non_tensor_batch else 0


def _proto_split(value: Any, start: int, stop: int) -> Any:  # not by its own methods, which differ between forks
    columns = {name: column[start:stop] for name, column in value.non_tensor_batch.items()}
    return type(value)(None if value.batch is None else value.batch[start:stop], columns, dict(value.meta_info))


# --- mappings, NamedTuples and dataclasses of columns -------------------------------------------------------------


def is_named_tuple(cls: type) -> bool:
    """Whether ``cls`` was made by `typing.NamedTuple` or `collections.namedtuple`."""
    return issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple)


def columns_of(value: Any) -> Mapping[Any, Any]:
    """The items of a mapping, or the fields of a NamedTuple or dataclass, by name."""
    if isinstance(value, dict | Mapping):  # dict first: that check is faster than the one for an abstract class
        return value
    names = value._fields if is_named_tuple(type(value)) else [field.name for field in fields(value)]
    return {name: getattr(value, name, None) for name in names}


def rebuilt(like: Any, columns: dict[Any, Any]) -> Any:
    """A value of the type of ``like`` with other columns; a dict if a mapping of that type cannot be rebuilt."""
    if type(like) is dict:
        return columns
    if isinstance(like, Mapping):
        return _rebuilt_mapping(like, columns)
    if is_named_tuple(type(like)):
        return like._make(columns.values())
    taken = [field.name for field in fields(like) if field.init]
    made = replace(like, **{name: columns[name] for name in taken})
    for name in columns.keys() - taken:
        object.__setattr__(made, name, columns[name])
    return made


def _rebuilt_mapping(like: Mapping[Any, Any], columns: dict[Any, Any]) -> Mapping[Any, Any]:
    try:
        if isinstance(like, dict | UserDict):  # a copy has its own items and keeps the attributes
            made: Any = copy.copy(like)
            attributes = getattr(made, "__dict__", {})
            if all(attributes.get(key) is column for key, column in like.items()):  # columns are attributes too
                made.__dict__ = {name: value for name, value in attributes.items() if name not in like} | columns
            if list(made) != list(columns)[: len(made)]:  # some are missing, or in another order
                for key in like:
                    del made[key]
            for key, column in columns.items():
                made[key] = column
        else:
            made = type(like)(columns)  # type: ignore[call-arg]  # most mapping types accept a dict
        is_whole = made.keys() == columns.keys() and all(made[key] is column for key, column in columns.items())
        former = {*map(id, like.values())} - {*map(id, columns.values())}
        is_whole &= former.isdisjoint(map(id, getattr(made, "__dict__", {}).values()))
    except Exception:
        return columns
    return made if is_whole else columns


def _like_the_first(values: Sequence[Any], columns: dict[Any, Any], numbers: Sequence[Index] | None) -> Any:
    return rebuilt(values[0], columns)


def _encoding(values: Sequence[Any], columns: dict[Any, Any], numbers: Sequence[Index] | None) -> Any:
    """A BatchEncoding, with the details that a fast tokenizer keeps for each row, if all values have them."""
    known = [value.encodings for value in values]
    for value, details in zip(values, known, strict=True):
        if details is None or any(len(column) != len(details) for column in value.values()):
            return type(values[0])(columns)
    if numbers is not None:
        known = [[details[number] for number in each] for details, each in zip(known, numbers, strict=True)]
    return type(values[0])(columns, list(chain.from_iterable(known)))


MAPPING = ColumnsType(False, _like_the_first)
RECORD = ColumnsType(True, _like_the_first)
TENSOR = BatchType(_tensor_rows, _tensor_split, _tensor_concat, _tensor_take, row=getitem)
TENSORDICT = BatchType(
    lambda value: int(value.batch_size[0]) if value.batch_dims else None,
    _tensordict_split,
    _tensordict_concat,
    _tensordict_take,
    lambda value, name: value.get(name),
    getitem,
)
_ARRAY = BatchType(
    lambda value: int(value.shape[0]) if len(value.shape) else None,
    lambda value, start, stop: value[start:stop],
    _array_concat,
    getitem,
    row=getitem,
)
_LIST = BatchType(
    len,
    lambda value, start, stop: value[start:stop],
    lambda values: list(chain.from_iterable(values)),
    lambda value, numbers: [value[number] for number in numbers.tolist()],
    row=getitem,
)
_FRAME = BatchType(
    len,
    lambda value, start, stop: value.iloc[start:stop],
    lambda values: sys.modules["pandas"].concat(list(values)),
    lambda value, numbers: value.iloc[numbers],
    getitem,
    lambda value, number: value.iloc[number],
)
_DATASET = BatchType(
    len,
    _dataset_split,
    lambda values: sys.modules["datasets"].concatenate_datasets(list(values)),
    column=getitem,
    row=getitem,
)
_PROTO = BatchType(_proto_rows, _proto_split, lambda values: type(values[0]).concat(list(values)))
KNOWN_BY_NAME: dict[tuple[str, str], BatchType | ColumnsType] = {  # names, because a lookup must not import
    ("numpy", "ndarray"): _ARRAY,
    ("builtins", "list"): _LIST,
    ("builtins", "dict"): MAPPING,
    ("torch", "Tensor"): TENSOR,
    ("tensordict.base", "TensorDictBase"): TENSORDICT,
    ("verl.protocol", "DataProto"): _PROTO,
    ("pandas", "DataFrame"): _FRAME,
    ("pandas", "Series"): _FRAME,
    ("pandas.core.frame", "DataFrame"): _FRAME,  # their names before pandas 3
    ("pandas.core.series", "Series"): _FRAME,
    ("datasets.arrow_dataset", "Dataset"): _DATASET,
    ("transformers.tokenization_utils_base", "BatchEncoding"): ColumnsType(False, _encoding),
}
