"""`AnyGroup`: the members that worker groups and the groups of roles have in common: they are called, and looked at."""

from __future__ import annotations

import secrets
from abc import ABCMeta
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from bandmaster.calls.derived import PutRows
from bandmaster.calls.future import Future
from bandmaster.calls.hooks import OPEN
from bandmaster.calls.options import checked_seconds
from bandmaster.calls.request import CallRequest, CallSite, Collection
from bandmaster.calls.spec import MethodSpec
from bandmaster.calls.submission import Submitter
from bandmaster.contract import Launch
from bandmaster.errors import ArgumentError, ClosedError, UsageError, WorkerDied, suggestion
from bandmaster.groups.method import GroupMethod
from bandmaster.lifecycle import tables
from bandmaster.lifecycle.death_watch import DeathWatch
from bandmaster.lifecycle.ownership import Ownership
from bandmaster.plan.arguments import BoundArgument, CallPlan, everywhere, scatter
from bandmaster.plan.binding import bind, signature_without_self
from bandmaster.plan.mesh import Mesh
from bandmaster.plan.transfer import Gather, Only
from bandmaster.pool import ResourcePool
from bandmaster.rows.kept import held_by
from bandmaster.worker import Worker

if TYPE_CHECKING:
    from bandmaster.tracing.records import CallTable
    from bandmaster.turns.turns import Turn, TurnTaker


