"""`ItemStream`: runs the async generator of a request, and keeps its items until the caller takes them.

::

    request OPEN_ITEMS ──► run: the generator ──► items ──► take ◄── requests FIRST_ITEMS, MORE_ITEMS
                                 ▲ waits while it has made as many as the caller has asked for, at most
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

from bandmaster.codec import Payload
from bandmaster.contract import FIRST_ITEMS, MAXSIZE, METHOD, MORE_ITEMS, OPEN_ITEMS, STREAM
from bandmaster.errors.failure import Failure
from bandmaster.worker_process.executor import Executor


class ItemStream:
    """The items of one generator, which is run as long as a request is. Everything runs on one event loop.

    Attributes:
        method: Name of the method.

    Args:
        method: Name of the method.
        generator: What it returned.
        limit: The number of items that may be made until `take` is called with another one.
        forget: Called when no item is left, and none follows.
    """

    def __init__(
        self, method: str, generator: AsyncGenerator[Any, Any], limit: int, forget: Callable[[], object]
    ) -> None:
        self.method = method
        self._generator, self._limit, self._forget = generator, limit, forget
        self._items: list[Payload] = []
        self._n_made = 0
        self._is_over = False  # whether no item follows
        self._is_collected = True
        self._waiters: list[asyncio.Future[None]] = []  # for a change

    async def run(self, encode: Callable[[Any], Any], is_collected: bool) -> Any:
        """Run the generator to its end, and wait until all its items were taken; then raise its exception.

        Args:
            encode: Encodes an item; returns the failure if it cannot be encoded.
            is_collected: Whether the caller takes the items of this rank.

        Returns:
            The failure of an item that cannot be encoded; None if there is none.
        """
        self._is_collected = is_collected
        try:
            error = await self._make_all(encode)
            self._end()
            while self._items:
                await self._change()
        finally:  # it may have been cancelled
            self._end()
            self._items.clear()
            self._forget()
        if isinstance(error, BaseException):
            raise error
        return error

    async def _make_all(self, encode: Callable[[Any], Any]) -> Failure | BaseException | None:
        """Make the items. Returns what has ended them early; raises only if it was cancelled."""
        try:
            async with aclosing(self._generator):  # cancelled between two items, it runs its `finally` blocks
                async for item in self._generator:
                    if self._is_collected:
                        encoded = encode(item)  # now, as the generator may change it
                        if isinstance(encoded, Failure):
                            return encoded
                        self._items.append(encoded.private())
                    self._n_made += 1
                    self._tell()
                    while self._n_made >= self._limit:
                        await self._change()
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # the user's code may raise anything
            return error
        return None

    async def take(self, limit: int) -> tuple[list[Payload | bytes], bool]:
        """Hand out the items that are there, at least one unless it was the last; and whether no item follows.

        An item without buffers is bytes, the head of its payload, which are pickled faster.

        Args:
            limit: The number of items that may be made from now on, with those before.
        """
        self._limit = limit
        self._tell()
        while self._is_collected and not (self._items or self._is_over):
            await self._change()
        items, self._items = self._items, []
        self._tell()
        return [item if item.buffers else item.head for item in items], self._is_over

    def _end(self) -> None:
        self._is_over = True
        self._tell()

    def _tell(self) -> None:
        while self._waiters:
            waiter = self._waiters.pop()
            if not waiter.done():
                waiter.set_result(None)

    async def _change(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter  # not an `asyncio.Event`, which stacks would show


def _open_items(executor: Executor, /, *args: Any, **kwargs: Any) -> ItemStream:
    stream, limit, method = kwargs.pop(STREAM), kwargs.pop(MAXSIZE), kwargs[METHOD]
    generator = executor.begun_generator(args, kwargs, AsyncGenerator)
    made = ItemStream(method, generator, limit, partial(executor.generators.pop, stream, None))
    executor.generators[stream] = made
    return made


async def _take_items(executor: Executor, stream: str, limit: int) -> tuple[list[Payload | bytes], bool]:
    """The items of a stream; see `ItemStream.take`. One that is not here has ended."""
    found = executor.generators.get(stream)
    return ([], True) if found is None else await found.take(limit)


OWN_METHODS: dict[str, Callable[..., Any]] = {
    OPEN_ITEMS: _open_items,
    FIRST_ITEMS: _take_items,
    MORE_ITEMS: _take_items,
}
