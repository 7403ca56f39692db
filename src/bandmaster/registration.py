"""`register`, which sets the transfer protocol of a method, and the types of registered methods for type checkers.

A registered method has two types. In the worker it is the method itself. On a typed group (see `GroupOf`) it is a
`GroupMethod` with the same parameters, whose result type follows from the protocol.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, overload

from bandmaster.errors import ProtocolError
from bandmaster.plan.numbers import as_whole
from bandmaster.plan.transfer import Broadcast, Custom, Dispatch, Execute, Outgoing, TransferProtocol, as_protocol
from bandmaster.worker import Registration, mark

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Concatenate, Generic, Literal, ParamSpec, Protocol, TypeVar

    from bandmaster.calls.future import Future
    from bandmaster.groups.group import GroupOf
    from bandmaster.groups.method import GroupMethod
    from bandmaster.plan.transfer import Concat, Gather, Only, PerRank, Reduce, Route, Split
    from bandmaster.requests.method import RequestMethod

    P = ParamSpec("P")  # the method's parameters
    R = TypeVar("R")  # the method's return type
    T = TypeVar("T")  # the type of the awaited value of an async method
    M = TypeVar("M")  # the method of the group

    class Registered(Generic[P, R, M]):
        """The type of a registered method for type checkers; at run time it is the function."""

        @overload
        def __get__(self, instance: None, owner: Any) -> Callable[Concatenate[Any, P], R]: ...
        @overload
        def __get__(self, instance: GroupOf[Any], owner: Any) -> M: ...
        @overload
        def __get__(self, instance: object, owner: Any) -> Callable[P, R]: ...
        def __get__(self, instance: Any, owner: Any) -> Any: ...

    class _Own(Protocol):
        """A decorator for methods whose group call has the method's own return value as its result."""

        @overload
        def __call__(
            self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], /
        ) -> Registered[P, Coroutine[Any, Any, T], GroupMethod[P, T, T]]: ...
        @overload
        def __call__(self, method: Callable[Concatenate[Any, P], R], /) -> Registered[P, R, GroupMethod[P, R, R]]: ...

    class _Listed(Protocol):
        """A decorator for methods whose group call has a list of the method's return values as its result."""

        @overload
        def __call__(
            self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], /
        ) -> Registered[P, Coroutine[Any, Any, T], GroupMethod[P, list[T], list[T]]]: ...
        @overload
        def __call__(
            self, method: Callable[Concatenate[Any, P], R], /
        ) -> Registered[P, R, GroupMethod[P, list[R], list[R]]]: ...

    class _PerRank(Protocol):
        """A `_Listed` decorator for methods whose group call takes a sequence of one value per rank per argument."""

        @overload
        def __call__(
            self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], /
        ) -> Registered[P, Coroutine[Any, Any, T], GroupMethod[..., list[T], list[T]]]: ...
        @overload
        def __call__(
            self, method: Callable[Concatenate[Any, P], R], /
        ) -> Registered[P, R, GroupMethod[..., list[R], list[R]]]: ...

    class _OwnLater(Protocol):
        """An `_Own` decorator for non-blocking methods: the group's call returns a future."""

        @overload
        def __call__(
            self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], /
        ) -> Registered[P, Coroutine[Any, Any, T], GroupMethod[P, Future[T], T]]: ...
        @overload
        def __call__(
            self, method: Callable[Concatenate[Any, P], R], /
        ) -> Registered[P, R, GroupMethod[P, Future[R], R]]: ...

    class _ListedLater(Protocol):
        """A `_Listed` decorator for non-blocking methods: the group's call returns a future."""

        @overload
        def __call__(
            self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], /
        ) -> Registered[P, Coroutine[Any, Any, T], GroupMethod[P, Future[list[T]], list[T]]]: ...
        @overload
        def __call__(
            self, method: Callable[Concatenate[Any, P], R], /
        ) -> Registered[P, R, GroupMethod[P, Future[list[R]], list[R]]]: ...

    class _Requested(Protocol):
        """A decorator for methods whose calls are requests."""

        @overload
        def __call__(
            self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], /
        ) -> Registered[P, Coroutine[Any, Any, T], RequestMethod[P, T]]: ...
        @overload
        def __call__(self, method: Callable[Concatenate[Any, P], R], /) -> Registered[P, R, RequestMethod[P, R]]: ...

    class _Untyped(Protocol):
        """A decorator for methods whose group call has unknown parameter and result types."""

        def __call__(
            self, method: Callable[Concatenate[Any, P], R], /
        ) -> Registered[P, R, GroupMethod[..., Any, Any]]: ...

    _REQUEST = Literal[Dispatch.REQUEST, "REQUEST"] | TransferProtocol[Route, Only]
    _LISTED = Literal[Dispatch.ONE_TO_ALL, Dispatch.THREE_D_PP_ONLY, "ONE_TO_ALL", "3D_PP_ONLY", "THREE_D_PP_ONLY"]
    _OWN = Literal[
        Dispatch.DP_PROTO,
        Dispatch.THREE_D_PROTO,
        Dispatch.THREE_D_ALL_MICRO_DP,
        "DP_PROTO",
        "3D_PROTO",
        "THREE_D_PROTO",
        "3D_ALL_MICRO_DP",
        "THREE_D_ALL_MICRO_DP",
    ]
    _Listing = _LISTED | TransferProtocol[Split | Broadcast, Gather]
    _Owning = _OWN | TransferProtocol[Split | Broadcast, Concat | Only | Reduce]
    _ListingPerRank = Literal[Dispatch.ALL_TO_ALL, "ALL_TO_ALL"] | TransferProtocol[PerRank, Gather]
    _Rules = Mapping[str, Outgoing] | None


