"""Objects of weak references, listed in one step: other threads may make and drop such objects meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar
from weakref import ref

T = TypeVar("T")


def living(references: Iterable[ref[T]]) -> list[T]:
    """The objects that are still there, of the references that ``keyrefs`` or ``valuerefs`` of a dictionary returns.

    Such a dictionary itself, like a `WeakSet`, raises RuntimeError if it changes while a thread iterates over it.
    """
    return [one for reference in references if (one := reference()) is not None]
