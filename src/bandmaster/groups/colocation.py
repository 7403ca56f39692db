"""`colocate`: several worker classes in one process per slot, each with a group of its own.

::

    colocate(pool, actor=Actor, critic=Critic)        process of rank 0      process of rank 1
          │                                             ┌──────────┐           ┌──────────┐
          ├─ .actor   a group: act, update ────────────►│ Actor    │           │ Actor    │
          └─ .critic  a group: values ─────────────────►│ Critic   │           │ Critic   │
                                                        └──────────┘           └──────────┘
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from os import PathLike
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from bandmaster.calls.request import encode_constructor
from bandmaster.calls.spec import MethodSpec, specs_of
from bandmaster.calls.submission import Submitter
from bandmaster.errors import ArgumentError, MeshError, UsageError
from bandmaster.groups.base import AnyGroup
from bandmaster.groups.group import GroupOf, WorkerGroup
from bandmaster.lifecycle.checks import check_names, checked_mesh, checked_meshes, turn_hooks, unwrap, why_not_replaced
from bandmaster.plan.binding import bind, signature_without_self
from bandmaster.plan.mesh import Mesh
from bandmaster.pool import ResourcePool
from bandmaster.roles import SEPARATOR, Role, Roles
from bandmaster.worker import ClassWithInitArgs, Worker, registrations

OF_THE_PROCESSES = {"restart": "restart", "replace": "replace", "close": "close", "__enter__": "close"}

if TYPE_CHECKING:
    from bandmaster.turns.turns import TurnTaker


def colocate(
    pool: ResourcePool,
    /,
    *,
    meshes: Mapping[str, Mesh | Mapping[str, Mesh]] | None = None,
    name: str | None = None,
    name_prefix: str | None = None,
    start_timeout: float | None = None,
    output: str | PathLike[str] | None = None,
    logging: str | int | None = None,
    **roles: Any,
) -> ColocatedGroup:
    """Start one process per slot that holds a worker of every role, and return a group of each role.

    The workers of one rank share a process, a device and a process group of torch.distributed; each finds the others in
    its attribute ``roles``. A rank runs one call at a time, whatever its role.

    Args:
        pool: The slots, one process per slot.
        meshes: By role, the mesh of its group, ``Mesh(dp=world_size)`` by default; or a dict of named meshes, as the
            ``meshes`` of `WorkerGroup`.
        name: Name of the group, as for `WorkerGroup`; by default the names of the roles, such as ``actor_critic``.
        name_prefix: Prefix of that name, before the names of the roles, as for `WorkerGroup`.
        start_timeout: Seconds that the processes may take to start, and then again for all constructors.
        output: A directory for the output of the workers, as for `WorkerGroup`.
        logging: The lowest level of records of workers that the controller handles, as for `WorkerGroup`.
        **roles: By name of the role: a subclass of `Worker`, a tuple of it and positional arguments of its constructor,
            or a `ClassWithInitArgs`. The constructors run in this order.

    Returns:
        A group whose attributes are the groups of the roles.

    Raises:
        UsageError: There is no role; the name of a role is not an identifier, or is an attribute of the group;
            ``meshes`` names an unknown role; or the classes were wrapped by ``@ray.remote`` with different options.
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
    options = {
        "name": name,
        "name_prefix": name_prefix,
        "start_timeout": start_timeout,
        "output": output,
        "logging": logging,
    }
    return ColocatedGroup(pool, roles, {} if meshes is None else meshes, options)


