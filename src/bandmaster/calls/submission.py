"""Submission: encode what a call plan says, put the payloads, send the calls, and make a pending call of them.

::

    CallPlan ── encode_group, once per payload ──► Workers.put ──► Call, one for all ranks that get the same
                                                                     └── Workers.call ──► PendingCall ──► Future
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol
from weakref import WeakValueDictionary

from bandmaster.calls.encoding import encode_group
from bandmaster.calls.future import Future
from bandmaster.calls.later import LaterCall, LaterCalls
from bandmaster.calls.options import CallOptions
from bandmaster.calls.pending import NOTHING, CallSite, Collection, Failures, OpenCalls, PendingCall
from bandmaster.calls.row_arguments import RowsElsewhere, refers_to_rows
from bandmaster.codec import Payload
from bandmaster.contract import CLOSE_STREAM, NEXT, Call, Reply, Workers
from bandmaster.errors import CallCancelled, CallTimeout
from bandmaster.plan.arguments import ArgumentGroup, CallPlan, alike
from bandmaster.plan.mesh import Mesh
from bandmaster.plan.shares import Share
from bandmaster.plan.transfer import Gather, Only
from bandmaster.tracing.ledger import recording
from bandmaster.tracing.records import CallRecord

__all__ = ["Submitter", "Traffic", "Turns"]


class Turns(Protocol):
    """Says when a group that takes turns on its slots may be called; see `bandmaster.turns.participant`."""

    def admitted(self, label: str) -> AbstractContextManager[None]:
        """The context in which a call is sent. Raises UsageError if none may be sent now."""


class InParts(Protocol):
    """A call that is sent part by part: chunks of rows, or requests for the items of a generator.

    Attributes:
        site: What messages say about it.
        is_done: Whether it has ended.
    """

    site: CallSite

    @property
    def is_done(self) -> bool: ...

    def cancel(self) -> bool:
        """Cancel the parts that run, and send no more."""


class Traffic:
    """The calls to the same workers that may not be over.

    Attributes:
        open_calls: The calls, of all groups that have these workers.
        later: The calls that were not sent yet, since the rows that they take are not there.
    """

    def __init__(self) -> None:
        self.open_calls = OpenCalls()
        self.later = LaterCalls()
        self._in_parts: WeakValueDictionary[int, InParts] = WeakValueDictionary()

    def add_in_parts(self, call: InParts) -> None:
        """Note a call that is sent part by part, as long as something refers to it."""
        self._in_parts[id(call)] = call

    def in_parts(self) -> list[InParts]:
        """The calls that are sent part by part and have not ended; other threads may add some meanwhile."""
        calls = [reference() for reference in self._in_parts.valuerefs()]
        return [call for call in calls if call is not None and not call.is_done]


class Submitter:
    """Sends the calls of one group.

    Attributes:
        mesh: The group's mesh.
        meshes: The meshes of methods that were registered for another one, by method.
        ranks: All ranks.
        traffic: What submitters share that have the same workers.
        options: What the group says about its calls: ``timeout`` and ``grace``.
        turns: Says when it may be called; None if it takes no turns.

    Args:
        workers: Returns the group's workers; raises if the group was closed.
        cls: The worker class.
        mesh: The group's mesh.
        group: The group's name.
        prefix: What the workers' names of the methods begin with.
        traffic: Shared with the submitters of other groups that have the same workers.
    """

    def __init__(
        self,
        workers: Callable[[], Workers],
        cls: type,
        mesh: Mesh,
        group: str,
        prefix: str = "",
        traffic: Traffic | None = None,
    ) -> None:
        self.mesh = mesh
        self.ranks = tuple(range(mesh.size))
        self.options: dict[str, float | None] = {}
        self.turns: Turns | None = None
        self._workers = workers
        self._cls = cls
        self._group = group
        self.meshes: dict[str, Mesh] = {}
        self._prefix = prefix
        self._sites: dict[str, CallSite] = {}  # by method
        self.traffic = traffic = traffic or Traffic()
        self._open_calls = traffic.open_calls

    def label(self, method: str) -> str:
        """What messages call a method."""
        return f"{self._cls.__name__}.{method}"

    def submit(
        self,
        owner: object,
        method: str,
        plan: CallPlan | Callable[[], CallPlan],
        ranks: tuple[int, ...],
        collection: Collection,
        options: CallOptions | None = None,
        waits: bool = False,
        keeps_rows: bool = False,
        parents: Sequence[Future[Any]] = (),
    ) -> Any:
        """Send a call.

        Args:
            owner: The group, which lives as long as the future.
            method: Name of the method.
            plan: Its arguments, or what plans them when it is sent.
            ranks: The ranks that run it.
            collection: How their values become the result.
            options: How long it may take; by default as the group says.
            waits: Whether to wait for the result: then Ctrl-C cancels the call, as nobody else has the future.
            keeps_rows: Whether the rows of the result stay where they are made until somebody reads them.
            parents: The futures of rows that it takes and that are not there; it is sent when they are.

        Returns:
            The future, or its result if the caller waits for it.
        """
        given = owner, method, plan, ranks, collection, options, waits, keeps_rows, parents
        if self.turns is None:
            future = self._submitted(*given)
        else:
            with self.turns.admitted(self.label(method)):
                future = self._submitted(*given)
        if not waits:
            return future
        try:
            return future.result()
        except CallTimeout:
            raise  # it can still be waited for
        except BaseException:  # Ctrl-C: nobody else has the future
            future.cancel()
            raise

    def _submitted(
        self,
        owner: object,
        method: str,
        plan: CallPlan | Callable[[], CallPlan],
        ranks: tuple[int, ...],
        collection: Collection,
        options: CallOptions | None,
        waits: bool,
        keeps_rows: bool,
        parents: Sequence[Future[Any]],
    ) -> Future[Any]:
        """Send a call, or have it sent when the rows that it takes are there. As `submit`, without waiting."""
        call, later = None, self.traffic.later
        future: Future[Any]
        if parents or later.calls:
            self.check_open()
            send = partial(self._sent, method, plan, ranks, collection, options, keeps_rows)
            waiting = LaterCall(self.site(method, options), keeps_rows, parents, send, later)
            future = Future(waiting, owner)
            later.add(waiting, waits)
        else:
            call = self._new_call(method, collection, options, keeps_rows)
            future = Future(call, owner)
        try:
            if call is not None:
                self._send(call, method, plan, ranks, collection.ranks)
        except CallTimeout:
            raise  # it can still be waited for
        except BaseException:  # Ctrl-C: the ranks that were asked must not wait for those that were not
            future.cancel()
            raise
        return future

    def submit_hook(self, method: str, ranks: tuple[int, ...]) -> Future[Any]:
        """Send a call without arguments and values, behind all others, whether or not it is the group's turn.

        Args:
            method: Name of the method.
            ranks: The ranks that run it.
        """
        nothing = Collection(Gather(), ())
        return self._submitted(None, method, CallPlan(()), ranks, nothing, None, False, False, ())

    def admitted(self, label: str) -> AbstractContextManager[None]:
        """The context in which a call is sent; raises UsageError if it is not the group's turn."""
        return nullcontext() if self.turns is None else self.turns.admitted(label)

    def _sent(
        self,
        method: str,
        plan: CallPlan | Callable[[], CallPlan],
        ranks: tuple[int, ...],
        collection: Collection,
        options: CallOptions | None,
        keeps_rows: bool,
    ) -> PendingCall:
        """Send a call that was submitted before."""
        call = self._new_call(method, collection, options, keeps_rows)
        self._send_or_cancel(call, method, plan, ranks, collection.ranks)
        return call

    def _send_or_cancel(
        self,
        call: PendingCall,
        method: str,
        plan: CallPlan | Callable[[], CallPlan],
        ranks: tuple[int, ...],
        collected: tuple[int, ...],
    ) -> None:
        """Send a call; the ranks that were asked do not wait for those that were not, if that goes wrong."""
        try:
            self._send(call, method, plan, ranks, collected)
        except BaseException:
            Future(call).cancel()
            raise

    def _new_call(
        self, method: str, collection: Collection, options: CallOptions | None, keeps_rows: bool
    ) -> PendingCall:
        workers = self._workers()
        site, dead = self.site(method, options), Failures(workers.deaths)
        return PendingCall(workers, site, collection, self._open_calls, dead, keeps_rows)

    def _send(
        self,
        call: PendingCall,
        method: str,
        plan: CallPlan | Callable[[], CallPlan],
        ranks: tuple[int, ...],
        collected: tuple[int, ...],
    ) -> None:
        """Send a call, unless a rank is dead."""
        if call.failures:
            return
        if not isinstance(plan, CallPlan):
            plan = plan()
        call.real_rows = plan.real_rows
        reply = Reply.KEEP if call.keeps_rows else Reply.RETURN
        name, workers, label = self._prefix + method, call.workers, call.site.method
        record = call.record = None if recording.trace is None else self._record(call.site, workers)
        outgoing = self._encode(workers, label, name, plan, ranks, collected, reply, record)
        with call.reading:
            self._open_calls.add(call)
            workers.call(outgoing, call.tickets)
            if record is not None:
                record.is_sent()

    def submit_for_each(self, owner: object, method: str, plan: CallPlan, ranks: tuple[int, ...]) -> list[Future[Any]]:
        """Send a call, with a future for each rank."""
        self.traffic.later.wait()
        shares = {Share(rank, (rank,)): Collection(Only(), (rank,)) for rank in ranks}
        failures = Failures()
        site, name = self.site(method), self._prefix + method
        with self.admitted(site.method):
            return self._submit_shares(owner, site, name, plan, shares, failures, Reply.RETURN)

    def encoded(self, method: str, plan: CallPlan, ranks: tuple[int, ...]) -> list[Call]:
        """A call that returns the value of each rank, ready for `Workers.call`."""
        return self._encode(
            self._workers(), self.label(method), self._prefix + method, plan, ranks, ranks, Reply.RETURN
        )

    def submit_shares(
        self,
        owner: object,
        method: str,
        plan: CallPlan,
        shares: Mapping[Share, Collection],
        options: CallOptions | None,
        name: str | None = None,
        kind: type[PendingCall] = PendingCall,
    ) -> list[Future[Any]]:
        """Send a call now, with a future for each share of the ranks, whose rows stay where they are made.

        Calls that were not sent yet, since the rows that they take are not there, come after it. The caller has looked
        whether it is the group's turn.

        Args:
            owner: The group, which lives as long as the futures.
            method: Name of the method.
            plan: Its arguments.
            shares: How the value of each becomes the result.
            options: How long it may take; by default as the group says.
            name: What the workers are asked for, if it is not the method.
            kind: The class of the calls.
        """
        failures = Failures() if name in (NEXT, CLOSE_STREAM) else Failures(self._workers().deaths)
        site, name = self.site(method, options), name or self._prefix + method
        return self._submit_shares(owner, site, name, plan, shares, failures, Reply.KEEP, kind)

    def submit_chunk(
        self,
        owner: object,
        method: str,
        plan: CallPlan,
        share: Share,
        collection: Collection,
        options: CallOptions | None,
    ) -> Future[Any]:
        """Send a call to some ranks at once; what goes wrong is its error. Its rows stay where they are made."""
        call = self._new_call(method, collection, options, True)
        try:
            self._send_or_cancel(call, method, plan, share.ranks, collection.ranks)
        except Exception as error:
            call.fail(error)
        return Future(call, owner)

    def _submit_shares(
        self,
        owner: object,
        site: CallSite,
        name: str,
        plan: CallPlan,
        shares: Mapping[Share, Collection],
        failures: Failures,  # which all know, so that none is left in a collective with one that failed
        reply: Reply,
        kind: type[PendingCall] = PendingCall,
    ) -> list[Future[Any]]:
        workers, tickets = self._workers(), dict[int, Any]()
        record = self._record(site, workers)
        if not failures:
            ranks = tuple([rank for share in shares for rank in share.ranks])
            collected = tuple([rank for collection in shares.values() for rank in collection.ranks])
            outgoing = self._encode(workers, site.method, name, plan, ranks, collected, reply, record)
            try:
                workers.call(outgoing, tickets)
                if record is not None:
                    record.is_sent()
            except BaseException:  # Ctrl-C
                self._give_up(workers, site, tickets)
                raise
        results: list[Future[Any]] = []
        for share, collection in shares.items():
            known = failures if kind.is_for_all else Failures(failures)
            call = kind(workers, site, collection, self._open_calls, known, reply is Reply.KEEP)
            call.tickets.update({rank: tickets[rank] for rank in share.ranks if rank in tickets})
            call.real_rows, call.record = plan.real_rows, record
            self._open_calls.add(call)
            results.append(Future(call, owner))
        return results

    def _give_up(self, workers: Workers, site: CallSite, tickets: dict[int, Any]) -> None:
        """Cancel what was sent of a call that nobody gets: ranks that fail it go on when all of them have ended it."""
        call = PendingCall(workers, site, NOTHING, self._open_calls)
        call.tickets.update(tickets)
        self._open_calls.add(call)
        call.cancel()

    def begin_anew(self) -> None:
        """The workers were stopped, and so all pending calls have failed; others take their place."""
        self._give_up_later()
        self._open_calls.clear()

    def cancel_all(self) -> None:
        """Cancel the calls that are not over, and wait until they are: at most for the grace of each."""
        self._give_up_later()
        self._open_calls.cancel_all()

    def check_open(self) -> None:
        """Raise ClosedError if the group was closed."""
        self._workers()

    @property
    def workers(self) -> Workers:
        """The workers; raises if the group was closed."""
        return self._workers()

    def worker_method(self, method: str) -> str:
        """The workers' name of a method."""
        return self._prefix + method

    @staticmethod
    def _record(site: CallSite, workers: Workers) -> CallRecord | None:
        """The record of a call that is about to be encoded, if a trace records."""
        trace = recording.trace
        return None if trace is None else trace.begin(site.group, site.method, workers)

    def _give_up_later(self) -> None:
        self.traffic.later.give_up(
            lambda method: CallCancelled(
                f"{method} was not sent, as its group was closed or restarted, or one of its ranks replaced, before "
                "the rows that it takes were there; make the call again"
            )
        )

    def site(self, method: str, options: CallOptions | None = None) -> CallSite:
        """What messages say about a call of a method."""
        site = self._sites.get(method)
        if site is None:
            mesh = self.meshes.get(method, self.mesh)
            site = self._sites[method] = CallSite(self.label(method), mesh, self._group, None, self.options)
        return site if options is None else site._replace(options=options)

    def _encode(
        self,
        workers: Workers,
        label: str,
        name: str,
        plan: CallPlan,
        ranks: tuple[int, ...],
        collected: tuple[int, ...],
        reply: Reply,
        record: CallRecord | None = None,
    ) -> list[Call]:
        """Encode and put everything: what cannot be encoded is known before anything is sent."""
        groups: Sequence[ArgumentGroup] = plan.groups
        elsewhere = None
        if refers_to_rows(groups):
            elsewhere = RowsElsewhere(label, workers)
            groups = elsewhere.addressed(groups)
        payloads: list[Payload] = []
        receivers: list[tuple[int, ...]] = []
        for group in groups:
            if group.items:
                payloads.append(encode_group(group, label))
                receivers.append(group.ranks)
        parts = workers.put(payloads) if payloads else ()
        rows = [part.placed(workers) for part in elsewhere.parts] if elsewhere is not None else ()
        calls, is_fenced = [], len(ranks) > 1
        for members, numbers, is_collected in alike(ranks, tuple(receivers), collected):
            answer = reply if is_collected else Reply.DROP
            named = elsewhere.needed(numbers, rows) if elsewhere is not None else ()
            named_parts = tuple([parts[number] for number in numbers])
            which = elsewhere.numbers(numbers) if elsewhere is not None else None
            calls.append(
                Call(members, name, named_parts, answer, named, record is not None, which, is_fenced=is_fenced)
            )
        if record is not None:
            record.is_encoded(sum([payload.nbytes for payload in payloads]))
            if elsewhere is not None:
                elsewhere.note_in(record)
        return calls
