"""Submission: encode the arguments of a call plan, put the payloads, and send the call.

::

    CallRequest ── plan ── orders_of ─────► Workers.put ──► an order per set of ranks alike ──► Workers.call
         └──► Call ◄── tickets ──────────────────────────────────────────────────────────────────────┘
                └──► Future
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from bandmaster.calls.call import Call, Failures
from bandmaster.calls.future import Future
from bandmaster.calls.hooks import OPEN, CallTrace, Gate, hooks
from bandmaster.calls.open_work import OpenWork
from bandmaster.calls.options import FUNCTION, library
from bandmaster.calls.request import CallRequest, CallSite, Collection, encode_group
from bandmaster.calls.row_arguments import RowsElsewhere, refers_to_rows
from bandmaster.calls.spec import MethodSpec
from bandmaster.codec import Payload
from bandmaster.contract import CLOSE_STREAM, NEXT, Reply, WorkerCall, Workers
from bandmaster.errors import UsageError, suggestion
from bandmaster.plan.arguments import ArgumentGroup, CallPlan, Share, alike
from bandmaster.plan.mesh import Mesh
from bandmaster.plan.rows import RealRows
from bandmaster.plan.transfer import Custom, Gather, Only
from bandmaster.platform.locks import SigintSafeLock

if TYPE_CHECKING:
    from typing_extensions import Self


def orders_of(
    request: CallRequest, workers: Workers, plan: CallPlan, label: str, record: CallTrace | None
) -> list[WorkerCall]:
    """Encode and put all arguments, so that an encoding error is raised before anything is sent.

    Args:
        request: The call; ``asks_for`` is the workers' name of the method.
        workers: The workers that run it.
        plan: Its arguments.
        label: ``"Class.method"``, for messages.
        record: Its record, if a trace records.
    """
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
    reply = Reply.KEEP if request.keeps_rows else Reply.RETURN
    orders = []
    for ranks, numbers, is_collected in alike(request.ranks, tuple(receivers), request.collection.ranks):
        order = WorkerCall(
            ranks,
            request.asks_for,
            tuple(map(parts.__getitem__, numbers)),
            reply if is_collected else Reply.DROP,
            is_timed=record is not None,
            is_fenced=len(request.ranks) > 1,
        )
        if elsewhere is not None:
            order = order._replace(rows=elsewhere.named(numbers, rows), needed=elsewhere.needed(numbers))
        orders.append(order)
    if record is not None:
        record.is_encoded(sum([payload.nbytes for payload in payloads]))
        if elsewhere is not None:
            elsewhere.note_in(record)
    return orders


class Submitter:
    """Sends the calls of one group.

    Attributes:
        mesh: The group's mesh.
        ranks: All ranks.
        work: The open calls; submitters for the same workers share them.
        options: The group's own options of calls, such as ``timeout`` and ``grace``.
        refused: The values of ``on_stall`` that the group cannot have, and why.
        gate: Says when the group may be called.
        workers: Returns the group's workers; raises ClosedError if the group was closed.
        prefix: The prefix of the workers' names of the methods.

    Args:
        workers: See above.
        cls: The worker class.
        mesh: The group's mesh.
        group: The group's name.
        prefix: See above.
        methods: The registered methods, which may be for other meshes.
        work: Shared with the submitters of other groups that have the same workers.
    """

    def __init__(
        self,
        workers: Callable[[], Workers],
        cls: type,
        mesh: Mesh,
        group: str,
        prefix: str = "",
        methods: Mapping[str, MethodSpec] = MappingProxyType({}),
        work: OpenWork | None = None,
    ) -> None:
        self.mesh = mesh
        self.ranks = tuple(range(mesh.size))
        self.options: dict[str, Any] = {}
        self.refused: dict[str, str] = {}
        self.gate: Gate = OPEN
        self.workers, self.prefix = workers, prefix
        self._cls = cls
        self._group, self._methods = group, methods
        self._sites: dict[str, CallSite] = {}  # by method
        self.work = work or OpenWork()

    def label(self, method: str) -> str:
        """``"Class.method"``, for messages."""
        return f"{self._cls.__name__}.{method}"

    def call(self, request: CallRequest) -> Any:
        """Send a call and wait for its result. Ctrl-C cancels it, as no other code has the future."""
        submit = self.submit_anyway if self.gate is OPEN else self.submit
        try:
            return submit(request, is_waited_for=True).result_or_cancel()
        except BaseException:
            if self.work.is_given:  # the ranks that have failed it begin no request until the others have ended it
                self.work.read_in_background()
            raise

    def submit(self, request: CallRequest, is_waited_for: bool = False) -> Future[Any]:
        """Send a call now, or when the rows that it takes are there.

        Args:
            request: The call.
            is_waited_for: Whether the caller waits for it at once, and so sends it when the rows are there.
        """
        if self.gate is OPEN:
            return self.submit_anyway(request, is_waited_for)
        with self.gate.admitted(self.label(request.method)):
            return self.submit_anyway(request, is_waited_for)

    def submit_anyway(self, request: CallRequest, is_waited_for: bool = False) -> Future[Any]:
        """Send a call as `submit` does, whether or not the gate is open."""
        call = Call(request, self.site(request.method, request.options), self._send, self.work)
        call.is_waited_for = is_waited_for
        future: Future[Any] = Future(call, request.owner)
        if request.parents or (self.work.waiting and not request.is_at_once):
            self.workers()  # raises if the group was closed
            self.work.enqueue(call, is_waited_for)
        else:
            call.begin()
        return future

    def _send(self, call: Call, request: CallRequest) -> None:
        """Send a call, unless a rank is dead."""
        workers = self.workers()
        failures = Failures(workers.deaths)
        orders: Sequence[WorkerCall] = ()
        if not failures:
            orders, call.real_rows = self._planned(request, workers, call)
        with call.lock:
            if call.request is None:  # it was cancelled meanwhile, perhaps before it had a record
                if call.record is not None and call.done is not None:
                    call.record.is_done(call.done.error)
                return
            try:
                call.is_being_sent(workers, failures)
                if self.work.is_given and not call.is_waited_for:  # workers may send requests behind it
                    call.read_in_background()  # from here on, as Ctrl-C may come
                if orders:
                    self.work.add(call)
                    self.work.send_calls(workers, orders, call.tickets)
                    call.place = next(iter(call.tickets.values())).number if call.tickets else 0
                    if call.record is not None:
                        call.record.is_sent()
            except BaseException as error:
                call.fail(error)  # here, as another thread that finds it without tickets takes it for done
                raise

    def _planned(
        self, request: CallRequest, workers: Workers, call: Call
    ) -> tuple[Sequence[WorkerCall], RealRows | None]:
        """Plan a call, and begin its record if a trace records. Returns its orders, and the rows of ranks."""
        plan = request.plan if isinstance(request.plan, CallPlan) else request.plan()
        begin = hooks.trace
        call.record = None if begin is None else begin(call, workers)
        if request.beside:
            plan = plan._replace(groups=(*plan.groups, ArgumentGroup((), (), request.ranks).beside(request.beside)))
        request.asks_for = request.asks_for or self.prefix + request.method
        return orders_of(request, workers, plan, call.site.method, call.record), plan.real_rows

    def submit_for_each(self, request: CallRequest) -> list[Future[Any]]:
        """Send a call, with a future for each rank."""
        self.work.wait_until_sent()
        shares = {Share(rank, (rank,)): Collection(Only(), (rank,)) for rank in request.ranks}
        with self.gate.admitted(self.label(request.method)):
            return self._submit_shares(request, shares, Failures())

    def encoded(self, method: str, plan: CallPlan, ranks: tuple[int, ...]) -> list[WorkerCall]:
        """The orders of a call that returns the value of each rank, ready for `Workers.call`."""
        request = CallRequest(method, plan, ranks, Collection(Gather(), ranks), asks_for=self.prefix + method)
        return orders_of(request, self.workers(), plan, self.label(method), None)

    def submit_shares(self, request: CallRequest, shares: Mapping[Share, Collection]) -> list[Future[Any]]:
        """Send a call now. Returns a future for each share of the ranks, whose rows stay where they are made.

        Calls that wait for rows come after it. The caller has asked the gate.

        Args:
            request: The call; its ranks and its collection are replaced by those of the shares.
            shares: The collection of each share.
        """
        is_next = request.asks_for in (NEXT, CLOSE_STREAM)  # for ranks that have begun the stream
        failures = Failures() if is_next else Failures(self.workers().deaths)
        return self._submit_shares(replace(request, keeps_rows=True), shares, failures)

    def _submit_shares(
        self, request: CallRequest, shares: Mapping[Share, Collection], failures: Failures
    ) -> list[Future[Any]]:
        """Send a call unless there are failures, which its shares have in common: no rank waits for a failed one."""
        workers, site = self.workers(), self.site(request.method, request.options)
        calls = {
            share: Call(replace(request, collection=collection), site, None, self.work)
            for share, collection in shares.items()
        }
        ranks = tuple([rank for share in shares for rank in share.ranks])
        collected = tuple([rank for collection in shares.values() for rank in collection.ranks])
        whole = replace(request, ranks=ranks, collection=Collection(Gather(), collected))
        first = next(iter(calls.values()))
        orders, real_rows = ([], None) if failures else self._planned(whole, workers, first)
        tickets = dict[int, Any]()
        try:
            # Ctrl-C comes when all of them are known; but where methods run meanwhile, it is for these.
            with SigintSafeLock() if workers.arrivals is not None else nullcontext():
                try:
                    if orders:
                        self.work.send_calls(workers, orders, tickets)
                finally:
                    place = next(iter(tickets.values())).number if tickets else 0
                    for share, call in calls.items():
                        call.real_rows, call.record = real_rows, first.record
                        call.tickets.update({rank: tickets[rank] for rank in share.ranks if rank in tickets})
                        call.is_being_sent(workers, failures if request.is_for_all else Failures(failures))
                        call.place = place
                        if call.tickets or not orders:  # else it was sent to no rank, and has no outcome to be read
                            self.work.add(call)
                    if self.work.is_given:
                        self.work.read_in_background()
            if first.record is not None:
                first.record.is_sent()
            return [Future(call, request.owner) for call in calls.values()]
        except BaseException:  # nobody gets the futures, and ranks that fail the calls go on when all have ended them
            for call in calls.values():
                call.cancel()
            raise

    def options_but(self, options: Mapping[str, Any] | None, changes: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The options that a call sets itself, with some changed, which are checked; None for those of the group."""
        if not changes:
            return options
        checked = library.options.but(changes)
        policy = changes.get("on_stall")
        why_not = self.refused.get(policy if isinstance(policy, str) else FUNCTION) if policy is not None else None
        if why_not is not None:
            raise UsageError(f"on_stall={policy!r} is not possible: {why_not}")
        return {**(options or {}), **{name: getattr(checked, name) for name in changes}}

    def site(self, method: str, options: Mapping[str, Any] | None = None) -> CallSite:
        """The `CallSite` of a call of a method."""
        site = self._sites.get(method)
        if site is None:
            mesh = self._methods[method].mesh if method in self._methods else self.mesh
            site = self._sites[method] = CallSite(self.label(method), mesh, self._group, None, self.options)
        return site if options is None else site._replace(options=options)


