"""A registered method: what is known of it once, and what a group hands out under its name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from bandmaster.binding import bind, bind_per_rank, signature_without_self
from bandmaster.errors import MeshError
from bandmaster.mesh import Mesh
from bandmaster.options import CallOptions, default_options
from bandmaster.planning import Packed, Parcel, Slot, everywhere, first_ranks, pack, scatter, sources
from bandmaster.transfer import Broadcast, Custom, Execute, Gather, Incoming, Only, Outgoing, TransferProtocol
from bandmaster.worker import Registration

if TYPE_CHECKING:
    from bandmaster.future import Future
    from bandmaster.group import WorkerGroup

__all__ = ["GroupMethod", "MethodSpec"]


@dataclass(frozen=True)
class MethodSpec:
    """What is known of a method before it is called.

    Attributes:
        function: As the class has it.
        name: Its name.
        label: ``"Class.method"``.
        signature: Without ``self``.
        positional: Names of its parameters where all of them can go by position and none is ``*args``; else None.
        n_required: How many have no default.
        is_for_zero: Whether it runs on rank 0 alone.
        goes_everywhere: Whether all arguments go, as they are, to every rank that it runs on.
        registration: What `register` was told.
        mesh: The group's.
    """

    function: Callable[..., Any]
    name: str
    label: str
    signature: inspect.Signature
    positional: tuple[str, ...] | None
    n_required: int
    is_for_zero: bool
    goes_everywhere: bool
    registration: Registration
    mesh: Mesh

    @classmethod
    def of(cls, worker_class: type, name: str, registration: Registration, mesh: Mesh) -> MethodSpec:
        """Look at a registered method of a class."""
        function = getattr(worker_class, name)
        label = f"{worker_class.__name__}.{name}"
        signature = signature_without_self(worker_class, name)
        parameters = signature.parameters.values()
        goes_by_position = all(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
        n_required = sum(p.default is p.empty for p in parameters)
        positional = tuple(signature.parameters) if goes_by_position else None
        is_for_zero = registration.execute is Execute.RANK_ZERO
        outgoing = registration.protocol.outgoing if isinstance(registration.protocol, TransferProtocol) else None
        goes_everywhere = is_for_zero or (isinstance(outgoing, Broadcast) and not registration.arguments)
        return cls(
            function, name, label, signature, positional, n_required, is_for_zero, goes_everywhere, registration, mesh
        )

    @cached_property
    def incoming(self) -> Incoming:
        """How the values come back; the `collect_fn` of a custom protocol gets them as a list."""
        if isinstance(self.registration.protocol, TransferProtocol):
            return Only() if self.is_for_zero else self.registration.protocol.incoming
        return Gather()

    @cached_property
    def collected(self) -> tuple[int, ...]:
        """The ranks whose values come back.

        Raises:
            MeshError: They are named by an axis that the mesh does not have.
        """
        return sources(self.mesh, self.incoming)

    def pack(self, args: Sequence[Any], kwargs: Mapping[str, Any], outgoing: Outgoing) -> Packed:
        """Decide which argument of a call goes where, as `bind` and `bandmaster.planning` do, but plain calls sooner.

        Raises:
            ArgumentError: They do not fit the method.
            BatchError, MeshError: They cannot be split as asked.
        """
        names = self.positional
        n_ranks = 1 if self.is_for_zero else self.mesh.size
        if names is None or kwargs or not self.n_required <= len(args) <= len(names):
            slots = bind(self.label, self.signature, args, kwargs)
        elif self.goes_everywhere:
            return Packed((Parcel(tuple(enumerate(args)), names, first_ranks(n_ranks)),))
        else:
            slots = [Slot(index, names[index], value) for index, value in enumerate(args)]
        if self.goes_everywhere:
            return Packed((everywhere(slots, n_ranks),))
        return pack(slots, outgoing, self.registration.arguments, self.mesh, self.label)


class GroupMethod:
    """A registered method, bound to a group: call it, or `submit` it to get a `Future`."""

    def __init__(self, group: WorkerGroup, spec: MethodSpec, options: CallOptions | None = None) -> None:
        self._group = group
        self._spec = spec
        self._options = options
        self.__name__ = spec.name
        self.__qualname__ = spec.label
        self.__doc__ = spec.function.__doc__
        self.__signature__ = spec.signature

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the method as it was registered; a `Future` if that was with ``blocking=False``."""
        return self._send(args, kwargs, waits=self._spec.registration.is_blocking)

    def options(self, /, **options: float | None) -> GroupMethod:
        """The same method with other limits on how long a call may take.

        Args:
            **options: ``timeout``: seconds that a wait for the result may take before `CallTimeout`, None for as
                long as it takes. ``grace``: once one rank has failed or the call was given up, the others are
                interrupted, and after so many seconds more ended if they have not stopped; None never ends them.

        Raises:
            UsageError: There is no such option, or its value makes no sense.
        """
        base = self._options or default_options().but(self._group._options)
        return GroupMethod(self._group, self._spec, base.but(options))

    def submit(self, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Send the call and return its `Future` without waiting.

        Raises:
            UsageError: The arguments do not fit the method or its protocol; nothing was sent.
        """
        future: Future[Any] = self._send(args, kwargs, waits=False)
        return future

    def _send(self, args: Sequence[Any], kwargs: Mapping[str, Any], waits: bool) -> Any:
        """Send the call; its future, or its result if the caller ``waits``."""
        group, spec, protocol = self._group, self._spec, self._spec.registration.protocol
        if isinstance(protocol, Custom):
            return self._send_by(protocol, args, kwargs, waits)
        try:
            packed = spec.pack(args, kwargs, protocol.outgoing)
            ranks = (0,) if spec.is_for_zero else group._ranks
            return group._submit(spec.name, packed, ranks, spec.incoming, spec.collected, None, self._options, waits)
        except MeshError as error:
            raise MeshError(
                f"{spec.label} goes by {protocol!r}, but {error}; give the group a mesh= with that"
            ) from None

    def _send_by(self, custom: Custom, args: Sequence[Any], kwargs: Mapping[str, Any], waits: bool) -> Any:
        group, spec = self._group, self._spec
        slots = bind_per_rank(spec.label, spec.signature, group, custom, args, kwargs)
        packed = Packed(tuple(scatter(slots, group.world_size, spec.label)))
        finish = partial(custom.collect, group)
        return group._submit(
            spec.name, packed, group._ranks, spec.incoming, spec.collected, finish, self._options, waits
        )

    def __repr__(self) -> str:
        return f"<group method {self._spec.label}{self._spec.signature}, {self._spec.registration.protocol!r}>"
