"""Rows that were kept where they were made: read as arguments of a call, and described as its result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

from bandmaster.codec import Payload
from bandmaster.contract import RowFacts
from bandmaster.errors import BatchError
from bandmaster.plan.batch import as_batch
from bandmaster.plan.columns import schema_of
from bandmaster.plan.handles import Elsewhere, assemble

__all__ = ["NO_ROWS", "RowReaders", "facts_of", "with_rows"]

RowReaders = Mapping[int, Callable[[], Payload]]  # by the label that arguments refer to
NO_ROWS: RowReaders = MappingProxyType({})


def facts_of(value: Any, nbytes: int) -> RowFacts | None:
    """What is known of a value's rows; None if it is not a batch, which the controller then says."""
    try:
        batch = as_batch(value)
    except BatchError:
        return None
    return None if batch is None else RowFacts(batch.n_rows, nbytes, schema_of(value))


def with_rows(
    items: Sequence[tuple[int | str, Any]], rows: RowReaders, decode: Callable[[Payload], Any]
) -> Iterator[tuple[int | str, Any]]:
    """The arguments of a call, with the rows that some refer to. Each payload is decoded once."""

    @cache
    def value_at(label: int) -> Any:
        return decode(rows[label]())

    for key, argument in items:
        yield key, assemble(argument.plan, value_at) if type(argument) is Elsewhere else argument
