"""`MethodSpec`: the facts about a registered method that are known before a call; determined once per group."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from bandmaster.calls.request import Collection
from bandmaster.errors import BatchError, MeshError
from bandmaster.plan.arguments import ArgumentGroup, BoundArgument, CallPlan, everywhere, first_ranks, plan_call
from bandmaster.plan.binding import bind, signature_without_self
from bandmaster.plan.mesh import Mesh
from bandmaster.plan.rows import on_mesh, shards, sources
from bandmaster.plan.transfer import (
    Broadcast,
    Custom,
    Execute,
    Gather,
    Incoming,
    Only,
    Outgoing,
    Reduce,
    Route,
    Split,
    TransferProtocol,
)
from bandmaster.worker import Registration


@dataclass(eq=False)
class MethodSpec:
    """The facts about a registered method that do not depend on a call's arguments.

    Attributes:
        function: The function in the class.
        name: Its name.
        label: ``"Class.method"``.
        signature: Its signature without ``self``.
        positional: Names of its parameters if all of them can go by position and none is ``*args``; else None.
        n_required: Number of parameters without a default.
        is_generator: Whether it yields items.
        is_for_zero: Whether it runs on rank 0 alone.
        goes_everywhere: Whether all arguments go, as they are, to every rank that it runs on.
        registration: The arguments of `register`.
        mesh: The one of the group's meshes for which it was registered.
        ranks: The ranks that it runs on.
    """

    function: Callable[..., Any]
    name: str
    label: str
    signature: inspect.Signature
    registration: Registration
    mesh: Mesh

    def __post_init__(self) -> None:
        parameters = self.signature.parameters.values()
        goes_by_position = all(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
        self.positional = tuple(self.signature.parameters) if goes_by_position else None
        self.n_required = sum(p.default is p.empty for p in parameters)
        self.is_generator = inspect.isgeneratorfunction(self.function) or inspect.isasyncgenfunction(self.function)
        registration, protocol = self.registration, self.registration.protocol
        self.is_for_zero = registration.execute is Execute.RANK_ZERO
        outgoing = protocol.outgoing if isinstance(protocol, TransferProtocol) else None
        is_broadcast = isinstance(outgoing, Broadcast) and not registration.arguments
        self.goes_everywhere = self.is_for_zero or isinstance(outgoing, Route) or is_broadcast
        self.ranks = first_ranks(1 if self.is_for_zero else self.mesh.size)

    @classmethod
    def of(
        cls, worker_class: type, name: str, registration: Registration, mesh: Mesh, meshes: Mapping[str, Mesh]
    ) -> MethodSpec:
        """Inspect a registered method of a class.

        Args:
            worker_class: The class.
            name: Name of the method.
            registration: The arguments of `register`.
            mesh: The group's mesh.
            meshes: The group's further meshes, by name.

        Raises:
            MeshError: The registration names a mesh that the group does not have; or the protocol, or a rule of one of
                the arguments, names an axis or a coordinate that the mesh does not have.
        """
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
        spec = cls(getattr(worker_class, name), name, label, signature, registration, mesh)
        spec._check_mesh()
        return spec

    def _check_mesh(self) -> None:
        """Raise if the mesh lacks an axis or coordinate that calls of the method would need."""
        protocol = self.registration.protocol
        if self.is_for_zero or isinstance(protocol, Custom):
            return
        transfers: list[tuple[str, Outgoing | Route | Incoming]] = [
            (self.label, protocol.outgoing),
            *((self.label, collect) for collect in protocol.collects),
            *((f"argument {name!r} of {self.label}", rule) for name, rule in self.registration.arguments.items()),
        ]
        for what, transfer in transfers:
            try:
                if isinstance(transfer, Split | Route):
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
    def is_async(self) -> bool:
        """Whether it is awaited."""
        return inspect.iscoroutinefunction(self.function)

    @cached_property
    def collection(self) -> Collection:
        """The rule that makes the result from the values; the `collect_fn` of a custom protocol gets a list."""
        return Collection(on_mesh(self.mesh, self._incoming), sources(self.mesh, self._incoming))

    @property
    def _incoming(self) -> Incoming | tuple[Incoming, ...]:
        if isinstance(self.registration.protocol, TransferProtocol):
            return Only() if self.is_for_zero else self.registration.protocol.incoming
        return Gather()

    @cached_property
    def _weighted(self) -> Reduce | None:
        """The collect that weights by the row counts of the ranks, if there is one."""
        collects = getattr(self.registration.protocol, "collects", ())
        return next((collect for collect in collects if isinstance(collect, Reduce) and collect.weights), None)

    def plan(self, args: Sequence[Any], kwargs: Mapping[str, Any], outgoing: Outgoing) -> CallPlan:
        """Plan the arguments of a call by `bind` and `plan_call`; plain calls take a shorter path.

        Raises:
            ArgumentError: The arguments do not match the signature of the method.
            BatchError: The arguments cannot be split as requested.
        """
        names = self.positional
        if names is None or kwargs or not self.n_required <= len(args) <= len(names):
            arguments = bind(self.label, self.signature, args, kwargs)
        elif self.goes_everywhere:
            return CallPlan((ArgumentGroup(tuple(enumerate(args)), names, self.ranks),))
        else:
            arguments = list(map(BoundArgument, range(len(args)), names, args))
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
    """The specs of the registered methods of a class, by name. Raises MeshError in the cases of `MethodSpec.of`."""
    return {name: MethodSpec.of(worker_class, name, registered[name], mesh, meshes) for name in registered}
