"""Starts calls whose results come share by share, or item by item."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from bandmaster.calls.call import Call
from bandmaster.calls.future import Future
from bandmaster.calls.options import CallOptions, FlowOptions
from bandmaster.calls.request import CallRequest, CallSite, Collection
from bandmaster.calls.spec import MethodSpec
from bandmaster.calls.submission import Submitter
from bandmaster.contract import CLOSE_STREAM, METHOD, NEXT, OPEN_STREAM, STREAM
from bandmaster.errors import UsageError
from bandmaster.flow.feed import Feed, Source
from bandmaster.flow.stream import Arrivals, Stream
from bandmaster.plan.arguments import ArgumentGroup, CallPlan, Share, of_one_rank, shares
from bandmaster.plan.rows import RealRows
from bandmaster.plan.transfer import Only

ITEMS_AHEAD = 2  # of each rank, by default


@dataclass(frozen=True)
class Flow:
    """One call of a method whose results do not come as one value from all ranks.

    Attributes:
        group: The group, which lives as long as the futures.
        submitter: Sends the calls.
        spec: The method.
        options: The limits of the calls.
        how: The user's flow options.
    """

    group: object
    submitter: Submitter
    spec: MethodSpec
    options: CallOptions | None
    how: FlowOptions

    def stream(self, plan: Callable[[], CallPlan], parents: Sequence[Future[Any]]) -> Stream:
        """A stream of the values of the ranks, or of the items that generators yield.

        Args:
            plan: Plans the call, when the rows that it takes are there.
            parents: The futures of the missing rows.
        """
        if not self.spec.is_generator:
            return self._streamed(plan, self._values, parents)
        ahead = replace(self.how, maxsize=self.how.maxsize or ITEMS_AHEAD)
        return replace(self, how=ahead)._streamed(plan, partial(Items, self), parents)

    def _streamed(
        self, plan: Callable[[], Any], make: Callable[[Any], Source], parents: Sequence[Future[Any]]
    ) -> Stream:
        """A stream of the parts of a call that begins now, or when its rows are there and earlier calls are sent."""
        arrivals = Arrivals()
        feed = Feed(self._site, self.submitter, self.how, arrivals.put)
        begin = _begin(plan, make, parents)
        with self.submitter.admitted(self.spec.label):
            feed.start(begin, parents)
        return Stream(feed, arrivals)

    @property
    def _site(self) -> CallSite:
        return self.submitter.site(self.spec.name, self.options)

    def _values(self, plan: CallPlan) -> Source:
        """Send a call whose values arrive one by one."""
        found = {share: self.alone(share) for share in self.shares_of(plan)}
        return Source(_labelled(found, self.submitter.submit_shares(self.request(plan), found), plan.real_rows))

    def request(self, plan: CallPlan) -> CallRequest:
        """The request for a call of all ranks."""
        spec = self.spec
        return CallRequest(spec.name, plan, spec.ranks, owner=self.group, options=self.options)

    def alone(self, share: Share) -> Collection:
        """The collection that makes a result of its own from the value of a share."""
        return Collection(of_one_rank(self.spec.collection.incoming, share.rank), (share.rank,))

    def shares_of(self, plan: CallPlan) -> tuple[Share, ...]:
        """The shares of the ranks that each return a value."""
        return shares(self.spec.ranks, [group.ranks for group in plan.groups], self.spec.collection.ranks)


class Items(Source):
    """The items of generators, one after the other from each share.

    An item is requested when the one before it is there, so that other calls come between two items, and so that a
    generator exists when its next item is requested, whatever the order in which a backend runs calls.

    Args:
        flow: The call.
        plan: Its arguments.
    """

    def __init__(self, flow: Flow, plan: CallPlan) -> None:
        self._flow, self._rows, self._stream = flow, plan.real_rows, uuid.uuid4().hex
        if self._rows is not None and self._rows.padded_to is not None:
            raise UsageError(
                f"{flow.spec.label} yields items, from which padding cannot be removed; split without pad=True"
            )
        name = ((STREAM, self._stream), (METHOD, flow.submitter.worker_method(flow.spec.name)))
        plan_ = CallPlan((*plan.groups, ArgumentGroup(name, ("stream", "method"), flow.spec.ranks)))
        found = flow.shares_of(plan)
        super().__init__(self._call(found, OPEN_STREAM, plan_))
        self._unclosed = set(found)

    def has_more(self, share: Share) -> bool:
        """Whether the generators of a share have not ended."""
        return share in self._unclosed

    def send(self, share: Share) -> Future[Any]:
        """Request the next item of a share."""
        with self._flow.submitter.admitted(self._flow.spec.label):
            return self._call([share], NEXT)[share]

    def is_end(self, share: Share, future: Future[Any]) -> bool:
        """Whether a reply has no item."""
        call = future._call
        assert isinstance(call, Call), "items are requested by calls"
        if call.has_value_of(share.rank):
            return False
        self._unclosed.discard(share)
        return True

    def close(self) -> None:
        """Close the generators that have not ended, also outside of the group's turn, as it frees resources."""
        unclosed, self._unclosed = self._unclosed, set()
        if unclosed:
            with contextlib.suppress(Exception):  # the group was closed
                self._call(sorted(unclosed), CLOSE_STREAM)

    def _call(self, found: Sequence[Share], what: str, plan: CallPlan | None = None) -> dict[Share, Future[Any]]:
        if plan is None:
            ranks = tuple([rank for share in found for rank in share.ranks])
            plan = CallPlan((ArgumentGroup(((0, self._stream),), ("stream",), ranks),))
        request = replace(self._flow.request(plan), asks_for=what, is_for_all=False, is_cleanup=what == CLOSE_STREAM)
        alone = {share: Collection(Only(), (share.rank,)) for share in found}
        return _labelled(found, self._flow.submitter.submit_shares(request, alone), self._rows)


def _begin(
    plan: Callable[[], Any], make: Callable[[Any], Source], parents: Sequence[Future[Any]]
) -> Callable[[], Source]:
    """Return a function that sends the first parts of a call. Mistakes are errors now, unless rows are missing."""
    if parents:
        return lambda: make(plan())
    return partial(make, plan())


def _labelled(
    found: Iterable[Share], futures: Sequence[Future[Any]], rows: RealRows | None
) -> dict[Share, Future[Any]]:
    """The futures by share, labelled with the rank and the rows of the share."""
    labelled = dict(zip(found, futures, strict=True))
    for share, future in labelled.items():
        future.rank, future.numbers = share.rank, None if rows is None else rows.numbers[share.rank]
    return labelled
