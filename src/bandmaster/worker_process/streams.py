"""Generator methods whose items are asked for one by one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from typing import Any

__all__ = ["END", "Streams"]

END = object()  # in place of an item: there is none any more


class Streams:
    """The generators of this worker that have begun and not ended, by name."""

    def __init__(self) -> None:
        self._turns: dict[str, asyncio.Lock] = {}  # where calls overlap, two may ask for the next item
        self._open: dict[str, Generator[Any, Any, Any] | AsyncGenerator[Any, Any]] = {}

    def open(self, name: str, generator: Any) -> None:
        """Begin with a generator; it runs up to its first item when that is asked for."""
        if not isinstance(generator, Generator | AsyncGenerator):
            raise TypeError(f"a method with yield returned {type(generator).__name__} instead of a generator")
        self._open[name] = generator

    def method_of(self, name: str) -> str:
        """The name of the method whose generator this is; also if it has ended or was never begun."""
        generator: Any = self._open.get(name)
        return "the end of a stream" if generator is None else generator.__name__

    def next(self, name: str) -> Any:
        """The next item, a coroutine that returns it, or `END`; also of a stream that has ended or was never begun."""
        generator = self._open.get(name)
        if isinstance(generator, AsyncGenerator):
            return self._next_of_async(name, generator)
        try:
            return END if generator is None else next(generator)
        except BaseException as error:  # the generator has ended by it
            del self._open[name]
            if isinstance(error, StopIteration):
                return END
            raise

    async def _next_of_async(self, name: str, generator: AsyncGenerator[Any, Any]) -> Any:
        async with self._turns.setdefault(name, asyncio.Lock()):
            try:
                return await anext(generator)
            except BaseException as error:
                self._open.pop(name, None)
                self._turns.pop(name, None)
                if isinstance(error, StopAsyncIteration):
                    return END
                raise

    def close(self, name: str) -> Any:
        """Have a generator run its ``finally`` blocks; a coroutine that does so if it is async."""
        generator = self._open.pop(name, None)
        if isinstance(generator, AsyncGenerator):
            self._turns.pop(name, None)
            return _closed(generator)
        if generator is not None:
            generator.close()
        return None


async def _closed(generator: AsyncGenerator[Any, Any]) -> None:
    await generator.aclose()
