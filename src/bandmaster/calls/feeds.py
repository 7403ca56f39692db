"""Where the futures of a stream come from: shares of the ranks, or the items of generators."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from bandmaster.calls.future import Future
from bandmaster.calls.outcome import Outcome
from bandmaster.calls.pending import PendingCall
from bandmaster.calls.stream import Arrivals
from bandmaster.contract import Workers
from bandmaster.errors import CallCancelled
from bandmaster.plan.shares import Share

__all__ = ["CloseCall", "ItemCall", "ItemFeed", "ShareFeed", "pending_calls"]


def pending_calls(futures: Iterable[Future[Any]]) -> list[PendingCall]:
    """The calls of some futures that are not done; another thread may change what holds the futures."""
    calls: list[Outcome] = [future._call for future in list(futures)]
    return [call for call in calls if isinstance(call, PendingCall) and not call.is_done]


class ShareFeed:
    """The values of the ranks, each as it comes.

    Args:
        futures: One for each share of the ranks.
        workers: The workers that were asked.
    """

    def __init__(self, futures: Mapping[Future[Any], Share], workers: Workers) -> None:
        self.site = next(iter(futures))._call.site
        self.workers = workers
        self.arrived: Arrivals[Future[Any]] = Arrivals()
        self._left = dict(futures)
        for future in futures:
            future.add_done_callback(self.arrived.put)

    @property
    def is_open(self) -> bool:
        """Whether a rank has not replied."""
        return bool(self._left)

    def received(self, future: Future[Any]) -> Future[Any]:
        """As `Feed.received`."""
        del self._left[future]
        error = future.exception()
        if error is not None:
            raise error
        return future

    def pending(self) -> list[PendingCall]:
        """As `Feed.pending`."""
        return pending_calls(self._left)

    def close(self) -> None:
        """As `Feed.close`."""
        futures, self._left = self._left, {}
        for future in futures:
            future.cancel()


class ItemCall(PendingCall):
    """A call for the next item of a generator.

    Attributes:
        is_end: Whether there is none any more; known once it is done.
    """

    __slots__ = ("is_end",)

    def _conclude(self) -> None:
        self.is_end = self._values.get(self._collection.ranks[0], self) is None
        super()._conclude()


class CloseCall(PendingCall):
    """A call that closes generators."""

    __slots__ = ()
    is_cleanup = True


class ItemFeed:
    """The items of generators, of which each is asked for a few more than were taken.

    Args:
        opened: The futures of the calls that have begun with the generators, for each share of the ranks.
        ask: Asks a share for its next item.
        close: Closes the generators of some shares.
        maxsize: How many items of a share may be made before they are taken.
        workers: The workers that are asked.
    """

    def __init__(
        self,
        opened: Mapping[Future[Any], Share],
        ask: Callable[[Share], Future[Any]],
        close: Callable[[list[Share]], object],
        maxsize: int,
        workers: Workers,
    ) -> None:
        self.site = next(iter(opened))._call.site
        self.workers = workers
        self.arrived: Arrivals[Share] = Arrivals()
        self._opened = set(opened)
        self._share_of = dict(opened)
        self._asked = {share: deque([future]) for future, share in opened.items()}  # in the order of the items
        self._ended: set[Share] = set()
        self._is_cancelled = False
        self._ask, self._close = ask, close
        for future, share in opened.items():
            self._tell_when_done(future, share)
        try:
            for _ in range(maxsize):
                for share in opened.values():
                    self._ask_for_one(share)
        except BaseException:
            self.close()
            raise

    @property
    def is_open(self) -> bool:
        """Whether a generator has not ended."""
        return bool(self._share_of)

    def received(self, share: Share) -> Future[Any] | None:
        """As `Feed.received`; has the next item made.

        The items of a rank are done in their order, but may be told of in another.
        """
        if self._is_cancelled:
            raise CallCancelled(f"{self.site.method} was cancelled; make the call again")
        future = self._asked[share].popleft()
        del self._share_of[future]
        error = future.exception()
        if error is not None:
            raise error
        if future in self._opened:
            self._opened.remove(future)
            return None
        if isinstance(future._call, ItemCall) and future._call.is_end:
            self._ended.add(share)
            return None
        if share not in self._ended:
            self._ask_for_one(share)
        return future

    def pending(self) -> list[PendingCall]:
        """As `Feed.pending`."""
        return pending_calls(self._share_of)

    def close(self) -> None:
        """As `Feed.close`."""
        asked, self._share_of = self._share_of, {}
        for future in asked:
            future.cancel()
        with contextlib.suppress(Exception):  # the group was closed, or has died
            self._close(sorted(set(self._asked) - self._ended))

    @property
    def is_done(self) -> bool:
        """Whether all generators have ended, or were closed."""
        return not self.is_open

    def cancel(self) -> bool:
        """Ask for no more items. The stream raises `CallCancelled` and closes the generators then."""
        self._is_cancelled = True
        self.arrived.put(next(iter(self._asked)))  # wakes a thread that waits for an item
        for future in list(self._share_of):
            future.cancel()
        return True

    def _ask_for_one(self, share: Share) -> None:
        future = self._ask(share)
        self._share_of[future] = share
        self._asked[share].append(future)
        self._tell_when_done(future, share)

    def _tell_when_done(self, future: Future[Any], share: Share) -> None:
        future.add_done_callback(lambda _: self.arrived.put(share))
