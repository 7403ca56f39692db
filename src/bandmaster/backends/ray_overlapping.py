"""A Ray actor whose async methods overlap, as those of Ray's own actors do: it runs on Ray's event loop."""

from __future__ import annotations

import inspect
from typing import Any

from bandmaster.backends.ray_actor import Labels, WorkerActor, arguments
from bandmaster.codec import Payload

__all__ = ["OverlappingActor", "has_async_methods"]


def has_async_methods(cls: type) -> bool:
    """Whether a worker class has a public async method, or async generator."""
    methods = [getattr(cls, name) for name in dir(cls) if not name.startswith("_")]
    return any(inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method) for method in methods)


class OverlappingActor(WorkerActor):
    """As `WorkerActor`, but while an async method awaits something, the actor begins with other calls.

    Calls come as actor tasks alone, and begin in an order that Ray chooses. Ray runs no method of such an actor in the
    main thread, where calls are interrupted; it cancels those of async methods.
    """

    overlaps = True

    async def bandmaster_call(self, number: int, method: str, reply: int, labels: Labels, *parts: Payload) -> Any:
        """As `WorkerActor.bandmaster_call`."""
        outcome = await self._executor.call_beside(method, reply, *arguments(labels, parts))
        return self._as_asked(outcome, reply)

    bandmaster_call_of_others = bandmaster_call
