"""`Arrivals`: the queue of a stream."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable
from typing import Any, TypeAlias

from bandmaster.calls.future import Future
from bandmaster.platform.deadline import Deadline

Arrival: TypeAlias = "Future[Any] | None"


class Arrivals:
    """The queue of a stream: futures, and None where the feed has news.

    Any thread may put an arrival in, and any thread or task may take it.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._wakes: dict[object, Callable[[], object]] = {}  # of the tasks that wait

    def put(self, arrival: Arrival) -> None:
        """Add an arrival; it does not block."""
        self._queue.put(arrival)
        for wake in list(self._wakes.values()):
            with contextlib.suppress(RuntimeError):  # the event loop was closed
                wake()

    def drained(self) -> list[Future[Any]]:
        """Remove and return all futures."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._queue.get_nowait())
        return [future for future in found if future is not None]

    def get(self, timeout_s: float | None) -> Arrival:
        """Wait for the next arrival. Raises queue.Empty if none comes in time."""
        return self._queue.get(timeout=Deadline(timeout_s).left())

    async def get_async(self) -> Arrival:
        """Wait for the next arrival in an event loop."""
        import asyncio  # here, as it takes a third of the import time of the whole library

        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        self._wakes[arrived] = lambda: loop.call_soon_threadsafe(arrived.set)
        try:
            while True:
                arrived.clear()
                try:
                    return self._queue.get_nowait()
                except queue.Empty:
                    await arrived.wait()
        finally:
            del self._wakes[arrived]
