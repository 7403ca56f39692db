"""Columns by name: described, selected and joined in mappings of columns and in frames of pandas. Pure."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from bandmaster.errors import BatchError
from bandmaster.plan.batch import as_batch, users_batch_types
from bandmaster.plan.batch_types import rebuilt


class Column(NamedTuple):
    """The facts about a column without its rows.

    Attributes:
        dtype: Name of the dtype, such as ``"float32"``; name of the type if rows are Python objects. Different
            dtypes have different names: that of a pandas Categorical ends in the number and a checksum of categories.
        shape: Shape of one row; None if rows may differ.
        nbytes: Bytes of all rows; 0 if counting them requires reading each row.
    """

    dtype: str
    shape: tuple[int, ...] | None
    nbytes: int

    def __repr__(self) -> str:
        return self.dtype if self.shape is None else f"{self.dtype}{list(self.shape)}"


Schema = Mapping[Hashable, Column]  # by name; None is the name of the only column of a value without columns


class RowFacts(NamedTuple):
    """The facts about rows without their content.

    Attributes:
        n_rows: Number of rows.
        nbytes: Their encoded size.
        schema: The columns.
    """

    n_rows: int
    nbytes: int
    schema: Schema

    @property
    def plain(self) -> tuple[int, int, dict[Hashable, tuple[Any, ...]]]:
        """The facts without classes of this module, for a fast `encode`; `of_plain` reads them."""
        return self.n_rows, self.nbytes, {name: tuple(column) for name, column in self.schema.items()}

    @classmethod
    def of_plain(cls, plain: tuple[int, int, dict[Hashable, tuple[Any, ...]]]) -> RowFacts:
        """The facts that `plain` returned."""
        n_rows, nbytes, schema = plain
        return cls(n_rows, nbytes, {name: Column(*column) for name, column in schema.items()})


def facts_of(value: Any, nbytes: int) -> RowFacts | None:
    """The facts about the rows of a value whose encoded size is ``nbytes``.

    Returns:
        None if it is not a batch, or one of a type that other processes of this host may not know.

    Raises:
        BatchError: In the cases of `as_batch`.
    """
    batch = as_batch(value)
    return None if batch is None or batch.is_learned else RowFacts(batch.n_rows, nbytes, schema_of(value))


def schema_of(value: Any) -> dict[Hashable, Column]:
    """The columns of a batch, by name; the name is None for a value without named columns."""
    columns = _columns(value)
    return {None: _column(value)} if columns is None else {name: _column(part) for name, part in columns.items()}


def choose_columns(value: Any, names: Mapping[Any, Any]) -> Any:
    """A batch with some of the columns of another batch, without a copy unless it is a frame.

    Args:
        value: The other batch.
        names: The name of each column in ``value``, by its new name.
    """
    if is_frame(value):
        chosen, new = value[list(names.values())], {old: new for new, old in names.items()}
        return chosen if list(new) == [*new.values()] else chosen.set_axis(chosen.columns.map(new), axis=1)
    if _is_lazy_stack(value):
        return type(value)(*[choose_columns(row, names) for row in value.tensordicts], stack_dim=value.stack_dim)
    columns = {new: value[old] for new, old in names.items()}
    return type(value)(columns, batch_size=value.batch_size) if _is_tensordict(value) else rebuilt(value, columns)


def join_columns(values: Sequence[Any]) -> Any:
    """A batch of the type of the first value with the columns of all values, which have equal row counts.

    It is a dict if the first value is a frame and others are not: a frame may be unable to hold their columns.
    """
    first = values[0]
    if all(map(is_frame, values)):
        return sys.modules["pandas"].concat([value.set_axis(first.index) for value in values], axis=1)
    columns = {name: part for value in values for name, part in (_columns(value) or {}).items()}
    if _is_tensordict(first):
        return type(first)(columns, batch_size=first.batch_size[:1])
    return columns if is_frame(first) else rebuilt(first, columns)


def ascending(column: Any, name: Hashable) -> np.ndarray[Any, Any]:
    """The numbers of the rows in ascending order of a column; rows with equal values stay in their order.

    Raises:
        BatchError: The column has not one value for each row, or values that cannot be compared.
    """
    try:
        if hasattr(column, "sort_values"):  # pandas has an order of its own for categories and for missing values
            return np.asarray(column.reset_index(drop=True).sort_values(kind="stable").index)
        if isinstance(column, list) and not any(isinstance(value, list | tuple) for value in column):
            # An array would convert the values to one type. NaN comes last, as in arrays.
            return np.array(sorted(range(len(column)), key=lambda row: (column[row] != column[row], column[row])), int)
        return np.argsort(as_array(column).reshape(len(column)), kind="stable")
    except Exception as error:
        raise BatchError(
            f"cannot sort by column {name!r}: that takes one value for each row, all of which can be compared ({error})"
        ) from error


def as_array(column: Any) -> np.ndarray[Any, Any]:
    """A column as an array in host memory: float32 for dtypes that only torch has, such as bfloat16."""
    if hasattr(column, "cpu"):
        column = column.detach().cpu()
    is_torchs = str(getattr(column, "dtype", "")).startswith(("torch.bfloat", "torch.float8"))
    return np.asarray(column.float() if is_torchs else column)


def _columns(value: Any) -> Mapping[Any, Any] | None:
    """The columns of a value that has names for them; None for any other value."""
    if _is_tensordict(value):
        return dict(value.items())
    if _is_lazy_stack(value):  # whose rows may differ in shape on one rank and not on another
        return {name: [row[name] for row in value.unbind(0)] for name in value.keys()}  # noqa: SIM118
    if isinstance(value, Mapping):
        return value
    return {name: value[name] for name in value.columns} if is_frame(value) else None


def _column(value: Any) -> Column:
    has_columns = _is_tensordict(value) or _is_lazy_stack(value)  # whose dtype is the one that all of them have
    dtype = None if has_columns else getattr(value, "dtype", None)
    is_nested = getattr(value, "is_nested", False)
    try:
        nbytes = int(value.values().nbytes if is_nested else value.nbytes)
    except (AttributeError, RuntimeError, TypeError):  # Python objects; sparse and strided nested tensors
        nbytes = 0
    if is_nested:
        return Column(f"jagged {_name_of(dtype)}", None, nbytes)
    shape = getattr(value, "shape", None)
    if dtype is not None and shape and not isinstance(value, tuple([cls for cls, _ in users_batch_types()])):
        return Column(_name_of(dtype), tuple(shape[1:]), nbytes)
    return Column(type(value).__name__, None, nbytes)


def _name_of(dtype: Any) -> str:
    """The name of a dtype, with the details that pandas leaves out: categories and storage."""
    name, categories = str(dtype).removeprefix("torch."), getattr(dtype, "categories", None)
    if categories is not None:
        said = repr((list(categories), categories.dtype, dtype.ordered))
        return f"{name}[{len(categories)} #{crc32(said.encode()):08x}]"
    return f"{name}[{dtype.storage}]" if hasattr(dtype, "storage") and not name.endswith("]") else name


def _is_tensordict(value: Any) -> bool:
    return _is_of(value, "tensordict", "TensorDict")


def _is_lazy_stack(value: Any) -> bool:
    return _is_of(value, "tensordict", "LazyStackedTensorDict")


def is_frame(value: Any) -> bool:
    """Whether a batch is a frame of pandas, of which columns are only copied."""
    return _is_of(value, "pandas", "DataFrame")


def _is_of(value: Any, module: str, name: str) -> bool:
    """Whether a value is an instance of a class, without importing its module."""
    cls = getattr(sys.modules.get(module), name, None)
    return cls is not None and isinstance(value, cls)
