"""`WorkerGroup`: one worker class on every place of a pool, called as if it were one object.

::

    group.method(x) ── bind (the real signature) ── pack (mesh, protocol) ── encode ──► crew.put, crew.call
                                                                                             │ workers
    result ◄────────── collect (join, list, reduce) ◄── Future ◄────────── crew.wait, crew.fetch
"""

from __future__ import annotations

import string
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from bandmaster.backends import Call, Crew, Launch, Reply, get_backend
from bandmaster.binding import bind, signature_without_self
from bandmaster.calls import CallInfo, GroupCall, OpenCalls
from bandmaster.checks import check_names, check_options, checked_mesh, unwrap
from bandmaster.collect import collect
from bandmaster.envelope import encode_constructor, encode_parcel
from bandmaster.errors import ArgumentError, CallTimeout, ClosedError, CollectError, UsageError, WorkerDied
from bandmaster.failure import Failure
from bandmaster.future import Future
from bandmaster.mesh import Mesh
from bandmaster.method import GroupMethod, MethodSpec
from bandmaster.options import CallOptions, default_options
from bandmaster.planning import CollectEach, Packed, Slot, alike, everywhere, scatter
from bandmaster.pool import ResourcePool
from bandmaster.render import html_table, text_table
from bandmaster.tenancy import Tenancy
from bandmaster.transfer import Gather, Incoming, Only
from bandmaster.watch import DeathWatch
from bandmaster.wire.steady import check_not_held
from bandmaster.worker import registrations

__all__ = ["WorkerGroup"]