class AnyGroup(metaclass=ABCMeta):
    """A worker group, or the group of a role: the methods of one worker class on some ranks.

    It knows the workers, and may share them with other groups; `GroupOf` starts and ends them.
    """

    _cls: type[Worker]
    _name: str
    _mesh: Mesh
    _meshes: Mapping[str, Mesh]
    _methods: Mapping[str, MethodSpec]
    _submitter: Submitter
    _pool: ResourcePool
    _launch: Launch
    _ownership: Ownership
    _watches: list[DeathWatch]
    _key: str
    _is_direct: bool  # whether workers send requests to its ranks themselves, once this is decided

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
            >>> import numpy as np, bandmaster as bm
            >>> with bm.ResourcePool([2], backend="inprocess") as pool:
            ...     group = bm.WorkerGroup(pool, bm.Worker)
            ...     [len(part) for part in group.put(np.arange(10)).shuffle(seed=0).batches(4)]
            [4, 4, 2]
        """
        return Future(PutRows(batch, self._submitter.site("put")), self)

    def describe(self) -> str:
        """Return a table with a line per rank: name, mesh coordinates, host, pid, device, channel, requests, rows held.

        Only axes larger than 1 are shown. "requests" counts the open requests that the controller has sent to the rank;
        the first line says how many wait for a replica. The last column shows the bytes of rows that the rank has made
        and that futures still keep; see `Future.release`.

        Raises:
            ClosedError: The group was closed.
        """
        return tables.as_text(repr(self), self.worker_names, self._mesh, self._running())

    def _running(self) -> tables.Running:
        workers = self._ownership.workers()
        return tables.Running(workers.records, held_by(workers), self._submitter.work.ranks_of_requests())

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

    def turn(self, *others: AnyGroup, timeout: float | None = None) -> Turn:
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
                so that the wait would never end. Threads that wait for each other's turns are told of: see `Stall`.
                Or at once: this is the first turn of a group that was given to workers, which send it requests.
            Stalled: ``on_stall`` of the group is not ``"warn"``, and it was waited for in vain.
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

        timeout_s = checked_seconds("timeout of turn", timeout)
        groups = tuple(dict.fromkeys((self, *others)))
        for group in groups:
            if not isinstance(group, AnyGroup):
                raise ArgumentError(f"turn takes worker groups, got {type(group).__name__} ({group!r})")
        for group in groups:
            group._ownership.check()
            if group.__dict__.setdefault("_is_direct", False):
                raise UsageError(
                    f"group {group._name!r} cannot take turns: it was pickled for workers before its first turn, so "
                    "that these may send its ranks requests themselves; make the group again, and call turn() once "
                    "before it is given to workers: then the controller makes all their calls"
                )
        return Turn(groups, [group._turn_taker() for group in groups], timeout_s)

    def _turn_taker(self) -> TurnTaker:
        """The group's turn taker, which checks its calls from now on. Raises UsageError if it cannot have one."""
        from bandmaster.turns.turns import turn_taker  # a feature

        return turn_taker(self._cls, self._name, self._pool._places, self._submitter, self._ownership)

    def set_default_options(self, /, **options: Any) -> None:
        """Set the options of this group's calls that do not set them with `GroupMethod.options`.

        Args:
            **options: ``timeout``, ``grace`` and ``stall_after``, in seconds, and ``on_stall``; see `CallOptions`.

        Raises:
            UsageError: An option is unknown, or its value is invalid, or not possible for this group.
        """
        self._submitter.options.update(self._submitter.options_but(None, options) or {})

    def cancel(self) -> int:
        """Cancel all calls of this group that have not ended, from any thread. Does not wait.

        Ranks that run one of them are interrupted, and skip the others, as after `Future.cancel`. The futures raise
        `CallCancelled`, streams do so when they are iterated over, and the group can be called again at once: its next
        calls run when the ranks have stopped. Rows of calls that have ended stay where they are.

        Maps send no more requests, and the generators of streams are closed. For a role of `colocate` only the
        calls of that role are cancelled, for the colocated group those of all roles. On backend ``"inprocess"`` calls
        have ended when they are submitted.

        Returns:
            The number of calls that were cancelled. A stream counts as one call, and so do a map, and all requests of
            a method.

        Raises:
            ClosedError: The group was closed.
            UsageError: A signal handler called this during an operation of the group.

        Example:
            >>> import bandmaster as bm
            >>> with bm.ResourcePool([2], backend="inprocess") as pool:
            ...     group = bm.WorkerGroup(pool, bm.Worker)
            ...     group.cancel()  # no call is running
            0
        """
        self._ownership.check()
        name = self._name
        return self._submitter.work.cancel(lambda site: site.group == name or site.group.startswith(f"{name}."))

    # --- calls by name ---

    def execute_all_sync(self, method_name: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Run a method, registered or not, on every rank, and wait for all results.

        When every argument is a list of world_size values, rank r gets the r-th value of each list; otherwise every
        rank gets the arguments unchanged.

        Args:
            method_name: Name of the method.
            *args: Its positional arguments.
            **kwargs: Its keyword arguments.

        Returns:
            One value per rank, in rank order.

        Raises:
            ArgumentError: The class has no such method, or the arguments do not match its signature.
            RemoteError: The method raised on at least one rank.
            CollectError: A returned value cannot be pickled or unpickled.
            WorkerDied, CallTimeout: In the cases of a registered method.
        """
        values: list[Any] = self._on_all(method_name, self._plan_for_all(method_name, args, kwargs))
        return values

    def execute_all_async(self, method_name: str, /, *args: Any, **kwargs: Any) -> list[Future[Any]]:
        """Non-blocking `execute_all_sync`. Returns one `Future` per rank."""
        plan = self._plan_for_all(method_name, args, kwargs)
        return self._submitter.submit_for_each(CallRequest(method_name, plan, self._submitter.ranks, owner=self))

    def execute_rank_zero_sync(self, method_name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run a method, registered or not, on rank 0, wait for it, and return its value.

        Raises:
            ArgumentError: The class has no such method, or the arguments do not match its signature.
            RemoteError: The method raised.
        """
        plan = self._same(method_name, args, kwargs, 1)
        return self._submitter.call(CallRequest(method_name, plan, (0,), Collection(Only(), (0,)), self))

    def execute_rank_zero_async(self, method_name: str, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Non-blocking `execute_rank_zero_sync`. Returns a `Future`."""
        plan = self._same(method_name, args, kwargs, 1)
        return self._submitter.submit_for_each(CallRequest(method_name, plan, (0,), owner=self))[0]

    execute_all = execute_all_async
    execute_rank_zero = execute_rank_zero_async

    def _plan_for_all(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallPlan:
        arguments, n_ranks = self._bind(method, args, kwargs), len(self._submitter.ranks)
        if arguments and all(isinstance(each.value, list) and len(each.value) == n_ranks for each in arguments):
            return CallPlan(tuple(scatter(arguments, n_ranks, self._submitter.label(method))))
        return CallPlan((everywhere(arguments, n_ranks),))

    def _same(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], n_ranks: int) -> CallPlan:
        """A plan that broadcasts the arguments to ranks 0 … n_ranks-1."""
        return CallPlan((everywhere(self._bind(method, args, kwargs), n_ranks),))

    def _on_all(self, method: str, plan: CallPlan) -> Any:
        """Run a planned call on every rank, and return the values in rank order."""
        ranks = self._submitter.ranks
        return self._submitter.call(CallRequest(method, plan, ranks, Collection(Gather(), ranks), self))

    def _bind(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[BoundArgument]:
        if not (isinstance(method, str) and callable(getattr(self._cls, method, None))):
            if isinstance(method, str) and hasattr(self._cls, method):
                kind = type(getattr(self._cls, method)).__name__
                raise ArgumentError(
                    f"{self._submitter.label(method)} is a {kind}, not a method; add a method that returns it"
                )
            hint = suggestion(str(method), dir(self._cls))
            raise ArgumentError(f"{self._cls.__name__} has no method {method!r}{hint}")
        return bind(self._submitter.label(method), signature_without_self(self._cls, method), args, kwargs)

    # --- the methods of the worker class ---

    if not TYPE_CHECKING:  # so that type checkers report unknown names

        def __getattr__(self, name: str) -> Any:
            known = self.__dict__  # attributes are missing if `__init__` failed
            spec = known.get("_methods", {}).get(name)
            if spec is not None:
                if spec.registration.is_request:
                    return _request_method()(self, self._submitter, spec)
                return GroupMethod(self, self._submitter, spec)
            raise no_attribute(self, name)

    def __reduce__(self) -> tuple[Any, ...]:
        """The group as it is pickled for workers: from here on, workers can call it."""
        from bandmaster.callers.called import called_group, is_direct, reference_to  # a feature
        from bandmaster.callers.door import Door, GivenGroup

        known = self.__dict__
        if "_key" not in known:
            key = f"{secrets.token_hex(8)}:{self._name}"
            self._ownership.when_closed(partial(Door.take_back, key))  # first: Ctrl-C may come
            known.setdefault("_key", key)  # as other threads may pickle it, too
        work = self._submitter.work
        work.is_given = True
        work.read_in_background()
        given = GivenGroup(self._name, partial(getattr, self), self._ownership.open_workers, work)
        may_be_direct = self._submitter.gate is OPEN and any(map(is_direct, self._methods.values()))
        may_be_direct = known.setdefault("_is_direct", may_be_direct)  # unless a thread takes the first turn meanwhile
        reference = reference_to(given, self._key, self._submitter.prefix, may_be_direct)
        if not self._ownership.is_open:  # another thread has closed it meanwhile
            Door.take_back(self._key)
        return called_group, (reference, self._cls, self._mesh, dict(self._meshes))

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._methods})

    def __repr__(self) -> str:
        closed = self._submitter.gate.note if self._ownership.is_open else ", closed"
        return f"<{type(self).__name__} {self._name} of {self.world_size} on {self._pool!r}, {self._mesh!r}{closed}>"

    def _repr_html_(self) -> str:
        try:
            running = self._running()
        except UsageError:  # it is closed
            running = None
        return tables.as_html(repr(self), self.worker_names, self._mesh, running, self._methods.values())


def no_attribute(group: Any, name: str) -> AttributeError:
    """The error for a name that is neither an attribute of a group nor a registered method of its worker class."""
    known = group.__dict__
    cls, hint = known.get("_cls"), ""
    methods = [method for method in known.get("_methods", ()) if not method.startswith("_")]
    if not name.startswith("_"):
        if callable(getattr(cls, name, None)):
            return AttributeError(
                f"{cls.__name__}.{name} is not registered: put @bandmaster.register(...) above it, or call "
                f"execute_all_sync({name!r}, ...)"
            )
        listed = f"; {cls.__name__} has {', '.join(methods)}" if methods else ""
        hint = suggestion(name, [*methods, *dir(type(group))]) or listed
    error = AttributeError(f"{type(group).__name__} has no attribute {name!r}{hint}")
    error.name = name  # without obj, so that Python does not add the same suggestion to a traceback
    return error


@cache
def _request_method() -> Any:
    from bandmaster.requests.method import RequestMethod  # a feature

    return RequestMethod
