"""`RequestMethod`: a method of a group that is registered with a `Route`, as ``group.method`` returns it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypedDict, TypeVar

from bandmaster.calls.future import Future
from bandmaster.calls.options import CallOptions
from bandmaster.calls.request import encode_group
from bandmaster.calls.spec import MethodSpec
from bandmaster.calls.submission import Submitter
from bandmaster.codec import Payload
from bandmaster.errors import ArgumentError, UsageError
from bandmaster.requests.request import Request, RequestFuture
from bandmaster.requests.router import ANY, Router, Target

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
        """
        router, request = self._made(args, kwargs)
        return self._sent(request, lambda: router.submit(request, self._target))

    submit = __call__

    def all(self, /, *args: P.args, **kwargs: P.kwargs) -> Future[list[G]]:
        """Send the request to all replicas, whether or not they have a place for it.

        Returns:
            The future of the list of their values, in the order of the replicas.

        Raises:
            ArgumentError: The arguments do not match the method's signature, or one of them cannot be pickled.
        """
        router, request = self._made(args, kwargs)
        request.is_listed = True
        return self._sent(request, lambda: router.send(request, router.replicas))

    def options(self, /, **options: Unpack[RequestOptions]) -> RequestMethod[P, G]:
        """A copy of this method with other options.

        Args:
            **options: ``timeout``: seconds after which a request that is waited for is cancelled, and raises
                `CallTimeout`; None sets no limit. ``key``: a hashable value, for example of a conversation; requests
                with equal keys go to one replica, whose caches then know it, unless that replica has more than
                ``spill`` (16) open requests more than the least busy one. ``replica``: the number of the replica.

        Raises:
            UsageError: An option is unknown, or its value is invalid.
        """
        limits = {name: value for name, value in options.items() if name == "timeout"}
        chosen: Mapping[str, Any] = {name: value for name, value in options.items() if name != "timeout"}
        unknown = [name for name in chosen if name not in ("key", "replica", "spill")]
        if unknown:
            raise UsageError(f"a request has no option {unknown[0]!r}; its options are timeout, key, replica and spill")
        base = self._submitter.options_but(self._options, limits)
        target = replace(self._target, **chosen)
        n = len(Router.of(self._submitter, self._spec).replicas)
        for name, value, most in (("replica", target.replica, n - 1), ("spill", target.spill, None)):
            is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
            if value is not None and not (is_number and (most is None or value <= most)):
                up_to = f"from 0 to {most}, as there are {n} replicas" if most is not None else "of 0 or more"
                raise UsageError(f"{name} must be a whole number {up_to}, got {value!r}")
        try:
            hash(target.key)
        except TypeError:
            raise UsageError(
                f"key must be hashable, got {type(target.key).__name__}; pass a string or a number"
            ) from None
        return type(self)(self._group, self._submitter, self._spec, base, target)

    def stream(self, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Refuse: a request has one value.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            f"{self._spec.label} is a request, which has one value and no stream; await {self._spec.name}(...)"
        )

    def _made(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Router, Request]:
        """The router of the method, and a request for it that was not sent."""
        router = Router.of(self._submitter, self._spec)
        site = self._submitter.site(self._spec.name, self._options)
        return router, Request(site, self._payload(args, kwargs), router)

    def _sent(self, request: Request, send: Callable[[], object]) -> Future[Any]:
        """Send a request. If no future is returned, as Ctrl-C or a deadline has come, it is cancelled."""
        future: Future[Any] = RequestFuture(request, self._group)
        try:
            with self._submitter.admitted(self._spec.label):
                send()
        except BaseException:
            request.cancel()
            raise
        return future

    def _payload(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Payload:
        spec = self._spec
        group = spec.plan(args, kwargs, spec.registration.protocol.outgoing).groups[0]  # type: ignore[union-attr]
        for (_, value), name in zip(group.items, group.names, strict=False):
            if isinstance(value, Future):
                raise ArgumentError(
                    f"argument {name!r} of {spec.label} is a future, but requests take values; pass the value that "
                    "`await` or result() returns"
                )
        return encode_group(group, spec.label).private()

    def __repr__(self) -> str:
        return f"<request method {self._spec.label}{self._spec.signature}, {self._spec.registration.protocol!r}>"
