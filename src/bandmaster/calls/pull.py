"""Pull dispatch: chunks of rows are sent to whichever replica is free.

::

    PullPlan ── chunks ──► Puller ── one chunk each ──► replicas
                             │  ▲                          │
                             │  └──── a chunk is done ─────┘
                             ├──► PulledCall   all chunks, in the order of the batch, for a future
                             └──► ChunkFeed    each chunk as it comes, for a stream
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from bandmaster.calls.feeds import pending_calls
from bandmaster.calls.future import Future
from bandmaster.calls.pending import CallSite, PendingCall
from bandmaster.calls.stream import Arrivals
from bandmaster.contract import Workers
from bandmaster.errors import CallCancelled
from bandmaster.plan.batch_types import Index
from bandmaster.plan.shares import Share

__all__ = ["ChunkFeed", "Pull", "Puller"]


class Puller:
    """Sends chunks to free replicas, in the threads in which the chunks before them are found to be done.

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
        on_error: Called with what a chunk could not be sent for; then no more are sent.
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
        """Send chunks as far as replicas are free and there is room."""
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
        """A chunk that was done was taken, so that there is room for one more."""
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


class ChunkFeed:
    """The chunks of a call, each as it comes.

    Args:
        site: What messages say about the call.
        workers: The workers that are asked.
        chunks: For each chunk the numbers of its rows.
        replicas: The ranks that take a chunk together.
        send: Sends a chunk to a replica.
        maxsize: Number of chunks that may be running or done without being taken; None for no limit.
        returns_errors: Whether chunks that have failed come as futures as well.
    """

    def __init__(
        self,
        site: CallSite,
        workers: Workers,
        chunks: Sequence[Index],
        replicas: Sequence[Share],
        send: Callable[[int, Share], Future[Any]],
        maxsize: int | None,
        returns_errors: bool,
    ) -> None:
        self.site, self.workers = site, workers
        self.arrived: Arrivals[Future[Any] | Exception] = Arrivals()
        self._n_to_take = len(chunks)
        self._returns_errors = returns_errors
        self._puller = Puller(chunks, replicas, send, maxsize, self.arrived.put, self.arrived.put)
        try:
            self._puller.go_on()
        except BaseException:  # Ctrl-C
            self._puller.stop()
            raise

    @property
    def is_open(self) -> bool:
        """Whether a chunk was not taken."""
        return self._n_to_take > 0

    def received(self, future: Future[Any] | Exception) -> Future[Any]:
        """As `Feed.received`; makes room for one more."""
        if isinstance(future, Exception):
            raise future
        self._n_to_take -= 1
        error = future.exception()
        if error is not None and not self._returns_errors:
            raise error
        self._puller.taken()
        return future

    def pending(self) -> list[PendingCall]:
        """As `Feed.pending`."""
        return pending_calls(self._puller.running)

    @property
    def is_done(self) -> bool:
        """Whether all chunks were taken, or the stream was closed."""
        return not self.is_open

    def cancel(self) -> bool:
        """Send no more chunks, and cancel those that run. The stream raises `CallCancelled` and is closed then."""
        self.arrived.put(CallCancelled(f"{self.site.method} was cancelled; make the call again"))
        self._puller.stop()
        return True

    def close(self) -> None:
        """As `Feed.close`."""
        self._n_to_take = 0
        self._puller.stop()


class Pull(NamedTuple):
    """What a pulled call does once the rows that it takes are there.

    Attributes:
        chunks: For each chunk the numbers of its rows.
        send: Sends a chunk to a replica.
    """

    chunks: Sequence[Index]
    send: Callable[[int, Share], Future[Any]]