_OF_REQUESTS = ", which methods have that are registered with Dispatch.REQUEST"
_ELSEWHERE = {  # what is often looked for in a method that lacks it
    "remote": "; call it, or submit(...) it for a future",
    "map": _OF_REQUESTS,
    "all": _OF_REQUESTS,
}


class AnyMethod:
    """A registered method of a group with options, whether its calls go to all ranks or to one replica.

    Attributes:
        beside: Keyword arguments that are not the method's, but the library's.
        is_relayed: Whether the controller calls it for a worker: calls that wait for their rows do not hold it up.

    Args:
        group: The group, which lives as long as the futures.
        submitter: Sends its calls.
        spec: The method.
        options: The limits of calls; None uses those of the group.
        how: The other options; None uses the defaults.
    """

    beside: Sequence[tuple[str, Any]] = ()
    is_relayed = False
    _how: Any
    _kind: str

    def __init__(
        self,
        group: object,
        submitter: Submitter,
        spec: MethodSpec,
        options: Mapping[str, Any] | None = None,
        how: Any = None,
    ) -> None:
        self._group, self._submitter, self._spec, self._options = group, submitter, spec, options
        if how is not None:
            self._how = how
        self.__dict__.update(spec.described)

    @property
    def has_functions(self) -> bool:
        """Whether its protocol is a pair of the user's functions, which a call runs in this process."""
        return isinstance(self._spec.registration.protocol, Custom)

    def _but(self, limits: Mapping[str, Any], how: Any) -> Self:
        """A copy with some limits changed, and other options."""
        options = self._submitter.options_but(self._options, limits)
        return type(self)(self._group, self._submitter, self._spec, options, how)

    if not TYPE_CHECKING:  # so that type checkers report unknown names

        def __getattr__(self, name: str) -> NoReturn:
            spec = self.__dict__.get("_spec")
            hint = _ELSEWHERE.get(name) or suggestion(name, dir(type(self)))
            error = AttributeError(f"{self._kind} {spec and spec.label} has no attribute {name!r}{hint}")
            error.name = name  # without obj, so that Python does not add the same suggestion to a traceback
            raise error

    def __reduce__(self) -> NoReturn:
        raise TypeError("a method of a group cannot be pickled; pass the group, or the values that the workers need")

    def __repr__(self) -> str:
        spec = self._spec
        return f"<{self._kind} {spec.label}{spec.signature}, {spec.registration.protocol!r}>"
