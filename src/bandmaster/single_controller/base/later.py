"""The result of a non-blocking call whose mode joins rows: a ``DataProtoFuture`` as in verl."""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from functools import lru_cache
from typing import Any

from bandmaster.calls.future import Future
from bandmaster.errors import BatchError
from bandmaster.plan.batch import count_rows, describe, take_rows
from bandmaster.plan.rows import row_ranges

__all__ = ["RowsLater"]


class RowsLater:
    """The rows that a non-blocking call will return.

    If verl is loaded, it is also an instance of verl's ``DataProtoFuture``. A method of any `RayWorkerGroup` takes it
    as an argument and waits for it. It makes an ObjectRef only when the program reads ``futures``.
    """

    def __init__(self, future: Future[Any], cuts: tuple[tuple[int, int], ...] = ()) -> None:
        self._future = future
        self._cuts = cuts  # (index, n): part index of n, of the part before

    @staticmethod
    def of(future: Future[Any]) -> RowsLater:
        """The rows of a call; an instance of verl's class if verl is loaded."""
        protocol = sys.modules.get("verl.protocol")
        return (RowsLater if protocol is None else _as_verls(protocol.DataProtoFuture))(future)

    def get(self) -> Any:
        """Wait for the rows. Raises as `Future.result`."""
        rows = self._future.result()
        for index, n in self._cuts:
            n_rows = count_rows(rows)
            if n_rows is None:
                raise BatchError(f"{describe(rows)} has no rows to be cut into {n} parts; call get() on the whole")
            rows = take_rows(rows, range(*row_ranges(n_rows, n)[index]))
        return rows

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the rows at most ``timeout`` seconds and return them. Raises as `Future.result`."""
        self._future.exception(timeout)
        return self.get()

    def chunk(self, chunks: int) -> Sequence[RowsLater]:
        """Parts of the rows, which are cut once they are there."""
        return [type(self)(self._future, (*self._cuts, (index, chunks))) for index in range(chunks)]

    @property
    def futures(self) -> list[Any]:
        """A list of one ObjectRef, which holds all rows. Waits for the rows."""
        return [sys.modules["ray"].put(self.get())]  # a program that asks for an ObjectRef has loaded Ray

    def __await__(self) -> Generator[Any, None, Any]:
        yield from self._future.__await__()
        return self.get()

    def __repr__(self) -> str:
        return f"<rows of {self._future!r}>"

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __reduce__(self) -> Any:
        return _same, (self.get(),)


def _same(rows: Any) -> Any:
    return rows


@lru_cache(maxsize=4)
def _as_verls(base: type) -> type[RowsLater]:
    return type("DataProtoFuture", (RowsLater, base), {})
