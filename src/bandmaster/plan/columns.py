"""Columns by name: described, selected and joined in values that are batches. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from bandmaster.plan.batch import as_batch
from bandmaster.plan.batch_types import rebuilt

__all__ = [
    "Column",
    "RowFacts",
    "Schema",
    "choose_columns",
    "facts_of",
    "join_columns",
    "schema_of",
]


class Column(NamedTuple):
    """What is known of a column without its rows.

    Attributes:
        dtype: Name of the dtype, such as ``"float32"``; name of the type where rows are Python objects.
        shape: Shape of one row; None where rows may differ.
        nbytes: Bytes of all rows; 0 where they cannot be counted without looking at each.
    """

    dtype: str
    shape: tuple[int, ...] | None
    nbytes: int

    def __repr__(self) -> str:
        return self.dtype if self.shape is None else f"{self.dtype}{list(self.shape)}"


Schema = Mapping[str | None, Column]  # by name; None is the name of the only column of a value without columns


class RowFacts(NamedTuple):
    """What is known of rows without looking at them.

    Attributes:
        n_rows: Number of rows.
        nbytes: Their encoded size.
        schema: The columns.
    """

    n_rows: int
    nbytes: int
    schema: Schema


def facts_of(value: Any, nbytes: int) -> RowFacts | None:
    """What is known of the rows of a value whose encoded size is ``nbytes``; None if it is not a batch.

    Raises:
        BatchError: In the cases of `as_batch`.
    """
    batch = as_batch(value)
    return None if batch is None else RowFacts(batch.n_rows, nbytes, schema_of(value))


def schema_of(value: Any) -> dict[str | None, Column]:
    """The columns of a batch, by name; the name is None for a value without named columns."""
    columns = _columns(value)
    return {None: _column(value)} if columns is None else {name: _column(part) for name, part in columns.items()}


def choose_columns(value: Any, names: Mapping[str, str]) -> Any:
    """A batch with some of the columns of another, which it does not copy.

    Args:
        value: The other batch.
        names: By the new name, the name in ``value``.
    """
    if _is_mapping(value):
        return rebuilt(value, {new: value[old] for new, old in names.items()})
    if _is_frame(value):
        chosen = value[list(names.values())]
        return chosen.set_axis(list(names), axis=1)
    return type(value)({new: value.get(old) for new, old in names.items()}, batch_size=value.batch_size)


def join_columns(values: Sequence[Any]) -> Any:
    """A batch of the type of the first one with the columns of all, which have equally many rows."""
    first = values[0]
    columns = {name: part for value in values for name, part in _named(value).items()}
    if _is_mapping(first):
        return rebuilt(first, columns)
    if _is_frame(first):
        return type(first)({name: getattr(part, "values", part) for name, part in columns.items()}, index=first.index)
    return type(first)(columns, batch_size=first.batch_size[:1])


def _named(value: Any) -> Mapping[Any, Any]:
    columns = _columns(value)
    assert columns is not None, "what has no columns was refused when the handles were joined"
    return columns


def _columns(value: Any) -> Mapping[Any, Any] | None:
    """The columns of a value that has names for them; None for any other value."""
    if _is_mapping(value):
        return value
    if _is_tensordict(value):
        return dict(value.items())
    return {name: value[name] for name in value.columns} if _is_frame(value) else None


def _column(value: Any) -> Column:
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if getattr(value, "is_nested", False):
        return Column(f"jagged {_short(dtype)}", None, int(value.values().nbytes) if hasattr(value, "values") else 0)
    nbytes = getattr(value, "nbytes", 0)
    if dtype is not None and shape:
        return Column(_short(dtype), tuple(shape[1:]), int(nbytes))
    return Column(type(value).__name__, None, int(nbytes) if isinstance(nbytes, int) else 0)


def _short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _is_of(value: Any, module: str, name: str) -> bool:
    """Whether a value is an instance of a class, which is not imported for this."""
    cls = getattr(sys.modules.get(module), name, None)
    return cls is not None and isinstance(value, cls)


def _is_mapping(value: Any) -> TypeGuard[Mapping[Any, Any]]:
    return isinstance(value, Mapping) and not _is_tensordict(value)


def _is_tensordict(value: Any) -> bool:
    return _is_of(value, "tensordict", "TensorDict")


def _is_frame(value: Any) -> bool:
    return _is_of(value, "pandas", "DataFrame")
