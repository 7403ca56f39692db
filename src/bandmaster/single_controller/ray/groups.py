"""verl's ``RayWorkerGroup``, over bandmaster's worker groups.

::

    RayWorkerGroup(pool, RayClassWithInitArgs(cls, ...))
        │  _inner: a bandmaster group, or the workers of another group that it was attached to
        ├─ method(x)   dispatch_fn ── one value per rank ──► bandmaster's call ── collect_fn ──► result
        └─ spawn()     a group for each role of a colocated class, on the same workers
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from bandmaster.calls.options import checked_seconds
from bandmaster.calls.request import CallRequest, Collection
from bandmaster.calls.spec import MethodSpec
from bandmaster.calls.submission import Submitter
from bandmaster.codec import Payload, decode, encode
from bandmaster.errors import ArgumentError, UsageError, suggestion
from bandmaster.groups.base import no_attribute
from bandmaster.lifecycle.checks import check_options
from bandmaster.plan.arguments import CallPlan, scatter
from bandmaster.plan.binding import bind
from bandmaster.plan.mesh import Mesh
from bandmaster.plan.transfer import Custom, Gather, as_protocol
from bandmaster.plan.transfer import Execute as CoreExecute
from bandmaster.pool import ResourcePool
from bandmaster.roles import SEPARATOR
from bandmaster.single_controller.base.batches import resolved
from bandmaster.single_controller.base.decorator import (
    PROTOCOLS,
    Dispatch,
    Execute,
    get_predefined_dispatch_fn,
)
from bandmaster.single_controller.base.worker_group import WorkerGroup
from bandmaster.single_controller.ray.classes import registered_by_verl, unwrapped
from bandmaster.single_controller.ray.inner import (
    AttachedGroup,
    StartedGroup,
    check_backend,
    nsight_options,
    variables_of,
)
from bandmaster.single_controller.ray.launch import ACTORS
from bandmaster.single_controller.ray.methods import RayMethod, references
from bandmaster.worker import ClassWithInitArgs, Registration

__all__ = ["RayWorkerGroup"]


class RayWorkerGroup(WorkerGroup):
    """A worker group with verl's parameters and methods, and with all attributes of a bandmaster group.

    Args:
        resource_pool: The slots for the workers, one worker per slot; None attaches the group to existing workers.
        ray_cls_with_init: The worker class and its constructor's arguments.
        bin_pack: Must be a bool; slots of an entry of the pool are on one node in any case.
        name_prefix: Prefix of the workers' names; by default the pool's prefix followed by six random letters.
        detached: Whether the workers outlive this process; the pool has to be detached as well.
        worker_names: Names of existing workers, which may be another process's.
        worker_handles: Their actor handles, in place of names.
        ray_wait_register_center_timeout: Ignored: workers do not wait for the register center, see `name_prefix`.
        mesh: Named axes over the ranks, for the protocols of HybridFlow.
        device_name: Ignored: the pool says whether slots have a GPU.
        use_gpu: Must not be True for a pool without GPUs.
        worker_env: Further environment variables of the workers.
        profile_steps: The steps to profile; their number sets where ``nsight`` ends its capture.
        worker_nsight_options: Options of Ray's profiler ``nsight`` for the workers; used only with ``profile_steps``.
        start_timeout: Seconds that the processes may take to start, and then again for the constructors.

    Raises:
        UsageError: A value has the wrong type, or they contradict each other.
        ValueError: ``worker_env`` names a variable that the group itself sets.
        Exception: All errors of `bandmaster.WorkerGroup`.
    """

    def __init__(
        self,
        resource_pool: ResourcePool | None = None,
        ray_cls_with_init: Any = None,
        bin_pack: bool = True,
        name_prefix: str | None = None,
        detached: bool = False,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[Any] | None = None,
        ray_wait_register_center_timeout: int = 300,
        *,
        mesh: Mesh | None = None,
        device_name: str = "cuda",
        use_gpu: bool | None = None,
        worker_env: Mapping[str, str] | None = None,
        profile_steps: Sequence[int] | None = None,
        worker_nsight_options: Mapping[str, Any] | None = None,
        start_timeout: float | None = None,
    ) -> None:
        for name, flag in (("bin_pack", bin_pack), ("detached", detached)):
            if not isinstance(flag, bool):
                raise UsageError(
                    f"{name} of RayWorkerGroup must be True or False, got {flag!r}; name_prefix and mesh are keywords"
                )
        check_options("RayWorkerGroup", None, name_prefix)
        checked_seconds("start_timeout of RayWorkerGroup", start_timeout)
        self.ray_cls_with_init = ray_cls_with_init
        self.resource_pool = resource_pool
        self.device_name = device_name
        self.profile_steps, self.worker_nsight_options = profile_steps, worker_nsight_options
        self.wg_dict: dict[str, RayWorkerGroup] | None = None
        self.sub_cls_name = ""
        given = ray_cls_with_init if isinstance(ray_cls_with_init, ClassWithInitArgs) else None
        cls = unwrapped(ray_cls_with_init if given is None else given.cls)
        for role_class in (cls, *getattr(cls, "raw_cls_dict", {}).values()):
            _check_names(role_class)
        if resource_pool is None:
            self._inner: StartedGroup | AttachedGroup = AttachedGroup(worker_handles, worker_names, cls, mesh)
        elif worker_names is not None or worker_handles is not None:
            raise UsageError(
                "a group has either a resource_pool, or the names or handles of existing workers; not both"
            )
        else:
            if use_gpu and not resource_pool.use_gpu:
                raise UsageError(f"use_gpu is True, but {resource_pool!r} has none; make the pool with use_gpu=True")
            variables = variables_of(resource_pool, worker_env)
            check_backend(resource_pool, worker_env, detached)
            options = dict(getattr(given, "options", {}))
            if profile_steps and worker_nsight_options is not None and device_name == "cuda":
                nsight = nsight_options(worker_nsight_options, len(profile_steps))
                options["runtime_env"] = {**options.get("runtime_env", {}), "nsight": nsight}
            self._inner = StartedGroup(
                resource_pool,
                ray_cls_with_init,
                mesh,
                name_prefix,
                start_timeout,
                variables,
                detached,
                options,
            )
        self._bind(cls, self._inner._submitter)

    def _bind(self, cls: Any, submitter: Submitter) -> None:
        """Make the methods of a worker class methods of this group."""
        self._cls, self._submitter = cls, submitter
        self._dispatch_info: dict[str, Sequence[int]] = {}
        self._collect_info: dict[str, Sequence[bool]] = {}
        self._methods = {} if cls is None else registered_by_verl(cls)
        self._specs: dict[str, MethodSpec] = {}  # by name; a `RayMethod` refers to the group, which it must not keep

    @property
    def method_names(self) -> list[str]:
        """The methods of the workers that can be called on the group."""
        return list(self._methods)

    @property
    def world_size(self) -> int:  # type: ignore[override]
        """Number of ranks."""
        return self._submitter.mesh.size

    @property
    def name_prefix(self) -> str:
        """The prefix of the workers' names.

        Programs of verl up to 0.5 build the name of the group's register center from it. That actor is therefore
        started when the prefix is read first, unless the group was attached to the workers of another one.
        """
        self._inner.start_register_center()
        return self._inner.prefix

    @property
    def fused_worker_used(self) -> bool:
        """Whether the workers hold one worker of each of several roles."""
        return bool(getattr(self._inner._cls, "colocated", None))

    @property
    def _workers(self) -> list[Any]:
        return self.workers

    @property
    def workers(self) -> list[Any]:
        """The actor handle of each rank. A worker whose handle is kept lives on after the group was collected."""
        return self._inner.workers

    @property
    def worker_names(self) -> list[str]:
        """The name of each rank's actor."""
        return self._inner.worker_names

    @property
    def _worker_names(self) -> list[str]:
        return self.worker_names

    @property
    def master_address(self) -> str:
        """Address of the group's rendezvous."""
        return self.execute_rank_zero_sync("get_master_addr_port")[0]  # type: ignore[no-any-return]

    @property
    def master_port(self) -> str:
        """Port of the group's rendezvous."""
        return self.execute_rank_zero_sync("get_master_addr_port")[1]  # type: ignore[no-any-return]

    def dispatch_info(self, mesh_name: str) -> Sequence[int]:
        """The data-parallel rank of every rank on a mesh that the workers have registered; queried once."""
        if mesh_name not in self._dispatch_info:
            self._dispatch_info[mesh_name] = self._query_dispatch_info(mesh_name)
        return self._dispatch_info[mesh_name]

    def collect_info(self, mesh_name: str) -> Sequence[bool]:
        """For every rank, whether its values are collected on a mesh that the workers have registered."""
        if mesh_name not in self._collect_info:
            self._collect_info[mesh_name] = self._query_collect_info(mesh_name)
        return self._collect_info[mesh_name]

    # --- roles ---

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, RayWorkerGroup]:
        """A group for each of these roles of a colocated class, on the same workers.

        Raises:
            UsageError: The class has no such role.
        """
        return {role: self._spawned(role) for role in prefix_set}

    def _spawned(self, role: str) -> RayWorkerGroup:
        colocated = getattr(self._inner._cls, "colocated", {})
        if role not in colocated:
            known = ", ".join(colocated) or "none: make the class with create_colocated_worker_cls"
            raise UsageError(f"{self!r} has no role {role!r}; its roles are {known}")
        group = object.__new__(type(self))
        vars(group).update(vars(self), sub_cls_name=role, wg_dict=None, _whole=self)
        cls, inner, shared = colocated[role][0], self._inner, self._submitter
        name = f"{inner.name}.{role}"
        mine = Submitter(shared.workers, cls, shared.mesh, name, role + SEPARATOR, work=shared.work)
        mine.options = shared.options
        group._bind(cls, mine)
        return group

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """Make the group of each of these roles an attribute of this group."""
        self.wg_dict = self.wg_dict or self.spawn(prefix_set)
        vars(self).update(self.wg_dict)

    @classmethod
    def from_detached(
        cls,
        name_prefix: str | None = None,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[Any] | None = None,
        ray_cls_with_init: Any = None,
        **kwargs: Any,
    ) -> RayWorkerGroup:
        """A group of existing workers, which another group, perhaps of another process, has started."""
        return cls(
            None,
            ray_cls_with_init,
            name_prefix=name_prefix,
            worker_names=worker_names,
            worker_handles=worker_handles,
            **kwargs,
        )

    # --- calls by name ---

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method on every rank, wait, and return the list of values; see `bandmaster.WorkerGroup`."""
        plan = self._plan(method_name, args, kwargs)
        ranks = self._submitter.ranks
        request = CallRequest(method_name, plan, ranks, Collection(Gather(), ranks), owner=self)
        values: list[Any] = self._submitter.call(request)
        return values

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method, which need not be registered, on every rank. Returns one ObjectRef per rank."""
        plan = self._plan(method_name, args, kwargs)
        return references(self._submitter, self, method_name, plan, self._submitter.ranks)

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method, which need not be registered, on rank 0, wait, and return its value."""
        plan = self._plan(method_name, args, kwargs, 1)
        return self._submitter.call(CallRequest(method_name, plan, (0,), Collection(Gather(), (0,)), owner=self))[0]

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method, which need not be registered, on rank 0. Returns the ObjectRef of its value."""
        plan = self._plan(method_name, args, kwargs, 1)
        return references(self._submitter, self, method_name, plan, (0,))[0]

    execute_all = execute_all_async
    execute_rank_zero = execute_rank_zero_async

    def _plan(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], n: int | None = None) -> CallPlan:
        """Plan one value per rank if all arguments are lists of that length; else every rank gets every argument."""
        if not callable(getattr(self._cls, name, None)):
            hint = suggestion(name, dir(self._cls))
            raise ArgumentError(f"{getattr(self._cls, '__name__', self._cls)} has no method {name!r}{hint}")
        args, kwargs = [resolved(value) for value in args], {key: resolved(value) for key, value in kwargs.items()}
        values = [*args, *kwargs.values()]
        size = self.world_size if n is None else n
        is_split = n is None and bool(values) and all(isinstance(v, list) and len(v) == size for v in values)
        if not is_split:
            args, kwargs = [[value] * size for value in args], {key: [value] * size for key, value in kwargs.items()}
        return self._scattered(name, args, kwargs, size)

    def _scattered(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], n: int) -> CallPlan:
        spec = self._spec(name)
        return CallPlan(tuple(scatter(bind(spec.label, spec.signature, args, kwargs), n, spec.label)))

    def _spec(self, name: str) -> MethodSpec:
        """The facts about a method, which need not be registered."""
        if name not in self._specs:
            modes = self._methods.get(name)
            registration = Registration(Custom(_unused, _unused)) if modes is None else _registration(**modes)
            self._specs[name] = MethodSpec.of(self._cls, name, registration, self._submitter.mesh, {})
        return self._specs[name]

    # --- methods ---

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            known = self.__dict__
            if name in known.get("_methods", ()):
                return RayMethod(self, self._submitter, self._spec(name))
            if "_inner" in known and not name.startswith("__"):
                with suppress(AttributeError):
                    return getattr(known.get("_whole") or known["_inner"], name)
            raise no_attribute(self, name)

    else:

        def __getattr__(self, name: str) -> Any: ...

    def close(self) -> None:
        """End the workers, also those whose handles are kept. Detached workers and workers of another group live on."""
        self._inner.close()

    def __enter__(self) -> RayWorkerGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start_worker_aliveness_check(self, every_n_seconds: float = 1) -> None:
        """Raise SIGABRT in this process once a worker has died. `on_death` calls a function instead.

        Args:
            every_n_seconds: Ignored: most deaths are noticed as they happen.
        """
        self._inner.on_death(lambda _: signal.raise_signal(signal.SIGABRT))

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._methods, *dir(self._inner)})

    def __repr__(self) -> str:
        return f"<role {self.sub_cls_name!r} of {self._inner!r}>" if self.sub_cls_name else repr(self._inner)

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(self._inner, StartedGroup) and self._inner._pool._lease.backend != ACTORS:
            raise UsageError(
                f"{self!r} cannot be pickled, as its workers are no Ray actors; give it a RayResourcePool, or pass a "
                "bandmaster.WorkerGroup, which other workers can call"
            )
        classes = encode((type(self), self._inner._cls))
        return _attached, (self.workers, self.worker_names, self._inner.mesh, classes, self.sub_cls_name)

    def __deepcopy__(self, memo: Any = None) -> RayWorkerGroup:
        group = object.__new__(type(self))
        vars(group).update(vars(self))
        group._bind(self._cls, self._submitter)
        return group

    __copy__ = __deepcopy__


