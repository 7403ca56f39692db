"""`colocate`: several worker classes in one process per slot, each with a group of its own.

::

    colocate(pool, actor=Actor, critic=Critic)        process of rank 0      process of rank 1
          │                                             ┌──────────┐           ┌──────────┐
          ├─ .actor   a group: act, update ────────────►│ Actor    │           │ Actor    │
          └─ .critic  a group: values ─────────────────►│ Critic   │           │ Critic   │
                                                        └──────────┘           └──────────┘
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from bandmaster.calls.encoding import encode_constructor
from bandmaster.calls.method import MethodSpec
from bandmaster.calls.submission import Submitter
from bandmaster.errors import ArgumentError, UsageError, WorkerDied
from bandmaster.group import GroupOf, WorkerGroup
from bandmaster.lifecycle.checks import check_names, checked_mesh, checked_meshes, unwrap
from bandmaster.plan.mesh import Mesh
from bandmaster.pool import ResourcePool
from bandmaster.roles import SEPARATOR, Role, Roles
from bandmaster.worker import ClassWithInitArgs, registrations

__all__ = ["ColocatedGroup", "RoleGroup", "colocate"]


def colocate(
    pool: ResourcePool,
    /,
    *,
    meshes: Mapping[str, Mesh | Mapping[str, Mesh]] = MappingProxyType({}),
    name_prefix: str | None = None,
    start_timeout: float | None = None,
    **roles: Any,
) -> ColocatedGroup:
    """Start one process per slot that holds a worker of every role, and return a group of each role.

    The workers of one rank share a process, a device and a process group of torch.distributed; each finds the others in
    its attribute ``roles``. A rank runs one call at a time, whatever its role.

    Args:
        pool: The slots, one process per slot.
        meshes: By role, the mesh of its group, ``Mesh(dp=world_size)`` by default; or a dict of named meshes, as the
            ``meshes`` of `WorkerGroup`.
        name_prefix: Prefix of the workers' names, as for `WorkerGroup`.
        start_timeout: Seconds that the processes may take to start, and then the same again for all constructors.
        **roles: By name of the role: a subclass of `Worker`, a tuple of it and positional arguments of its constructor,
            or a `ClassWithInitArgs`. The constructors run in this order.

    Returns:
        A group whose attributes are the groups of the roles.

    Raises:
        UsageError: There is no role; a role has the name of an attribute of the group; ``meshes`` names no role; or
            the classes were wrapped by ``@ray.remote`` with different options.
        Exception: All errors of `WorkerGroup`.

    Example:
        >>> import bandmaster as bm
        >>> class Actor(bm.Worker):
        ...     @bm.register(bm.Dispatch.DP_PROTO)
        ...     def act(self, rows):
        ...         return [row + self.roles["critic"].bonus for row in rows]
        >>> class Critic(bm.Worker):
        ...     def __init__(self, bonus):
        ...         self.bonus = bonus
        >>> with bm.ResourcePool([2], backend="inprocess") as pool:
        ...     group = bm.colocate(pool, actor=Actor, critic=(Critic, 10))
        ...     group.actor.act([1, 2, 3])
        [11, 12, 13]

    Source: HybridFlow (arXiv 2409.19256), section 4.1; verl's ``create_colocated_worker_cls``.
    """
    return ColocatedGroup(pool, roles, meshes, name_prefix, start_timeout)


class _RoleParts(NamedTuple):
    """What the group of a role consists of, besides what it shares with the colocated group."""

    role: Role
    name: str
    methods: dict[str, MethodSpec]
    submitter: Submitter


class ColocatedGroup(GroupOf[Any]):
    """The processes that `colocate` has started; its attributes are the groups of the roles.

    Closing it ends the processes of all roles. `restart` and `replace` construct the workers of all roles again, in new
    processes, and pass each role's hook its own part of the state.
    """

    def __init__(
        self,
        pool: ResourcePool,
        roles: Mapping[str, Any],
        meshes: Mapping[str, Mesh | Mapping[str, Mesh]],
        name_prefix: str | None,
        start_timeout: float | None,
    ) -> None:
        if not isinstance(pool, ResourcePool):
            raise ArgumentError(f"the first argument of colocate must be a ResourcePool, got {type(pool).__name__}")
        found, options = _checked_roles(pool, roles, meshes)
        methods = {name: _methods_of(role) for name, role in found.items()}
        cls = type("_".join(found), (Roles,), {})
        wrapped = SimpleNamespace(__ray_actor_class__=cls, _default_options=options)
        self._parts: dict[str, _RoleParts] = {}
        self._groups: weakref.WeakValueDictionary[str, RoleGroup] = weakref.WeakValueDictionary()
        super().__init__(
            pool, ClassWithInitArgs(wrapped, **found), name_prefix=name_prefix, start_timeout=start_timeout
        )
        for name, role in found.items():
            group, traffic = f"{self._name}.{name}", self._submitter.traffic
            submitter = Submitter(self._ownership.workers, role.cls, role.mesh, group, name + SEPARATOR, traffic)
            self._parts[name] = _RoleParts(role, group, methods[name], submitter)

    @property
    def role_names(self) -> tuple[str, ...]:
        """The names of the roles, in the order in which their workers are constructed."""
        return tuple(self._parts)

    def role(self, name: str) -> RoleGroup:
        """The group of a role, as the attribute of that name.

        Raises:
            UsageError: There is no such role.
        """
        if name not in self._parts:
            raise UsageError(f"{self._name} has no role {name!r}; its roles are {', '.join(self._parts)}")
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = RoleGroup(self, name, self._parts[name])
        return group

    def restart(self, state: Mapping[str, Any] | None = None) -> None:
        """End all processes, even busy ones, and start new ones and construct the workers of all roles again.

        Args:
            state: By role, the value passed to its ``on_restart``; roles that are not named get None.

        Raises:
            UsageError: ``state`` names no role, or one without ``on_restart``; nothing was done.
            Exception: All errors of `WorkerGroup.restart`.
        """
        self._check_state("restart", "on_restart", state)
        super().restart(state)

    def replace(self, rank: int, state: Mapping[str, Any] | None = None) -> None:
        """End the process of one rank, and start a new one and construct its workers of all roles.

        Args:
            rank: The rank whose process is replaced.
            state: By role, the value passed to its ``on_replace``; roles that are not named get None.

        Raises:
            UsageError: A role has no ``on_replace``, or ``state`` names no role; nothing was done.
            Exception: All errors of `WorkerGroup.replace`.
        """
        without = [name for name, parts in self._parts.items() if not hasattr(parts.role.cls, "on_replace")]
        if without:
            raise UsageError(
                f"{self._name} does not support the replacement of one rank: define a method on_replace(self, rank, "
                f"state) in the worker class of {', '.join(without)}, or restart() the whole group"
            )
        self._check_state("replace", "on_replace", state)
        super().replace(rank, state)

    def _check_state(self, method: str, hook: str, state: Mapping[str, Any] | None) -> None:
        if state is None:
            return
        if not isinstance(state, Mapping):
            raise UsageError(f"the state of {method} must be a dict with one value per role, got {state!r}")
        for name in state:
            if name not in self._parts or not hasattr(self._parts[name].role.cls, hook):
                raise UsageError(
                    f"{method}() got a state for {name!r}, but only roles with a method {hook} take one; the roles are "
                    f"{', '.join(self._parts)}"
                )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            return self.role(name) if name in self.__dict__.get("_parts", ()) else super().__getattr__(name)

    else:

        def __getattr__(self, name: str) -> Any: ...

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._parts})


class RoleGroup(WorkerGroup):
    """The group of one role: its methods and its mesh, on processes that it shares with the groups of other roles."""

    def __init__(self, colocated: ColocatedGroup, role: str, parts: _RoleParts) -> None:
        self._colocated = colocated  # lives as long as this
        self._role = role
        self._cls = parts.role.cls
        self._mesh = parts.role.mesh
        self._meshes = parts.role.meshes
        self._name = parts.name
        self._methods = parts.methods
        self._submitter = parts.submitter
        self._pool = colocated._pool
        self._ownership = colocated._ownership
        self._launch = colocated._launch
        self._changing = threading.RLock()
        self._watches = []

    @property
    def workers(self) -> list[Any]:
        """As for other groups: on Ray the actors that the roles share, on ``"inprocess"`` the role's own workers."""
        handles = super().workers
        return [handle.roles[self._role] if isinstance(handle, Roles) else handle for handle in handles]

    def on_death(self, callback: Callable[[WorkerDied], object]) -> None:
        """As for other groups; the call that the error names is one of the colocated group."""
        self._colocated.on_death(callback)

    def restart(self, state: Any = None) -> NoReturn:
        """Not for one role alone.

        Raises:
            UsageError: Always; the colocated group has this method.
        """
        raise self._shared("restart")

    def replace(self, rank: int, state: Any = None) -> NoReturn:
        """Not for one role alone.

        Raises:
            UsageError: Always; the colocated group has this method.
        """
        raise self._shared("replace")

    def close(self) -> None:
        """Not for one role alone.

        Raises:
            UsageError: Always; the colocated group has this method.
        """
        raise self._shared("close")

    def _shared(self, method: str) -> UsageError:
        return UsageError(
            f"{self._name} shares its processes with the other roles; call {method}() of the colocated group, which is "
            f"about all of them"
        )


