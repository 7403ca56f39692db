"""`WorkerGroup`: one worker class on every slot of a pool, called as if it were one object.

::

    group.method(x) ── bind (the real signature) ── plan (mesh, protocol) ── encode ──► Workers.put, Workers.call
                                                                                              │ worker processes
    result ◄────────── collect (join, list, reduce) ◄── PendingCall ◄──────── Workers.wait, Workers.fetch
"""

from __future__ import annotations

import string
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, TypeVar

from bandmaster.backends import get_backend
from bandmaster.calls.encoding import encode_constructor
from bandmaster.calls.method import GroupMethod, MethodSpec
from bandmaster.calls.options import default_options
from bandmaster.calls.pending import CallSite, Collection
from bandmaster.calls.submission import Submitter
from bandmaster.contract import Launch
from bandmaster.errors import ArgumentError, ClosedError, UsageError, WorkerDied
from bandmaster.lifecycle.checks import check_names, check_options, checked_mesh, unwrap
from bandmaster.lifecycle.construction import replace_worker, start_workers
from bandmaster.lifecycle.death_watch import DeathWatch
from bandmaster.lifecycle.ownership import Ownership
from bandmaster.plan.arguments import BoundArgument, CallPlan, everywhere, scatter
from bandmaster.plan.binding import bind, signature_without_self
from bandmaster.plan.mesh import Mesh
from bandmaster.plan.render import html_table, text_table
from bandmaster.plan.transfer import Gather, Only
from bandmaster.platform.locks import check_not_held
from bandmaster.pool import ResourcePool
from bandmaster.worker import Worker, registrations

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["GroupOf", "WorkerGroup"]

W = TypeVar("W", bound=Worker)


