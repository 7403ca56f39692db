"""Batches: counts, splits and concatenates rows. Pure: torch, pandas and others are used only if loaded.

A *batch* is a value with a leading row dimension. Which types are batches is decided by type, never by length:

- numpy arrays and torch tensors of at least one dim, ``list``, TensorDict and tensorclasses,
- pandas DataFrames and Series, Hugging Face Datasets,
- every type given to `register_batch_type`,
- mappings, NamedTuples and dataclasses whose values are all batches of one row count. A mapping may be of any type:
  ``dict``, ``UserDict``, or the ``BatchEncoding`` and ``ModelOutput`` of transformers.

A mapping that holds batches beside other values is an error. A NamedTuple or dataclass that does so is a config: it is
not a batch, and is broadcast.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from bandmaster.errors import BatchError, UsageError
from bandmaster.errors.failure import reraise_if_from_signal
from bandmaster.plan.batch_types import (
    KNOWN_BY_NAME,
    MAPPING,
    RECORD,
    TENSOR,
    TENSORDICT,
    BatchType,
    ColumnsType,
    Index,
    columns_of,
    is_named_tuple,
    rebuilt,
)

KNOWN = (
    "arrays and tensors with a row dim, list, TensorDict, pandas DataFrame and Series, Hugging Face Dataset, "
    "registered types, and mappings, NamedTuples and dataclasses of equally long batches"
)
_CONSTANTS = {str, int, float, bool, type(None)}  # immutable, and decoded from the head alone
_registered: dict[type, BatchType] = {}  # by `register_batch_type`
_learned: dict[type, BatchType] = {}  # registered by the controller; other processes may not know them


def register_batch_type(
    cls: type,
    *,
    rows: Callable[[Any], int],
    split: Callable[[Any, int, int], Any],
    concat: Callable[[Sequence[Any]], Any],
    take: Callable[[Any, Any], Any] | None = None,
    column: Callable[[Any, str], Any] | None = None,
) -> None:
    """Make instances of ``cls`` and its subclasses batches. Only the controller has to call it.

    Large rows of the type that a method returns stay on the ranks if the workers call it, too; else they come to the
    controller, and go from there to the ranks that take them.

    Args:
        cls: The type whose instances have rows.
        rows: ``rows(value)`` returns the number of rows.
        split: ``split(value, start, stop)`` returns the rows start … stop-1; they may share memory with ``value``.
        concat: ``concat(values)`` returns one value with the rows of all ``values`` in order; ``values`` is never
            empty.
        take: ``take(value, numbers)`` returns the rows with these numbers, a one-dimensional int64 array, in that
            order. Without it the rows are split off range by range and concatenated, which is slower.
        column: ``column(value, name)`` returns a column as an array, or raises KeyError; for types whose columns have
            names.

    Raises:
        UsageError: ``cls`` is not a class, or one of the functions is not callable.

    Example:
        >>> from bandmaster.plan.batch import count_rows
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
        raise UsageError(f"the first argument of register_batch_type must be a class, got {cls!r}")
    functions = {"rows": rows, "split": split, "concat": concat, "take": take, "column": column}
    for name, function in functions.items():
        if not (callable(function) or (function is None and name in ("take", "column"))):
            raise UsageError(f"{name} of register_batch_type must be callable, got {function!r}")
    _registered[cls] = BatchType(rows, split, concat, take, column)
    _kind_of.cache_clear()


def users_batch_types() -> tuple[tuple[type, BatchType], ...]:
    """The types that this process has passed to `register_batch_type`, and the `BatchType` of each."""
    return tuple(_registered.items())


def learn_batch_type(cls: type, kind: BatchType) -> None:
    """Make instances of a type that another process has registered batches, unless this one has registered it."""
    if cls not in _registered:
        _learned[cls] = kind
        _kind_of.cache_clear()


class Portion(NamedTuple):
    """Some rows of a batch whose rows lie elsewhere.

    Attributes:
        value: The batch.
        numbers: The rows; the number of one stands for that row itself, as `Batch.row` returns it.
    """

    value: Any
    numbers: Index | int


