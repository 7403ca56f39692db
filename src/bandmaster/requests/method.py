"""`RequestMethod`: a method of a group that is registered with a `Route`, as ``group.method`` returns it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from bandmaster.calls.future import Future
from bandmaster.calls.options import RequestOptions
from bandmaster.calls.submission import AnyMethod
from bandmaster.contract import MAXSIZE, METHOD, STREAM
from bandmaster.errors import UsageError
from bandmaster.plan.binding import bind
from bandmaster.requests.arguments import Arguments, Beside
from bandmaster.requests.future import RequestFuture
from bandmaster.requests.map_rows import MapOptions
from bandmaster.requests.request import Request
from bandmaster.requests.router import Router
from bandmaster.requests.stream import GeneratorRequest, RequestStream
from bandmaster.requests.target import ANY, LIMITS, Target

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bandmaster.requests.map import Mapped

P = ParamSpec("P")
G = TypeVar("G", covariant=True)


class RequestMethod(AnyMethod, Generic[P, G]):
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

    _kind = "request method"
    _how = ANY
    calls_back = False  # whether a request that runs on the group waits for those of this method

    @overload
    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> Future[G]: ...
    @overload
    def __call__(self, rows: Future[Any], /, *args: Any, **kwargs: Any) -> Future[G]: ...
    def __call__(self, /, *args: Any, **kwargs: Any) -> Future[G]:
        """Send a request to one replica. Returns its future, which can be awaited, or waited for by ``result``.

        If all replicas run as many requests of the method as its ``concurrency`` allows, the request waits for a place:
        in an event loop the future does, elsewhere this call does.

        Raises:
            ArgumentError: The arguments do not match the method's signature, or one of them cannot be pickled.
            CallTimeout: No place became free within the request's ``timeout``. It was not sent.
            UsageError: The method yields items; use `stream`.
        """
        self._check_has_value()
        return self._sent(self._made(args, kwargs))

    submit = __call__

    @overload
    def all(self, /, *args: P.args, **kwargs: P.kwargs) -> Future[list[G]]: ...
    @overload
    def all(self, rows: Future[Any], /, *args: Any, **kwargs: Any) -> Future[list[G]]: ...
    def all(self, /, *args: Any, **kwargs: Any) -> Future[list[G]]:
        """Send the request to all replicas, whether or not they have a place for it.

        While a rank is being replaced, the request waits, and outside of an event loop this call does.

        Returns:
            The future of the list of their values, in the order of the replicas.

        Raises:
            ArgumentError: The arguments do not match the method's signature, or one of them cannot be pickled.
            UsageError: The method yields items, or ``retries``, ``replica`` or ``min_version`` is set.
        """
        self._check_has_value()
        for name in ("retries", "replica", "min_version"):
            if (value := getattr(self._how, name)) != getattr(ANY, name):
                raise UsageError(
                    f"{self._spec.name}.all(...) goes to all replicas, once; leave out {name}={value}, or .all"
                )
        return self._sent(self._made(args, kwargs, Target(is_all=True)))

    def map(
        self,
        /,
        *args: Any,
        in_flight: int | None = None,
        chunk: int | None = None,
        group_by: str | None = None,
        on_error: str = "raise",
        maxsize: int | None = None,
        **kwargs: Any,
    ) -> Mapped:
        """Send one request for each row, or chunk of rows, of the batches among the arguments.

        Arguments that are batches by their type are cut (see `bandmaster.plan.batch`), unless the method was registered
        with ``arguments={"name": Broadcast()}``; all others go with each request. Each request goes to the replica that
        is least busy when there is a place, or to that of the `options`; their ``timeout`` is the deadline of each
        request, after which it is cancelled. The call does not wait: requests are sent as others end, also while no
        thread waits for the map. They take what the arguments are now. Rows of futures are read where they lie, by the
        replica that gets them, and may be missing yet.

        Args:
            *args: The arguments of the method; parameters that have the names of these options go by position.
            in_flight: Most requests of the map that are open at a time; by default as many as the replicas have places
                for.
            chunk: Most rows of a request, which gets a batch; None sends a request for each row, which gets the row
                itself: an item of a list, a row of an array, a dict of the rows of columns.
            group_by: The name of the column, or the argument, whose equal values keep rows in one chunk.
            on_error: With ``"return"``, a request that fails does not end the map: an iteration yields its failed
                future, and the whole is a `PartialResult`.
            maxsize: Most requests that are open, or done and not taken by an iteration; None sets no limit.
            **kwargs: The arguments of the method by name.

        Returns:
            The map, which is iterated over as requests end, or asked for the whole in the order of the rows.

        Raises:
            ArgumentError: The arguments do not match the method's signature, or one of them cannot be pickled.
            BatchError: No argument is a batch, their row counts differ, or ``group_by`` names no column.
            UsageError: An option is invalid, the method yields items, or the group has not its turn.

        Example:
            >>> import bandmaster as bm
            >>> class Rollout(bm.Worker):
            ...     @bm.register(bm.Dispatch.REQUEST, concurrency=100)
            ...     async def chat(self, prompt, end):
            ...         return prompt.upper() + end
            ...     @bm.register(bm.Dispatch.REQUEST)
            ...     def lengths(self, prompts):
            ...         return [len(prompt) for prompt in prompts]
            >>> with bm.ResourcePool([2], backend="inprocess") as pool:
            ...     rollout = bm.WorkerGroup(pool, Rollout)
            ...     print(rollout.chat.map(["a", "b", "c"], end="!").result())
            ...     print(rollout.lengths.map(["a", "bb", "ccc"], chunk=2).result())
            ...     print(sorted((item.numbers[0], item.result()) for item in rollout.chat.map(["x", "y"], end="?")))
            ['A!', 'B!', 'C!']
            [1, 2, 3]
            [(0, 'X?'), (1, 'Y?')]
        """
        from bandmaster.requests.map import MapFeed, open_map

        self._check_has_value()
        name, most = self._spec.name, self._how.maxsize
        if most != ANY.maxsize:
            raise UsageError(
                f"maxsize={most} of options is that of a stream; a map has its own: {name}.map(..., maxsize=)"
            )
        spec, how = self._spec, MapOptions(maxsize, on_error, in_flight, chunk, group_by)
        router, site = Router.of(self._submitter, spec), self._submitter.site(spec.name, self._options)
        feed = MapFeed(self._group, router, site, self._how, how)
        return open_map(feed, spec, bind(spec.label, spec.signature, args, kwargs))

    def options(self, /, **options: Unpack[RequestOptions]) -> RequestMethod[P, G]:
        """A copy of this method with other options.

        Args:
            **options: ``timeout``: seconds after which a request that is waited for is cancelled, and raises
                `CallTimeout`; None sets no limit. ``stall_after`` and ``on_stall``: see `CallOptions`. ``key``: a
                hashable value, for example of a conversation; requests with equal keys go to one replica, whose caches
                then know it, unless that replica has more than ``spill`` (16) open requests more than the least busy
                one. ``replica``: the number of the replica. ``maxsize``: most items of a `stream` that are made before
                they are taken, 16 by default. ``retries``: how often a request is sent again, to another replica,
                because its replica has died; one that a worker may have begun is sent again only if the method is
                registered with ``is_idempotent=True``. ``min_version``: the version of its weights that a replica must
                have reported at least, see `report`; as long as none has, the request waits.

        Raises:
            UsageError: An option is unknown, or its value is invalid.
        """
        limits = {name: value for name, value in options.items() if name in LIMITS}
        chosen: Mapping[str, Any] = {name: value for name, value in options.items() if name not in LIMITS}
        return self._but(limits, self._how.but(chosen, len(Router.of(self._submitter, self._spec).replicas)))

    @overload
    def stream(self, /, *args: P.args, **kwargs: P.kwargs) -> RequestStream[Any]: ...
    @overload
    def stream(self, rows: Future[Any], /, *args: Any, **kwargs: Any) -> RequestStream[Any]: ...
    def stream(self, /, *args: Any, **kwargs: Any) -> RequestStream[Any]:
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
        spec = self._spec
        if not spec.is_generator:
            raise UsageError(f"{spec.label} has one value and no stream, as it does not yield; call {spec.name}(...)")
        if self._how.retries:
            raise UsageError(
                f"{spec.name}.stream(...), whose items may have been read, is never sent again; leave out "
                f"retries={self._how.retries}"
            )
        run = self._made(args, kwargs)
        assert isinstance(run, GeneratorRequest), "the method yields"
        stream: RequestStream[Any] = RequestStream(run, self._group)
        self._sent(run)
        return stream

    @property
    def runs_beside(self) -> bool:
        """Whether its requests run beside others."""
        return not Router.of(self._submitter, self._spec).is_exclusive

    def _made(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Target | None = None, beside: Beside = ()
    ) -> Request:
        """A request for the method, which was not sent. It goes where the options say, unless a target is given."""
        router = Router.of(self._submitter, self._spec)
        site = self._submitter.site(self._spec.name, self._options)
        spec = self._spec
        plan = spec.plan(args, kwargs, spec.registration.protocol.outgoing)  # type: ignore[union-attr]
        items, name = [*self.beside, *beside], ""
        if spec.is_generator:
            name = secrets.token_hex(8)
            items += [(STREAM, name), (METHOD, router.method), (MAXSIZE, self._how.maxsize)]
        encoded = Arguments.of(plan.groups[0].beside(items), spec.label)
        made = site, encoded, router, target or self._how
        request = GeneratorRequest(*made, name) if name else Request(*made)
        request.calls_back = self.calls_back
        if encoded.rows:
            request.parents = [value for group in encoded.rows for _, value in group.items if not value.done()]
        return request

    def _sent(self, request: Request) -> Future[Any]:
        """Send a request. If no future is returned, as Ctrl-C or a deadline has come, it is cancelled."""
        future: Future[Any] = RequestFuture(request, self._group)
        try:
            with self._submitter.gate.admitted(self._spec.label):
                request.router.submit(request)
        except BaseException:
            request.cancel()
            raise
        return future

    def _check_has_value(self) -> None:
        if self._spec.is_generator:
            raise UsageError(f"{self._spec.label} yields items: iterate over {self._spec.name}.stream(...)")
