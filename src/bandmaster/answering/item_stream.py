"""`ItemStream`: runs the async generator of a request, and hands over its items as they are made.

::

    request OPEN_ITEMS ──► run: the generator ──► items, each a reply; then the reply that ends the request
                                 ▲ waits while it has made as many as it may ◄── requests MORE_ITEMS
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

from bandmaster.codec import Payload
from bandmaster.contract import MAXSIZE, METHOD, MORE_ITEMS, OPEN_ITEMS, STREAM
from bandmaster.errors.failure import Failure
from bandmaster.worker_process.executor import Executor

MOST_EARLY = 1000  # limits of streams that are not here: most of them have ended


class ItemStream:
    """The items of one generator, which is run as long as a request is. Everything runs on one event loop.

    Attributes:
        method: Name of the method.

    Args:
        method: Name of the method.
        generator: What it returned.
        limit: The number of items that may be made until `allow` is called.
        forget: Called when no item follows.
    """

    def __init__(
        self, method: str, generator: AsyncGenerator[Any, Any], limit: int, forget: Callable[[], object]
    ) -> None:
        self.method = method
        self._generator, self._limit, self._forget = generator, limit, forget
        self._waiter: asyncio.Future[None] | None = None  # until more items may be made

    async def run(self, encode: Callable[[Any], Any], give: Callable[[Payload], object] | None) -> Failure | None:
        """Run the generator to its end.

        Args:
            encode: Encodes an item; returns the failure if it cannot be encoded.
            give: Called with each item, which may change then; None if the caller takes those of another rank.

        Returns:
            The failure of an item that cannot be encoded; None if there is none.
        """
        n_made = 0
        try:
            async with aclosing(self._generator):  # cancelled between two items, it runs its `finally` blocks
                async for item in self._generator:
                    if give is not None:
                        encoded = encode(item)
                        if isinstance(encoded, Failure):
                            return encoded
                        give(encoded)
                    n_made += 1
                    while n_made >= self._limit:
                        self._waiter = asyncio.get_running_loop().create_future()
                        await self._waiter  # not an `asyncio.Event`, which stacks would show
        finally:
            self._forget()
        return None

    def allow(self, limit: int) -> None:
        """Let it make so many items, with those that it has made."""
        self._limit = limit
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _open_items(executor: Executor, /, *args: Any, **kwargs: Any) -> ItemStream:
    stream, limit, method = kwargs.pop(STREAM), kwargs.pop(MAXSIZE), kwargs[METHOD]
    limit = executor.early_limits.pop(stream, limit)
    generator = executor.begun_generator(args, kwargs, AsyncGenerator)
    made = ItemStream(method, generator, limit, partial(executor.generators.pop, stream, None))
    executor.generators[stream] = made
    return made


def _allow_items(executor: Executor, stream: str, limit: int) -> None:
    """Let a stream make so many items; see `ItemStream.allow`. It may have ended, or not have begun on this rank."""
    found, early = executor.generators.get(stream), executor.early_limits
    if found is not None:
        found.allow(limit)
        return
    early[stream] = limit
    if len(early) > MOST_EARLY:
        del early[next(iter(early))]


OWN_METHODS: dict[str, Callable[..., Any]] = {OPEN_ITEMS: _open_items, MORE_ITEMS: _allow_items}
