"""`WorkerGroup`: one worker per slot of a pool, called as if all of them were one object.

::

    group.method(x) ── bind (the real signature) ── plan (mesh, protocol) ── encode ──► Workers.put, Workers.call
                                                                                              │ worker processes
    result ◄────────── collect (join, list, reduce) ◄── calls.Call ◄───────── Workers.wait, Workers.fetch
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from bandmaster.backends import get_backend
from bandmaster.calls.options import REPLACE, checked_seconds
from bandmaster.calls.request import encode_constructor
from bandmaster.calls.spec import specs_of
from bandmaster.calls.submission import Submitter
from bandmaster.contract import Launch
from bandmaster.errors import ArgumentError, UsageError
from bandmaster.groups.base import AnyGroup
from bandmaster.lifecycle.checks import (
    check_names,
    check_options,
    checked_level,
    checked_mesh,
    checked_meshes,
    checked_output,
    turn_hooks,
    unwrap,
    why_not_replaced,
)
from bandmaster.lifecycle.construction import replace_worker, start_workers
from bandmaster.lifecycle.death_watch import DeathWatch
from bandmaster.lifecycle.ownership import Ownership, add_group, close_former, open_groups
from bandmaster.plan.mesh import Mesh
from bandmaster.plan.numbers import as_whole
from bandmaster.platform.locks import check_not_held
from bandmaster.pool import ResourcePool
from bandmaster.pool.lease import close_all as close_each
from bandmaster.pool.resource_pool import open_pools
from bandmaster.worker import Worker, imports_of, registrations

if TYPE_CHECKING:
    from typing_extensions import Self

W = TypeVar("W", bound=Worker)


class GroupOf(AnyGroup, Generic[W]):
    """A worker group whose methods editors complete and type checkers check.

    Subclass it together with the worker class. At run time the subclass behaves like `WorkerGroup`::

        class ActorGroup(GroupOf[Actor], Actor): ...

        actor = ActorGroup(pool, Actor)
        actor.act(batch)  # parameters as in Actor.act; the result's type follows from its protocol

    The parameters are those of `WorkerGroup`.

    Raises:
        ArgumentError: The worker class is not a subclass of the worker class among the bases.
        Exception: All errors of `WorkerGroup`.
    """

    _worker_classes: ClassVar[tuple[type[Worker], ...]] = ()
    _is_numbered: ClassVar[bool] = True  # whether a name that is taken gets a number, unless the user has given it

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._worker_classes = tuple(base for base in cls.__bases__ if issubclass(base, Worker))
        mine = set(dir(GroupOf))
        for name in {name for base in cls._worker_classes for name in dir(base)} - mine:
            if not name.startswith("_"):
                setattr(cls, name, _OfTheWorkers(name))

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Create the group; skips a ``__new__`` of a worker class among the bases."""
        return object.__new__(cls)

    def __init__(
        self,
        pool: ResourcePool,
        worker_class: Any,
        /,
        *args: Any,
        mesh: Mesh | None = None,
        meshes: Mapping[str, Mesh] | None = None,
        name: str | None = None,
        name_prefix: str | None = None,
        start_timeout: float | None = None,
        output: str | PathLike[str] | None = None,
        logging: str | int | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(pool, ResourcePool):
            raise ArgumentError(
                f"the first argument of {type(self).__name__} must be a ResourcePool, "
                f"got {type(pool).__name__} ({pool!r})"
            )
        check_options(type(self).__name__, name, name_prefix)
        start_timeout_s = checked_seconds(f"start_timeout of {type(self).__name__}", start_timeout)
        directory, level = checked_output(type(self).__name__, output), checked_level(type(self).__name__, logging)
        cls, args, kwargs, options = unwrap(worker_class, args, kwargs)
        if issubclass(cls, GroupOf):
            raise UsageError(
                f"the worker class of a group must not be a group class, got {cls.__name__}; pass the "
                "worker class among its bases"
            )
        if not issubclass(cls, self._worker_classes or Worker):
            expected = " or ".join(base.__name__ for base in self._worker_classes)
            raise ArgumentError(
                f"the worker class of {type(self).__name__} must be {expected} or a subclass, got {cls.__name__}"
            )
        registered = registrations(cls)
        check_names(cls, registered, dir(GroupOf))
        prefix = pool.name_prefix if name_prefix is None else name_prefix
        own_meshes = checked_mesh(mesh, pool.world_size, pool), checked_meshes(meshes, pool.world_size, pool)
        self._constructor, self._pool = encode_constructor(cls, args, kwargs), pool
        self._ownership = Ownership(self, name or f"{prefix}{cls.__name__}")
        add_group(self, self._ownership.name, name is None and self._is_numbered)
        try:
            self._set_up(cls, *own_meshes)
            if name is not None:
                for former in close_former(self):
                    former._pool._give_back(pool)
            slots = pool._occupy(self, self._name, self._ownership.when_closed)
            names = tuple(f"{self._name}_{slot.node_rank}:{slot.local_rank}" for slot in slots)
            self._launch = Launch(
                self._name,
                cls.__name__,
                self._mesh,
                self._meshes,
                slots,
                names,
                options,
                start_timeout_s,
                env=pool.env,
                preload=pool.preload,
                imports=imports_of(cls),
                output=directory,
                log_level=level,
            )
            watch = _watch()
            with self._submitter.gate.renewal():
                self._start(self._launch)
            if watch is not None and self._ownership.workers().arrivals is not None:  # else the methods run here
                self._ownership.when_closed(partial(watch.soon.put, None))
                watch.begin(self._ownership, self._submitter.work, self)
        except BaseException:
            self._ownership.close()
            self._ownership.tell_of_end()  # perhaps another thread had closed it before it got its slots
            raise

    def _set_up(self, cls: type[Worker], mesh: Mesh, meshes: Mapping[str, Mesh]) -> None:
        """Set the attributes that do not depend on the workers. The group has its name already."""
        self._cls, self._mesh, self._meshes = cls, mesh, meshes
        self._methods = specs_of(cls, registrations(cls), mesh, meshes)
        self._changing = threading.RLock()  # one restart or replacement at a time
        self._watches: list[DeathWatch] = []
        self._submitter = Submitter(self._ownership.workers, cls, mesh, self._name, methods=self._methods)
        if why_not := self._why_not_replaced():
            self._submitter.refused[REPLACE] = why_not
        if turn_hooks(cls):
            self._turn_taker()

    def _start(self, launch: Launch) -> None:
        """Start the workers. Subclasses extend the launch with options that users cannot set."""
        backend = get_backend(self._pool._lease.backend)
        start_workers(backend, launch, self._constructor, self._ownership)

    def restart(self, state: Any = None) -> None:
        """End all workers, even busy ones, and start and construct new ones on the same slots.

        Ranks whose host is lost get the slots of a spare node of the pool (``ResourcePool(..., spares=)``). The
        constructors run with their original arguments, in a new rendezvous. If the class has a method
        ``on_restart(self, state)``, the group then calls it on every rank. Pending calls fail with `WorkerDied`.

        Args:
            state: Picklable value passed to ``on_restart``, the same on every rank.

        If the group takes turns, this is a `turn` of it: other groups on its slots yield first.

        Raises:
            UsageError: ``state`` is given, but the class has no ``on_restart``, or this thread has the turn of another
                group on the same slots; nothing was done.
            PlacementError: A host is lost, and the pool has no spare node for its ranks; nothing was done.
            ConstructorError, WorkerDied, CallTimeout: The new workers failed to start, as for a new group; `restart`
                can be called again.
            RemoteError: ``on_restart`` raised.
            ClosedError: The group was closed.
        """
        check_not_held(self._changing)
        self._ownership.check()
        self._check_state("restart", "on_restart", state)
        has_hook = callable(getattr(self._cls, "on_restart", None))
        hook = self._same("on_restart", (state,), {}, self.world_size) if has_hook else None
        with self._submitter.gate.renewal(), self._changing:
            self._launch = replace(self._launch, slots=self._pool._renewed())
            self._ownership.workers().stop("the group was restarted; if restart() raised, its error says why none run")
            self._end_watches()
            self._submitter.work.begin_anew()
            self._start(self._launch)
            self._submitter.gate.is_new()
            self._watch_again()
            if hook is not None:
                self._on_all("on_restart", hook)

    def replace(self, rank: int, state: Any = None) -> None:
        """End the worker of one rank, if it still runs, and start and construct a new one on its slot.

        The class opts in by defining ``on_replace(self, rank, state)``. The group calls it on every rank once the new
        worker is constructed, so that the other ranks can, for example, leave their process group and join a new one.
        A class whose ranks cannot be replaced one by one, as these depend on each other, may have a class method
        ``why_not_replaced(cls, mesh)``, which returns the reason, or "" if they can.
        Pending calls are cancelled first; a rank that does not stop within the grace of its call is ended.

        Args:
            rank: The rank whose worker is replaced.
            state: Picklable value passed to ``on_replace``, the same on every rank.

        Raises:
            UsageError: The group has no such rank, the class has no ``on_replace`` or says that a rank cannot be
                replaced alone, or another rank is also dead; the worker was not replaced.
            ConstructorError, WorkerDied, CallTimeout: The new worker failed to start, as for a new group; `replace`
                can be called again.
            RemoteError: ``on_replace`` raised.
            ClosedError: The group was closed.
        """
        self._ownership.check()
        if (number := as_whole(rank, 0, self.world_size - 1)) is None:
            raise UsageError(f"{self._name} has ranks 0 to {self.world_size - 1}, got rank {rank!r}")
        rank = number
        if why_not := self._why_not_replaced():
            raise UsageError(why_not)
        self._check_state("replace", "on_replace", state, rank)
        hook = self._same("on_replace", (rank, state), {}, self.world_size)
        check_not_held(self._changing)
        with self._submitter.gate.renewal(), self._changing:
            self._check_alive_but(rank)
            self._submitter.work.cancel_all()
            self._check_alive_but(rank)
            self._end_watches()
            with self._submitter.work.renewing(rank):
                replace_worker(self._ownership, self._launch, self._constructor, rank)
                self._watch_again()
                self._submitter.gate.has_new(rank)
                self._on_all("on_replace", hook)

    def _check_state(self, method: str, hook: str, state: Any, *args: Any) -> None:
        """Raise UsageError if there is a state for ``method``, but no ``hook`` that receives it with ``args``."""
        if state is not None and not callable(getattr(self._cls, hook, None)):
            raise UsageError(
                f"{method}() got a state, but {self._cls.__name__} has no method {hook}(self, state) to receive it; "
                f"define the method, or call {method}() without a state"
            )

    def _why_not_replaced(self) -> str:
        """The reason why no rank can be replaced; "" if each can."""
        return why_not_replaced(self._cls, self._mesh)

    def _check_alive_but(self, rank: int) -> None:
        workers = self._ownership.workers()
        workers.check()
        others = [str(dead) for dead in list(workers.deaths) if dead != rank]
        if others:
            raise UsageError(
                f"cannot replace rank {rank}: rank {', '.join(others)} is dead too, and only one rank can be replaced "
                "at a time; use restart()"
            )

    def _end_watches(self) -> None:
        for watch in self._watches:
            watch.end()

    def _watch_again(self) -> None:
        """Register every `on_death` callback again, now for the new workers."""
        self._watches[:] = [watch.again(self._ownership.workers()) for watch in self._watches]

    def close(self) -> None:
        """End the workers and release their slots. Pending calls fail with `WorkerDied`. Closing twice does nothing."""
        self._ownership.close()
        if "_submitter" not in self.__dict__:  # another thread has only begun to construct it, and finds it closed
            return
        self._end_watches()
        self._submitter.work.begin_anew()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class WorkerGroup(GroupOf[Any]):
    """Ranks 0 … world_size-1 of one worker class, on the slots of a pool.

    Each method that the class marks with `register` is a method of the group, with its name, signature and
    docstring. ``group.method(x)`` waits for the result, ``group.method.submit(x)`` returns a `Future`, and
    ``group.method.options(timeout=60)`` sets the limits of a call. Unregistered methods can be called by name with
    `execute_all_sync` and the other ``execute_`` methods. The group is a context manager that closes it.

    Args:
        pool: The slots for the workers, one worker per slot. The caller owns the pool: closing the group does not
            close it.
        worker_class: A subclass of `Worker`, plain, wrapped by ``@ray.remote``, or with its arguments in
            `ClassWithInitArgs`.
        *args: Positional arguments of the worker's constructor, the same for every rank.
        mesh: Named axes over the ranks; ``Mesh(dp=world_size)`` by default.
        meshes: Further meshes of the same ranks by name, for methods that were registered with ``mesh=name``: for
            example one of training and one of generation.
        name: Name of the group, with which the workers' names and each line of their output begin. An open group of
            this process that has it is closed first, so that a cell of a notebook can be run again; if it was on
            another pool, slots of that pool without groups are released until a group needs them. By default the
            pool's prefix and the name of the class, with a number if an open group is called so: ``Actor-2``.
        name_prefix: Prefix of the group's name before the name of the class, in place of the pool's.
        start_timeout: Seconds that the processes may take to start, and then again for the constructors; None sets no
            limit.
        output: A directory for the output of the workers, which is made if it does not exist. The output of rank 2 is
            appended to ``{output}/{name}-2.out`` in place of the controller's standard output and error; on Ray, on
            the host of the worker.
        logging: The lowest level, such as ``"INFO"``, of the records of Python's `logging` in workers that loggers of
            the same names handle in the controller, by the controller's configuration. By default records stay in the
            workers.
        **kwargs: Keyword arguments of the worker's constructor. Arguments called ``mesh``, ``meshes``, ``name``,
            ``name_prefix``, ``start_timeout``, ``output`` or ``logging`` have to go through
            `ClassWithInitArgs`.

    Raises:
        ArgumentError: The first argument is not a pool, the arguments do not match the constructor's signature, or one
            of them cannot be pickled.
        MeshError: A mesh and the pool differ in size, or a registered method names a mesh or an axis that the group
            does not have.
        UsageError: ``worker_class`` is not a worker class or has an async constructor, an option has the wrong type,
            or a registered method hides an attribute of the group; or ``output`` is not a writable directory, or the
            backend does not support ``output``.
        ConstructorError: A worker's constructor raised. The other workers were ended and all slots released.
        WorkerDied: A worker's process ended before the worker was constructed. The other workers were ended and all
            slots released.
        CallTimeout: The processes or the constructors took longer than ``start_timeout``. The workers were ended and
            all slots released.
        PlacementError: The pool does not fit, a slot already holds as many groups as it may, or a process did not
            start.
        ClosedError: The pool was closed, perhaps by another thread meanwhile, which has ended the workers.
        ResourceError: There is no descriptor, process or thread for a worker, or the working directory was removed.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


def _watch() -> Any:
    """The object that looks after calls, and from here on after constructors; None if its room was removed."""
    with suppress(ModuleNotFoundError):
        from bandmaster.watching.watch import watch

        return watch
    return None


class _OfTheWorkers:
    """A descriptor on a group class for an attribute name of the worker class; returns the group's own attribute."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, group: Any, owner: Any) -> Any:
        return self if group is None else group.__getattr__(self._name)


def close_all() -> None:
    """Close all worker groups and resource pools of this process, also those that no variable refers to any more.

    Their workers end and their slots are released, as by `WorkerGroup.close` and `ResourcePool.close`. New pools
    and groups can be made afterwards. In a fork of the controller, it closes those that the fork has made.

    Raises:
        UsageError: A signal handler called this during an operation of a group, which stays open.

    Example:
        >>> import bandmaster as bm
        >>> pool = bm.ResourcePool([2], backend="inprocess")
        >>> group = bm.WorkerGroup(pool, bm.Worker, name="actor")
        >>> bm.close_all()
        >>> pool
        <closed ResourcePool([2], backend='inprocess')>
    """
    close_each([*open_groups(), *open_pools()])