class _Checked(NamedTuple):
    """The checked arguments for a role, and the facts derived from them before anything is started."""

    cls: type[Worker]
    role: Role
    methods: dict[str, MethodSpec]
    options: Mapping[str, Any]


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
        options: Mapping[str, Any],
    ) -> None:
        if not isinstance(pool, ResourcePool):
            raise ArgumentError(f"the first argument of colocate must be a ResourcePool, got {type(pool).__name__}")
        found = _checked_roles(pool, roles, meshes)
        cls = type("_".join(found), (Roles,), {})
        wrapped = SimpleNamespace(__ray_actor_class__=cls, _default_options=_common_options(found))
        self._roles, self._submitters = found, dict[str, Submitter]()
        self._groups: weakref.WeakValueDictionary[str, RoleGroup] = weakref.WeakValueDictionary()
        given = {name: checked.role for name, checked in found.items()}
        super().__init__(pool, ClassWithInitArgs(wrapped, given), **options)

    def _set_up(self, cls: type[Worker], mesh: Mesh, meshes: Mapping[str, Mesh]) -> None:
        super()._set_up(cls, mesh, meshes)
        workers, work = self._ownership.workers, self._submitter.work
        for name, checked in self._roles.items():
            role = f"{self._name}.{name}"
            prefix, methods = name + SEPARATOR, checked.methods
            submitter = Submitter(workers, checked.cls, checked.role.mesh, role, prefix, methods, work)
            submitter.refused = self._submitter.refused
            self._submitters[name] = submitter
            if turn_hooks(checked.cls):
                self._turn_taker_of(name)

    def _turn_taker_of(self, role: str) -> TurnTaker:
        """The turn taker of a role; also makes the one that takes turns for all roles together."""
        from bandmaster.turns.turns import turn_taker  # a feature

        submitter, places = self._submitters[role], self._pool._places
        taker = turn_taker(self._roles[role].cls, f"{self._name}.{role}", places, submitter, self._ownership)
        whole = turn_taker(self._cls, self._name, places, self._submitter, self._ownership)
        if taker not in whole.roles:
            whole.roles.append(taker)
        return taker

    @property
    def role_names(self) -> tuple[str, ...]:
        """The names of the roles, in the order in which their workers are constructed."""
        return tuple(self._roles)

    def role(self, name: str) -> RoleGroup:
        """The group of a role; also available as the attribute of that name.

        Raises:
            UsageError: There is no such role.
        """
        if name not in self._roles:
            raise UsageError(f"{self._name} has no role {name!r}; its roles are {', '.join(self._roles)}")
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = RoleGroup(self, name)
        return group

    def restart(self, state: Mapping[str, Any] | None = None) -> None:
        """End all processes, even busy ones, start new ones, and construct the workers of all roles again.

        Args:
            state: By role, the value passed to its ``on_restart``; roles that are not named get None.

        Raises:
            UsageError: ``state`` names an unknown role, or one without ``on_restart``; nothing was done.
            Exception: All errors of `WorkerGroup.restart`.
        """
        super().restart(state)

    def replace(self, rank: int, state: Mapping[str, Any] | None = None) -> None:
        """End the process of one rank, start a new one, and construct its workers of all roles.

        Args:
            rank: The rank whose process is replaced.
            state: By role, the value passed to its ``on_replace``; roles that are not named get None.

        Raises:
            UsageError: A role has no ``on_replace``, or ``state`` names an unknown role; nothing was done.
            Exception: All errors of `WorkerGroup.replace`.
        """
        super().replace(rank, state)

    def _why_not_replaced(self) -> str:
        by_role = [
            why_not_replaced(checked.cls, checked.role.mesh, f" in the worker class of {name}")
            for name, checked in self._roles.items()
        ]
        return next(filter(None, by_role), "")

    def _turn_taker(self) -> NoReturn:
        raise UsageError(
            f"the roles of {self._name} take turns, each on its own: with group.{self.role_names[0]}.turn()"
        )

    def set_default_options(self, /, **options: Any) -> None:
        """Set the options of the calls of all roles that do not set them themselves.

        Args:
            **options: ``timeout``, ``grace`` and ``stall_after``, in seconds, and ``on_stall``; see `CallOptions`.

        Raises:
            UsageError: An option is unknown, or its value is invalid, or not possible for this group.
        """
        checked = self._submitter.options_but(None, options) or {}
        for submitter in (self._submitter, *self._submitters.values()):
            submitter.options.update(checked)

    def _check_state(self, method: str, hook: str, state: Any, *args: Any) -> None:
        """Refuse a state for a role without the hook, and a hook with another signature, before anything is done."""
        for checked in self._roles.values():
            if _has(checked, hook):
                cls = checked.cls
                bind(f"{cls.__name__}.{hook}", signature_without_self(cls, hook), (*args, None), {})
        if state is None:
            return
        if not isinstance(state, Mapping):
            raise UsageError(f"the state of {method} must be a dict with one value per role, got {state!r}")
        for name in state:
            if name not in self._roles or not _has(self._roles[name], hook):
                raise UsageError(
                    f"{method}() got a state for {name!r}, but only roles with a method {hook} take one; the roles are "
                    f"{', '.join(self._roles)}"
                )

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("_roles", ()):
            return self.role(name)
        return super().__getattr__(name)  # type: ignore[misc]  # hidden from type checkers

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._roles})


