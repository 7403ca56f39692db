"""Generator methods whose items are asked for one by one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from typing import Any

END = object()  # in place of an item: there is none any more


class Streams:
    """The generators of this worker that have begun and not ended, by name."""

    def __init__(self) -> None:
        self._open: dict[str, Generator[Any, Any, Any] | AsyncGenerator[Any, Any]] = {}

    def open(self, name: str, generator: Any) -> None:
        """Keep a generator; it runs up to its first item when that is asked for."""
        if not isinstance(generator, Generator | AsyncGenerator):
            raise TypeError(f"a method with yield returned {type(generator).__name__} instead of a generator")
        self._open[name] = generator

    def method_of(self, name: str) -> str:
        """The name of the method whose generator this is. Raises LookupError as `next`."""
        return str(self._generator(name).__name__)

    def next(self, name: str) -> Any:
        """The next item, a coroutine that returns it, or `END`.

        Raises:
            LookupError: The stream has ended, was closed, or was never begun here.
        """
        generator = self._generator(name)
        if isinstance(generator, AsyncGenerator):
            return self._next_of_async(name, generator)
        try:
            return next(generator)
        except BaseException as error:  # the generator has ended by it
            del self._open[name]
            if isinstance(error, StopIteration):
                return END
            raise

    def _generator(self, name: str) -> Any:
        if name not in self._open:
            raise LookupError(
                "this worker has no open generator of the stream: it was closed, or the worker was replaced or "
                "restarted; make the call again"
            )
        return self._open[name]

    async def _next_of_async(self, name: str, generator: AsyncGenerator[Any, Any]) -> Any:
        try:
            return await anext(generator)
        except BaseException as error:
            self._open.pop(name, None)
            if isinstance(error, StopAsyncIteration):
                return END
            raise

    def close(self, name: str) -> Any:
        """Have a generator run its ``finally`` blocks; a coroutine that does so if it is async."""
        generator = self._open.pop(name, None)
        if isinstance(generator, AsyncGenerator):
            return _closed(generator)
        if generator is not None:
            generator.close()
        return None


async def _closed(generator: AsyncGenerator[Any, Any]) -> None:
    await generator.aclose()