def _attached(handles: Sequence[Any], names: Sequence[str], mesh: Mesh, classes: Payload, role: str) -> RayWorkerGroup:
    """Unpickle a group: make one that is attached to the same workers."""
    group_cls, worker_cls = decode(classes)
    group: RayWorkerGroup = group_cls.from_detached(None, names, handles, worker_cls, mesh=mesh)
    return group.spawn([role])[role] if role else group


def _check_names(cls: Any) -> None:
    hidden = [name for name in registered_by_verl(cls) if hasattr(RayWorkerGroup, name)]
    if hidden:
        raise UsageError(
            f"{cls.__name__} registers {', '.join(map(repr, hidden))}, but these are names of RayWorkerGroup's own "
            "attributes; rename the method"
        )


def _registration(dispatch_mode: Any, execute_mode: Execute, blocking: bool) -> Registration:
    """The bandmaster `Registration` for the arguments of verl's ``register``."""
    is_member = isinstance(dispatch_mode, Dispatch)
    ours = PROTOCOLS.get(dispatch_mode) if is_member else as_protocol(dispatch_mode)
    if execute_mode is Execute.RANK_ZERO:  # rank 0 gets the arguments as they are
        return Registration(PROTOCOLS[Dispatch.DP_PROTO], CoreExecute.RANK_ZERO, blocking)
    if ours is not None:
        return Registration(ours, is_blocking=blocking)
    pair = get_predefined_dispatch_fn(dispatch_mode)
    return Registration(Custom(pair["dispatch_fn"], pair["collect_fn"]), is_blocking=blocking)


def _unused(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("it stands for functions that a call by name does not have")
