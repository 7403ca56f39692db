"""`RequestMethod`: a method of a group that is registered with a `Route`, as ``group.method`` returns it."""

from __future__ import annotations

import secrets
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypedDict, TypeVar

from bandmaster.calls.future import Future
from bandmaster.calls.options import CallOptions
from bandmaster.calls.request import encode_group
from bandmaster.calls.spec import MethodSpec
from bandmaster.calls.submission import Submitter
from bandmaster.contract import MAXSIZE, METHOD, STREAM
from bandmaster.errors import ArgumentError, UsageError
from bandmaster.plan.arguments import ArgumentGroup
from bandmaster.requests.request import Request, RequestFuture
from bandmaster.requests.router import Router
from bandmaster.requests.stream import GeneratorRequest, RequestStream
from bandmaster.requests.target import ANY, Target

if TYPE_CHECKING:
    from typing_extensions import Unpack

P = ParamSpec("P")
G = TypeVar("G", covariant=True)


class RequestOptions(TypedDict, total=False):
    """The keywords of `RequestMethod.options`, for type checkers."""

    timeout: float | None
    key: Hashable
    replica: int | None
    spill: int
    maxsize: int
    retries: int
    min_version: int | None


class RequestMethod(Generic[P, G]):
    """A registered method of a worker group whose calls are requests: each goes to one replica.

    Example:
        >>> import asyncio, bandmaster as bm
        >>> class Rollout(bm.Worker):
        ...     @bm.register(bm.Dispatch.REQUEST, concurrency=100)
        ...     async def chat(self, prompt):
        ...         await asyncio.sleep(0.01)
        ...         return prompt.upper()
        >>> async def main(rollout):
        ...     return await asyncio.gather(*[rollout.chat(word) for word in ("a", "b", "c")])
        >>> with bm.ResourcePool([2], backend="inprocess") as pool:
        ...     asyncio.run(main(bm.WorkerGroup(pool, Rollout)))
        ['A', 'B', 'C']
    """

    beside: Sequence[tuple[str, Any]] = ()  # keyword arguments that are not the method's, but the library's

    def __init__(
        self,
        group: object,
        submitter: Submitter,
        spec: MethodSpec,
        options: CallOptions | None = None,
        target: Target = ANY,
    ) -> None:
        self._group, self._submitter, self._spec = group, submitter, spec
        self._options, self._target = options, target
        self.__dict__.update(spec.described)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> Future[G]:
        """Send a request to one replica. Returns its future, which can be awaited, or waited for by ``result``.

        If all replicas run as many requests of the method as its ``concurrency`` allows, the request waits for a place:
        in an event loop the future does, elsewhere this call does.

        Raises:
            ArgumentError: The arguments do not match the method's signature, or one of them cannot be pickled.
            CallTimeout: No place became free within the request's ``timeout``. It was not sent.
            UsageError: The method yields items; use `stream`.
        """
        self._check_has_value()
        router, request, target = self._made(args, kwargs)
        with self._submitter.admitted(self._spec.label):
            router.submit(request, target)
        return RequestFuture(request, self._group)

    submit = __call__

    def all(self, /, *args: P.args, **kwargs: P.kwargs) -> Future[list[G]]:
        """Send the request to all replicas, whether or not they have a place for it.

        Returns:
            The future of the list of their values, in the order of the replicas.

        Raises:
            ArgumentError: The arguments do not match the method's signature, or one of them cannot be pickled.
            UsageError: The method yields items, or ``retries`` is set.
        """
        self._check_has_value()
        self._check_no_retries(f"{self._spec.name}.all(...)", "which goes to all replicas")
        router, request, _ = self._made(args, kwargs)
        request.is_listed = True
        with self._submitter.admitted(self._spec.label):
            router.send(request, router.replicas)
        return RequestFuture(request, self._group)

    def options(self, /, **options: Unpack[RequestOptions]) -> RequestMethod[P, G]:
        """A copy of this method with other options.

        Args:
            **options: ``timeout``: seconds after which a request that is waited for is cancelled, and raises
                `CallTimeout`; None sets no limit. ``key``: a hashable value, for example of a conversation; requests
                with equal keys go to one replica, whose caches then know it, unless that replica has more than
                ``spill`` (16) open requests more than the least busy one. ``replica``: the number of the replica.
                ``maxsize``: most items of a `stream` that are made before they are taken, 16 by default.
                ``retries``: how often a request is sent again, to another replica, because its replica has died; one
                that a worker may have begun is sent again only if the method is registered with
                ``is_idempotent=True``. ``min_version``: the version of its weights that a replica must have reported at
                least, see `report`; as long as none has, the request waits.

        Raises:
            UsageError: An option is unknown, or its value is invalid.
        """
        limits = {name: value for name, value in options.items() if name == "timeout"}
        chosen: Mapping[str, Any] = {name: value for name, value in options.items() if name != "timeout"}
        base = self._submitter.options_but(self._options, limits)
        target = self._target.but(chosen, len(Router.of(self._submitter, self._spec).replicas))
        return type(self)(self._group, self._submitter, self._spec, base, target)

    def stream(self, /, *args: P.args, **kwargs: P.kwargs) -> RequestStream[Any]:
        """Send a request to one replica, and return an iterator over the items that the method yields there.

        Iterate with ``async for`` or ``for``. The request has its place until the stream ends.

        Raises:
            ArgumentError: The arguments do not match the method's signature, or one of them cannot be pickled.
            CallTimeout: No place became free within the request's ``timeout``. It was not sent.
            UsageError: The method does not yield, or ``retries`` is set.

        Example:
            >>> import bandmaster as bm
            >>> class Rollout(bm.Worker):
            ...     @bm.register(bm.Dispatch.REQUEST, concurrency=100)
            ...     async def tokens(self, prompt):
            ...         for token in prompt.split():
            ...             yield token
            >>> with bm.ResourcePool([2], backend="inprocess") as pool:
            ...     rollout = bm.WorkerGroup(pool, Rollout)
            ...     list(rollout.tokens.stream("to be or not"))
            ['to', 'be', 'or', 'not']
        """
        spec, most = self._spec, self._target.maxsize
        if not spec.is_generator:
            raise UsageError(f"{spec.label} has one value and no stream, as it does not yield; call {spec.name}(...)")
        self._check_no_retries(f"{spec.name}.stream(...)", "whose items may have been read")
        router, run, target = self._made(args, kwargs)
        assert isinstance(run, GeneratorRequest), "the method yields"
        stream: RequestStream[Any] = RequestStream(run, most, self._group)
        with self._submitter.admitted(spec.label):
            router.submit(run, target)
        return stream

    def _made(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Router, Request, Target]:
        """The router of the method, a request for it that was not sent, and the choice of its replica."""
        router = Router.of(self._submitter, self._spec)
        site = self._submitter.site(self._spec.name, self._options)
        arguments = self._arguments(args, kwargs)
        if self._spec.is_generator:
            name = secrets.token_hex(8)
            arguments = arguments.beside(((STREAM, name), (METHOD, router.method), (MAXSIZE, self._target.maxsize)))
        payload = encode_group(arguments, self._spec.label).private()
        request = (
            GeneratorRequest(site, payload, router, name) if self._spec.is_generator else Request(site, payload, router)
        )
        return router, request, self._target

    def _check_has_value(self) -> None:
        if self._spec.is_generator:
            raise UsageError(f"{self._spec.label} yields items: iterate over {self._spec.name}.stream(...)")

    def _check_no_retries(self, what: str, why: str) -> None:
        if self._target.retries:
            raise UsageError(f"{what}, {why}, is never sent again; leave out retries={self._target.retries}")

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ArgumentGroup:
        spec = self._spec
        group = spec.plan(args, kwargs, spec.registration.protocol.outgoing).groups[0]  # type: ignore[union-attr]
        for (_, value), name in zip(group.items, group.names, strict=False):
            if isinstance(value, Future):
                raise ArgumentError(
                    f"argument {name!r} of {spec.label} is a future, but requests take values; pass the value that "
                    "`await` or result() returns"
                )
        return group.beside(self.beside)

    def __repr__(self) -> str:
        return f"<request method {self._spec.label}{self._spec.signature}, {self._spec.registration.protocol!r}>"
