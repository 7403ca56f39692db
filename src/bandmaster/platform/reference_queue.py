"""Weak references that enqueue a record when their object is collected.

The callback of each is `deque.append`, so it is safe in any thread, whichever locks that thread holds.

Source: ``java.lang.ref.ReferenceQueue``.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class _Reference(weakref.ref[Any], Generic[T]):
    __slots__ = ("record",)
    record: T


class ReferenceQueue(Generic[T]):
    """Records of watched objects that have been collected. Not thread-safe, but objects may be collected in any thread.

    Attributes:
        has_records: A deque that is non-empty, and therefore true, when `drain` would return records.
    """

    def __init__(self) -> None:
        self.has_records: deque[_Reference[T]] = deque()
        self._all: dict[int, _Reference[T]] = {}  # by id, because a reference to an unhashable object has no hash

    def watch(self, thing: object, record: T) -> None:
        """Enqueue the record when the object is collected."""
        reference: _Reference[T] = _Reference(thing, self.has_records.append)
        reference.record = record
        self._all[id(reference)] = reference

    def __len__(self) -> int:
        """Number of records that `drain` would return now or may return later."""
        return len(self._all)

    def living(self) -> Iterator[T]:
        """The records of watched objects that have not been collected."""
        return (reference.record for reference in list(self._all.values()) if reference() is not None)

    def drain(self) -> list[T]:
        """Remove and return the records of watched objects that have been collected."""
        records = []
        while self.has_records:
            reference = self.has_records.popleft()
            self._all.pop(id(reference), None)
            records.append(reference.record)
        return records
