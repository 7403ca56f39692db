"""The feeds of calls whose results come share by share, or item by item."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bandmaster.calls.call import Call
from bandmaster.calls.future import Future
from bandmaster.calls.options import CallOptions, FlowOptions
from bandmaster.calls.request import CallRequest, Collection
from bandmaster.calls.spec import MethodSpec
from bandmaster.calls.submission import Submitter
from bandmaster.contract import CLOSE_STREAM, METHOD, NEXT, OPEN_STREAM, STREAM
from bandmaster.errors import UsageError
from bandmaster.flow.feed import Feed
from bandmaster.plan.arguments import ArgumentGroup, CallPlan, Share, of_one_rank, shares
from bandmaster.plan.rows import RealRows
from bandmaster.plan.transfer import Only


class Values(Feed):
    """The values of a call, one by one.

    Args:
        group: The group, which lives as long as the futures.
        submitter: Sends the calls.
        spec: The method.
        options: The limits of the calls.
        how: The user's flow options.
    """

    n_ahead: int | None = None  # the usual ``maxsize`` of each rank

    def __init__(
        self, group: object, submitter: Submitter, spec: MethodSpec, options: CallOptions | None, how: FlowOptions
    ) -> None:
        how = replace(how, maxsize=how.maxsize or self.n_ahead)
        super().__init__(submitter.site(spec.name, options), submitter, how)
        self._spec = spec
        self._request = CallRequest(spec.name, CallPlan(()), spec.ranks, owner=group, options=options)
        self._rows: RealRows | None = None  # that each rank was sent

    def _first(self, plan: CallPlan) -> Mapping[Share, Future[Any]]:
        incoming, self._rows = self._spec.collection.incoming, plan.real_rows
        found = {share: Collection(of_one_rank(incoming, share.rank), (share.rank,)) for share in self._shares(plan)}
        return self._sent_as_one(replace(self._request, plan=plan), found)

    def _shares(self, plan: CallPlan) -> tuple[Share, ...]:
        """The shares of the ranks that each return a value."""
        return shares(self._spec.ranks, [group.ranks for group in plan.groups], self._spec.collection.ranks)

    def _sent_as_one(self, request: CallRequest, found: Mapping[Share, Collection]) -> dict[Share, Future[Any]]:
        """Send a call. Returns its futures by share, labelled with the rank and the rows of the share."""
        futures = dict(zip(found, self._submitter.submit_shares(request, found), strict=True))
        for share, future in futures.items():
            future.rank, future.numbers = share.rank, None if self._rows is None else self._rows.numbers[share.rank]
        return futures


class Items(Values):
    """The items of generators, one after the other from each share.

    An item is requested when the one before it is there, so that other calls come between two items, and so that a
    generator exists when its next item is requested, whatever the order in which a backend runs calls.
    """

    n_ahead = 2
    _unclosed: frozenset[Share] = frozenset()  # the shares whose generators have begun, and not ended

    def _first(self, plan: CallPlan) -> Mapping[Share, Future[Any]]:
        if plan.real_rows is not None and plan.real_rows.padded_to is not None:
            raise UsageError(
                f"{self._spec.label} yields items, from which padding cannot be removed; split without pad=True"
            )
        self._rows, found, self._stream = plan.real_rows, self._shares(plan), uuid.uuid4().hex
        name = ((STREAM, self._stream), (METHOD, self._submitter.prefix + self._spec.name))
        named = CallPlan((*plan.groups, ArgumentGroup(name, ("stream", "method"), self._spec.ranks)))
        futures = self._call(found, OPEN_STREAM, named)
        self._unclosed = frozenset(found)
        return futures

    def _call(self, found: Sequence[Share], what: str, plan: CallPlan | None = None) -> dict[Share, Future[Any]]:
        if plan is None:
            ranks = tuple([rank for share in found for rank in share.ranks])
            plan = CallPlan((ArgumentGroup(((0, self._stream),), ("stream",), ranks),))
        is_cleanup = what == CLOSE_STREAM
        request = replace(self._request, plan=plan, asks_for=what, is_cleanup=is_cleanup, is_for_all=False)
        return self._sent_as_one(request, {share: Collection(Only(), (share.rank,)) for share in found})

    def _has_more(self, share: Share) -> bool:
        return share in self._unclosed

    def _send_next(self, share: Share) -> Future[Any]:
        with self._submitter.gate.admitted(self._spec.label):
            return self._call([share], NEXT)[share]

    def _is_end(self, share: Share, future: Future[Any]) -> bool:
        call = future._call
        assert isinstance(call, Call), "items are requested by calls"
        if call.has_value_of(share.rank):
            return False
        self._unclosed -= {share}
        return True

    def close(self) -> None:
        """Close the generators that have not ended, also outside of the group's turn, as it frees resources."""
        super().close()
        unclosed, self._unclosed = self._unclosed, frozenset()
        if unclosed:
            with contextlib.suppress(Exception):  # the group was closed
                self._call(sorted(unclosed), CLOSE_STREAM)
