"""Registered methods: `MethodSpec` is determined once per group, `GroupMethod` is what `group.method` returns."""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from bandmaster.calls.future import Future
from bandmaster.calls.options import CallOptions, FlowOptions, MethodOptions, default_options
from bandmaster.calls.pending import Collection
from bandmaster.calls.stream import ItemCall, ItemFeed, ShareFeed, Stream
from bandmaster.calls.submission import Submitter
from bandmaster.codec import decode, encode
from bandmaster.contract import CLOSE_STREAM, METHOD, NEXT, OPEN_STREAM, STREAM
from bandmaster.errors import BatchError, MeshError, UsageError
from bandmaster.plan.arguments import (
    ArgumentGroup,
    BoundArgument,
    CallPlan,
    everywhere,
    first_ranks,
    plan_call,
    scatter,
)
from bandmaster.plan.binding import bind, bind_per_rank, signature_without_self
from bandmaster.plan.mesh import Mesh
from bandmaster.plan.rows import on_mesh, shards, sources
from bandmaster.plan.shares import Share, of_one_rank, shares
from bandmaster.plan.transfer import (
    Broadcast,
    Concat,
    Custom,
    Execute,
    Gather,
    Incoming,
    Only,
    Outgoing,
    Reduce,
    Split,
    TransferProtocol,
)
from bandmaster.worker import Registration

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["GroupMethod", "MethodSpec", "specs_of"]

FLOW = FlowOptions()
FLOW_NAMES = [field.name for field in fields(FlowOptions)]

P = ParamSpec("P")  # the method's parameters
C = TypeVar("C", covariant=True)  # what a call returns: its result, or its future
G = TypeVar("G", covariant=True)  # the result


@dataclass(frozen=True)
class MethodSpec:
    """The facts about a registered method that do not depend on a call's arguments.

    Attributes:
        function: As the class has it.
        name: Its name.
        label: ``"Class.method"``.
        signature: Without ``self``.
        positional: Names of its parameters where all of them can go by position and none is ``*args``; else None.
        n_required: How many have no default.
        is_generator: Whether it yields items.
        is_for_zero: Whether it runs on rank 0 alone.
        goes_everywhere: Whether all arguments go, as they are, to every rank that it runs on.
        registration: What `register` was told.
        mesh: The one of the group's meshes that it was registered for.
        ranks: The ranks that it runs on.
    """

    function: Callable[..., Any]
    name: str
    label: str
    signature: inspect.Signature
    positional: tuple[str, ...] | None
    n_required: int
    is_generator: bool
    is_for_zero: bool
    goes_everywhere: bool
    registration: Registration
    mesh: Mesh
    ranks: tuple[int, ...]

    @classmethod
    def of(
        cls, worker_class: type, name: str, registration: Registration, mesh: Mesh, meshes: Mapping[str, Mesh]
    ) -> MethodSpec:
        """Inspect a registered method of a class.

        Args:
            worker_class: The class.
            name: Name of the method.
            registration: What `register` was told.
            mesh: The group's mesh.
            meshes: The group's further meshes, by name.

        Raises:
            MeshError: The registration names a mesh that the group does not have; or the protocol, or a rule of one of
                the arguments, asks for what the mesh does not have.
        """
        function = getattr(worker_class, name)
        label = f"{worker_class.__name__}.{name}"
        if registration.mesh is not None:
            if registration.mesh not in meshes:
                known = f"only the meshes {', '.join(map(repr, meshes))}" if meshes else "no named meshes"
                raise MeshError(
                    f"{label} is registered for mesh {registration.mesh!r}, but the group has {known}; pass "
                    f"meshes={{{registration.mesh!r}: Mesh(...)}}"
                )
            mesh = meshes[registration.mesh]
        signature = signature_without_self(worker_class, name)
        parameters = signature.parameters.values()
        goes_by_position = all(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
        n_required = sum(p.default is p.empty for p in parameters)
        positional = tuple(signature.parameters) if goes_by_position else None
        is_for_zero = registration.execute is Execute.RANK_ZERO
        outgoing = registration.protocol.outgoing if isinstance(registration.protocol, TransferProtocol) else None
        goes_everywhere = is_for_zero or (isinstance(outgoing, Broadcast) and not registration.arguments)
        spec = cls(
            function,
            name,
            label,
            signature,
            positional,
            n_required,
            inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function),
            is_for_zero,
            goes_everywhere,
            registration,
            mesh,
            first_ranks(1 if is_for_zero else mesh.size),
        )
        spec._check_mesh()
        return spec

    def _check_mesh(self) -> None:
        """Raise if the mesh lacks an axis or coordinate that calls of the method would need."""
        protocol = self.registration.protocol
        if self.is_for_zero or isinstance(protocol, Custom):
            return
        transfers: list[tuple[str, Outgoing | Incoming]] = [
            (self.label, protocol.outgoing),
            *((self.label, collect) for collect in protocol.collects),
            *((f"argument {name!r} of {self.label}", rule) for name, rule in self.registration.arguments.items()),
        ]
        for what, transfer in transfers:
            try:
                if isinstance(transfer, Split):
                    shards(self.mesh, transfer)
                elif isinstance(transfer, Incoming):
                    sources(self.mesh, transfer)
            except MeshError as error:
                named = self.registration.mesh
                other = "another mesh=" if named is None else f"another mesh, meshes={{{named!r}: Mesh(...)}}"
                raise MeshError(
                    f"{what} uses {transfer!r}, but {error}; change the rule, or give the group {other}"
                ) from None

    @cached_property
    def described(self) -> Mapping[str, Any]:
        """Name, docstring and signature of the worker's method, as attributes of the group's method."""
        return {
            "__name__": self.name,
            "__qualname__": self.label,
            "__doc__": self.function.__doc__,
            "__signature__": self.signature,
        }

    @cached_property
    def collection(self) -> Collection:
        """How the values become the result; the `collect_fn` of a custom protocol gets them as a list."""
        return Collection(on_mesh(self.mesh, self._incoming), sources(self.mesh, self._incoming))

    @property
    def _incoming(self) -> Incoming | tuple[Incoming, ...]:
        if isinstance(self.registration.protocol, TransferProtocol):
            return Only() if self.is_for_zero else self.registration.protocol.incoming
        return Gather()

    @cached_property
    def _weighted(self) -> Reduce | None:
        """The collect that needs to know how many rows each rank gets, if there is one."""
        collects = getattr(self.registration.protocol, "collects", ())
        return next((collect for collect in collects if isinstance(collect, Reduce) and collect.weights), None)

    def plan(self, args: Sequence[Any], kwargs: Mapping[str, Any], outgoing: Outgoing) -> CallPlan:
        """Decide which argument of a call goes where: as `bind` and `plan_call`, but plain calls take a short cut.

        Raises:
            ArgumentError: They do not fit the method.
            BatchError: They cannot be split as asked.
        """
        names = self.positional
        if names is None or kwargs or not self.n_required <= len(args) <= len(names):
            arguments = bind(self.label, self.signature, args, kwargs)
        elif self.goes_everywhere:
            return CallPlan((ArgumentGroup(tuple(enumerate(args)), names, self.ranks),))
        else:
            arguments = [BoundArgument(index, names[index], value) for index, value in enumerate(args)]
        if self.goes_everywhere:
            return CallPlan((everywhere(arguments, len(self.ranks)),))
        plan = plan_call(arguments, outgoing, self.registration.arguments, self.mesh, self.label)
        if plan.real_rows is None and self._weighted is not None:
            raise BatchError(
                f"{self.label} collects with {self._weighted!r}, but this call splits no argument, so there are no "
                "rows to weight by; pass a batch, or remove weights='rows'"
            )
        return plan


