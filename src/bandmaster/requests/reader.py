"""`LoopReader`: reads replies in the thread of an event loop, for the requests that are awaited there."""

from __future__ import annotations

import asyncio
import errno
import os
import select
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

from bandmaster.contract import Workers
from bandmaster.errors import ResourceError
from bandmaster.requests.request import Request

_OWNED = "_bandmaster_owned"  # attribute of event loops


class _Owned(NamedTuple):
    """The objects of an event loop that are collected with it.

    Attributes:
        reader: Reads for it.
        awaited: The futures of `LoopReader.add`, and so the tasks that await them, for requests without news. As long
            as there are any, the event loop reads.
        watched: The workers that are read from, each with a descriptor that their `stop` does not close.
    """

    reader: LoopReader
    awaited: set[asyncio.Future[None]]
    watched: dict[Workers, select.epoll]


class LoopReader:
    """Reads the replies of the workers that requests of one event loop wait for, when something has arrived.

    Open requests refer to it, and it refers to its event loop and to futures weakly: a task that awaits a request, and
    whose event loop was closed, is collected with that, and then the request is cancelled.

    Args:
        loop: The event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = ref(loop)  # which has this
        self._arrived: deque[ref[asyncio.Future[None]]] = deque()  # those of requests that have news
        self._soon: deque[Callable[[], object]] = deque()
        self._is_reading = self._is_scheduled = False
        setattr(loop, _OWNED, _Owned(self, set(), {}))  # last: Ctrl-C leaves the loop with no half of a reader

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop. It exists, where this runs on it."""
        loop = self._loop()
        assert loop is not None, "it calls this"
        return loop

    @property
    def _owned(self) -> _Owned:
        owned: _Owned = getattr(self.loop, _OWNED)
        return owned

    @classmethod
    def of(cls, loop: Any = None) -> LoopReader:
        """The reader of an event loop; by default of the one that runs in this thread."""
        loop = loop or asyncio.get_running_loop()
        owned: _Owned | None = getattr(loop, _OWNED, None)
        return cls(loop) if owned is None else owned.reader

    def add(self, request: Request) -> asyncio.Future[None]:
        """Read until a request has news. Returns the future that is done then."""
        self._read_from(request.workers)  # first: it may raise
        waiter: asyncio.Future[None] = self.loop.create_future()
        self._owned.awaited.add(waiter)
        request.waiters.append(partial(self._tell, ref(waiter)))
        if request.has_news:
            self._tell(ref(waiter), request)
        return waiter

    def _read_from(self, workers: Workers) -> None:
        """Read what arrives from some workers."""
        watched = self._owned.watched
        if workers not in watched and (fd := workers.arrivals) is not None:
            for other in list(watched):
                if not other.check(is_thorough=False):  # it was stopped
                    self._ignore(other)
            try:
                arrivals = select.epoll.fromfd(os.dup(fd))  # the number of `fd` is free for others when that is closed
            except OSError as error:
                if error.errno == errno.EBADF:  # another thread has stopped them just now, which ends the request
                    return
                raise ResourceError(f"there is no descriptor to await replies with ({error})") from error
            self.loop.add_reader(arrivals, self._read, workers)
            watched[workers] = arrivals

    def _ignore(self, workers: Workers) -> None:
        """Read no longer what arrives from some workers."""
        arrivals = self._owned.watched.pop(workers, None)
        if arrivals is not None:
            self.loop.remove_reader(arrivals)
            arrivals.close()

    def _rest(self) -> None:
        """Read no more, unless a request has come meanwhile."""
        if not self._owned.awaited:
            for workers in list(self._owned.watched):
                self._ignore(workers)

    def _tell(self, waiter: ref[asyncio.Future[None]], _: Request) -> None:
        """Wake who awaits a future of `add`. Any thread may call this; it does not block."""
        self._arrived.append(waiter)
        self._wake_soon()

    def call(self, function: Callable[[], object]) -> bool:
        """Have the event loop call a function, once if it is given again meanwhile; False if the loop has ended."""
        loop = self._loop()
        if loop is None or loop.is_closed():
            return False
        if function not in self._soon:
            self._soon.append(function)
        self._wake_soon()
        return True

    def _wake_soon(self) -> None:
        loop = self._loop()
        if loop is None or self._is_reading or self._is_scheduled:
            return
        try:
            self._is_scheduled = True
            loop.call_soon_threadsafe(self._wake)
        except BaseException as error:  # Ctrl-C, or the event loop was closed
            self._is_scheduled = False
            if not isinstance(error, RuntimeError):
                raise

    def _read(self, workers: Workers) -> None:
        """Take what has arrived, in the event loop."""
        self._is_reading = True
        try:
            is_open = workers.check(is_thorough=False)
        finally:
            self._is_reading = False
            self._wake()
        if not is_open:
            self._ignore(workers)

    def _wake(self) -> None:
        self._is_scheduled = False  # first: what is told from here on is not missed
        awaited = self._owned.awaited
        while self._arrived:
            waiter = self._arrived.popleft()()
            awaited.discard(waiter)
            if not (waiter is None or waiter.done()):
                waiter.set_result(None)
        while self._soon:
            self._soon.popleft()()
        if not awaited and self._owned.watched:
            self.loop.call_soon(self._rest)
