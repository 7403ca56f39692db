"""`RequestStream`: the items that the async generator of one replica makes, as ``group.method.stream`` returns it.

::

    RequestStream ── once ──────────► GeneratorRequest: runs the generator, and so has the place ──► its task ──► items
                  ── again and again ─► ItemsRequest: waits for an item, and takes all that are there ◄──────────── ┘

The generator may be as far ahead of the reader as `maxsize` says. To close the stream is to cancel the request that
runs the generator; whatever ends that ends the stream.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from bandmaster.calls.outcome import error_of
from bandmaster.calls.request import CallSite
from bandmaster.calls.result import Done
from bandmaster.codec import Payload, decode, encode
from bandmaster.contract import FIRST_ITEMS, MORE_ITEMS, OPEN_ITEMS
from bandmaster.errors import CallCancelled, CallTimeout
from bandmaster.errors.failure import Failure
from bandmaster.flow.stream import Closing
from bandmaster.requests.arguments import Arguments
from bandmaster.requests.future import RequestFuture
from bandmaster.requests.request import Request

T = TypeVar("T")


class GeneratorRequest(Request):
    """The request that runs the generator of a stream. It is done when that has ended, and its items are taken.

    Attributes:
        name: Name of the stream.
        items: The last request for its items; None before there are some.
    """

    asks_for = OPEN_ITEMS
    items: Request | None = None

    def __init__(self, site: CallSite, arguments: Arguments, router: Any, name: str) -> None:
        super().__init__(site, arguments, router)
        self.name = name

    @property
    def is_unread(self) -> bool:  # type: ignore[override]  # here it is computed
        """Whether nobody waits for its next item, though it has not ended."""
        items = self.items or self.first
        return items is not None and items.is_done

    def end(self) -> None:
        """Tell those who wait that it is done, those for the first items as well if it was never sent."""
        super().end()
        if self.first is not None and not (self.first.is_sent or self.first.is_done):
            self.first.end()


class ItemsRequest(Request):
    """A request for the items of a generator. Its value: their payloads, at least one unless it was the last; is it?

    Attributes:
        run: A weak reference to the request that runs the generator, with which the first one is sent.

    Args:
        name: Name of the stream.
        limit: The number of items that the generator may make, with those before.
        asks_for: `FIRST_ITEMS`, or `MORE_ITEMS` once there were some.
    """

    has_place = False
    run: weakref.ref[Request]

    def __init__(self, site: CallSite, router: Any, name: str, limit: int, asks_for: str) -> None:
        super().__init__(site, Arguments((encode(((0, name), (1, limit))),)), router)
        self.asks_for = asks_for

    def _made(self) -> Done:
        return super()._made() if self.replicas else Done(value=((), True))

    def late(self, timeout_s: float) -> CallTimeout:
        """The `CallTimeout` to raise after a wait of ``timeout_s``."""
        if not self.replicas:
            run = self.run()
            assert run is not None, "the stream that waits has it"
            return run.late(timeout_s)
        ranks = ", ".join(map(str, self.missing))
        what, what_next = f"got no item from rank {ranks}", "the stream was closed; iterate over a new one"
        return CallTimeout(self.site.method, self.missing, timeout_s, self.stacks(), what_next, what)


class RequestStream(Closing, Generic[T]):
    """The items of one request, in the order in which the method yields them, for ``for`` or ``async for``.

    At most ``maxsize`` items are made before they are taken, see `RequestMethod.options`. The stream ends, the
    ``finally`` blocks of the method run, and its place on the replica becomes free: when the method has ended and its
    items are taken; when it raises; when a wait for the next item takes longer than ``timeout``, or is cancelled; by
    `close`, the end of a ``with`` block, or when no variable refers to the stream any more.

    Raises:
        RemoteError: In the iteration, behind the items before: the method raised.
        WorkerDied: In the iteration: the replica has died.
        CallTimeout: In the iteration: there was no item in time.
        CallCancelled: In the iteration: the group has cancelled its calls.

    Args:
        run: The request that runs the generator; it is about to be sent.
        most: The value of ``maxsize``.
        group: The group, which lives as long as the stream.
    """

    def __init__(self, run: GeneratorRequest, most: int, group: object) -> None:
        self._run, self._most, self._group = run, most, group
        self._items: deque[Payload | bytes] = deque()
        self._n_taken = 0
        self._lock = threading.Lock()
        super().__init__(run.site.method, run.workers, run.cancel)
        run.first = ItemsRequest(run.site, run.router, run.name, most, FIRST_ITEMS)
        run.first.run = weakref.ref(run)
        run.first.calls_back = run.calls_back
        self._waits_for: RequestFuture[Any] | None = RequestFuture(run.first, group)

    def __next__(self) -> T:
        while not self._items and (future := self._next()) is not None:
            with self._closing_after_errors():
                self._take(future, future.result())
        if not self._items:
            raise StopIteration
        return self._value(self._items.popleft())

    async def __anext__(self) -> T:
        while not self._items and (future := self._next()) is not None:
            with self._closing_after_errors():
                self._take(future, await future)
        if not self._items:
            raise StopAsyncIteration
        return self._value(self._items.popleft())

    def _next(self) -> RequestFuture[Any] | None:
        """The future to wait for: that of the next items, behind the last one that of the end; None after that."""
        with self._lock:
            if self._waits_for is None and self._is_open:
                run = self._run
                request: Request = run
                if not run.is_done:  # else it was cancelled, or its replica has died
                    limit = self._n_taken + self._most
                    request = ItemsRequest(run.site, run.router, run.name, limit, MORE_ITEMS)
                    run.items = request
                    run.router.send(request, run.replicas)
                self._waits_for = RequestFuture(request, self._group)
            return self._waits_for if self._is_open else None

    def _take(self, future: RequestFuture[Any], value: Any) -> None:
        """Take the value of a future of `_next`; several tasks or threads may have waited for it."""
        with self._lock:
            if future is not self._waits_for:
                return
            if future._call is self._run:
                self._is_open = False
                return
            items, is_last = value
            self._n_taken += len(items)
            self._waits_for = RequestFuture(self._run, self._group) if is_last else None
            self._items.extend(items)

    def _value(self, item: Payload | bytes) -> T:
        try:
            value: T = decode(Payload(item) if isinstance(item, bytes) else item)
        except BaseException as error:  # the user's objects may raise anything as they are unpickled
            rank = self._run.replicas[0].ranks[0]
            raise error_of(self._run.site, {rank: Failure.unreadable(error)}) from error
        return value

    @contextlib.contextmanager
    def _closing_after_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if isinstance(error, CallTimeout):
                error.stream = self
            if self._is_open or not isinstance(error, CallCancelled):  # else another thread has closed it
                self.close()
                raise

    def close(self) -> None:
        """End the stream; the method runs its ``finally`` blocks. Closing twice is fine. Does not wait."""
        super().close()
        self._items.clear()
