"""`Mapped`: many requests of one method, one for each row or chunk of rows; `RequestMethod.map` returns it.

::

    Mapped ──► MapFeed ── send, flush ──► Router ──► replicas
                 ▲ note: a request has ended, or a place may be free (any thread)
                 └── look: takes the requests that have ended, and sends others (the thread of callbacks)
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from typing import Any

from bandmaster.calls.future import Claim, Future, as_it_is, claims_of
from bandmaster.calls.progress import progress
from bandmaster.calls.request import CallSite
from bandmaster.calls.result import Done
from bandmaster.calls.spec import MethodSpec
from bandmaster.errors import CallTimeout, ResourceError, RowsLost, UsageError
from bandmaster.flow.feed import Feed
from bandmaster.flow.stream import Stream
from bandmaster.plan.arguments import BoundArgument, Share, to_ranks
from bandmaster.platform.deadline import Deadline
from bandmaster.platform.locks import SigintSafeLock
from bandmaster.requests.arguments import Arguments, check_has_rows
from bandmaster.requests.map_rows import MapOptions, Parts, joined, numbers_of, plan_parts, stacked
from bandmaster.requests.request import Request
from bandmaster.requests.router import Router
from bandmaster.requests.target import Target
from bandmaster.rows.table import Table


class Mapped(Stream):
    """The requests of one map. Use it in one of two ways:

    - Iterate over it, with ``for`` or ``async for``. It yields a `Future` that is done for each request as it ends; its
      ``numbers`` are the numbers of its rows in the batch, its ``rank`` the rank that returned the value. Values that
      were taken are not kept. The end of the last reference to the map cancels what was not taken.
    - Ask for the whole in the order of the rows: `result`, ``await``, or `future`.

    `close`, or the end of a ``with`` block, cancels the requests that are not done.
    """

    _feed: MapFeed
    _is_iterated = False

    def __init__(self, feed: MapFeed) -> None:
        super().__init__(feed)
        self._is_whole = False

    @property
    def future(self) -> Future[Any]:
        """The future of the whole: the values of single rows in a list, or the joined rows of chunks.

        With ``chunk``, it is a handle: rows stay where they were made until ``result()``, and it can be an argument of
        other calls. Its `Future.cancel` cancels the map. With ``on_error="return"`` the whole is a `PartialResult`.

        Raises:
            UsageError: The map was iterated over, or has a ``maxsize``.
        """
        if self._is_iterated or self._feed.how.maxsize is not None:
            why = "was iterated over" if self._is_iterated else "waits for an iteration to take values, as maxsize says"
            raise UsageError(
                f"the map of {self._feed.site.method} {why}, so the whole cannot be had; call map again for it"
            )
        self._is_whole, self._is_open = True, False  # the map goes on as long as the future, whatever becomes of this
        return Future(self._feed)

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the whole, in the order of the rows. Ctrl-C cancels the map.

        Args:
            timeout: Seconds to wait; then `CallTimeout` is raised, and the map goes on. None sets no limit: each
                request has its own, see `RequestMethod.options`.

        Returns:
            A list of the values of single rows, the joined rows of chunks, or a `PartialResult`.

        Raises:
            UsageError: The map was iterated over, or has a ``maxsize``.
            RemoteError, WorkerDied, CallTimeout, CallCancelled: A request has failed, see `Future.result`.
            CollectError: The values of chunks cannot be joined.
        """
        return self.future.result_or_cancel(timeout)

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait for the whole in an event loop; see `result`. Cancelling the task that waits cancels the map."""
        return self.future.__await__()

    def cancel(self) -> bool:
        """Cancel all requests that have not ended, and send no more. Returns False if the map was over."""
        return self._feed.cancel()

    def close(self) -> None:
        """Cancel the requests that are not done. Closing twice is fine."""
        if self._is_whole:
            self.cancel()
        else:
            super().close()

    def __next__(self) -> Future[Any]:
        """Wait for the next request to end; see `Stream.__next__`. Raises UsageError if the whole was asked for."""
        self._begin_iteration()
        return super().__next__()

    async def __anext__(self) -> Future[Any]:
        """Wait for the next request to end in an event loop; see `__next__`."""
        self._begin_iteration()
        return await super().__anext__()

    def _begin_iteration(self) -> None:
        if self._is_whole:
            raise UsageError(
                f"the whole of the map of {self._feed.site.method} was asked for, so it cannot be iterated over; call "
                "map again"
            )
        self._is_iterated = True

    def __repr__(self) -> str:
        return f"<map of {self._feed.site.method}, {'ended' if self._feed.is_ended else 'open'}>"


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
    """

    how: MapOptions
    are_requests = True

    def __init__(self, group: object, router: Router, site: CallSite, target: Target, how: MapOptions) -> None:
        unlimited = site._replace(options={**(site.options or {}), "timeout": None})
        super().__init__(unlimited, router.submitter, how, how.chunk is not None and how.on_error == "raise")
        self.claims: list[Claim] = []
        self.due: float | None = None
        self._group, self._router, self._each, self._target = group, router, site, target
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
        whole = Arguments.of(to_ranks(plan.whole, ()), self.site.method) if plan.whole else Arguments()
        self._parts, self._whole = plan, whole
        router.maps.add(self)
        progress.add(self)
        return {}

    def _has_more(self, share: Share) -> bool:
        return self._n_sent < len(self._parts.numbers)

    def _send_next(self, share: Share) -> Future[Any]:
        """Make the next request, and have `_flush` send it if there is a place for it."""
        number, label = self._n_sent, self.site.method
        is_gated = self.how.maxsize is not None  # then it is sent as the user takes others
        with self._submitter.gate.admitted(label) if is_gated else contextlib.nullcontext():
            arguments = Arguments.of(to_ranks(self._parts.of(number), ()), label).beside(self._whole)
            request = Request(self._each, arguments, self._router, self._target, self.how.chunk is not None)
            request.tell_map = self.note
            future: Future[Any] = Future(request, self._group)
            future.numbers = self._parts.rows_of(number)
            self._open[request] = future, time.monotonic()  # first: the end of the map ends what Ctrl-C has left of it
            try:
                is_chosen = self._router.put(request)
            except Exception:
                del self._open[request]
                raise
            if not is_chosen:
                self._look_soon()  # it may wait behind others that have to wait longer
        self._n_sent += 1
        return future

    def _flush(self) -> None:
        self._router.flush()
        if self._timeout_s is not None:
            self.due = next((since + self._timeout_s for _, since in self._open.values()), None)

    def _watch_part(self, future: Future[Any]) -> None:
        """Do nothing: `look` finds the requests that are done."""

    def give_up(self, why: BaseException | None) -> None:
        """Send no more requests, and have `look` end those that are open; see `Feed.give_up`."""
        try:
            super().give_up(why)
        finally:
            progress.look_at(self)

    def close(self) -> None:
        """Stop it without an error, and drop the claims on rows."""
        super().close()
        self.claims = []

    # --- a watch ---

    def note(self, request: Request) -> None:
        """Have the thread look at the map, of which a request has ended. It does not block."""
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
                    ended = [*self._taken(), *self._late()]
                    done = [one for one in ended if one in self._running]  # else Ctrl-C came
                self.parts_done(done)
        except Exception as error:
            self.give_up(error)
        if self.is_ended:
            self._cancel_open()
        is_over = self.is_ended and not self._open
        if is_over:
            self._router.maps.discard(self)
            self.close()
        return is_over

    def is_busy(self) -> bool:
        """Whether a request has not ended, or `look` has not told of it since."""
        with self._looking:  # else one may have ended, and the next not be sent yet
            return bool(self._open)

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
                request.tell_map = None  # a future that is kept does not keep the batch
                future.rank = request.replicas[0].ranks[0] if request.replicas else None
                found.append(future)
        return found

    def _late(self) -> Sequence[Future[Any]]:
        """The futures of the requests whose deadlines are over; they are cancelled, unless a rank is in a debugger.

        There are none once it is over, as all requests are cancelled then.
        """
        found: list[Future[Any]] = []
        timeout_s, now = self._timeout_s, time.monotonic()
        if timeout_s is None or self.is_ended:
            return found
        for request in [request for request, (_, since) in self._open.items() if since + timeout_s <= now]:
            future, _ = self._open.pop(request)
            late = request.late(timeout_s)
            if late.is_debugged:
                self._open[request] = future, now
            else:
                late.future = future
                late.has_cancelled()
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
                with SigintSafeLock():  # Ctrl-C loses no value
                    self._values = sorted(self.arrivals.drained(), key=lambda part: next(iter(numbers_of(part)), 0))
                if self.is_released:
                    self.release()
        if not self.keeps_rows:
            with contextlib.suppress(Exception):  # it is the result
                self.value(Deadline(math.inf))
            self._values = []  # here, as Ctrl-C may come before they are part of the result
        return True

    def tell(self) -> None:
        """Call the functions of `watch` if it is done."""
        if self._callbacks:
            self.wait(0)
        super().tell()

    def table(self) -> Table:
        """The rows, in the order of the batch; all chunks are done, without an error."""
        table = self._table  # once, as another thread may release them
        if table is None:
            table = self._table = stacked(self._values or (), self.site.method)
        return table

    def _brought(self, deadline: Deadline) -> Done:
        try:
            return Done(value=joined(self._values or (), self.how, self.site, deadline))
        except Exception as error:
            if self.keeps_rows and isinstance(error, RowsLost | CallTimeout | ResourceError):
                raise  # the rows of other chunks may be there, or these rows later
            return Done(error)

    def _drop_rows(self) -> None:
        self._table = None
        for part in self._values or ():
            part.release()


def open_map(feed: MapFeed, spec: MethodSpec, arguments: Sequence[BoundArgument]) -> Mapped:
    """Send the first requests of a map, or have them sent when the rows are there that it takes.

    Args:
        feed: Sends them.
        spec: The method.
        arguments: The bound arguments.

    Raises:
        ArgumentError: An argument cannot be pickled, or is a future without rows.
        BatchError: There is no batch, or they cannot be cut; if rows are missing, the map has this error.
    """
    for argument in arguments:
        check_has_rows(argument.value, argument.name, spec.label)
    futures = [argument.value for argument in arguments if isinstance(argument.value, Future)]
    given = [argument._replace(value=as_it_is(argument.value, argument.name, spec.label)) for argument in arguments]
    feed.claims = claims_of(futures, {})
    plan = partial(plan_parts, given, spec.registration.arguments, spec.label, feed.how)
    mapped = Mapped(feed)  # first: if Ctrl-C comes before the user has it, its end ends what was sent
    feed.start(plan, [future for future in futures if not future.done()])
    return mapped
