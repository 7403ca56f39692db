"""`WorkerGroup`: one worker per slot of a pool, called as if all of them were one object.

::

    group.method(x) ── bind (the real signature) ── plan (mesh, protocol) ── encode ──► Workers.put, Workers.call
                                                                                              │ worker processes
    result ◄────────── collect (join, list, reduce) ◄── calls.Call ◄───────── Workers.wait, Workers.fetch
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, TypeVar

from bandmaster.backends import get_backend
from bandmaster.calls.derived import PutRows
from bandmaster.calls.encoding import encode_constructor
from bandmaster.calls.future import Future
from bandmaster.calls.hooks import Gate
from bandmaster.calls.options import check_seconds, default_options
from bandmaster.calls.request import CallSite
from bandmaster.calls.spec import specs_of
from bandmaster.calls.submission import Submitter
from bandmaster.contract import Launch
from bandmaster.errors import ArgumentError, ClosedError, UsageError, WorkerDied, suggestion
from bandmaster.groups.by_name import ByName
from bandmaster.groups.cancellation import Cancelling
from bandmaster.groups.method import GroupMethod
from bandmaster.lifecycle import tables
from bandmaster.lifecycle.checks import (
    check_name,
    check_names,
    check_options,
    checked_level,
    checked_mesh,
    checked_meshes,
    checked_output,
    has_turn_hooks,
    unwrap,
)
from bandmaster.lifecycle.construction import replace_worker, start_workers
from bandmaster.lifecycle.death_watch import DeathWatch
from bandmaster.lifecycle.open_groups import open_groups
from bandmaster.lifecycle.ownership import Ownership
from bandmaster.plan.mesh import Mesh
from bandmaster.platform.locks import check_not_held
from bandmaster.pool import ResourcePool
from bandmaster.rows.kept import held_by
from bandmaster.worker import Worker, imports_of, registrations

if TYPE_CHECKING:
    from typing_extensions import Self

    from bandmaster.tracing.records import CallTable
    from bandmaster.turns.turns import Turn, TurnTaker

W = TypeVar("W", bound=Worker)


class GroupOf(ByName, Cancelling, Generic[W]):
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
    _is_colocated = False  # whether groups of this class share processes
    _name: str

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
        check_options(type(self).__name__, name_prefix, start_timeout)
        check_name(type(self).__name__, name, name_prefix)
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
        self._constructor = encode_constructor(cls, args, kwargs)
        is_default = name is None and name_prefix is None
        self._ownership = Ownership(self, name or f"{prefix}{cls.__name__}")
        open_groups.add(self, self._ownership.name, is_default)
        try:
            self._set_up(cls, pool, *own_meshes)
            if name is not None:
                for former in open_groups.close_former(self):
                    former._pool._give_back(pool)
            slots = pool._occupy(self, self._name, self._ownership.set_slots)
            names = tuple(f"{self._name}_{slot.node_rank}:{slot.local_rank}" for slot in slots)
            self._launch = Launch(
                self._name,
                cls.__name__,
                self._mesh,
                self._meshes,
                slots,
                names,
                options,
                start_timeout,
                env=pool.env,
                preload=pool.preload,
                imports=imports_of(cls),
                output=directory,
                log_level=level,
            )
            with self._renewal():
                self._start(self._launch)
        except BaseException:
            self._ownership.close()
            raise

    def _set_up(self, cls: type[Worker], pool: ResourcePool, mesh: Mesh, meshes: Mapping[str, Mesh]) -> None:
        """Set the attributes that do not depend on the workers. The group has its name already."""
        name = self._name
        self._cls, self._pool, self._mesh, self._meshes = cls, pool, mesh, meshes
        self._methods = specs_of(cls, registrations(cls), mesh, meshes)
        self._changing = threading.RLock()  # one restart or replacement at a time
        self._watches: list[DeathWatch] = []
        self._submitter = Submitter(self._ownership.workers, cls, mesh, name)
        self._submitter.meshes = {method: spec.mesh for method, spec in self._methods.items()}
        if has_turn_hooks(cls):
            self._turn_taker()

    def _turn_taker(self) -> TurnTaker:
        """The group's turn taker, which checks its calls from now on. Raises UsageError if it cannot have one."""
        from bandmaster.turns.turns import turn_taker  # a feature

        return turn_taker(self._cls, self._name, self._pool._places, self._submitter, self._ownership)

    @property
    def _gate(self) -> Gate | None:
        """The group's turns, if it takes any."""
        return self._submitter.gate

    def _renewal(self) -> AbstractContextManager[None]:
        """The turn in which workers are constructed, if the group takes turns."""
        return nullcontext() if (gate := self._gate) is None else gate.renewal()

    def _start(self, launch: Launch) -> None:
        """Start the workers. Subclasses extend the launch with options that users cannot set."""
        self._ownership.set_workers(start_workers(get_backend(self._pool._lease.backend), launch, self._constructor))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._mesh.size

    @property
    def mesh(self) -> Mesh:
        """Named axes over the ranks."""
        return self._mesh

    @property
    def meshes(self) -> Mapping[str, Mesh]:
        """Further meshes of the same ranks, by the name that `register` uses for them."""
        return dict(self._meshes)

    @property
    def name(self) -> str:
        """The group's name, the prefix of the workers' names; by default the name of the class, such as ``Actor``.

        If another open group has it, a number is added: ``Actor-2``.
        """
        return self._name

    @property
    def worker_names(self) -> list[str]:
        """One name per rank, in rank order: ``{name}_{node}:{local_rank}``."""
        return list(self._launch.worker_names)

    @property
    def workers(self) -> list[Any]:
        """One object per rank: its name with rank, host and pid; on backend ``"inprocess"`` the worker itself."""
        return [record.handle() for record in self._ownership.workers().records]

    def put(self, batch: Any) -> Future[Any]:
        """Make a future of the controller's own rows, which calls of all groups take like the future of a call.

        The rows are encoded now, and sent once to each host that reads any of them, however many calls take parts.

        Args:
            batch: A batch; later changes to it have no effect.

        Raises:
            BatchError: ``batch`` has no rows.
            ArgumentError: ``batch`` cannot be pickled.

        Example:
            >>> import numpy as np
            >>> with ResourcePool([2], backend="inprocess") as pool:
            ...     group = WorkerGroup(pool, Worker)
            ...     [len(part) for part in group.put(np.arange(10)).shuffle(seed=0).batches(4)]
            [4, 4, 2]
        """
        return Future(PutRows(batch, self._submitter.site("put")), self)

    def describe(self) -> str:
        """Return a table with one line per rank: name, mesh coordinates, host, pid, device, channel, and rows held.

        Only axes larger than 1 are shown. The last column shows the bytes of rows that the rank has made and that
        futures still keep; see `Future.release`.

        Raises:
            ClosedError: The group was closed.
        """
        workers = self._ownership.workers()
        return tables.as_text(repr(self), self.worker_names, self._mesh, workers.records, held_by(workers))

    def calls(self) -> CallTable:
        """The calls of this group that the present or last `bandmaster.trace` has recorded; prints as a table.

        Raises:
            UsageError: No trace was ever opened.
        """
        from bandmaster.tracing.ledger import calls_of  # a feature

        return calls_of(self._name)

    @property
    def healthy(self) -> bool:
        """Whether no worker is known to have died. It does not call the workers. False once the group is closed."""
        try:
            workers = self._ownership.workers()
        except ClosedError:
            return False
        return workers.check() and not workers.deaths

    def on_death(self, callback: Callable[[WorkerDied], object]) -> None:
        """Call ``callback(error)`` in a background thread soon after a worker has died.

        The callback runs at most once until `restart` or `replace` renews the workers. Closing the group does not
        count as a death.

        Args:
            callback: Function of one argument, the `WorkerDied` that a call would raise. Its exceptions are logged.

        Raises:
            ClosedError: The group was closed.
            ResourceError: The system allows no more threads.
        """
        site = CallSite(self._cls.__name__, self._mesh, self._name)
        self._watches.append(DeathWatch(self._ownership.workers(), site, callback))

    def turn(self, *others: GroupOf[Any], timeout: float | None = None) -> Turn:
        """Reserve this group's slots for this group during a ``with`` or an ``async with`` block.

        Groups share slots if they are on one pool, on pools that were merged or split from it, or roles of `colocate`.
        When the block is entered, it waits until no other group has a turn on any of the slots. The other groups then
        yield, after their calls that still run: if their class has a method ``on_yield(self)``, it is called on every
        rank, to release device memory. Then ``on_resume(self)``, if there is such a method, is called on every rank of
        this group if it had yielded. A group that has turn after turn neither yields nor resumes in between.

        While a group has its turn, calls of other groups on its slots are refused, if they have one of the two methods
        or were ever asked for a turn; so are calls of a group that has yielded. The construction of a group with such a
        method, `restart` and `replace` are turns as well.

        A thread can enter the turn of a group again in its own turn, and other threads join it, those of several groups
        if they ask for the same ones; it ends with the last of the blocks. Once another group waits for the slots,
        threads join only while a thread is inside that asked before it. If a hook raises, no group has the turn, and
        the hook is called again for the next turn.

        Args:
            *others: Groups that have their turns at the same time as this one.
            timeout: Seconds that entering the block may take, hooks included; None sets no limit.

        Returns:
            The context manager.

        Raises:
            UsageError: When the block is entered: this thread or task has the turn of another group on the same slots,
                so that the wait would never end. Threads that wait for each other's turns are not noticed: take turns
                in the same order everywhere, or set a timeout.
            TurnTimeout: Another group had its turn for too long, or its calls took too long to send.
            CallTimeout: A hook took too long. It still runs; the next turn waits for it.
            RemoteError, WorkerDied: A hook raised, or a worker died; ``error.method`` names the class.
            ClosedError: The group was closed.

        Example:
            >>> import bandmaster as bm
            >>> class Model(bm.Worker):
            ...     def __init__(self, name):
            ...         self.name = name
            ...     def on_yield(self):
            ...         print(self.name, "goes to the CPU")
            ...     def on_resume(self):
            ...         print(self.name, "comes back")
            ...     @bm.register(bm.Dispatch.DP_PROTO)
            ...     def run(self, rows):
            ...         return [f"{self.name} {row}" for row in rows]
            >>> with bm.ResourcePool([1], backend="inprocess") as pool:
            ...     actor, critic = bm.WorkerGroup(pool, Model, "actor"), bm.WorkerGroup(pool, Model, "critic")
            ...     with critic.turn():
            ...         critic.run([1])
            ...     with actor.turn():
            ...         actor.run([2])
            actor goes to the CPU
            ['critic 1']
            critic goes to the CPU
            actor comes back
            ['actor 2']
        """
        from bandmaster.turns.turns import Turn  # a feature

        check_seconds("timeout of turn", timeout)
        groups = tuple(dict.fromkeys((self, *others)))
        for group in groups:
            if not isinstance(group, GroupOf):
                raise ArgumentError(f"turn takes worker groups, got {type(group).__name__} ({group!r})")
        for group in groups:
            group._ownership.check()
        return Turn(groups, [group._turn_taker() for group in groups], timeout)

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
        has_hook = callable(getattr(self._cls, "on_restart", None))
        if state is not None and not has_hook:
            raise UsageError(
                f"restart() got a state, but {self._cls.__name__} has no method on_restart(self, state) to receive "
                "it; define the method, or call restart() without a state"
            )
        hook = self._same("on_restart", (state,), {}, self.world_size) if has_hook else None
        with self._renewal(), self._changing:
            self._launch = replace(self._launch, slots=self._pool._renewed())
            self._ownership.workers().stop("the group was restarted")
            self._end_watches()
            self._submitter.work.begin_anew()
            self._start(self._launch)
            if (gate := self._gate) is not None:
                gate.is_new()
            self._watch_again()
            if hook is not None:
                self._on_all("on_restart", hook)

    def replace(self, rank: int, state: Any = None) -> None:
        """End the worker of one rank, if it still runs, and start and construct a new one on its slot.

        The class opts in by defining ``on_replace(self, rank, state)``. The group calls it on every rank once the new
        worker is constructed, so that the other ranks can, for example, leave their process group and join a new one.
        Pending calls are cancelled first; a rank that does not stop within the grace of its call is ended.

        Args:
            rank: The rank whose worker is replaced.
            state: Picklable value passed to ``on_replace``, the same on every rank.

        Raises:
            UsageError: The group has no such rank, the class has no ``on_replace``, or another rank is also dead;
                the worker was not replaced.
            ConstructorError, WorkerDied, CallTimeout: The new worker failed to start, as for a new group; `replace`
                can be called again.
            RemoteError: ``on_replace`` raised.
            ClosedError: The group was closed.
        """
        self._ownership.check()
        if not isinstance(rank, int) or not 0 <= rank < self.world_size:
            raise UsageError(f"{self._name} has ranks 0 to {self.world_size - 1}, got rank {rank!r}")
        if not callable(getattr(self._cls, "on_replace", None)):
            raise UsageError(
                f"{self._cls.__name__} does not support the replacement of one rank: define a method "
                "on_replace(self, rank, state), or restart() the whole group"
            )
        hook = self._same("on_replace", (rank, state), {}, self.world_size)
        check_not_held(self._changing)
        with self._renewal(), self._changing:
            self._check_alive_but(rank)
            self._submitter.work.cancel_all()
            self._check_alive_but(rank)
            self._end_watches()
            replace_worker(self._ownership.workers(), self._launch, self._constructor, rank)
            self._watch_again()
            if (gate := self._gate) is not None:
                gate.has_new(rank)
            self._on_all("on_replace", hook)

    def _check_alive_but(self, rank: int) -> None:
        workers = self._ownership.workers()
        workers.check()
        others = [str(dead) for dead in workers.deaths if dead != rank]
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
        self._watches = [watch.again(self._ownership.workers()) for watch in self._watches]

    def close(self) -> None:
        """End the workers and release their slots. Pending calls fail with `WorkerDied`. Closing twice does nothing."""
        self._ownership.close()
        self._end_watches()
        self._submitter.work.begin_anew()
        if (gate := self._gate) is not None:
            gate.is_closed()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    if not TYPE_CHECKING:  # so that type checkers report unknown names

        def __getattr__(self, name: str) -> Any:
            known = self.__dict__  # attributes are missing if `__init__` failed
            spec = known.get("_methods", {}).get(name)
            if spec is not None:
                return GroupMethod(self, self._submitter, spec)
            cls = known.get("_cls")
            if cls is not None and callable(getattr(cls, name, None)) and not name.startswith("_"):
                raise AttributeError(
                    f"{cls.__name__}.{name} is not registered: put @register(...) above it, or call "
                    f"execute_all_sync({name!r}, ...)"
                )
            is_public = not name.startswith("_")
            hint = suggestion(name, (*known.get("_methods", ()), *dir(type(self)))) if is_public else ""
            error = AttributeError(f"{type(self).__name__} has no attribute {name!r}{hint}")
            error.name = name  # without obj, so that Python does not add the same suggestion to a traceback
            raise error

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a WorkerGroup cannot be pickled: it belongs to its controller; pass the values that the workers need"
        )

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._methods})

    def __repr__(self) -> str:
        note = "" if (gate := self._gate) is None else gate.note
        closed = note if self._ownership.is_open else ", closed"
        return f"<{type(self).__name__} {self._name} of {self.world_size} on {self._pool!r}, {self._mesh!r}{closed}>"

    def _repr_html_(self) -> str:
        try:
            workers = self._ownership.workers()
        except UsageError:  # it is closed
            workers = None
        records, held = (workers.records, held_by(workers)) if workers else (None, {})
        return tables.as_html(repr(self), self.worker_names, self._mesh, records, held, self._methods.values())

    def set_default_options(self, /, **options: float | None) -> None:
        """Set the options of this group's calls that do not set them with `GroupMethod.options`.

        Args:
            **options: ``timeout`` and ``grace`` in seconds, see `GroupMethod.options`.

        Raises:
            UsageError: An option is unknown, or its value is not a non-negative number or None.
        """
        default_options().but(options)  # checks the values
        self._submitter.options.update(options)


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
        name_prefix: Prefix of the group's name before the name of the class, in place of ``name``. Several groups may
            have such a name.
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
        ResourceError: There is no descriptor, process or thread for a worker, or the working directory was removed.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class _OfTheWorkers:
    """A descriptor on a group class for an attribute name of the worker class; returns the group's own attribute."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, group: Any, owner: Any) -> Any:
        return self if group is None else group.__getattr__(self._name)
