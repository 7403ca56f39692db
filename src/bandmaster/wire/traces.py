"""What is left of objects that are gone: noted by C code, wherever the last reference goes and whatever is locked."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

__all__ = ["Trace", "Traces"]

T = TypeVar("T")


class Trace(weakref.ref[Any], Generic[T]):
    """Of one object.

    Attributes:
        of: What has to be known of it when it is gone.
    """

    __slots__ = ("of",)
    of: T


class Traces(Generic[T]):
    """Of the objects that somebody asked to be told of. Not thread-safe, but objects may end in any thread.

    Attributes:
        ended: Of those that are gone.
    """

    def __init__(self) -> None:
        self.ended: deque[Trace[T]] = deque()
        self._all: dict[int, Trace[T]] = {}  # by their ids, as what they are of may have no hash

    def follow(self, thing: object, of: T) -> None:
        """Take notice when a thing is gone."""
        trace: Trace[T] = Trace(thing, self.ended.append)
        trace.of = of
        self._all[id(trace)] = trace

    def living(self) -> Iterator[T]:
        """Of those that are there."""
        return (trace.of for trace in list(self._all.values()) if trace() is not None)

    def take_ended(self) -> list[Trace[T]]:
        """What `ended` has; it has nothing afterwards."""
        taken = []
        while self.ended:
            trace = self.ended.popleft()
            self._all.pop(id(trace), None)
            taken.append(trace)
        return taken