class WorkerGroup:
    """Ranks 0 … world_size-1 of one worker class, on the places of a pool.

    Each method that the class marks with `register` is a method of the group, with its name, signature and
    docstring. Methods without the mark can be called by name with `execute_all_sync` and its kin.

    Args:
        pool: Where the workers go; one per place.
        worker_class: A subclass of `Worker`, plain, wrapped by ``@ray.remote``, or with its arguments in
            `ClassWithInitArgs`.
        *args: Positional arguments of its constructor, the same for every rank.
        mesh: Named axes over the ranks; ``Mesh(dp=world_size)`` by default.
        name_prefix: Beginning of the workers' names; the pool's and six random letters by default.
        start_timeout_s: How long the constructors may take; as long as they take by default.
        **kwargs: Keyword arguments of its constructor. Those called ``mesh``, ``name_prefix`` or
            ``start_timeout_s`` have to go through `ClassWithInitArgs`.

    Raises:
        ArgumentError: The constructor cannot be called so, or an argument cannot be pickled.
        MeshError: The mesh has another size than the pool, or lacks an axis that a registered method names.
        UsageError: No worker class, an async constructor, an option of the wrong type, or a registered method that
            hides an attribute of the group.
        ConstructorError: A worker's constructor raised; the others were ended. All places were given back.
        WorkerDied: A worker's process ended before it was constructed; likewise.
        CallTimeout: The constructors did not end in time; likewise.
        PlacementError: The pool does not fit, or its places hold as many groups as they may.
        ResourceError: There is no descriptor, process or thread for a worker, or the working directory was removed.
    """

    def __init__(
        self,
        pool: ResourcePool,
        worker_class: Any,
        /,
        *args: Any,
        mesh: Mesh | None = None,
        name_prefix: str | None = None,
        start_timeout_s: float | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(pool, ResourcePool):
            raise ArgumentError(f"{type(self).__name__} takes a ResourcePool, then a worker class; {pool!r} is no pool")
        check_options(type(self).__name__, name_prefix, start_timeout_s)
        cls, args, kwargs, options = unwrap(worker_class, args, kwargs)
        registered = registrations(cls)
        check_names(cls, registered, dir(WorkerGroup))
        self._cls = cls
        self._pool = pool
        self._mesh = checked_mesh(mesh, pool)
        self._ranks = tuple(range(self._mesh.size))
        self._methods = {name: MethodSpec.of(cls, name, registered[name], self._mesh) for name in registered}
        self._options: dict[str, float | None] = {}
        self._infos: dict[str, CallInfo] = {}  # by method
        self._life = threading.RLock()  # one restart or replacement at a time
        self._open_calls = OpenCalls()
        self._watches: list[DeathWatch] = []
        constructor = encode_constructor(cls, args, kwargs)
        prefix = pool.name_prefix + _random_letters() if name_prefix is None else name_prefix
        self._name = f"{prefix}{cls.__name__}"
        self._tenancy = Tenancy(self, self._name)
        try:
            seats = pool._occupy(self, self._name, self._tenancy.take)
            names = tuple(f"{self._name}_{seat.node_rank}:{seat.local_rank}" for seat in seats)
            self._launch = Launch(
                self._name,
                cls,
                constructor,
                self._mesh,
                seats,
                names,
                pool.use_gpu,
                pool.cpus_per_worker,
                options,
                start_timeout_s,
            )
            self._tenancy.move_in(get_backend(pool.backend).start(self._launch))
        except BaseException:
            self._tenancy.close()
            raise

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._mesh.size

    @property
    def mesh(self) -> Mesh:
        """Named axes over the ranks."""
        return self._mesh

    @property
    def name(self) -> str:
        """Prefix and class, which the names of the workers begin with."""
        return self._name

    @property
    def worker_names(self) -> list[str]:
        """``{name_prefix}{ClassName}_{node}:{local_rank}`` of every rank."""
        return list(self._launch.worker_names)

    @property
    def workers(self) -> list[Any]:
        """The backend's own handles, one per rank: actor handles on Ray, the objects themselves in-process."""
        return list(self._tenancy.crew.handles)

    def execute_all_sync(self, method_name: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Run a method, registered or not, on every rank, and wait.

        When every argument is a list of world_size values, rank r gets the r-th of each; otherwise every rank
        gets the arguments as they are.

        Returns:
            The value of every rank, in rank order.

        Raises:
            ArgumentError: No such method, or arguments that do not fit it.
            RemoteError: It raised on some rank.
        """
        values: list[Any] = self._on_all(method_name, self._pack_all(method_name, args, kwargs))
        return values

    def execute_all_async(self, method_name: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        """The same without waiting: for every rank an ObjectRef on Ray, a `Future` elsewhere."""
        return self._references(method_name, self._pack_all(method_name, args, kwargs), self._ranks)

    def execute_rank_zero_sync(self, method_name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run a method, registered or not, on rank 0 with the arguments as they are; its plain value.

        Raises:
            ArgumentError: No such method, or arguments that do not fit it.
            RemoteError: It raised.
        """
        packed = self._same(method_name, args, kwargs, 1)
        return self._submit(method_name, packed, (0,), Only(), (0,), waits=True)

    def execute_rank_zero_async(self, method_name: str, /, *args: Any, **kwargs: Any) -> Any:
        """The same without waiting: an ObjectRef on Ray, a `Future` elsewhere."""
        return self._references(method_name, self._same(method_name, args, kwargs, 1), (0,))[0]

    execute_all = execute_all_async
    execute_rank_zero = execute_rank_zero_async

    def describe(self) -> str:
        """A table of the ranks: where each is on the mesh, on which host and device, and whether it has a lane.

        Raises:
            ClosedError: The group was closed.
        """
        return text_table(repr(self), *self._table(self._tenancy.crew.describe()))

    @property
    def healthy(self) -> bool:
        """Whether every worker's process is there, as far as is known without asking it; False once closed."""
        try:
            crew = self._tenancy.crew
        except ClosedError:
            return False
        crew.look_for_deaths()
        return not crew.deaths

    def on_death(self, callback: Callable[[WorkerDied], object]) -> None:
        """Call ``callback(error)`` from a thread as soon as a worker dies, once until `restart` or `replace`.

        The error names the rank and how it ended, as a call would have raised it. Closing the group is no death.

        Raises:
            ClosedError: The group was closed.
            ResourceError: The system allows no more threads.
        """
        call = CallInfo(self._cls.__name__, self._mesh, self._name)
        self._watches.append(DeathWatch(self._tenancy.crew, call, callback))

    def restart(self, state: Any = None) -> None:
        """End all workers, whatever they do, and start and construct new ones on the same places.

        Constructors get the arguments that they got the first time, in a new rendezvous. Then, where the class has a
        method ``on_restart(self, state)``, it is called on every rank. Calls that are pending fail with `WorkerDied`.

        Args:
            state: Anything that ``on_restart`` is to get, the same on every rank.

        Raises:
            UsageError: ``state`` is given, but the class has no ``on_restart``; nothing was done.
            ConstructorError, WorkerDied, CallTimeout: As for a new group; it can be tried again.
            RemoteError: ``on_restart`` raised.
            ClosedError: The group was closed.
        """
        check_not_held(self._life)
        with self._life:
            crew, has_hook = self._tenancy.crew, callable(getattr(self._cls, "on_restart", None))
            if state is not None and not has_hook:
                raise UsageError(f"{self._cls.__name__} has no method on_restart(self, state) to take the state")
            hook = self._same("on_restart", (state,), {}, self.world_size) if has_hook else None
            crew.stop("the group was restarted")
            self._end_watches()
            self._open_calls = OpenCalls()  # what was pending has failed
            self._tenancy.move_in(get_backend(self._pool.backend).start(replace(self._launch, is_again=True)))
            self._watch_again()
            if hook is not None:
                self._on_all("on_restart", hook)

    def replace(self, rank: int, state: Any = None) -> None:
        """End the worker of one rank, if it still runs, and start and construct a new one on its place.

        The class allows it by having a method ``on_replace(self, rank, state)``, which is called on every rank when
        the new worker stands: there the others can, for example, leave their process group and join a new one. Calls
        that are pending are given up first; a rank that does not stop within their grace is ended as ever.

        Args:
            rank: Whose worker.
            state: Anything that ``on_replace`` is to get, the same on every rank.

        Raises:
            UsageError: No such rank, the class has no ``on_replace``, or another rank is dead too; nothing was done.
            ConstructorError, WorkerDied, CallTimeout: As for a new group; it can be tried again.
            RemoteError: ``on_replace`` raised.
            ClosedError: The group was closed.
        """
        self._tenancy.check()
        if not isinstance(rank, int) or not 0 <= rank < self.world_size:
            raise UsageError(f"{rank!r} is no rank of {self._name}, which has 0 to {self.world_size - 1}")
        if not callable(getattr(self._cls, "on_replace", None)):
            raise UsageError(
                f"{self._cls.__name__} does not say that one rank can be replaced: give it a method "
                "on_replace(self, rank, state), or restart() the whole group"
            )
        hook = self._same("on_replace", (rank, state), {}, self.world_size)
        check_not_held(self._life)
        with self._life:
            self._check_alive_but(rank)
            self._open_calls.give_up_all()
            self._check_alive_but(rank)
            self._end_watches()
            get_backend(self._pool.backend).replace(self._tenancy.crew, self._launch, rank)
            self._watch_again()
            self._on_all("on_replace", hook)

    def _check_alive_but(self, rank: int) -> None:
        crew = self._tenancy.crew
        crew.look_for_deaths()
        others = [str(dead) for dead in crew.deaths if dead != rank]
        if others:
            raise UsageError(f"rank {', '.join(others)} is dead too, and one can be replaced at a time; use restart()")

    def _end_watches(self) -> None:
        for watch in self._watches:
            watch.end()

    def _watch_again(self) -> None:
        """Who watches for deaths watches the new workers."""
        self._watches = [watch.again(self._tenancy.crew) for watch in self._watches]

    def close(self) -> None:
        """End the workers and give their places back. Closing twice is fine."""
        self._tenancy.close()

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        known = self.__dict__  # may lack anything, when `__init__` has failed
        spec = known.get("_methods", {}).get(name)
        if spec is not None:
            return GroupMethod(self, spec)
        cls = known.get("_cls")
        if cls is not None and callable(getattr(cls, name, None)) and not name.startswith("_"):
            raise AttributeError(
                f"{cls.__name__}.{name} is not registered: put @register(...) above it, or call "
                f"execute_all_sync({name!r}, ...)"
            )
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a WorkerGroup stays in its controller; pass the values that the workers need instead")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._methods})

    def __repr__(self) -> str:
        closed = "" if self._tenancy.is_open else ", closed"
        return f"<{type(self).__name__} {self._name} of {self.world_size} on {self._pool!r}, {self._mesh!r}{closed}>"

    def _repr_html_(self) -> str:
        return html_table(repr(self), *self._table([{}] * self.world_size))

    def _table(self, facts: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
        """Header and rows: every rank on the mesh, and what is known of it beyond that."""
        known = list(facts[0])
        rows = [
            [rank, name, *self._mesh.coordinates(rank).values(), *(fact[key] for key in known)]
            for rank, (name, fact) in enumerate(zip(self._launch.worker_names, facts, strict=True))
        ]
        return ["rank", "worker", *self._mesh.axis_names, *known], rows

    def _pack_all(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Packed:
        slots = self._bind(method, args, kwargs)
        if slots and all(isinstance(slot.value, list) and len(slot.value) == self.world_size for slot in slots):
            return Packed(tuple(scatter(slots, self.world_size, self._label(method))))
        return Packed((everywhere(slots, self.world_size),))

    def _same(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], n_ranks: int) -> Packed:
        """The same arguments for the first ranks."""
        return Packed((everywhere(self._bind(method, args, kwargs), n_ranks),))

    def _on_all(self, method: str, packed: Packed) -> Any:
        """Call every rank, and wait for the value of each."""
        return self._submit(method, packed, self._ranks, Gather(), self._ranks, waits=True)

    def _bind(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Slot]:
        if not (isinstance(method, str) and callable(getattr(self._cls, method, None))):
            if isinstance(method, str) and hasattr(self._cls, method):
                kind = type(getattr(self._cls, method)).__name__
                raise ArgumentError(f"{self._label(method)} is a {kind}, not a method; add a method that returns it")
            import difflib  # here, as few need it, and the import of everything is to be quick

            near = difflib.get_close_matches(str(method), dir(self._cls), 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ArgumentError(f"{self._cls.__name__} has no method {method!r}{hint}")
        return bind(self._label(method), signature_without_self(self._cls, method), args, kwargs)

    def set_default_options(self, /, **options: float | None) -> None:
        """Set what holds for the calls of this group that say nothing else.

        Args:
            **options: ``timeout`` and ``grace`` in seconds, see `GroupMethod.options`.

        Raises:
            UsageError: There is no such option, or its value makes no sense.
        """
        default_options().but(options)  # to check them
        self._options.update(options)

    def _call_info(self, method: str, options: CallOptions | None) -> CallInfo:
        info = self._infos.get(method)
        if info is None:
            info = CallInfo(self._label(method), self._mesh, self._name, None, self._options)
            self._infos[method] = info
        return info if options is None else info._replace(options=options)

    def _label(self, method: str) -> str:
        return f"{self._cls.__name__}.{method}"

    def _submit(
        self,
        method: str,
        packed: Packed,
        ranks: tuple[int, ...],
        incoming: Incoming | CollectEach,
        collected: tuple[int, ...],
        finish: Callable[[list[Any]], Any] | None = None,
        options: CallOptions | None = None,
        waits: bool = False,
    ) -> Any:
        """Send a call to ranks; its future collects from some of them by ``incoming``, then calls ``finish``.

        Returns:
            The future, or its result if the caller ``waits`` for it: then Ctrl-C gives the call up, as nobody else has
            the future.
        """
        crew, info = self._tenancy.crew, self._call_info(method, options)

        def conclude(values: Mapping[int, Any]) -> Any:
            in_order = [values[rank] for rank in collected]
            try:
                result = collect(incoming, collected, in_order, info.method, packed.real_rows)
            except CollectError as error:
                where = {rank: self._mesh.coordinates(rank) for rank in error.failures}
                raise CollectError(error.method, error.failures, where) from error.__cause__
            return result if finish is None else finish(result)

        tickets: dict[int, Any] = {}
        call = GroupCall(crew, tickets, info, self._open_calls, dict(crew.deaths))
        future = Future(call, conclude)
        try:
            if not call.failures:
                outgoing = self._encode(crew, info, method, packed, ranks, collected, Reply.VALUE)
                with call.reading:
                    self._open_calls.add(call)
                    crew.call(outgoing, tickets)
                del outgoing  # nor does the traceback of what is raised here keep it
            return future.result() if waits else future
        except CallTimeout:
            raise  # it can still be waited for
        except BaseException:  # Ctrl-C: the ranks that were asked must not wait for those that were not
            future.cancel()
            raise

    def _references(self, method: str, packed: Packed, ranks: tuple[int, ...]) -> list[Any]:
        """Send a call; what the backend's own users know for each rank's value, or a future of its own."""
        crew, tickets, info = self._tenancy.crew, dict[int, Any](), self._call_info(method, None)
        outgoing = self._encode(crew, info, method, packed, ranks, ranks, Reply.NATIVE)
        try:
            crew.call(outgoing, tickets)
        except BaseException:  # Ctrl-C
            crew.give_up(tickets)
            raise
        if crew.has_native_tickets:
            return list(tickets.values())
        failures: dict[int, Failure] = {}  # which all know, so that none is left in a collective with one that failed
        calls = {rank: GroupCall(crew, {rank: t}, info, self._open_calls, failures) for rank, t in tickets.items()}
        for call in calls.values():
            self._open_calls.add(call)
        return [Future(call, partial(_value_of, self, rank)) for rank, call in calls.items()]

    @staticmethod
    def _encode(
        crew: Crew,
        info: CallInfo,
        method: str,
        packed: Packed,
        ranks: tuple[int, ...],
        collected: tuple[int, ...],
        reply: Reply,
    ) -> list[Call]:
        """Encode and put everything: what cannot be encoded is known before anything is sent."""
        lend = None if reply is Reply.NATIVE else crew.lend
        payloads, receivers = [], []
        for parcel in packed.parcels:
            if parcel.items:
                payloads.append(encode_parcel(parcel, info.method, lend))
                receivers.append(parcel.ranks)
        parts = crew.put(payloads)
        calls = []
        for members, numbers, is_collected in alike(ranks, tuple(receivers), collected):
            answer = reply if is_collected else Reply.NOTHING
            loans: tuple[Any, ...] = ()
            for number in numbers:
                loans += payloads[number].loans
            calls.append(Call(members, method, tuple([parts[n] for n in numbers]), answer, loans))
        return calls


def _value_of(group: WorkerGroup, rank: int, values: Mapping[int, Any]) -> Any:
    """The value of the one rank; ``group`` is named so that it lives as long as the future that holds this."""
    return values[rank]


def _random_letters() -> str:
    """Whatever the user has seeded."""
    return "".join(string.ascii_letters[byte % 52] for byte in uuid.uuid4().bytes[:6])
