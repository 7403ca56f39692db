"""`Worker`, the base class of worker classes, and `Registration`, which `register` attaches to their methods."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from bandmaster.errors import ProtocolError, UsageError
from bandmaster.plan.mesh import Mesh
from bandmaster.plan.numbers import as_amount, as_whole
from bandmaster.plan.transfer import (
    Custom,
    Execute,
    Outgoing,
    Route,
    Split,
    TransferProtocol,
    check_padding,
    check_weights,
)

_MARK = "__bandmaster_registration__"
_LONG_IMPORTS = {"numpy", "pandas", "scipy", "sklearn", "tensordict", "torch", "transformers"}  # take long; no threads


class Worker:
    """Base class of worker classes. Each rank of a worker group has one instance.

    The attributes below are set before ``__init__`` of the subclass runs, whether or not it calls
    ``super().__init__()``. On backends with worker processes, ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``,
    ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` are set in the environment, so that
    ``torch.distributed.init_process_group()`` needs no arguments.

    Attributes:
        rank: Index of this worker in its group, 0 … world_size-1.
        world_size: Number of workers in the group.
        local_rank: Index of this worker among the group's workers on its node.
        local_world_size: Number of the group's workers on its node.
        node_rank: Index of its node in the resource pool.
        device: ``"cpu"``, or the worker's own GPU by its torch name, such as ``"cuda:0"``.
        mesh: The mesh of the group.
        meshes: The further meshes of the group, by name.
        coordinates: The coordinate of this rank on every axis of ``mesh``, by axis name.
        roles: In a group made by `colocate`, the workers of all roles in this process, by role, this one included;
            while a constructor runs, those constructed before it. Empty in other groups.
    """

    rank: int
    local_rank: int
    local_world_size: int
    node_rank: int
    device: str
    coordinates: dict[str, int]
    roles: Mapping[str, Any] = MappingProxyType({})
    __bandmaster_reports__: Mapping[str, Report] = MappingProxyType({})  # by the prefix of the role's methods

    if TYPE_CHECKING:  # read-only, as they are on a group: a typed group has both as bases

        @property
        def world_size(self) -> int:
            """Number of workers of the group."""

        @property
        def mesh(self) -> Mesh:
            """The group's mesh."""

        @property
        def meshes(self) -> Mapping[str, Mesh]:
            """The group's further meshes, by name."""
    else:
        world_size: int
        mesh: Mesh
        meshes: Mapping[str, Mesh]

    def __init__(self) -> None:
        """Do nothing: the attributes are already set."""


class Report(NamedTuple):
    """Load and version of a worker, as far as it has reported them.

    Attributes:
        load: How busy it is, in requests; None if it has not said so.
        version: The version of its weights; None if it has not said so.
    """

    load: float | None = None
    version: int | None = None


def report(worker: Worker, /, *, load: float | None = None, version: int | None = None) -> None:
    """Tell all callers how busy a worker is, or which version of its weights it has; called in the worker.

    The next reply of the worker carries what has changed. Callers send requests to the replicas that are least busy,
    and those with ``options(min_version=...)`` to replicas that have the version.

    Args:
        worker: The worker itself.
        load: The number of requests that it has, of all callers together, such as those that wait or run in an engine.
            Callers that have more than that on it count their own. It counts for a few seconds; ``math.inf``, of one
            that answers nothing for now, until the worker reports another one.
        version: The version of its weights, which grows. It counts until the worker reports another one.

    Raises:
        UsageError: ``worker`` is no worker, or a value is invalid.

    Example:
        >>> import asyncio, bandmaster as bm
        >>> class Rollout(bm.Worker):
        ...     @bm.register(bm.Dispatch.ONE_TO_ALL)
        ...     def load(self, version):
        ...         bm.report(self, version=version)
        ...     @bm.register(bm.Dispatch.REQUEST, concurrency=100)
        ...     async def chat(self, prompt):
        ...         return prompt.upper()
        >>> with bm.ResourcePool([2], backend="inprocess") as pool:
        ...     rollout = bm.WorkerGroup(pool, Rollout)
        ...     _ = rollout.load(7)
        ...     rollout.chat.options(min_version=7)("new").result()
        'NEW'
    """
    if not isinstance(worker, Worker):
        raise UsageError(f"report takes the worker itself, as in report(self, version=7), got {type(worker).__name__}")
    told = Report(as_amount(load), as_whole(version))
    if load is not None and told.load is None:
        raise UsageError(f"load must be a non-negative number of requests, got {load!r}")
    if version is not None and told.version is None:
        raise UsageError(f"version must be a whole number, got {version!r}")
    before = worker.__bandmaster_reports__.get("", Report())
    reported = Report(before.load if load is None else told.load, before.version if version is None else told.version)
    worker.__bandmaster_reports__ = {"": reported}


T = TypeVar("T")


def load_class(load: Callable[..., T], /, *args: Any) -> T:
    """Call a function that loads a worker class, which may import the class's module; see `check_not_loading`."""
    return load(*args)


def check_not_loading() -> None:
    """Check that the calling thread may create workers.

    This prevents endless recursion: a module that creates workers at import would start workers that import the module,
    and so on. It looks at the stack, because a mark that `load_class` sets could be left by Ctrl-C.

    Raises:
        UsageError: The thread is in `load_class`.
    """
    frame = sys._getframe().f_back
    while frame is not None:
        if frame.f_code is load_class.__code__:
            raise UsageError(
                "the module of a worker class creates workers when it is imported, and every worker imports it; move "
                "the code that creates them into a function, or under if __name__ == '__main__':"
            )
        frame = frame.f_back


@dataclass(frozen=True)
class WorkerContext:
    """Values for the attributes of a `Worker` of the same names; known before the worker is constructed."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    device: str
    mesh: Mesh
    meshes: Mapping[str, Mesh]

    @classmethod
    def of(cls, worker: Worker) -> WorkerContext:
        """The context with which a worker was made."""
        return cls(**{name: getattr(worker, name) for name in cls.__dataclass_fields__})

    def environment(self) -> dict[str, str]:
        """``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE``, as environment variables."""
        names = ("rank", "world_size", "local_rank", "local_world_size")
        return {name.upper(): str(getattr(self, name)) for name in names}


def make_worker(
    cls: type[Worker],
    context: WorkerContext,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    roles: Mapping[str, Worker] | None = None,
) -> Worker:
    """Construct a worker, and set its attributes before its ``__init__`` runs.

    Args:
        cls: The worker class.
        context: Values of the attributes.
        args: Positional arguments of ``__init__``.
        kwargs: Keyword arguments of ``__init__``.
        roles: In a colocated group, the workers of all roles in this process.

    Raises:
        TypeError: ``__init__`` returned a value.
        Exception: Raised by ``__new__`` or ``__init__`` of the class.
    """
    takes_arguments = cls.__new__ is not object.__new__
    worker = cls.__new__(cls, *args, **kwargs) if takes_arguments else cls.__new__(cls)
    vars(worker).update(vars(context), coordinates=context.mesh.coordinates(context.rank))
    if roles is not None:
        vars(worker)["roles"] = roles
    outcome: object = worker.__init__(*args, **kwargs)  # type: ignore[misc]  # the subclass has its own signature
    if outcome is not None:  # Python's own check; a coroutine, for example, has not run
        raise TypeError(f"{cls.__name__}.__init__() should return None, not {type(outcome).__name__!r}")
    return worker


def imports_of(cls: type) -> tuple[str, ...]:
    """The slow modules of `_LONG_IMPORTS` that the methods of a class name, and therefore probably import."""
    functions = [_function_of(one) for base in cls.__mro__ for one in vars(base).values()]
    unwrapped = [inspect.unwrap(function) for function in functions if inspect.isfunction(function)]
    codes = [function.__code__ for function in unwrapped if inspect.isfunction(function)]
    found: set[str] = set()
    while codes:
        code = codes.pop()
        found.update(name.partition(".")[0] for name in code.co_names)
        codes += [constant for constant in code.co_consts if inspect.iscode(constant)]
    return tuple(sorted(found & _LONG_IMPORTS))


class ClassWithInitArgs:
    """A worker class together with the arguments of its constructor.

    Needed only if their names clash with parameters of `WorkerGroup`, which otherwise accepts the arguments itself.

    Args:
        cls: A subclass of `Worker`, plain or wrapped by ``@ray.remote``.
        *args: Positional arguments of its constructor.
        **kwargs: Keyword arguments of its constructor.
    """

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        self.cls = cls
        self.args = args
        self.kwargs = kwargs

    def __repr__(self) -> str:
        given = [*map(repr, self.args), *(f"{key}={value!r}" for key, value in self.kwargs.items())]
        return f"ClassWithInitArgs({', '.join([getattr(self.cls, '__name__', repr(self.cls)), *given])})"


@dataclass(frozen=True)
class Registration:
    """The arguments of `register` for one method.

    Attributes:
        protocol: The transfer protocol, or the user's pair of functions.
        execute: The ranks that run the method.
        is_blocking: Whether the group's method waits for the result.
        arguments: Dispatch rules of single arguments, by parameter name.
        mesh: Name of the mesh that has the axes; None for the group's ``mesh``.
        concurrency: Most requests of the method that a replica runs at a time.
        is_idempotent: Whether a request that a worker may have begun may be sent again.
    """

    protocol: TransferProtocol[Any, Any] | Custom
    execute: Execute = Execute.ALL
    is_blocking: bool = True
    arguments: Mapping[str, Outgoing] = field(default_factory=dict)
    mesh: str | None = None
    concurrency: int = 1
    is_idempotent: bool = False

    @property
    def is_request(self) -> bool:
        """Whether a call goes to one replica."""
        return isinstance(self.protocol, TransferProtocol) and isinstance(self.protocol.outgoing, Route)


def mark(method: Any, registration: Registration) -> Any:
    """Mark a function, or the function that a class method or static method wraps; returns ``method`` itself.

    Raises:
        ProtocolError: ``method`` is not a function, or the registration names a parameter that it does not have.
    """
    function = _function_of(method)
    _check_arguments(function, registration)
    setattr(function, _MARK, registration)
    return method


def registrations(cls: type[Worker]) -> dict[str, Registration]:
    """The registrations of the methods of a worker class, by method name.

    Inherited methods are included. A method without a registration of its own has that of the method it overrides.

    Raises:
        ProtocolError: The inherited registration names a parameter that the overriding method does not have.
    """
    found = {}
    for name in dir(cls):
        functions = [_function_of(vars(base)[name]) for base in cls.__mro__ if name in vars(base)]
        for function in functions:
            registration = _registration_of(function)
            if isinstance(registration, Registration) and callable(functions[0]):
                _check_arguments(functions[0], registration)
                found[name] = registration
                break
    return found


def _function_of(method: Any) -> Any:
    """The function inside a `classmethod` or `staticmethod`; other values unchanged."""
    return method.__func__ if isinstance(method, classmethod | staticmethod) else method


def _registration_of(function: Any) -> Any:
    """The registration with which `mark` has marked a function; other attributes of a class have none."""
    try:
        return getattr(function, _MARK, None)
    except Exception:  # an attribute that computes its own may raise anything
        return None


def _check_request(method: Callable[..., Any], registration: Registration) -> None:
    name = method.__qualname__
    if inspect.isgeneratorfunction(method):
        raise ProtocolError(
            f"{name} is a generator, but the items of a request are made on the event loop of its worker; write async "
            "def"
        )
    is_async = inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)
    if registration.concurrency > 1 and not is_async:
        raise ProtocolError(
            f"{name} is registered with concurrency={registration.concurrency}, but only async methods run beside "
            "each other; write async def, or leave concurrency out"
        )


def _check_arguments(method: Any, registration: Registration) -> None:
    if not callable(method) or not hasattr(method, "__qualname__"):  # such as a functools.partial
        raise ProtocolError(f"@register must decorate a function, got {method!r}; write it directly above the def")
    # A static method has no self, and @staticmethod may be written above @register.
    names = [name for name in inspect.signature(method).parameters if name not in ("self", "cls")]
    for name, rule in registration.arguments.items():
        if name not in names:
            raise ProtocolError(
                f"@register(arguments=...) names {name!r}, but {method.__qualname__} has only the parameters {names}; "
                "rename one of the two, or put another @register(...) above an overriding method"
            )
        if not isinstance(rule, Outgoing):
            raise ProtocolError(f"the rule of argument {name!r} must be a Split, Broadcast or PerRank, got {rule!r}")
    protocol, rules = registration.protocol, list(registration.arguments.values())
    if registration.is_request:
        _check_request(method, registration)
        return
    if isinstance(protocol, Custom):
        return
    for rule in rules:
        check_padding(rule, protocol)
    padded = {rule for rule in (*rules, protocol.outgoing) if isinstance(rule, Split) and rule.pad}
    if len(padded) > 1:
        raise ProtocolError(f"{method.__qualname__} has different padded splits ({padded}); pad over the same axes")
    check_weights(protocol, rules, method.__qualname__)
