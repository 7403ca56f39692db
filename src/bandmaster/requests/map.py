"""`Mapped`: many requests of one method, one for each row or chunk of rows; `RequestMethod.map` returns it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial
from typing import Any

from bandmaster.calls.future import Future, claims_of
from bandmaster.calls.request import encode_argument
from bandmaster.calls.spec import MethodSpec
from bandmaster.codec import decode
from bandmaster.errors import UsageError
from bandmaster.flow.stream import Stream
from bandmaster.plan.arguments import BoundArgument
from bandmaster.requests.arguments import check_has_rows
from bandmaster.requests.map_feed import MapFeed
from bandmaster.requests.parts import plan_parts


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
    given = [argument._replace(value=_as_it_is(argument, spec.label)) for argument in arguments]
    feed.claims = claims_of(futures, {})
    plan = partial(plan_parts, given, spec.registration.arguments, spec.label, feed.how)
    feed.start(plan, [future for future in futures if not future.done()])
    return Mapped(feed)


def _as_it_is(argument: BoundArgument, method: str) -> Any:
    """A copy of an argument, which later changes by the caller do not affect."""
    if isinstance(argument.value, Future):
        return argument.value
    return decode(encode_argument(argument.value, argument.name, method).private())
