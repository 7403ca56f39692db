"""Rows as the model of a program knows them: in each column, each row is one number, as often as the column is wide."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Column(NamedTuple):
    """A column.

    Attributes:
        ids: The number of each row.
        width: How often the row has it.
    """

    ids: np.ndarray
    width: int


Columns = dict[Any, Column]  # by name; the only column of a plain array has the name None
NAMES = "abcdef"


def made(token: int, rank: int, is_named: bool) -> Columns:
    """The rows that a rank makes for a call: they travel in its reply, or lie in a segment."""
    ids = 16 * token + 4 * rank + np.arange(1 + (token + rank) % 2)
    wide = Column(ids, 10_000 if token % 3 else 10)
    if not is_named:
        return {None: wide}
    columns = {"a": Column(-ids, 1), "b": wide}
    return dict(reversed(columns.items())) if rank % 2 else columns  # the first one's order counts


def stacked(parts: list[Columns]) -> Columns:
    """The rows of some, one after the other, with the columns in the order of the first."""
    return {
        name: Column(np.concatenate([part[name].ids for part in parts]), column.width)
        for name, column in parts[0].items()
    }


def chosen(columns: Columns, index: Any) -> Columns:
    """Some of the rows."""
    return {name: Column(ids[index], width) for name, (ids, width) in columns.items()}


def share_of(columns: Columns, rank: int, n_ranks: int) -> Columns:
    """The rows that a rank gets of those that are split."""
    return {name: Column(np.array_split(ids, n_ranks)[rank], width) for name, (ids, width) in columns.items()}


def value_of(columns: Columns) -> Any:
    """The rows themselves."""
    arrays = {name: np.tile(ids[:, None], width) for name, (ids, width) in columns.items()}
    return arrays.get(None, arrays)


def passed_on(rows: Any, token: int) -> Any:
    """The rows that a call makes of others."""
    return {name: array * 31 + token for name, array in rows.items()} if isinstance(rows, dict) else rows * 31 + token


def passed_on_of(columns: Columns, token: int) -> Columns:
    """What the model knows of these rows."""
    return {name: Column(passed_on(ids, token), width) for name, (ids, width) in columns.items()}


def by_name(rows: Any) -> dict[Any, np.ndarray]:
    """The array of each column."""
    return rows if isinstance(rows, dict) else {None: np.asarray(rows)}


def are_rows(rows: Any, columns: Columns) -> bool:
    """Whether rows have these columns alone, in this order."""
    arrays = by_name(rows)
    return [*arrays] == [*columns] and all(
        array.shape == (len(ids), width) and bool((array == ids[:, None]).all())
        for array, (ids, width) in zip(arrays.values(), columns.values(), strict=True)
    )