class GroupOf(Generic[W]):
    """A worker group that editors and type checkers know the methods of.

    One line makes the class of such groups. At run time they are like any `WorkerGroup`::

        class ActorGroup(GroupOf[Actor], Actor): ...

        actor = ActorGroup(pool, Actor)
        actor.act(batch)  # parameters as in Actor.act; the result's type follows from its protocol

    The parameters are those of `WorkerGroup`.

    Raises:
        ArgumentError: The worker class is not one that the class of the group names; and as `WorkerGroup`.
    """

    _worker_classes: ClassVar[tuple[type[Worker], ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._worker_classes = tuple(base for base in cls.__bases__ if issubclass(base, Worker))
        mine = set(dir(GroupOf))
        for name in {name for base in cls._worker_classes for name in dir(base)} - mine:
            if not name.startswith("_"):
                setattr(cls, name, _OfTheWorkers(name))

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Not that of a worker class beside this one."""
        return object.__new__(cls)

    def __init__(
        self,
        pool: ResourcePool,
        worker_class: Any,
        /,
        *args: Any,
        mesh: Mesh | None = None,
        name_prefix: str | None = None,
        start_timeout: float | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(pool, ResourcePool):
            raise ArgumentError(f"{type(self).__name__} takes a ResourcePool, then a worker class; {pool!r} is no pool")
        check_options(type(self).__name__, name_prefix, start_timeout)
        cls, args, kwargs, options = unwrap(worker_class, args, kwargs)
        if issubclass(cls, GroupOf):
            raise UsageError(f"{cls.__name__} is a class of groups; give the worker class that it is made for")
        if not issubclass(cls, self._worker_classes or Worker):
            expected = " and ".join(base.__name__ for base in self._worker_classes)
            raise ArgumentError(f"a {type(self).__name__} is a group of {expected}, got {cls.__name__}")
        registered = registrations(cls)
        check_names(cls, registered, dir(GroupOf))
        self._cls = cls
        self._pool = pool
        self._mesh = checked_mesh(mesh, pool.world_size, pool)
        self._methods = {name: MethodSpec.of(cls, name, registered[name], self._mesh) for name in registered}
        self._changing = threading.RLock()  # one restart or replacement at a time
        self._watches: list[DeathWatch] = []
        self._constructor = encode_constructor(cls, args, kwargs)
        prefix = pool.name_prefix + _random_letters() if name_prefix is None else name_prefix
        self._name = f"{prefix}{cls.__name__}"
        self._ownership = Ownership(self, self._name)
        self._submitter = Submitter(self._ownership.workers, cls, self._mesh, self._name)
        try:
            slots = pool._occupy(self, self._name, self._ownership.set_slots)
            names = tuple(f"{self._name}_{slot.node_rank}:{slot.local_rank}" for slot in slots)
            self._launch = Launch(
                self._name,
                cls,
                self._mesh,
                slots,
                names,
                pool.use_gpu,
                pool.cpus_per_worker,
                options,
                start_timeout,
            )
            self._start(self._launch)
        except BaseException:
            self._ownership.close()
            raise

    def _start(self, launch: Launch) -> None:
        self._ownership.set_workers(start_workers(get_backend(self._pool.backend), launch, self._constructor))

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
        return [record.handle() for record in self._ownership.workers().records]

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
        values: list[Any] = self._on_all(method_name, self._plan_for_all(method_name, args, kwargs))
        return values

    def execute_all_async(self, method_name: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Non-blocking `execute_all_sync`. Returns one ObjectRef per rank on Ray, one `Future` per rank elsewhere."""
        plan = self._plan_for_all(method_name, args, kwargs)
        return self._submitter.submit_for_each(self, method_name, plan, self._submitter.ranks)

    def execute_rank_zero_sync(self, method_name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run a method, registered or not, on rank 0 with the arguments as they are; its plain value.

        Raises:
            ArgumentError: No such method, or arguments that do not fit it.
            RemoteError: It raised.
        """
        plan = self._same(method_name, args, kwargs, 1)
        return self._submitter.submit(self, method_name, plan, (0,), Collection(Only(), (0,)), waits=True)

    def execute_rank_zero_async(self, method_name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Non-blocking `execute_rank_zero_sync`. Returns an ObjectRef on Ray, a `Future` elsewhere."""
        plan = self._same(method_name, args, kwargs, 1)
        return self._submitter.submit_for_each(self, method_name, plan, (0,))[0]

    execute_all = execute_all_async
    execute_rank_zero = execute_rank_zero_async

    def describe(self) -> str:
        """A table of the ranks: where each is on the mesh, on which host and device, and by which channel it is called.

        Raises:
            ClosedError: The group was closed.
        """
        records = self._ownership.workers().records
        facts = [{name: getattr(record, name) for name in ("host", "pid", "device", "channel")} for record in records]
        return text_table(repr(self), *self._table(facts))

    @property
    def healthy(self) -> bool:
        """Whether every worker's process is there, as far as is known without asking it; False once closed."""
        try:
            workers = self._ownership.workers()
        except ClosedError:
            return False
        return workers.check() and not workers.deaths

    def on_death(self, callback: Callable[[WorkerDied], object]) -> None:
        """Call ``callback(error)`` from a thread as soon as a worker dies, once until `restart` or `replace`.

        The error names the rank and how it ended, as a call would have raised it. Closing the group is no death.

        Raises:
            ClosedError: The group was closed.
            ResourceError: The system allows no more threads.
        """
        site = CallSite(self._cls.__name__, self._mesh, self._name)
        self._watches.append(DeathWatch(self._ownership.workers(), site, callback))

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
        check_not_held(self._changing)
        with self._changing:
            workers, has_hook = self._ownership.workers(), callable(getattr(self._cls, "on_restart", None))
            if state is not None and not has_hook:
                raise UsageError(f"{self._cls.__name__} has no method on_restart(self, state) to take the state")
            hook = self._same("on_restart", (state,), {}, self.world_size) if has_hook else None
            workers.stop("the group was restarted")
            self._end_watches()
            self._submitter.begin_anew()
            self._start(replace(self._launch, is_again=True))
            self._watch_again()
            if hook is not None:
                self._on_all("on_restart", hook)

    def replace(self, rank: int, state: Any = None) -> None:
        """End the worker of one rank, if it still runs, and start and construct a new one on its place.

        The class allows it by having a method ``on_replace(self, rank, state)``, which is called on every rank when
        the new worker stands: there the others can, for example, leave their process group and join a new one. Calls
        that are pending are cancelled first; a rank that does not stop within their grace is ended as ever.

        Args:
            rank: Whose worker.
            state: Anything that ``on_replace`` is to get, the same on every rank.

        Raises:
            UsageError: No such rank, the class has no ``on_replace``, or another rank is dead too; nothing was done.
            ConstructorError, WorkerDied, CallTimeout: As for a new group; it can be tried again.
            RemoteError: ``on_replace`` raised.
            ClosedError: The group was closed.
        """
        self._ownership.check()
        if not isinstance(rank, int) or not 0 <= rank < self.world_size:
            raise UsageError(f"{rank!r} is no rank of {self._name}, which has 0 to {self.world_size - 1}")
        if not callable(getattr(self._cls, "on_replace", None)):
            raise UsageError(
                f"{self._cls.__name__} does not say that one rank can be replaced: give it a method "
                "on_replace(self, rank, state), or restart() the whole group"
            )
        hook = self._same("on_replace", (rank, state), {}, self.world_size)
        check_not_held(self._changing)
        with self._changing:
            self._check_alive_but(rank)
            self._submitter.cancel_all()
            self._check_alive_but(rank)
            self._end_watches()
            self._submitter.forget(rank)
            replace_worker(self._ownership.workers(), self._launch, self._constructor, rank)
            self._watch_again()
            self._on_all("on_replace", hook)

    def _check_alive_but(self, rank: int) -> None:
        workers = self._ownership.workers()
        workers.check()
        others = [str(dead) for dead in workers.deaths if dead != rank]
        if others:
            raise UsageError(f"rank {', '.join(others)} is dead too, and one can be replaced at a time; use restart()")

    def _end_watches(self) -> None:
        for watch in self._watches:
            watch.end()

    def _watch_again(self) -> None:
        """Watch the new workers for deaths, where the old ones were watched."""
        self._watches = [watch.again(self._ownership.workers()) for watch in self._watches]

    def close(self) -> None:
        """End the workers and give their places back. Closing twice is fine."""
        self._ownership.close()
        self._end_watches()
        self._submitter.begin_anew()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    if not TYPE_CHECKING:  # checkers are to find wrong names, and know the right ones

        def __getattr__(self, name: str) -> Any:
            known = self.__dict__  # may lack anything, when `__init__` has failed
            spec = known.get("_methods", {}).get(name)
            if spec is not None:
                return GroupMethod(self, self._submitter, spec)
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
        closed = "" if self._ownership.is_open else ", closed"
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

    def _plan_for_all(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallPlan:
        arguments = self._bind(method, args, kwargs)
        if arguments and all(isinstance(a.value, list) and len(a.value) == self.world_size for a in arguments):
            return CallPlan(tuple(scatter(arguments, self.world_size, self._submitter.label(method))))
        return CallPlan((everywhere(arguments, self.world_size),))

    def _same(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], n_ranks: int) -> CallPlan:
        """The same arguments for the first ranks."""
        return CallPlan((everywhere(self._bind(method, args, kwargs), n_ranks),))

    def _on_all(self, method: str, plan: CallPlan) -> Any:
        """Call every rank, and wait for the value of each."""
        ranks = self._submitter.ranks
        return self._submitter.submit(self, method, plan, ranks, Collection(Gather(), ranks), waits=True)

    def _bind(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[BoundArgument]:
        if not (isinstance(method, str) and callable(getattr(self._cls, method, None))):
            if isinstance(method, str) and hasattr(self._cls, method):
                kind = type(getattr(self._cls, method)).__name__
                raise ArgumentError(
                    f"{self._submitter.label(method)} is a {kind}, not a method; add a method that returns it"
                )
            import difflib  # here, as few need it, and the import of everything is to be quick

            near = difflib.get_close_matches(str(method), dir(self._cls), 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ArgumentError(f"{self._cls.__name__} has no method {method!r}{hint}")
        return bind(self._submitter.label(method), signature_without_self(self._cls, method), args, kwargs)

    def set_default_options(self, /, **options: float | None) -> None:
        """Set what holds for the calls of this group that say nothing else.

        Args:
            **options: ``timeout`` and ``grace`` in seconds, see `GroupMethod.options`.

        Raises:
            UsageError: There is no such option, or its value makes no sense.
        """
        default_options().but(options)  # to check them
        self._submitter.options.update(options)


class WorkerGroup(GroupOf[Any]):
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
        start_timeout: Seconds that the processes may take to start, and then the constructors; None, the default, for
            as long as they take.
        **kwargs: Keyword arguments of its constructor. Those called ``mesh``, ``name_prefix`` or
            ``start_timeout`` have to go through `ClassWithInitArgs`.

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

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class _OfTheWorkers:
    """An attribute of a worker class, on the class of its groups: the group's own attribute of that name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, group: Any, owner: Any) -> Any:
        return self if group is None else group.__getattr__(self._name)


def _random_letters() -> str:
    """Six letters that do not depend on what the user has seeded."""
    return "".join(string.ascii_letters[byte % 52] for byte in uuid.uuid4().bytes[:6])
