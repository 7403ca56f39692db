"""Starts calls whose results come share by share, item by item, or chunk by chunk."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from bandmaster.calls.future import Claim, Future, claims_of
from bandmaster.calls.options import CallOptions, FlowOptions
from bandmaster.calls.request import CallRequest, CallSite, Collection
from bandmaster.calls.spec import MethodSpec
from bandmaster.calls.submission import Submitter
from bandmaster.contract import CLOSE_STREAM, METHOD, NEXT, OPEN_STREAM, STREAM, Workers
from bandmaster.errors import UsageError
from bandmaster.flow.chunks import PullPlan, collect_chunks, plan_pull, replicas
from bandmaster.flow.feeds import Feed, ItemFeed, ShareFeed
from bandmaster.flow.pull import ChunkFeed, Pull
from bandmaster.flow.pulled import PulledCall
from bandmaster.flow.stream import Stream
from bandmaster.plan.arguments import ArgumentGroup, CallPlan, Share, of_one_rank, shares
from bandmaster.plan.binding import bind
from bandmaster.plan.rows import RealRows
from bandmaster.plan.transfer import Concat, Only, TransferProtocol

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
        if self.spec.is_generator:
            items = ItemFeed(*self._of_feeds, self._returns_errors, self.how.maxsize or ITEMS_AHEAD)
            return self._begun(items, partial(self._begin_items, items), plan, parents)
        shares = ShareFeed(*self._of_feeds)
        return self._begun(shares, partial(self._begin_shares, shares), plan, parents)

    def _begun(
        self, feed: Feed, begin: Callable[[Any], object], plan: Callable[[], Any], parents: Sequence[Future[Any]]
    ) -> Stream:
        """A stream of a feed that begins now, or when missing rows are there and the calls before it are sent."""
        if not parents:
            planned = plan()  # mistakes are errors now
            plan = lambda: planned  # noqa: E731
        with self.submitter.admitted(self.spec.label):
            try:
                if parents or self.submitter.work.waiting:
                    feed.begin_later(lambda: begin(plan()), parents, self.submitter.work)
                else:
                    begin(plan())
            except BaseException:  # Ctrl-C
                feed.close()
                raise
        return Stream(feed)

    @property
    def _of_feeds(self) -> tuple[CallSite, Workers]:
        return self.submitter.site(self.spec.name, self.options), self.submitter.workers

    @property
    def _returns_errors(self) -> bool:
        return self.how.on_error == "return"

    def _begin_shares(self, feed: ShareFeed, plan: CallPlan) -> None:
        """Send a call whose values arrive one by one."""
        alone = {share: self._alone(share) for share in self._shares_of(plan)}
        futures = self.submitter.submit_shares(self._request(plan), alone)
        feed.begin(_labelled(alone, futures, plan.real_rows))

    def _begin_items(self, feed: ItemFeed, plan: CallPlan) -> None:
        """Start generators, whose items are requested one by one."""
        if plan.real_rows is not None and plan.real_rows.padded_to is not None:
            raise UsageError(
                f"{self.spec.label} yields items, from which padding cannot be removed; split without pad=True"
            )
        stream, rows = uuid.uuid4().hex, plan.real_rows
        alone = {share: Collection(Only(), (share.rank,)) for share in self._shares_of(plan)}

        def call(some: Sequence[Share], which: CallPlan, what: str) -> dict[Share, Future[Any]]:
            request = replace(self._request(which), asks_for=what, is_for_all=False, is_cleanup=what == CLOSE_STREAM)
            futures = self.submitter.submit_shares(request, {share: alone[share] for share in some})
            return _labelled(some, futures, rows)

        def named(some: Sequence[Share]) -> CallPlan:
            asked = tuple([rank for share in some for rank in share.ranks])
            return CallPlan((ArgumentGroup(((0, stream),), ("stream",), asked),))

        def ask(share: Share) -> Future[Any]:
            with self.submitter.admitted(self.spec.label):
                return call([share], named([share]), NEXT)[share]

        def close(some: Sequence[Share]) -> object:  # even if it is not the group's turn, as it frees resources
            return call(some, named(some), CLOSE_STREAM)

        first = call(list(alone), self._first_items_plan(plan, stream), OPEN_STREAM)
        feed.begin_items(first, ask, close)
        self.submitter.work.add_in_parts(feed)

    def _first_items_plan(self, plan: CallPlan, name: str) -> CallPlan:
        """The arguments of the call that starts the generators."""
        items = ((STREAM, name), (METHOD, self.submitter.worker_method(self.spec.name)))
        return CallPlan((*plan.groups, ArgumentGroup(items, ("stream", "method"), self.spec.ranks)))

    def _shares_of(self, plan: CallPlan) -> tuple[Share, ...]:
        return shares(self.spec.ranks, [group.ranks for group in plan.groups], self.spec.collection.ranks)

    def chunks(self, args: Sequence[Any], kwargs: Mapping[str, Any], parents: Sequence[Future[Any]]) -> Stream:
        """A stream of the values of chunks; ``parents`` are the futures of missing rows."""
        takers, feed = self._takers(), ChunkFeed(*self._of_feeds, self._returns_errors, self.how.maxsize)
        plan = partial(self._pull, claims_of(args, kwargs), args, kwargs)
        return self._begun(feed, partial(self._begin_chunks, feed, takers), plan, parents)

    def _begin_chunks(self, feed: ChunkFeed, takers: Sequence[Share], pull: Pull) -> None:
        def send(number: int, share: Share) -> Future[Any]:
            with self.submitter.admitted(self.spec.label):  # chunk by chunk, as the user takes them
                return pull.send(number, share)

        feed.begin(Pull(pull.chunks, send), takers)
        self.submitter.work.add_in_parts(feed)

    def pulled(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], parents: Sequence[Future[Any]], waits: bool
    ) -> Future[Any]:
        """The future of all chunks."""
        takers, work = self._takers(), self.submitter.work
        self.submitter.check_open()
        begin: Callable[[], Pull] = partial(self._pull, claims_of(args, kwargs), args, kwargs)
        if not parents:
            pull = begin()  # mistakes are errors now
            begin = lambda: pull  # noqa: E731
        site = self.submitter.site(self.spec.name, self.options)
        join = partial(collect_chunks, self._protocol, method=self.spec.label)
        keeps_rows = isinstance(self.spec.collection.incoming, Concat)
        call = PulledCall(site, keeps_rows, self._returns_errors, parents, begin, takers, join, work)
        self.submitter.work.add_in_parts(call)
        future: Future[Any] = Future(call, self.group)
        with self.submitter.admitted(self.spec.label):  # once for all chunks: the group yields after the last one
            work.enqueue(call, waits)
            work.advance()
        return future

    @property
    def _protocol(self) -> TransferProtocol[Any, Any]:
        protocol = self.spec.registration.protocol
        assert isinstance(protocol, TransferProtocol), "`_takers` refuses others"
        return protocol

    def _takers(self) -> tuple[Share, ...]:
        if self.spec.is_for_zero or self.spec.is_generator:
            why = "runs on rank 0 alone" if self.spec.is_for_zero else "is a generator"
            raise UsageError(f"{self.spec.label} {why}, so it cannot be called with pull=; call it without")
        return replicas(self.spec.registration.protocol, self.spec.mesh, self.spec.label)

    def _pull(self, claims: Sequence[Claim], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Pull:
        """Plan the chunks; the rows of futures among the arguments are there."""
        spec, size = self.spec, self.how.pull
        assert size is not None, "the caller has checked it"
        arguments = bind(spec.label, spec.signature, args, kwargs)
        rules, split = spec.registration.arguments, self._protocol.outgoing
        plan = plan_pull(arguments, split, rules, spec.label, size, self.how.group_by)
        return Pull(plan.chunks, partial(self._send_chunk, claims, plan))

    def _send_chunk(self, _: Sequence[Claim], plan: PullPlan, number: int, share: Share) -> Future[Any]:
        chunk = plan.of(number, share.ranks)
        request = replace(self._request(chunk), ranks=share.ranks, collection=self._alone(share), keeps_rows=True)
        return self.submitter.submit_now(request)

    def _request(self, plan: CallPlan) -> CallRequest:
        """The request for a call of all ranks."""
        spec = self.spec
        return CallRequest(spec.name, plan, spec.ranks, owner=self.group, options=self.options)

    def _alone(self, share: Share) -> Collection:
        """The collection that makes a result of its own from the value of a share."""
        return Collection(of_one_rank(self.spec.collection.incoming, share.rank), (share.rank,))


def _labelled(
    shares: Iterable[Share], futures: Sequence[Future[Any]], rows: RealRows | None
) -> dict[Share, Future[Any]]:
    """The futures by share, labelled with the rank and the rows of the share."""
    found = dict(zip(shares, futures, strict=True))
    for share, future in found.items():
        future.rank, future.numbers = share.rank, None if rows is None else rows.numbers[share.rank]
    return found