def _checked_roles(
    pool: ResourcePool, roles: Mapping[str, Any], meshes: Mapping[str, Mesh | Mapping[str, Mesh]]
) -> tuple[dict[str, Role], Mapping[str, Any]]:
    """The roles, and the options of ``@ray.remote`` that their classes agree about."""
    if not roles:
        raise UsageError("colocate needs at least one role, such as actor=Actor")
    unknown = [name for name in meshes if name not in roles]
    if unknown:
        raise UsageError(f"meshes names {', '.join(map(repr, unknown))}, but the roles are {', '.join(roles)}")
    found: dict[str, Role] = {}
    options: dict[str, Any] = {}
    for name, given in roles.items():
        if name.startswith("_") or hasattr(ColocatedGroup, name):
            raise UsageError(
                f"a role cannot be called {name!r}: groups have an attribute of that name; rename the role"
            )
        cls, args, kwargs, own = unwrap(*_class_and_arguments(given))
        if issubclass(cls, GroupOf):
            raise UsageError(f"role {name!r} must be a worker class, got the group class {cls.__name__}")
        check_names(cls, registrations(cls), dir(RoleGroup))
        encode_constructor(cls, args, kwargs)  # refuses what does not fit, or cannot be sent, by its own name
        mesh: Any = meshes.get(name)
        mesh, named = (None, mesh) if isinstance(mesh, Mapping) else (mesh, None)
        size = pool.world_size
        found[name] = Role(cls, args, kwargs, checked_mesh(mesh, size, pool), checked_meshes(named, size, pool))
        for option, value in own.items():
            if options.setdefault(option, value) != value:
                raise UsageError(
                    f"the worker classes ask @ray.remote for {option}={options[option]!r} and, in role {name!r}, "
                    f"{option}={value!r}; roles share their processes, so give all classes the same options"
                )
    return found, options


def _methods_of(role: Role) -> dict[str, MethodSpec]:
    found = registrations(role.cls)
    return {name: MethodSpec.of(role.cls, name, found[name], role.mesh, role.meshes) for name in found}


def _class_and_arguments(given: Any) -> tuple[Any, Sequence[Any], Mapping[str, Any]]:
    if isinstance(given, tuple) and given:
        return given[0], given[1:], {}
    return given, (), {}
