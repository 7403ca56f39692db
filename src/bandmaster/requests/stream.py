"""`RequestStream`: the items that the async generator of one replica makes, as ``group.method.stream`` returns it.

::

    RequestStream ── once ─────────────► GeneratorRequest: runs the generator, and so has the place
        items ◄──────────────────────────┘
                  ── as it takes them ─► MORE_ITEMS: how many may be made

The generator may be as far ahead of the reader as `maxsize` says. To close the stream is to cancel the request that
runs the generator; whatever ends that ends the stream.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Generator
from typing import Any, Generic, TypeVar

from bandmaster.calls.outcome import error_of
from bandmaster.calls.request import CallSite
from bandmaster.codec import Payload, decode, encode
from bandmaster.contract import MORE_ITEMS, OPEN_ITEMS, Reply, WorkerCall
from bandmaster.errors import CallCancelled, CallTimeout, ClosedError
from bandmaster.errors.failure import Failure
from bandmaster.flow.stream import Closing
from bandmaster.platform.deadline import Deadline
from bandmaster.requests.arguments import Arguments
from bandmaster.requests.future import RequestFuture
from bandmaster.requests.request import Request
from bandmaster.requests.target import Target

T = TypeVar("T")


class GeneratorRequest(Request):
    """The request that runs the generator of a stream. It is done when that has ended.

    Attributes:
        name: Name of the stream.
        items: See `Request`; a failure is one that cannot be read here.
        readers: An entry for each thread or task that wants an item.
    """

    asks_for = OPEN_ITEMS

    def __init__(self, site: CallSite, arguments: Arguments, router: Any, target: Target, name: str) -> None:
        super().__init__(site, arguments, router, target)
        self.name = name
        self.items: deque[Payload | Failure] = deque()
        self.readers: list[None] = []
        self._n_come = 0

    def on_item(self, item: Payload | Failure) -> None:
        """Take an item; the thread that has received it calls this, and holds a lock."""
        if self.is_cancelled:
            return
        self.items.append(item)
        self._n_come += 1
        while self.waiters:  # always this list: another thread may be about to add one, and then looks at `has_news`
            self.waiters.pop()(self)

    def wait_for_news(self, timeout_s: float | None) -> bool:
        """Wait until an item has come, which another thread may have taken, or none follows; False if it is late."""
        n_before = self._n_come
        return self._wait(Deadline(timeout_s), lambda: self.has_news or self._n_come != n_before)

    def wait_until_ended(self, timeout_s: float | None) -> bool:
        """Wait until the generator has ended, as a turn of another group does; False if the time is over before."""
        self.is_awaited = True
        try:
            return super().wait_until_ended(timeout_s)
        finally:
            self.is_awaited = False

    def abandon(self) -> None:
        """Cancel it, and drop its items."""
        self.cancel()
        self.items = deque()  # another thread may be about to take one of them

    def allow(self, limit: int) -> None:
        """Let the generator make so many items, with those that it has made."""
        parts = tuple(self.workers.put([encode(((0, self.name), (1, limit)))]))
        with contextlib.suppress(ClosedError):  # then this one fails
            for rank in self.ranks:
                self.workers.request(rank, [WorkerCall((rank,), MORE_ITEMS, parts, Reply.DROP)], list)

    @property
    def is_unread(self) -> bool:  # type: ignore[override]  # here it is computed
        """Whether it has made items, and nobody waits for the next one, or for its end."""
        return self._n_come > 0 and not self.readers and not self.is_awaited

    def late(self, timeout_s: float, what: str = "has not ended on", what_next: str = "") -> CallTimeout:
        """The `CallTimeout` to raise after a wait of ``timeout_s``, by default for the end of the generator."""
        if not self.replicas or (self.is_cancelled and not what_next):
            return super().late(timeout_s)
        what_next = what_next or f"a stream of group {self.site.group!r} is open; read it to its end, or close it"
        what = f"{what} rank {', '.join(map(str, self.missing))}"
        return CallTimeout(self.site.method, self.missing, timeout_s, self.stacks(), what_next, what)


class _NextItem(RequestFuture[None]):
    """The future of the next item of a stream, or of its end."""

    _call: GeneratorRequest

    def _has_come(self, timeout_s: float | None) -> bool:
        return self._call.wait_for_news(timeout_s)

    def _late(self, timeout_s: float) -> CallTimeout:
        return self._call.late(timeout_s, "got no item from", "the stream was closed; iterate over a new one")

    def __await__(self) -> Generator[Any, None, None]:
        """Wait for it in an event loop."""
        return self._until_news()


class RequestStream(Closing, Generic[T]):
    """The items of one request, in the order in which the method yields them, for ``for`` or ``async for``.

    At most ``maxsize`` items are made before they are taken, see `RequestMethod.options`. The stream ends, the
    ``finally`` blocks of the method run, and its place on the replica becomes free: when the method has ended; when it
    raises; when a wait for the next item takes longer than ``timeout``, or is cancelled; by
    `close`, the end of a ``with`` block, or when no variable refers to the stream any more.

    Raises:
        RemoteError: In the iteration, behind the items before: the method raised.
        WorkerDied: In the iteration: the replica has died.
        CallTimeout: In the iteration: there was no item in time.
        CallCancelled: In the iteration: the group has cancelled its calls.

    Args:
        run: The request that runs the generator; it is about to be sent.
        group: The group, which lives as long as the stream.
    """

    def __init__(self, run: GeneratorRequest, group: object) -> None:
        self._run, self._most = run, run.target.maxsize
        self._next_item = _NextItem(run, group)
        self._n_taken, self._n_allowed = 0, self._most
        self._lock = threading.Lock()
        super().__init__(run.site.method, run.workers, run.abandon)

    def __next__(self) -> T:
        self._run.readers.append(None)
        try:
            while (item := self._next()) is None and self._is_open:
                self._next_item._wait(None)
            if item is not None:
                return self._value(item)
        except BaseException as error:
            self._close_after(error)
        finally:
            self._run.readers.pop()
        raise StopIteration

    async def __anext__(self) -> T:
        self._run.readers.append(None)
        try:
            while (item := self._next()) is None and self._is_open:
                await self._next_item
            if item is not None:
                return self._value(item)
        except GeneratorExit:  # the task is collected, at any point of what this thread does: the request is cancelled
            raise
        except BaseException as error:
            self._close_after(error)
        finally:
            self._run.readers.pop()
        raise StopAsyncIteration

    def _next(self) -> Payload | None:
        """Take the next item; None if there is none yet, or if the stream has ended."""
        run = self._run
        with self._lock:
            is_over, items = run.has_outcome, run.items  # in this order: all items have come by then
            item = items.popleft() if items and self._is_open else None
            if item is None:
                if self._is_open and is_over:
                    run.outcome()  # raises its error, if it has ended with one
                    self._is_open = False
                return None
            self._n_taken += 1
            if self._n_allowed - self._n_taken <= self._most // 2 and not run.is_done:
                self._n_allowed = self._n_taken + self._most
                run.allow(self._n_allowed)
        if isinstance(item, Failure):
            raise error_of(run.site, {run.replicas[0].ranks[0]: item})
        return item

    def _value(self, item: Payload) -> T:
        try:
            value: T = decode(item)
        except BaseException as error:  # the user's objects may raise anything as they are unpickled
            rank = self._run.replicas[0].ranks[0]
            raise error_of(self._run.site, {rank: Failure.unreadable(error)}) from error
        return value

    def _close_after(self, error: BaseException) -> None:
        """Close the stream, and raise an error; not one that says that another thread has closed it."""
        if isinstance(error, CallTimeout):
            error.stream, error.future = self, None
        if self._is_open or not isinstance(error, CallCancelled):
            self.close()
            raise error
