"""`MapSource`: sends the requests of a map as places become free, from the thread of callbacks.

::

    Feed ── send, flush ──► MapSource ──► Router ──► replicas
      ▲                        ▲ note: a request has ended, or a place may be free (any thread)
      └── parts_done ── look ──┘ (the thread of callbacks)
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bandmaster.calls.future import Claim, Future
from bandmaster.calls.progress import progress
from bandmaster.calls.request import CallSite
from bandmaster.calls.submission import Submitter
from bandmaster.flow.feed import Feed, Source
from bandmaster.plan.arguments import Share, to_ranks
from bandmaster.requests.arguments import Arguments
from bandmaster.requests.parts import MapOptions, Parts
from bandmaster.requests.request import Request
from bandmaster.requests.router import Router
from bandmaster.requests.target import Target


@dataclass(frozen=True, eq=False)
class MapCall:
    """The call of a map.

    Attributes:
        group: The group, which lives as long as the futures.
        submitter: Sends the calls of the group.
        router: Sends the requests of the method.
        site: Its `CallSite`, with the deadline of each request.
        target: The choice of the replicas.
        how: The user's options.
        beside: Keyword arguments of each request that are not the method's, but the library's.
    """

    group: object
    submitter: Submitter
    router: Router
    site: CallSite
    target: Target
    how: MapOptions
    beside: Sequence[tuple[str, Any]] = ()

    @property
    def n_places(self) -> int:
        """The number of requests that replicas can run at a time."""
        n_replicas = len(self.router.replicas) if self.target.replica is None else 1
        return n_replicas * self.router.concurrency


class MapSource(Source):
    """The requests of a map; a watch of the thread of callbacks.

    Attributes:
        workers: The workers that run them.
        due: The moment of the first deadline; None if there is none.

    Args:
        call: The call.
        parts: The rows of each.
        claims: The claims on the rows of futures that they take.
        feed: Has the futures of those that are sent.
    """

    is_per_share = False

    def __init__(self, call: MapCall, parts: Parts, claims: Sequence[Claim], feed: Feed) -> None:
        n = min(call.how.in_flight or call.n_places, len(parts.numbers))
        super().__init__({}, [Share(place, ()) for place in range(n)])
        self._call, self._parts, self._claims, self._feed, self._next = call, parts, claims, feed, 0
        self.workers = call.router.workers
        self.due: float | None = None
        self._timeout_s = call.site.limits().timeout
        self._open: dict[Request, tuple[Future[Any], float]] = {}  # with the moment at which it was sent
        self._ended: deque[Request] = deque()
        self._is_noted = False
        self._looking = threading.RLock()
        label, whole = call.site.method, to_ranks(parts.whole, ()).beside(call.beside)
        self._whole = Arguments.of(whole, label) if whole.items else Arguments(None)
        call.router.sources[self] = None
        progress.add(self)

    # --- a source ---

    def has_more(self, share: Share) -> bool:
        """Whether requests are left."""
        return self._next < len(self._parts.numbers)

    def send(self, share: Share) -> Future[Any]:
        """Make the next request, and have `flush` send it if there is a place for it."""
        call, number = self._call, self._next
        is_gated = call.how.maxsize is not None  # then it is sent as the user takes others
        with call.submitter.admitted(call.site.method) if is_gated else contextlib.nullcontext():
            arguments = Arguments.of(to_ranks(self._parts.of(number), ()), call.site.method).beside(self._whole)
            request = Request(call.site, arguments, call.router, call.how.chunk is not None, self)
            call.router.put(request, call.target)
        self._next += 1
        future: Future[Any] = Future(request, call.group)
        future.numbers = self._parts.rows_of(number)
        self._open[request] = future, time.monotonic()
        return future

    def flush(self) -> None:
        """Send the requests that have places."""
        self._call.router.flush()
        if self._timeout_s is not None:
            self.due = next((since + self._timeout_s for _, since in self._open.values()), None)

    def watch(self, future: Future[Any], when_done: Callable[[Future[Any]], object]) -> None:
        """Do nothing: `look` tells the feed of requests that are done."""

    def close(self) -> None:
        """Drop the claims on rows: no more requests are sent."""
        self._claims = ()

    # --- a watch ---

    def note(self, request: Request) -> None:
        """Have the thread look at a request that has ended, or for which a place may be free. It does not block."""
        if request.is_done:
            self._ended.append(request)
        if not self._is_noted:
            self._is_noted = True
            progress.look_at(self)

    def look(self) -> bool:
        """Take the requests that have ended, and send others. Returns whether the map is over."""
        self._is_noted = False  # first: what is noted from here on is not missed
        feed, router = self._feed, self._call.router
        try:
            with self._looking:  # and not that of the feed: other calls may begin now
                router.advance()
                with feed.lock:
                    done = [*self._taken(), *self._late()]
                feed.parts_done(done)
            if feed.done is not None:
                self._cancel()
        except Exception as error:
            feed.give_up(error)
        is_over = feed.done is not None and not self._open
        if is_over:
            router.sources.pop(self, None)
            self.close()
        return is_over

    def _cancel(self) -> None:
        """Cancel the requests that the feed does not know of, or could not cancel, as Ctrl-C came meanwhile."""
        for request in list(self._open):
            if not (request.is_cancelled and request.is_sent):
                request.cancel()

    def _taken(self) -> Sequence[Future[Any]]:
        """The futures of the requests that have ended, but for those that were late before."""
        found = []
        while self._ended:
            request = self._ended.popleft()
            if request in self._open:
                future, _ = self._open.pop(request)
                future.rank = request.replicas[0].ranks[0] if request.replicas else None
                found.append(future)
        return found

    def _late(self) -> Sequence[Future[Any]]:
        """The futures of the requests whose deadlines are over; they are cancelled, unless a rank is in a debugger."""
        found: list[Future[Any]] = []
        timeout_s, now = self._timeout_s, time.monotonic()
        if timeout_s is None:
            return found
        for request in [request for request, (_, since) in self._open.items() if since + timeout_s <= now]:
            future, _ = self._open.pop(request)
            late = request.late(timeout_s)
            if late.is_debugged:
                self._open[request] = future, now
            else:
                late.future = future
                request.expire(late)
                found.append(future)
        return found
