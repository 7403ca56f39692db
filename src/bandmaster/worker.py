"""`Worker`, the base of users' classes, and `register`, which says how a method's calls travel."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bandmaster.errors import ProtocolError, UsageError
from bandmaster.plan.mesh import Mesh
from bandmaster.plan.transfer import (
    Custom,
    Execute,
    Outgoing,
    Split,
    TransferProtocol,
    check_padding,
    check_weights,
)

__all__ = [
    "ClassLoading",
    "ClassWithInitArgs",
    "Registration",
    "Worker",
    "WorkerContext",
    "make_worker",
    "mark",
    "registrations",
]

_MARK = "__bandmaster_registration__"


class Worker:
    """Base class of what runs on every rank.

    The attributes below are set before ``__init__`` of the subclass runs, whether or not it calls
    ``super().__init__()``. A worker with a process of its own also finds ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``,
    ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` in its environment, so that
    ``torch.distributed.init_process_group()`` needs no arguments.

    Attributes:
        rank: Number of this worker in its group, 0 … world_size-1.
        world_size: Number of workers of the group.
        local_rank: Number of this worker among those of the group on its node.
        local_world_size: Number of workers of the group on this node.
        node_rank: Number of the node in the pool.
        device: ``"cpu"``, or the worker's own GPU as torch names it, such as ``"cuda:0"``.
        mesh: The group's mesh.
        coordinates: Where this rank lies on the mesh, by axis.
    """

    rank: int
    local_rank: int
    local_world_size: int
    node_rank: int
    device: str
    coordinates: dict[str, int]

    if TYPE_CHECKING:  # read-only, as they are on a group: a typed group has both as bases

        @property
        def world_size(self) -> int:
            """Number of workers of the group."""

        @property
        def mesh(self) -> Mesh:
            """The group's mesh."""
    else:
        world_size: int
        mesh: Mesh

    def __init__(self) -> None:
        """Nothing to do: the attributes are there already."""


class ClassLoading:
    """Whether this thread is loading a worker's class, and with it importing the modules that it comes from.

    A module that makes a pool when it is imported would then make workers that import it, and so on for ever.
    """

    _thread = threading.local()

    @classmethod
    def check(cls) -> None:
        """Refuse to make workers while this thread loads a worker's class.

        Raises:
            UsageError: It does.
        """
        if getattr(cls._thread, "is_loading", False):
            raise UsageError(
                "a worker imports the module of its class, and that module makes workers when it is imported; put "
                "what makes them into a function, or under if __name__ == '__main__':"
            )

    def __enter__(self) -> None:
        self._thread.is_loading = True

    def __exit__(self, *_: object) -> None:
        self._thread.is_loading = False


@dataclass(frozen=True)
class WorkerContext:
    """What a worker knows of itself before it is constructed; field for field the attributes of `Worker`."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    device: str
    mesh: Mesh

    def environment(self) -> dict[str, str]:
        """The usual variables, but for the rendezvous."""
        names = ("rank", "world_size", "local_rank", "local_world_size")
        return {name.upper(): str(getattr(self, name)) for name in names}


def make_worker(cls: type[Worker], context: WorkerContext, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Worker:
    """Construct a worker whose attributes are set before its ``__init__`` runs."""
    takes_arguments = cls.__new__ is not object.__new__
    worker = cls.__new__(cls, *args, **kwargs) if takes_arguments else cls.__new__(cls)
    vars(worker).update(vars(context), coordinates=context.mesh.coordinates(context.rank))
    outcome: object = worker.__init__(*args, **kwargs)  # type: ignore[misc]  # the subclass has its own signature
    if outcome is not None:  # as Python says when it calls a class; it may be a coroutine that nothing has run
        raise TypeError(f"{cls.__name__}.__init__() should return None, not {type(outcome).__name__!r}")
    return worker


class ClassWithInitArgs:
    """A worker class together with the arguments of its constructor.

    Needed where these clash with `WorkerGroup`'s own parameters; otherwise they can be given to the group.

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
    """What `register` was told about a method."""

    protocol: TransferProtocol[Any, Any] | Custom
    execute: Execute = Execute.ALL
    is_blocking: bool = True
    arguments: Mapping[str, Outgoing] = field(default_factory=dict)


def mark(method: Any, registration: Registration) -> Any:
    """Note on a function, or on what a class method or static method wraps, how its calls travel; returns it.

    Raises:
        ProtocolError: It is not a function, or the registration names a parameter that it does not have.
    """
    function = _function_of(method)
    if not callable(function):
        raise ProtocolError(f"@register marks a function, got {method!r}; write it right above the def")
    _check_arguments(function, registration)
    setattr(function, _MARK, registration)
    return method


def registrations(cls: type[Worker]) -> dict[str, Registration]:
    """The registered methods of a worker class, inherited ones included, by name."""
    found = {name: getattr(_function_of(inspect.getattr_static(cls, name)), _MARK, None) for name in dir(cls)}
    return {name: registration for name, registration in found.items() if isinstance(registration, Registration)}


def _function_of(method: Any) -> Any:
    """What `classmethod` and `staticmethod` wrap; anything else itself."""
    return method.__func__ if isinstance(method, classmethod | staticmethod) else method


def _check_arguments(method: Callable[..., Any], registration: Registration) -> None:
    # A static method has no self, and @staticmethod may be written above @register.
    names = [name for name in inspect.signature(method).parameters if name not in ("self", "cls")]
    for name, rule in registration.arguments.items():
        if name not in names:
            raise ProtocolError(f"{method.__qualname__} has no parameter {name!r} to transfer, only {names}")
        if not isinstance(rule, Outgoing):
            raise ProtocolError(f"{rule!r} does not say how {name!r} goes out; use Split, Broadcast or PerRank")
    protocol, rules = registration.protocol, list(registration.arguments.values())
    if isinstance(protocol, Custom):
        return
    for rule in rules:
        check_padding(rule, protocol)
    padded = {rule for rule in (*rules, protocol.outgoing) if isinstance(rule, Split) and rule.pad}
    if len(padded) > 1:
        raise ProtocolError(f"{method.__qualname__} pads in more than one way ({padded}); pad over the same axes")
    check_weights(protocol, rules, method.__qualname__)
