"""How the results of one call flow: as one value, share by share, item by item, or chunk by chunk."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from bandmaster.calls.feeds import CloseCall, ItemCall, ItemFeed, ShareFeed
from bandmaster.calls.future import Future
from bandmaster.calls.options import CallOptions, FlowOptions
from bandmaster.calls.pending import Collection
from bandmaster.calls.pull import ChunkFeed, Pull
from bandmaster.calls.pulled import PulledCall
from bandmaster.calls.spec import MethodSpec
from bandmaster.calls.stream import Stream
from bandmaster.calls.submission import Submitter
from bandmaster.contract import CLOSE_STREAM, METHOD, NEXT, OPEN_STREAM, STREAM
from bandmaster.errors import UsageError
from bandmaster.plan.arguments import ArgumentGroup, CallPlan
from bandmaster.plan.binding import bind
from bandmaster.plan.pulling import PullPlan, collect_chunks, plan_pull, replicas
from bandmaster.plan.shares import Share, of_one_rank, shares
from bandmaster.plan.transfer import Concat, Only, TransferProtocol

__all__ = ["Flow"]

ITEMS_AHEAD = 2  # of each rank, where the user does not say how many


@dataclass(frozen=True)
class Flow:
    """One call of a method whose results do not come as one value from all ranks.

    Attributes:
        group: The group, which lives as long as the futures.
        submitter: Sends the calls.
        spec: The method.
        options: How long calls may take.
        how: What the user has asked for.
    """

    group: object
    submitter: Submitter
    spec: MethodSpec
    options: CallOptions | None
    how: FlowOptions

    def shares(self, plan: CallPlan) -> Stream:
        """A stream of the values of the ranks."""
        found = self._shares_of(plan)
        alone = {share: self._alone(share) for share in found}
        futures = self.submitter.submit_shares(self.group, self.spec.name, plan, alone, self.options)
        for future, share in zip(futures, found, strict=True):
            _label(future, share, plan)
        return Stream(ShareFeed(dict(zip(futures, found, strict=True)), self.submitter.workers))

    def items(self, plan: CallPlan) -> Stream:
        """A stream of the items that generators yield."""
        if plan.real_rows is not None and plan.real_rows.padded_to is not None:
            raise UsageError(
                f"{self.spec.label} yields items, from which padding cannot be removed; split without pad=True"
            )
        found, name = self._shares_of(plan), uuid.uuid4().hex
        alone = {share: Collection(Only(), (share.rank,)) for share in found}
        begin = self._items_plan(plan, name)
        opened = self.submitter.submit_shares(self.group, self.spec.name, begin, alone, self.options, OPEN_STREAM)

        def call(some: Sequence[Share], what: str) -> list[Future[Any]]:
            asked = tuple([rank for share in some for rank in share.ranks])
            which = CallPlan((ArgumentGroup(((0, name),), ("stream",), asked),))
            collections = {share: alone[share] for share in some}
            kind = CloseCall if what == CLOSE_STREAM else ItemCall
            return self.submitter.submit_shares(
                self.group, self.spec.name, which, collections, self.options, what, kind
            )

        def ask(share: Share) -> Future[Any]:
            (future,) = call([share], NEXT)
            _label(future, share, plan)
            return future

        close = partial(call, what=CLOSE_STREAM)
        ahead = self.how.maxsize or ITEMS_AHEAD
        feed = ItemFeed(dict(zip(opened, found, strict=True)), ask, close, ahead, self.submitter.workers)
        self.submitter.traffic.add_in_parts(feed)
        return Stream(feed)

    def _items_plan(self, plan: CallPlan, name: str) -> CallPlan:
        """The arguments of the call that begins with the generators."""
        items = ((STREAM, name), (METHOD, self.submitter.worker_method(self.spec.name)))
        return CallPlan((*plan.groups, ArgumentGroup(items, ("stream", "method"), self.spec.ranks)), plan.real_rows)

    def _shares_of(self, plan: CallPlan) -> tuple[Share, ...]:
        return shares(self.spec.ranks, [group.ranks for group in plan.groups], self.spec.collection.ranks)

    def chunks(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Stream:
        """A stream of the values of chunks."""
        takers = self._takers()
        pull = self._pull(args, kwargs)
        site = self.submitter.site(self.spec.name, self.options)
        returns_errors = self.how.on_error == "return"

        def send(number: int, share: Share) -> Future[Any]:
            with self.submitter.admitted(self.spec.label):  # chunk by chunk, as the user takes them
                return pull.send(number, share)

        feed = ChunkFeed(site, self.submitter.workers, pull.chunks, takers, send, self.how.maxsize, returns_errors)
        self.submitter.traffic.add_in_parts(feed)
        return Stream(feed)

    def pulled(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], parents: Sequence[Future[Any]], waits: bool
    ) -> Future[Any]:
        """The future of all chunks."""
        takers, later = self._takers(), self.submitter.traffic.later
        self.submitter.check_open()
        begin: Callable[[], Pull] = partial(self._pull, args, kwargs)
        if not parents:
            pull = begin()  # mistakes are errors now
            begin = lambda: pull  # noqa: E731
        site = self.submitter.site(self.spec.name, self.options)
        join = partial(collect_chunks, self._protocol, method=self.spec.label)
        keeps_rows = isinstance(self.spec.collection.incoming, Concat)
        returns_errors = self.how.on_error == "return"
        call = PulledCall(site, keeps_rows, returns_errors, parents, begin, takers, join, later)
        self.submitter.traffic.add_in_parts(call)
        future: Future[Any] = Future(call, self.group)
        with self.submitter.admitted(self.spec.label):  # once for all chunks: the group yields after the last one
            later.add(call, waits)
            later.advance()
        return future

    @property
    def _protocol(self) -> TransferProtocol[Any, Any]:
        protocol = self.spec.registration.protocol
        assert isinstance(protocol, TransferProtocol), "`_takers` refuses others"
        return protocol

    def _takers(self) -> tuple[Share, ...]:
        if self.spec.is_for_zero or self.spec.is_generator:
            why = "runs on rank 0 alone" if self.spec.is_for_zero else "is a generator"
            raise UsageError(f"{self.spec.label} {why}, so that it cannot be called with pull=; call it without")
        return replicas(self.spec.registration.protocol, self.spec.mesh, self.spec.label)

    def _pull(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Pull:
        """Plan the chunks; the rows of futures among the arguments are there."""
        spec, size = self.spec, self.how.pull
        assert size is not None, "the caller has looked"
        arguments = bind(spec.label, spec.signature, args, kwargs)
        rules, split = spec.registration.arguments, self._protocol.outgoing
        plan = plan_pull(arguments, split, rules, spec.label, size, self.how.group_by)
        return Pull(plan.chunks, partial(self._send_chunk, plan))

    def _send_chunk(self, plan: PullPlan, number: int, share: Share) -> Future[Any]:
        spec = self.spec
        chunk = plan.of(number, share.ranks)
        return self.submitter.submit_chunk(self.group, spec.name, chunk, share, self._alone(share), self.options)

    def _alone(self, share: Share) -> Collection:
        """How the value of a share becomes a result of its own."""
        return Collection(of_one_rank(self.spec.collection.incoming, share.rank), (share.rank,))


def _label(future: Future[Any], share: Share, plan: CallPlan) -> None:
    """Note whose result it is, and of which rows."""
    future.rank = share.rank
    future.numbers = None if plan.real_rows is None else plan.real_rows.numbers[share.rank]