@overload
def register(
    dispatch_mode: _REQUEST,
    *,
    arguments: _Rules = ...,
    concurrency: int = ...,
    is_idempotent: bool = ...,
    mesh: str | None = ...,
) -> _Requested: ...
@overload
def register(
    dispatch_mode: Any,
    execute_mode: Literal[Execute.RANK_ZERO],
    blocking: Literal[True] = ...,
) -> _Own: ...
@overload
def register(
    dispatch_mode: Any = ..., *, execute_mode: Literal[Execute.RANK_ZERO], blocking: Literal[True] = ...
) -> _Own: ...
@overload
def register(
    dispatch_mode: _Listing,
    execute_mode: Literal[Execute.ALL] = ...,
    blocking: Literal[True] = ...,
    arguments: _Rules = ...,
    mesh: str | None = ...,
) -> _Listed: ...
@overload
def register(
    dispatch_mode: _Owning,
    execute_mode: Literal[Execute.ALL] = ...,
    blocking: Literal[True] = ...,
    arguments: _Rules = ...,
    mesh: str | None = ...,
) -> _Own: ...
@overload
def register(
    dispatch_mode: _ListingPerRank = ...,
    execute_mode: Literal[Execute.ALL] = ...,
    blocking: Literal[True] = ...,
    arguments: _Rules = ...,
    mesh: str | None = ...,
) -> _PerRank: ...
@overload
def register(
    dispatch_mode: _Listing,
    execute_mode: Literal[Execute.ALL] = ...,
    *,
    blocking: Literal[False],
    arguments: _Rules = ...,
    mesh: str | None = ...,
) -> _ListedLater: ...
@overload
def register(
    dispatch_mode: _Owning,
    execute_mode: Literal[Execute.ALL] = ...,
    *,
    blocking: Literal[False],
    arguments: _Rules = ...,
    mesh: str | None = ...,
) -> _OwnLater: ...
@overload
def register(
    dispatch_mode: Dispatch | TransferProtocol[Any, Any] | str | Mapping[str, Callable[..., Any]] = ...,
    execute_mode: Execute = ...,
    blocking: bool = ...,
    arguments: _Rules = ...,
    mesh: str | None = ...,
) -> _Untyped: ...
def register(
    dispatch_mode: Any = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    arguments: Mapping[str, Outgoing] | None = None,
    mesh: str | None = None,
    concurrency: int = 1,
    is_idempotent: bool = False,
) -> Any:
    """Make a method of a worker class callable on the whole worker group.

    A method of a subclass that overrides it is registered in the same way, unless it has a `register` of its own or is
    set to None.

    Args:
        dispatch_mode: The transfer protocol: a `Dispatch` member, its Python name or its name in the paper
            (``"3D_PROTO"``), a `TransferProtocol`, or ``{"dispatch_fn": f, "collect_fn": g}``, where
            ``f(group, *args, **kwargs)`` returns ``(args, kwargs)`` with one value per rank in each, and
            ``g(group, values)`` returns the result.
        execute_mode: ``Execute.ALL`` runs the method on all ranks. ``Execute.RANK_ZERO`` runs it on rank 0 alone, with
            the arguments unsplit, and returns its value.
        blocking: Whether the group's method waits for the result; if not, it returns a `Future`.
        arguments: Dispatch rules by parameter name; each replaces the protocol's dispatch rule for that parameter. For
            a protocol with a `Route`, ``Broadcast()`` has a map send a batch as a whole with each request.
        mesh: Name of the group's mesh that has the axes of the protocol and of ``arguments``, one of the ``meshes`` of
            `WorkerGroup`; by default the group's ``mesh``.
        concurrency: Most requests of the method that a replica runs at a time, for a protocol with a `Route`; further
            ones wait in the caller. More than 1 is for async methods, which run beside each other on the event loop of
            the worker. A method that is not async runs alone.
        is_idempotent: Whether a request may be run twice: with `RequestMethod.options(retries=n)`, it is sent again if
            its replica has died, also when that may have begun it.

    Returns:
        A decorator that marks the method and returns it unchanged.

    Raises:
        ProtocolError: The protocol is unknown (the message lists the known names) or contradicts itself, or
            ``arguments`` names a parameter that the method does not have, or is given with ``Execute.RANK_ZERO``.

    Example:
        >>> from bandmaster import Broadcast, Worker
        >>> class Trainer(Worker):
        ...     @register(Dispatch.DP_PROTO, arguments={"table": Broadcast()})
        ...     def step(self, batch, table): return [table[i] for i in batch]
    """
    if inspect.isfunction(dispatch_mode):
        raise ProtocolError(f"@register needs parentheses: write @register() or @register(Dispatch.ONE_TO_ALL) "
                            f"above {dispatch_mode.__name__}")  # fmt: skip
    protocol = as_protocol(dispatch_mode)
    if not isinstance(execute_mode, Execute):
        raise ProtocolError(f"execute_mode must be Execute.ALL or Execute.RANK_ZERO, got {execute_mode!r}")
    if isinstance(protocol, Custom) and (execute_mode is Execute.RANK_ZERO or arguments):
        raise ProtocolError("a custom dispatch_fn assigns all arguments to ranks itself; remove "
                            "execute_mode=Execute.RANK_ZERO and arguments=, or use a TransferProtocol")  # fmt: skip
    if not isinstance(arguments, Mapping | None):
        raise ProtocolError(f"arguments must be a dict of dispatch rules by parameter name, got {arguments!r}")
    if execute_mode is Execute.RANK_ZERO and arguments:
        raise ProtocolError("a method of rank 0 alone gets its arguments unsplit; remove execute_mode= or arguments=")
    if not isinstance(mesh, str | None):
        raise ProtocolError(f"mesh of register must be the name of one of the group's meshes, got {mesh!r}")
    if mesh is not None and (isinstance(protocol, Custom) or execute_mode is Execute.RANK_ZERO):
        raise ProtocolError("a custom dispatch_fn, and a method of rank 0 alone, use no axes of a mesh; remove mesh=")
    registration = Registration(
        protocol, execute_mode, blocking, dict(arguments or {}), mesh, as_whole(concurrency, 1) or 0, is_idempotent
    )
    if not registration.is_request:
        if is_idempotent:
            raise ProtocolError(
                "is_idempotent=True is for requests, which may be sent again; use Dispatch.REQUEST, or leave it out"
            )
        if concurrency != 1:
            raise ProtocolError(
                f"concurrency={concurrency!r} is for requests, which go to one replica; a call of all ranks runs "
                "alone: use Dispatch.REQUEST, or leave concurrency out"
            )
    elif not registration.concurrency:
        raise ProtocolError(f"concurrency must be a whole number of 1 or more, got {concurrency!r}")
    elif execute_mode is Execute.RANK_ZERO or any(rule != Broadcast() for rule in registration.arguments.values()):
        raise ProtocolError(
            "a request goes, with all its arguments, to one replica; remove execute_mode= and arguments=, of which "
            "Broadcast() alone is for requests: a map then sends the argument as a whole"
        )
    return partial(mark, registration=registration)