class Batch:
    """A value with rows, together with its batch type and row count, which are determined once.

    Attributes:
        value: The value itself, not a copy.
        n_rows: Number of rows.
    """

    __slots__ = ("_columns", "_kind", "n_rows", "value")

    def __init__(
        self, value: Any, kind: BatchType | ColumnsType, n_rows: int, columns: dict[Any, Batch] | None = None
    ) -> None:
        self.value = value
        self.n_rows = n_rows
        self._kind = kind
        self._columns = columns or {}

    def rows(self, numbers: Index) -> Any:
        """The rows with these numbers, in this order, as a value of the batch's type.

        A range of rows of arrays and tensors is a view of ``value``.

        Raises:
            BatchError: The rows of this value cannot be split.
        """
        kind = self._kind
        if isinstance(kind, ColumnsType):
            columns = {key: column.rows(numbers) for key, column in self._columns.items()}
            return self._split(kind.make, [self.value], columns, [numbers])
        if isinstance(numbers, range):
            return self._split(kind.split, self.value, numbers.start, numbers.stop)
        return self._by_runs(numbers) if kind.take is None else self._split(kind.take, self.value, numbers)

    def row(self, number: int) -> Any:
        """One row, without the row dim: an item of a list, a row of an array, a dict of the rows of columns.

        A type that was given to `register_batch_type` has no such rows: this returns a batch of one row.

        Raises:
            BatchError: The rows of this value cannot be split.
        """
        kind = self._kind
        if isinstance(kind, ColumnsType):
            rows = {key: column.row(number) for key, column in self._columns.items()}
            return rebuilt(self.value, rows) if kind.is_record else rows
        if kind.row is None:
            return self.rows(range(number, number + 1))
        return self._split(kind.row, self.value, number)

    def _split(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the batch type that returns some rows. Raises BatchError if it fails."""
        try:
            return function(*args)
        except BatchError:
            raise
        except Exception as error:
            reraise_if_from_signal(error)
            raise BatchError(f"cannot split the rows of {_name(self.value)}: {error}") from error

    def _by_runs(self, numbers: np.ndarray[Any, Any]) -> Any:
        """Take rows by number with a type that can only split off ranges of rows; uses as few ranges as possible."""
        if not len(numbers):
            return self.rows(range(0))
        ends = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(numbers)]
        runs = [range(int(numbers[start]), int(numbers[stop - 1]) + 1) for start, stop in pairwise(ends)]
        return concat([self] * len(runs), runs)

    def is_like(self, other: Batch) -> bool:
        """Whether another batch has the same batch type, so that their rows can be joined."""
        return self._kind is other._kind

    @property
    def is_elsewhere(self) -> bool:
        """Whether the value stands for rows that lie elsewhere."""
        return isinstance(self._kind, BatchType) and self._kind.is_elsewhere

    @property
    def is_learned(self) -> bool:
        """Whether it is of a type that another process has registered, or has a column of one."""
        if not _learned:
            return False
        return self._kind in _learned.values() or any(column.is_learned for column in self._columns.values())

    def sent(self, numbers: Index | int) -> Any:
        """The value to send for the rows with these numbers, or for a row: a `Portion` if they lie elsewhere."""
        if self.is_elsewhere:
            return Portion(self.value, numbers)
        return self.row(numbers) if isinstance(numbers, int) else self.rows(numbers)

    def column(self, name: Any) -> Any:
        """A column by its name; None if there is none, or columns of this type have no names."""
        kind = self._kind
        if isinstance(kind, ColumnsType):
            found = self._columns.get(name)
            return None if found is None else found.value
        try:
            return None if kind.column is None else kind.column(self.value, name)
        except KeyError:
            return None


def as_batch(value: Any) -> Batch | None:
    """The value as a `Batch`; None if it is not a batch.

    Raises:
        BatchError: A mapping holds batches beside other values; or the batches in a mapping, NamedTuple or dataclass
            have different row counts.
    """
    try:
        return _as_batch(value)
    except RecursionError:  # the value contains itself, so it is not a table of columns
        return None


def concat(batches: Sequence[Batch], numbers: Sequence[Index] | None = None) -> Any:
    """One value with the rows of all batches in order.

    Args:
        batches: At least one batch; all of one batch type.
        numbers: For each batch the numbers of its rows to take; None for all rows.

    Returns:
        The value, or the rows, of a single batch; for several batches a new value that shares no memory with them.

    Raises:
        BatchError: The batches have different types (both are named), or cannot be split or joined.
    """
    first, kind = batches[0], batches[0]._kind
    for index, batch in enumerate(batches):
        if not batch.is_like(first):
            raise _unlike(first.value, batch.value, index)
    if len(batches) == 1:
        return first.value if numbers is None else first.rows(numbers[0])
    try:
        if isinstance(kind, ColumnsType):
            return _joined_columns(batches, kind, numbers)
        if numbers is None:
            return kind.concat([batch.value for batch in batches])
        return kind.concat([batch.rows(each) for batch, each in zip(batches, numbers, strict=True)])
    except (BatchError, MemoryError):  # a lack of memory is not a fault of the values
        raise
    except Exception as error:
        reraise_if_from_signal(error)
        raise BatchError(f"cannot join {len(batches)} values of type {_name(first.value)}: {error}") from error


def count_rows(value: Any) -> int | None:
    """Number of rows of ``value``; None if it is not a batch. Raises BatchError in the cases of `as_batch`."""
    batch = as_batch(value)
    return None if batch is None else batch.n_rows


def take_rows(value: Any, numbers: Index) -> Any:
    """The rows of a batch with these numbers, in their order. A range of rows of arrays and tensors is a view.

    Raises:
        BatchError: ``value`` is not a batch, or its rows cannot be split.
    """
    return required_batch(value).rows(numbers)


def concat_rows(values: Sequence[Any]) -> Any:
    """One batch with the rows of all ``values`` in order.

    Returns:
        The value itself if there is one; for several values a new batch that shares no memory with them.

    Raises:
        BatchError: The values are not batches of one type (both types are named), or cannot be joined.
    """
    batches = [required_batch(values[0])]
    for index, value in enumerate(values[1:], 1):
        batch = _as_batch(value)
        if batch is None:
            raise _unlike(values[0], value, index)
        batches.append(batch)
    return concat(batches)


def detached(value: Any) -> Any:
    """``value`` with every tensor that requires grad detached; ``value`` itself if no tensor in it requires grad.

    Tensors inside lists and inside values of registered types are not detached. Values that are not batches, such as
    numbers, are returned unchanged.
    """
    kind = _kind_of(type(value)) if "torch" in sys.modules else None  # type: ignore[arg-type]  # classes are hashable
    if kind is TENSOR or kind is TENSORDICT:
        return value.detach() if _may_require_grad(value) else value
    if not isinstance(kind, ColumnsType):
        return value
    columns = columns_of(value)
    without = {key: detached(column) for key, column in columns.items()}
    is_same = all(without[key] is column for key, column in columns.items())
    return value if is_same else rebuilt(value, without)


def copies_rows(value: Any) -> bool:
    """Whether rows that are joined, or taken by number, share no writable memory with the value.

    True for arrays and tensors, lists of strings and numbers, and dicts and TensorDicts of those. False if that is
    unknown.
    """
    kind = type(value)
    name = f"{kind.__module__}.{kind.__name__}"
    if kind is np.ndarray:
        return not value.dtype.hasobject
    if kind is list:
        return _CONSTANTS.issuperset(map(type, value))
    if kind is dict or (name.startswith("tensordict.") and name.endswith(".TensorDict")):
        return all(map(copies_rows, value.values()))
    return name == "torch.Tensor" and not (value.is_nested or value.requires_grad)


def has_columns(value: Any) -> bool:
    """Whether the value is a mapping, NamedTuple or dataclass, which is a batch if all that it holds are batches."""
    return isinstance(_kind_of(type(value)), ColumnsType)  # type: ignore[arg-type]  # as above


def describe(value: Any) -> str:
    """Name the type of a value that is not a batch, and for a NamedTuple or dataclass a field that is not a batch."""
    columns = columns_of(value) if _kind_of(type(value)) is RECORD else {}  # type: ignore[arg-type]  # as above
    for name, column in columns.items():
        with suppress(BatchError):  # count_rows refuses a mapping that holds batches beside other values
            if count_rows(column) is not None:
                continue
        return f"{_name(value)}, whose field {name!r} is {_name(column)}"
    return _name(value)


def required_batch(value: Any) -> Batch:
    """The value as a `Batch`. Raises BatchError if it is not a batch."""
    batch = as_batch(value)
    if batch is None:
        raise BatchError(f"{_name(value)} has no rows; batches are {KNOWN}")
    return batch


def _as_batch(value: Any) -> Batch | None:
    kind = _kind_of(type(value))  # type: ignore[arg-type]  # classes are hashable
    if kind is None:
        return None
    if isinstance(kind, ColumnsType):
        columns = _record_columns(value) if kind.is_record else _mapping_columns(value)
        return Batch(value, kind, _common_count(value, columns), columns) if columns else None
    n_rows = kind.rows(value)
    return None if n_rows is None else Batch(value, kind, n_rows)


@lru_cache(maxsize=1024)
def _kind_of(cls: type) -> BatchType | ColumnsType | None:
    """The batch type of a class, None if it has none; one of its values may still lack rows, such as a 0-dim array."""
    for base in cls.__mro__:
        known = _registered.get(base) or _learned.get(base) or KNOWN_BY_NAME.get((base.__module__, base.__qualname__))
        if known is not None:
            return known
    if getattr(cls, "_is_tensorclass", False):
        return TENSORDICT
    if issubclass(cls, Mapping):
        return MAPPING
    return RECORD if is_dataclass(cls) or is_named_tuple(cls) else None


def _mapping_columns(value: Mapping[Any, Any]) -> dict[Any, Batch] | None:
    try:
        found = {key: _as_batch(item) for key, item in value.items()}
    except (BatchError, RecursionError):
        raise
    except Exception:
        return None  # a mapping type that cannot be read now, such as a config with missing values
    columns = {key: batch for key, batch in found.items() if batch is not None}
    if columns and len(columns) != len(found):
        (key, batch), other = next(iter(columns.items())), next(key for key in found if key not in columns)
        raise BatchError(
            f"a {type(value).__name__} mixes batches with other values: {key!r} has {batch.n_rows} rows, {other!r} "
            f"is {_name(value[other])} without rows"
        )
    return columns


def _record_columns(value: Any) -> dict[Any, Batch] | None:
    columns: dict[Any, Batch] = {}
    unclear = None
    for name, column in columns_of(value).items():
        try:
            batch = _as_batch(column)
        except BatchError as error:  # raised below if all other fields are batches
            unclear = unclear or error
            continue
        if batch is None:
            return None
        columns[name] = batch
    if unclear is not None:
        raise unclear
    return columns


def _common_count(value: Any, columns: Mapping[Any, Batch]) -> int:
    first = next(iter(columns))
    for key, batch in columns.items():
        if batch.n_rows != columns[first].n_rows:
            raise BatchError(
                f"a {type(value).__name__} has batches of unequal row counts: {first!r} has {columns[first].n_rows}, "
                f"{key!r} has {batch.n_rows}"
            )
    return columns[first].n_rows


def _joined_columns(batches: Sequence[Batch], kind: ColumnsType, numbers: Sequence[Index] | None) -> Any:
    first = batches[0]
    columns = [batch._columns for batch in batches]
    for index, batch in enumerate(batches):
        if kind.is_record and type(batch.value) is not type(first.value):
            raise _unlike(first.value, batch.value, index)
        if columns[index].keys() != columns[0].keys():
            keys = f"{list(columns[0])} (part 0) and {list(columns[index])} (part {index})"
            raise BatchError(f"cannot join dicts with keys {keys}")
    joined = {key: concat([column[key] for column in columns], numbers) for key in columns[0]}
    return kind.make([batch.value for batch in batches], joined, numbers)


def _unlike(first: Any, other: Any, index: int) -> BatchError:
    """The error for values of two types that were to be joined."""
    return BatchError(f"cannot join {_name(first)} (part 0) and {_name(other)} (part {index})")


def _may_require_grad(value: Any) -> bool:
    try:
        return bool(value.requires_grad)
    except RuntimeError:  # a lazy stack of unequal shapes does not know
        return True


def _name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