class RoleGroup(AnyGroup):
    """The group of one role: its methods and its mesh, on processes that it shares with the groups of other roles.

    It is used like a `WorkerGroup`, and counts as one for `isinstance`, but the methods for the processes (`restart`,
    `replace`, `close`, ``with``) are those of the colocated group alone.
    """

    def __init__(self, colocated: ColocatedGroup, role: str) -> None:
        checked = colocated._roles[role]
        self._colocated, self._role = colocated, role  # the colocated group lives as long as this
        self._cls, self._methods = checked.cls, checked.methods
        self._mesh, self._meshes = checked.role.mesh, checked.role.meshes
        self._name, self._submitter = f"{colocated._name}.{role}", colocated._submitters[role]
        self._pool, self._launch = colocated._pool, colocated._launch
        self._ownership, self._watches = colocated._ownership, colocated._watches

    def _turn_taker(self) -> TurnTaker:
        return self._colocated._turn_taker_of(self._role)

    @property
    def workers(self) -> list[Any]:
        """One object per rank: the name of the worker that the roles share, with rank, host and pid; on backend
        ``"inprocess"`` the role's own worker.
        """
        handles = super().workers
        return [handle.roles[self._role] if isinstance(handle, Roles) else handle for handle in handles]

    def __getattr__(self, name: str) -> Any:
        if name in OF_THE_PROCESSES:
            raise AttributeError(
                f"{self._name} shares its processes with the other roles; call {OF_THE_PROCESSES[name]}() of the "
                "colocated group, which acts on all roles"
            )
        return super().__getattr__(name)  # type: ignore[misc]  # hidden from type checkers


WorkerGroup.register(RoleGroup)  # for `isinstance` in programs that take either


def _has(checked: _Checked, hook: str) -> bool:
    return callable(getattr(checked.cls, hook, None))


def _checked_roles(
    pool: ResourcePool, roles: Mapping[str, Any], meshes: Mapping[str, Mesh | Mapping[str, Mesh]]
) -> dict[str, _Checked]:
    if not roles:
        raise UsageError("colocate needs at least one role, such as actor=Actor")
    if not isinstance(meshes, Mapping):
        raise MeshError(f"meshes of colocate must be a dict by role, such as {{'actor': Mesh(dp=2)}}, got {meshes!r}")
    unknown = [name for name in meshes if name not in roles]
    if unknown:
        raise UsageError(f"meshes names {', '.join(map(repr, unknown))}, but the roles are {', '.join(roles)}")
    found = {}
    for name, given in roles.items():
        if not name.isidentifier() or name.startswith("_"):
            raise UsageError(f"the name of a role must be an identifier without a leading underscore, got {name!r}")
        if name in dir(ColocatedGroup):
            advice = "give meshes={role: Mesh(...)}" if name == "mesh" else "rename the role"
            raise UsageError(f"a role cannot be called {name!r}: groups have an attribute of that name; {advice}")
        try:
            found[name] = _checked(pool, given, meshes.get(name))
        except UsageError as error:
            raise type(error)(f"role {name!r}: {error}") from error.__cause__
    return found


def _checked(pool: ResourcePool, given: Any, meshes: Mesh | Mapping[str, Mesh] | None) -> _Checked:
    given, args = (given[0], given[1:]) if isinstance(given, tuple) and given else (given, ())
    cls, args, kwargs, options = unwrap(given, args, {})
    if issubclass(cls, GroupOf):
        raise UsageError(f"{cls.__name__} is a class of groups; give a worker class")
    registered, size = registrations(cls), pool.world_size
    check_names(cls, registered, dir(GroupOf))
    mesh = checked_mesh(None if isinstance(meshes, Mapping) else meshes, size, pool)
    named = checked_meshes(meshes if isinstance(meshes, Mapping) else None, size, pool)
    methods = specs_of(cls, registered, mesh, named)
    return _Checked(cls, Role(encode_constructor(cls, args, kwargs), mesh, named), methods, options)


def _common_options(found: Mapping[str, _Checked]) -> Mapping[str, Any]:
    """Merge the options of ``@ray.remote`` of the classes of all roles; refuse contradictions."""
    common: dict[str, Any] = {}
    for name, checked in found.items():
        for option, value in checked.options.items():
            if common.setdefault(option, value) != value:
                raise UsageError(
                    f"the worker classes ask @ray.remote for {option}={common[option]!r} and, in role {name!r}, "
                    f"{option}={value!r}; roles share their processes, so give all classes the same options"
                )
    return common
