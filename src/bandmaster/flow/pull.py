"""Pull dispatch: sends chunks of rows to the next free replica.

::

    PullPlan ── chunks ──► Puller ── one chunk each ──► replicas
                             │  ▲                          │
                             │  └──── a chunk is done ─────┘
                             ├──► PulledCall   all chunks, in the order of the batch, for a future
                             └──► ChunkFeed    each chunk when it is done, for a stream
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from bandmaster.calls.call import Call
from bandmaster.calls.future import Future
from bandmaster.calls.request import CallSite
from bandmaster.contract import Workers
from bandmaster.flow.feeds import Feed, pending_calls
from bandmaster.plan.arguments import Share
from bandmaster.plan.batch_types import Index


class Puller:
    """Sends chunks to free replicas, in the threads that find earlier chunks done.

    Attributes:
        chunks: For each chunk the numbers of its rows.
        running: The futures of the chunks that were sent and are not done.
        n_left: Number of chunks that are not done.

    Args:
        chunks: For each chunk the numbers of its rows.
        replicas: The ranks that take a chunk together.
        send: Sends a chunk to a replica.
        maxsize: Number of chunks that may be running or done without being taken; None for no limit.
        on_done: Called with the future of each chunk that is done.
        on_error: Called with the exception of a chunk that could not be sent; then no more are sent.
        on_sent: Called when the last chunk was sent.
    """

    def __init__(
        self,
        chunks: Sequence[Index],
        replicas: Sequence[Share],
        send: Callable[[int, Share], Future[Any]],
        maxsize: int | None,
        on_done: Callable[[Future[Any]], object],
        on_error: Callable[[Exception], object],
        on_sent: Callable[[], object] = lambda: None,
    ) -> None:
        self.chunks = chunks
        self.running: dict[Future[Any], Share] = {}
        self.n_left = len(chunks)
        self._by_number: dict[int, Future[Any]] = {}
        self._todo = deque(range(len(chunks)))
        self._free = deque(replicas)
        self._room = float("inf") if maxsize is None else maxsize
        self._send, self._on_done, self._on_error, self._on_sent = send, on_done, on_error, on_sent
        self._lock = threading.RLock()
        self._is_sending = False

    @property
    def done(self) -> list[Future[Any]]:
        """The futures of all chunks, which are done, in the order of the chunks."""
        return [self._by_number[number] for number in range(len(self.chunks))]

    def go_on(self) -> None:
        """Send chunks while replicas are free and there is room."""
        with self._lock:
            if self._is_sending:  # by this thread, and a chunk was done as soon as it was sent
                return
            self._is_sending = True
            had_some, error = bool(self._todo), None
            try:
                while self._todo and self._free and self._room > 0:
                    number, replica = self._todo.popleft(), self._free.popleft()
                    self._room -= 1
                    future = self._send(number, replica)
                    future.rank, future.numbers = replica.rank, self.chunks[number]
                    self.running[future] = replica
                    future.add_done_callback(partial(self._done, number))
            except Exception as why:  # the group was closed, or rows cannot be cut
                self._todo.clear()
                error = why
            finally:
                self._is_sending = False
            is_last = had_some and not self._todo
        if error is not None:
            self._on_error(error)
        elif is_last:
            self._on_sent()

    def taken(self) -> None:
        """Make room for one more chunk, because the user has taken one."""
        with self._lock:
            self._room += 1
        self.go_on()

    def stop(self) -> None:
        """Send no more chunks, and cancel those that run."""
        with self._lock:
            self._todo.clear()
            running = list(self.running)
        for future in running:
            future.cancel()

    def _done(self, number: int, future: Future[Any]) -> None:
        with self._lock:
            self._free.append(self.running.pop(future))
            self.n_left -= 1
            self._by_number[number] = future
        self._on_done(future)
        self.go_on()


class ChunkFeed(Feed):
    """The chunks of a call, each when it is done.

    Args:
        site: The names for messages about the call, and its limits.
        workers: The workers that run it.
        returns_errors: Whether futures of failed chunks are items as well.
        maxsize: Number of chunks that may be running or done without being taken; None for no limit.
    """

    def __init__(self, site: CallSite, workers: Workers, returns_errors: bool, maxsize: int | None) -> None:
        super().__init__(site, workers, returns_errors)
        self._maxsize = maxsize
        self._puller: Puller | None = None
        self._n_left = 0

    def begin(self, pull: Pull, replicas: Sequence[Share]) -> None:
        """Send the first chunks; ``replicas`` are the ranks that take a chunk together."""
        self._n_left = len(pull.chunks)
        self._puller = Puller(pull.chunks, replicas, pull.send, self._maxsize, self._done, self.arrived.put)
        self._puller.go_on()

    def pending(self) -> list[Call]:
        """The calls of the chunks that are running."""
        return [] if self._puller is None else pending_calls(self._puller.running)

    def _is_taken(self, future: Future[Any]) -> None:
        assert self._puller is not None, "it has sent the chunk"
        self._puller.taken()

    def _stop(self) -> None:
        super()._stop()
        if self._puller is not None:
            self._puller.stop()

    def _done(self, future: Future[Any]) -> None:
        with self.lock:
            self._n_left -= 1
            self.arrived.put(future)
            if not self._n_left:
                self.arrived.put(None)


class Pull(NamedTuple):
    """The planned chunks of a pulled call, and the function that sends them.

    Attributes:
        chunks: For each chunk the numbers of its rows.
        send: Sends a chunk to a replica.
    """

    chunks: Sequence[Index]
    send: Callable[[int, Share], Future[Any]]