def specs_of(
    worker_class: type, registered: Mapping[str, Registration], mesh: Mesh, meshes: Mapping[str, Mesh]
) -> dict[str, MethodSpec]:
    """The specs of the registered methods of a class, by name. Raises MeshError as `MethodSpec.of`."""
    return {name: MethodSpec.of(worker_class, name, registered[name], mesh, meshes) for name in registered}


class GroupMethod(Generic[P, C, G]):
    """A registered method of a worker group: call it, or `submit` it to get a `Future`."""

    def __init__(
        self,
        group: object,
        submitter: Submitter,
        spec: MethodSpec,
        options: CallOptions | None = None,
        flow: FlowOptions = FLOW,
    ) -> None:
        self._group = group
        self._submitter = submitter
        self._spec = spec
        self._options = options
        self._flow = flow
        self.__dict__.update(spec.described)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> C:
        """Call the method on the group. Returns its result, or a `Future` if registered with ``blocking=False``."""
        result: C = self._send(args, kwargs, waits=self._spec.registration.is_blocking)
        return result

    def options(self, /, **options: Unpack[MethodOptions]) -> GroupMethod[P, C, G]:
        """A copy of this group method with other options.

        Args:
            **options: ``timeout``: seconds that a wait for the result may take before `CallTimeout`; None sets no
                limit. ``grace``: seconds from the interruption of the call, after a cancel or the failure of a rank,
                until ranks that still run it are ended; None never ends one. ``maxsize``: how many items of each rank a
                stream of a generator method has made before they are taken, 2 by default.

        Raises:
            UsageError: An option is unknown, or its value is invalid.
        """
        limits = {name: value for name, value in options.items() if name not in FLOW_NAMES}
        flow = {name: value for name, value in options.items() if name in FLOW_NAMES}
        base = self._options
        if limits:
            base = (base or default_options().but(self._submitter.options)).but(limits)
        return type(self)(self._group, self._submitter, self._spec, base, self._flow.but(flow))

    def submit(self, /, *args: P.args, **kwargs: P.kwargs) -> Future[G]:
        """Send the call and return its `Future` without waiting.

        Raises:
            UsageError: The arguments do not fit the method or its protocol; nothing was sent.
            ResourceError: No memory or descriptor is left for the arguments; nothing was sent.
        """
        future: Future[G] = self._send(args, kwargs, waits=False)
        return future

    def stream(self, /, *args: P.args, **kwargs: P.kwargs) -> Stream:
        """Send the call, and return an iterator over the results of the ranks as they come.

        The items are futures that are done, one for each rank whose value the protocol collects. If the method is a
        generator (``yield``), they are its items, each of which is made when the ones before it are taken: see
        ``maxsize`` of `options`. Other calls may be made meanwhile; a rank runs them between two items.

        Waits until the rows of futures among the arguments are there.

        Raises:
            UsageError: The arguments do not fit the method or its protocol; nothing was sent.
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
        spec, submitter = self._spec, self._submitter
        submitter.traffic.later.wait()
        plan = self._plan(args, kwargs)
        found = shares(spec.ranks, [group.ranks for group in plan.groups], spec.collection.ranks)
        if spec.is_generator:
            self._check_no_padding(plan)
            return self._stream_items(plan, found)
        collections = {
            share: Collection(of_one_rank(spec.collection.incoming, share.rank), (share.rank,)) for share in found
        }
        futures = submitter.submit_shares(self._group, spec.name, plan, collections, self._options)
        by_share = dict(zip(futures, found, strict=True))
        for future, share in by_share.items():
            _label(future, share, plan)
        return Stream(ShareFeed(by_share, submitter.workers))

    def _stream_items(self, plan: CallPlan, found: Sequence[Share]) -> Stream:
        """A stream of the items that generators yield."""
        spec, submitter, name = self._spec, self._submitter, uuid.uuid4().hex
        which = ArgumentGroup(
            ((STREAM, name), (METHOD, submitter.worker_method(spec.name))), ("stream", "method"), spec.ranks
        )
        alone = {share: Collection(Only(), (share.rank,)) for share in found}

        def call(shares: Sequence[Share], what: str) -> list[Future[Any]]:
            asked = tuple([rank for share in shares for rank in share.ranks])
            plan = CallPlan((ArgumentGroup(((0, name),), ("stream",), asked),))
            chosen = {share: alone[share] for share in shares}
            return submitter.submit_shares(self._group, spec.name, plan, chosen, self._options, what, ItemCall)

        def ask(share: Share) -> Future[Any]:
            (future,) = call([share], NEXT)
            _label(future, share, plan)
            return future

        def close(shares: Sequence[Share]) -> None:
            call(shares, CLOSE_STREAM)

        begin = CallPlan((*plan.groups, which))
        opened = submitter.submit_shares(self._group, spec.name, begin, alone, self._options, OPEN_STREAM)
        return Stream(
            ItemFeed(dict(zip(opened, found, strict=True)), ask, close, self._flow.maxsize, submitter.workers)
        )

    def _check_no_padding(self, plan: CallPlan) -> None:
        if plan.real_rows is not None and plan.real_rows.padded_to is not None:
            raise UsageError(
                f"{self._spec.label} yields items, so that padding cannot be removed from them; split without pad=True"
            )

    def _plan(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallPlan:
        """Decide which argument goes where; the rows of futures among them are there."""
        spec, protocol = self._spec, self._spec.registration.protocol
        if not isinstance(protocol, Custom):
            return spec.plan(args, kwargs, protocol.outgoing)
        arguments = bind_per_rank(spec.label, spec.signature, self._group, protocol, args, kwargs)
        return CallPlan(tuple(scatter(arguments, len(spec.ranks), spec.label)))

    def _send(self, args: Sequence[Any], kwargs: Mapping[str, Any], waits: bool) -> Any:
        """Send the call; its future, or its result if the caller ``waits``."""
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
            self._submitter.traffic.later.wait()  # its functions have to see the arguments now
            plan = self._plan(args, kwargs)
            collection = collection._replace(finish=partial(protocol.collect, self._group))
        elif parents or self._submitter.traffic.later.calls:
            bind(spec.label, spec.signature, args, kwargs)  # mistakes are errors now
            if not waits:
                args, kwargs = [_as_it_is(value) for value in args], {k: _as_it_is(v) for k, v in kwargs.items()}
            plan = partial(spec.plan, args, kwargs, protocol.outgoing)
        else:
            plan = self._plan(args, kwargs)
        keeps = not waits and isinstance(collection.incoming, Concat) and collection.finish is None
        return self._submitter.submit(
            self._group, spec.name, plan, spec.ranks, collection, self._options, waits, keeps, parents
        )

    @staticmethod
    def _not_there(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Future[Any]]:
        """The futures among the arguments of which the rows are not there."""
        return [value for value in (*args, *kwargs.values()) if type(value) is Future and not value.done()]

    def __repr__(self) -> str:
        return f"<group method {self._spec.label}{self._spec.signature}, {self._spec.registration.protocol!r}>"


def _label(future: Future[Any], share: Share, plan: CallPlan) -> None:
    """Note whose result it is, and of which rows."""
    future.rank = share.rank
    future.numbers = None if plan.real_rows is None else plan.real_rows.numbers[share.rank]


def _as_it_is(value: Any) -> Any:
    """A value that later changes of the caller's do not reach."""
    if value is None or isinstance(value, Future | str | int | float | bytes):
        return value
    return decode(encode(value).private())
