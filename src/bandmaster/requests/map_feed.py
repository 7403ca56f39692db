"""`MapFeed`: sends the requests of a map as places become free, from the thread of callbacks; and has their values.

::

    MapFeed ── send, flush ──► Router ──► replicas
      ▲ note: a request has ended, or a place may be free (any thread)
      └── look: takes the requests that have ended, and sends others (the thread of callbacks)
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bandmaster.calls.future import Claim, Future
from bandmaster.calls.progress import progress
from bandmaster.calls.request import CallSite
from bandmaster.calls.result import Done
from bandmaster.errors import CallTimeout, ResourceError, RowsLost
from bandmaster.flow.feed import Feed
from bandmaster.plan.arguments import Share, to_ranks
from bandmaster.platform.deadline import Deadline
from bandmaster.requests.arguments import Arguments
from bandmaster.requests.map_result import joined, numbers_of, stacked
from bandmaster.requests.parts import MapOptions, Parts
from bandmaster.requests.request import Request
from bandmaster.requests.router import Router
from bandmaster.requests.target import Target
from bandmaster.rows.table import Table


class MapFeed(Feed):
    """The requests of a map, a watch of the thread of callbacks; and the whole of their values in the order of rows.

    Attributes:
        how: The user's options.
        claims: The claims on the rows of futures that requests take.
        due: The moment of the first deadline; None if there is none.

    Args:
        group: The group, which lives as long as the futures.
        router: Sends the requests of the method.
        site: The `CallSite` of each request, with its deadline; the map itself has none.
        target: The choice of the replicas.
        how: The user's options.
        beside: Keyword arguments of each request that are not the method's, but the library's.
    """

    is_per_share = False

    def __init__(
        self,
        group: object,
        router: Router,
        site: CallSite,
        target: Target,
        how: MapOptions,
        beside: Sequence[tuple[str, Any]],
    ) -> None:
        unlimited = site._replace(options=replace(site.limits(), timeout=None))
        super().__init__(unlimited, router.submitter, how, how.chunk is not None and how.on_error == "raise")
        self.how, self.claims = how, list[Claim]()
        self.due: float | None = None
        self._group, self._router, self._each, self._target, self._beside = group, router, site, target, beside
        self._timeout_s = site.limits().timeout
        self._n_sent = 0
        self._open: dict[Request, tuple[Future[Any], float]] = {}  # with the moment at which it was sent
        self._requests_ended: deque[Request] = deque()
        self._is_noted = False
        self._looking = threading.RLock()
        self._values: list[Future[Any]] | None = None  # of the whole, once all requests are done
        self._table: Table | None = None

    # --- requests ---

    def _first(self, plan: Parts) -> Mapping[Share, Future[Any]]:
        router, how = self._router, self.how
        n_replicas = len(router.replicas) if self._target.replica is None else 1
        n = min(how.in_flight or n_replicas * router.concurrency, len(plan.numbers))
        self._free = [Share(place, ()) for place in range(n)]
        whole = to_ranks(plan.whole, ()).beside(self._beside)
        self._parts, self._whole = plan, Arguments.of(whole, self.site.method) if whole.items else Arguments()
        router.sources[self.look] = None
        progress.add(self)
        return {}

    def _has_more(self, share: Share) -> bool:
        return self._n_sent < len(self._parts.numbers)

    def _send_next(self, share: Share) -> Future[Any]:
        """Make the next request, and have `_flush` send it if there is a place for it."""
        number, label = self._n_sent, self.site.method
        is_gated = self.how.maxsize is not None  # then it is sent as the user takes others
        with self._submitter.admitted(label) if is_gated else contextlib.nullcontext():
            arguments = Arguments.of(to_ranks(self._parts.of(number), ()), label).beside(self._whole)
            request = Request(self._each, arguments, self._router, self.how.chunk is not None, self.note)
            if not self._router.put(request, self._target):
                self._look_soon()  # it may wait behind others that have to wait longer
        self._n_sent += 1
        future: Future[Any] = Future(request, self._group)
        future.numbers = self._parts.rows_of(number)
        self._open[request] = future, time.monotonic()
        return future

    def _flush(self) -> None:
        self._router.flush()
        if self._timeout_s is not None:
            self.due = next((since + self._timeout_s for _, since in self._open.values()), None)

    def _watch_part(self, future: Future[Any]) -> None:
        """Do nothing: `look` finds the requests that are done."""

    def close(self) -> None:
        """Stop it without an error, and drop the claims on rows."""
        super().close()
        self.claims = []

    # --- a watch ---

    def note(self, request: Request) -> None:
        """Have the thread look at a request that has ended, or for which a place may be free. It does not block."""
        if request.has_outcome:
            self._requests_ended.append(request)
        self._look_soon()

    def _look_soon(self) -> None:
        if not self._is_noted:
            self._is_noted = True
            progress.look_at(self)

    def look(self) -> bool:
        """Take the requests that have ended, and send others. Returns whether the map is over."""
        self._is_noted = False  # first: what is noted from here on is not missed
        try:
            with self._looking:  # and not `lock`: other calls may begin now
                self._router.advance()
                with self.lock:
                    done = [*self._taken(), *self._late()]
                self.parts_done(done)
        except Exception as error:
            self.give_up(error)
        if self.is_ended:
            self._cancel_open()
        is_over = self.is_ended and not self._open
        if is_over:
            self._router.sources.pop(self.look, None)
            self.close()
        return is_over

    def _cancel_open(self) -> None:
        """Cancel the requests that are not among the running parts, or could not be cancelled, as Ctrl-C came."""
        for request in list(self._open):
            if not (request.is_cancelled and request.is_sent):
                request.cancel()

    def _taken(self) -> Sequence[Future[Any]]:
        """The futures of the requests that have ended, but for those that were late before."""
        found = []
        while self._requests_ended:
            request = self._requests_ended.popleft()
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

    # --- the whole; nothing else takes from `arrivals` then ---

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until all requests are done, or one has failed; False if the time is over before."""
        if not super().wait(timeout_s):
            return False
        with self.lock:
            if self._values is None:
                self._values = sorted(self.arrivals.drained(), key=lambda part: next(iter(numbers_of(part)), 0))
                if self.is_released:
                    self.release()
        if not self.keeps_rows:
            with contextlib.suppress(Exception):  # it is the result
                self.value(Deadline(math.inf))
        return True

    def tell(self) -> None:
        """Call the functions of `watch` if it is done, and have `look` end its requests."""
        progress.look_at(self)
        if self._callbacks:
            self.wait(0)
        super().tell()

    def table(self) -> Table:
        """The rows, in the order of the batch; all chunks are done, without an error."""
        if self._table is None:
            self._table = stacked(self._values or (), self.site.method)
        return self._table

    def _brought(self, deadline: Deadline) -> Done:
        try:
            done = Done(value=joined(self._values or (), self.how, self.site, deadline))
        except (RowsLost, CallTimeout, ResourceError) as error:
            if self.keeps_rows:
                raise  # the rows of other chunks may be there, or these rows later
            done = Done(error)
        except Exception as error:  # a chunk's value cannot be read, or values cannot be joined
            done = Done(error)
        if not self.keeps_rows:
            self._values = []
        return done

    def _drop_rows(self) -> None:
        self._table = None
        for part in self._values or ():
            part.release()
