"""`GroupMethod`: a registered method of a group, as `group.method` returns it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from bandmaster.calls.future import Claim, Future, as_it_is, claims_of
from bandmaster.calls.options import FLOW_NAMES, FlowOptions, MethodOptions
from bandmaster.calls.request import CallRequest
from bandmaster.calls.spec import MethodSpec
from bandmaster.calls.submission import AnyMethod
from bandmaster.errors import UsageError
from bandmaster.plan.arguments import CallPlan, scatter
from bandmaster.plan.binding import bind, dispatched
from bandmaster.plan.transfer import Concat, Custom

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bandmaster.flow.stream import Stream

P = ParamSpec("P")  # the method's parameters
C = TypeVar("C", covariant=True)  # the return type of a call: its result, or its future
G = TypeVar("G", covariant=True)  # the result


class GroupMethod(AnyMethod, Generic[P, C, G]):
    """A registered method of a worker group: call it, or `submit` it to get a `Future`."""

    _kind = "group method"
    _how = FlowOptions()

    @overload
    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> C: ...
    @overload
    def __call__(self, rows: Future[Any], /, *args: Any, **kwargs: Any) -> C: ...
    def __call__(self, /, *args: Any, **kwargs: Any) -> C:
        """Call the method on the group. Returns its result, or a `Future` if registered with ``blocking=False``."""
        result: C = self._send(args, kwargs, waits=self._spec.registration.is_blocking)
        return result

    def options(self, /, **options: Unpack[MethodOptions]) -> GroupMethod[P, C, G]:
        """A copy of this group method with other options.

        Args:
            **options: ``timeout``: seconds that a wait for the result may take before `CallTimeout`; None sets no
                limit. ``grace``: seconds from the interruption of the call, after a cancel or the failure of a rank,
                until ranks that still run it are ended; None never ends one. ``stall_after`` and ``on_stall``: see
                `CallOptions`. ``maxsize``: most items of each rank that a stream of a generator method makes before
                they are taken, 2 by default. ``on_error``: with ``"return"``, a stream of a generator method yields the
                failed future of a rank, and the items of the other ranks go on.

        Raises:
            UsageError: An option is unknown, or its value is invalid.
        """
        limits = {name: value for name, value in options.items() if name not in FLOW_NAMES}
        flow = {name: value for name, value in options.items() if name in FLOW_NAMES}
        return self._but(limits, self._how.but(flow, self._spec.is_generator))

    @overload
    def submit(self, /, *args: P.args, **kwargs: P.kwargs) -> Future[G]: ...
    @overload
    def submit(self, rows: Future[Any], /, *args: Any, **kwargs: Any) -> Future[G]: ...
    def submit(self, /, *args: Any, **kwargs: Any) -> Future[G]:
        """Send the call and return its `Future` without waiting.

        Raises:
            UsageError: The arguments do not match the method's signature or its protocol; nothing was sent.
            ResourceError: No memory or descriptor is left for the arguments; nothing was sent.
        """
        future: Future[G] = self._send(args, kwargs, waits=False)
        return future

    @overload
    def stream(self, /, *args: P.args, **kwargs: P.kwargs) -> Stream: ...
    @overload
    def stream(self, rows: Future[Any], /, *args: Any, **kwargs: Any) -> Stream: ...
    def stream(self, /, *args: Any, **kwargs: Any) -> Stream:
        """Send the call, and return an iterator over the results of the ranks as they arrive.

        The items are futures that are done, one for each rank whose value the protocol collects. If the method is a
        generator (``yield``), they are its items, each of which is made when the ones before it are taken: see
        ``maxsize`` of `options`. Other calls may be made meanwhile; a rank runs them between two items.

        Does not wait for the rows of futures among the arguments, or for calls that were submitted before: the call is
        sent when the rows are there and those calls are sent; a later error is raised by the iteration.

        Raises:
            UsageError: The arguments do not match the method's signature or its protocol; nothing was sent.
            ResourceError: No memory or descriptor is left for the arguments.

        Example:
            >>> import bandmaster as bm
            >>> class Generator(bm.Worker):
            ...     @bm.register(bm.Dispatch.DP_PROTO)
            ...     def squares(self, numbers):
            ...         for number in numbers:
            ...             yield number**2
            >>> with bm.ResourcePool([2], backend="inprocess") as pool:
            ...     group = bm.WorkerGroup(pool, Generator)
            ...     sorted((item.rank, item.result()) for item in group.squares.stream([1, 2, 3]))
            [(0, 1), (0, 4), (1, 9)]
        """
        parents = self._not_there(args, kwargs)
        if parents:
            bind(self._spec.label, self._spec.signature, args, kwargs)  # mistakes are errors now
        is_at_once = not (parents or self._submitter.work.waiting)
        given = (args, kwargs) if is_at_once else _as_they_are(self._spec, args, kwargs)
        plan = partial(_claimed, claims_of(*given), partial(self._plan, *given))
        from bandmaster.flow.feed import Items, Values  # a feature
        from bandmaster.flow.stream import Stream

        kind = Items if self._spec.is_generator else Values
        feed = kind(self._group, self._submitter, self._spec, self._options, self._how)
        stream = Stream(feed)  # first: if Ctrl-C comes before the user has it, its end ends what was sent
        feed.start(plan, parents, is_at_once)
        return stream

    def _plan(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallPlan:
        """Plan the arguments; the rows of futures among them are there."""
        spec, protocol = self._spec, self._spec.registration.protocol
        if not isinstance(protocol, Custom):
            return spec.plan(args, kwargs, protocol.outgoing)
        given = dispatched(spec.label, self._group, protocol, args, kwargs)
        arguments = bind(spec.label, spec.signature, *given)
        return CallPlan(tuple(scatter(arguments, len(spec.ranks), spec.label)))

    def _send(self, args: Sequence[Any], kwargs: Mapping[str, Any], waits: bool) -> Any:
        """Send the call. Returns its future, or its result if the caller ``waits``."""
        spec, protocol = self._spec, self._spec.registration.protocol
        collection = spec.collection
        if spec.is_generator:
            raise UsageError(
                f"{spec.label} is a generator: iterate over {spec.name}.stream(...), or return a value instead of yield"
            )
        has_futures = Future in map(type, args) or (kwargs and Future in map(type, kwargs.values()))
        parents = self._not_there(args, kwargs) if has_futures else ()
        plan: CallPlan | Callable[[], CallPlan]
        if isinstance(protocol, Custom):
            if not self.is_relayed:
                self._submitter.work.wait_until_sent()  # the user's functions process the arguments now
            plan = self._plan(args, kwargs)
            collection = collection._replace(finish=partial(protocol.collect, self._group))
        elif parents or (self._submitter.work.waiting and not self.is_relayed):
            bind(spec.label, spec.signature, args, kwargs)  # mistakes are errors now
            if not waits:
                args, kwargs = _as_they_are(spec, args, kwargs)
            plan = partial(_claimed, claims_of(args, kwargs), partial(spec.plan, args, kwargs, protocol.outgoing))
        else:
            plan = spec.plan(args, kwargs, protocol.outgoing)
        keeps = not waits and isinstance(collection.incoming, Concat) and collection.finish is None
        request = CallRequest(spec.name, plan, spec.ranks, collection, self._group, self._options, keeps, parents)
        request.beside, request.is_at_once = self.beside, isinstance(plan, CallPlan)
        return self._submitter.call(request) if waits else self._submitter.submit(request)

    @staticmethod
    def _not_there(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Future[Any]]:
        """The futures among the arguments whose rows are not there."""
        return [value for value in (*args, *kwargs.values()) if type(value) is Future and not value.done()]


def _claimed(_: Sequence[Claim], plan: Callable[[], CallPlan]) -> CallPlan:
    """Plan a call, and keep its claims on the rows that it takes until then."""
    return plan()


def _as_they_are(
    spec: MethodSpec, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Copies of the arguments, which later changes by the caller do not affect."""
    names = (*spec.signature.parameters, *["args"] * len(args))
    copies = [as_it_is(value, name, spec.label) for value, name in zip(args, names, strict=False)]
    return copies, {name: as_it_is(value, name, spec.label) for name, value in kwargs.items()}
