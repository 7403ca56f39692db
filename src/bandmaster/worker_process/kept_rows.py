"""Rows that were kept where they were made, read as arguments of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from bandmaster.codec import Payload
from bandmaster.plan.handles import Elsewhere, assemble
from bandmaster.transport.kept import RowReaders

__all__ = ["with_rows"]


def with_rows(
    items: Sequence[tuple[int | str, Any]], rows: RowReaders, decode: Callable[[Payload], Any]
) -> Iterator[tuple[int | str, Any]]:
    """The arguments of a call, with the rows that some refer to. Each payload is decoded once."""

    @cache
    def value_at(label: int) -> Any:
        return decode(rows[label]())

    for key, argument in items:
        yield key, assemble(argument.plan, value_at) if type(argument) is Elsewhere else argument
