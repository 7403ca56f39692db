"""`CalledGroup`: a worker group as the workers have it to which it was given."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NoReturn
from weakref import WeakValueDictionary

from bandmaster.callers.circles import Circles, OpenChains, Wait, Waiting
from bandmaster.callers.door import ALL, CONTROLLER, OPTIONS, WAITS, Door, GivenGroup
from bandmaster.callers.reached import ReachedWorkers, is_here
from bandmaster.calls.future import Future
from bandmaster.calls.options import FUNCTION, RAISE, REPLACE, RESTART
from bandmaster.calls.spec import MethodSpec, specs_of
from bandmaster.calls.submission import Submitter
from bandmaster.errors import ArgumentError, UsageError, suggestion
from bandmaster.hosts.workers import AgentWorkers
from bandmaster.plan.mesh import Mesh
from bandmaster.plan.rows import replicas
from bandmaster.plan.transfer import Only, Route, TransferProtocol
from bandmaster.platform.forks import free_in_forks, n_forks
from bandmaster.platform.weak import living
from bandmaster.requests.arguments import Beside
from bandmaster.requests.future import RequestFuture
from bandmaster.requests.method import RequestMethod
from bandmaster.requests.request import Request
from bandmaster.requests.target import ANY, LIMITS, Target
from bandmaster.wire.lanes import LaneClient
from bandmaster.worker import Registration, Worker, registrations
from bandmaster.worker_process.call_path import PATH, Process, Step, conflict, here, path_of_this_call, refusal

_ONE = Mesh(dp=1)
_RELAYED = Registration(TransferProtocol(Route("dp"), Only()), concurrency=1 << 20)
# Groups, by reference, and controllers, which relay calls, by door; and number of forks.
_known: WeakValueDictionary[Any, Any] = WeakValueDictionary()
_kept: set[CalledGroup] = set()  # groups that have lanes or open calls, though the worker may refer to them no more
_lock = free_in_forks(threading.RLock())  # an unpickled class may make groups in turn


@dataclass(frozen=True)
class GroupReference:
    """A group as it is pickled.

    Attributes:
        door: The address of its controller's door.
        key: Its key there.
        name: Its name.
        reach: How workers reach its ranks: by "lanes", on the host of the controller, by "links", or not at all,
            "": then the controller makes all their calls.
        prefix: The prefix of the workers' names of its methods.
    """

    door: str
    key: str
    name: str
    reach: str
    prefix: str = ""


def reference_to(group: GivenGroup, key: str, prefix: str, may_be_direct: bool) -> GroupReference:
    """The reference to a group of this process, which workers can call from here on.

    Args:
        group: The group.
        key: Its key at the door.
        prefix: The prefix of the workers' names of its methods.
        may_be_direct: Whether workers may send requests to its ranks themselves, as it takes no turns.
    """
    workers = group.workers()
    reach = "links" if isinstance(workers, AgentWorkers) else "lanes" if isinstance(workers, LaneClient) else ""
    return GroupReference(Door.give(key, group), key, group.name, reach if may_be_direct else "", prefix)


def is_direct(spec: MethodSpec) -> bool:
    """Whether workers may send requests of a method to the replicas themselves, as each of these is one rank."""
    protocol: Any = spec.registration.protocol
    return spec.registration.is_request and all(len(ranks) == 1 for ranks in replicas(spec.mesh, protocol))


def called_group(reference: GroupReference, cls: type[Worker], mesh: Mesh, meshes: Mapping[str, Mesh]) -> CalledGroup:
    """The group of a reference, one in each process."""
    group: CalledGroup = _one_of((n_forks(), reference), lambda: CalledGroup(reference, cls, mesh, meshes))
    return group


def _one_of(key: Any, make: Callable[[], Any]) -> Any:
    """The group or controller of a key, which is made if there is none."""
    with _lock:
        one = _known.get(key)
        if one is None:
            one = _known[key] = make()
        return one


def _keep(group: CalledGroup) -> None:
    """Keep a group that has lanes or open calls, and drop those that have none any more if it is a new one."""
    with _lock:
        if group not in _kept:
            _kept.difference_update([one for one in _kept if one._n_forks != n_forks() or one._is_over])
            _kept.add(group)


class CalledGroup:
    """A worker group that was passed to a worker, which calls it: ``await group.method(x)``, or ``submit``.

    Arguments and values are passed by value. Requests go straight to the replica, by a lane or link of this process, if
    it is one rank; all other calls go by way of the controller. A method of a worker can wait for calls of other
    groups, but not for a call that waits for that method.

    The group belongs to its controller: it cannot be closed, restarted or resized here.

    Attributes:
        name: The group's name.
        mesh: Named axes over the ranks.
        meshes: Further meshes of the same ranks, by name.
        world_size: Number of ranks.
    """

    def __init__(self, reference: GroupReference, cls: type[Worker], mesh: Mesh, meshes: Mapping[str, Mesh]) -> None:
        self.name, self.mesh, self.meshes, self.world_size = reference.name, mesh, meshes, mesh.size
        self._reference, self._cls, self._n_forks = reference, cls, n_forks()
        self._methods = specs_of(cls, registrations(cls), mesh, meshes)
        self._collectives: dict[Future[Any], None] = {}  # the last call to all ranks, and those of other threads beside

    def _last_collectives(self) -> list[Future[Any]]:
        """The last call to all ranks, unless it has ended: behind it, whatever this worker calls next begins."""
        for last in list(self._collectives):
            if last.done():
                self._collectives.pop(last, None)  # nor are its values kept
        return list(self._collectives)

    def _requests(self) -> Sequence[Future[Any]]:
        """The requests to the ranks themselves, neither ended nor cancelled, behind which a call to all begins."""
        made = self.__dict__.get("_submitter")  # else there are none
        open_now = () if made is None else made.work.unanswered()
        return [RequestFuture(request, self) for request in open_now if not request.is_cancelled]

    def __getattr__(self, name: str) -> Any:
        spec = self.__dict__.get("_methods", {}).get(name)
        if spec is not None:
            return self._method(spec)
        if not name.startswith("_"):
            hint = suggestion(name, self._methods)
            raise AttributeError(
                f"group {self.name!r} was given to this worker, which can call its registered methods, but {name!r} is "
                f"none of them{hint}; all else is for the controller"
            )
        raise AttributeError(name)

    def _method(self, spec: MethodSpec) -> Any:
        if self._n_forks != n_forks():
            raise UsageError(
                f"group {self.name!r} was given to the process from which this one was forked; call it there"
            )
        own = Door.here(self._reference.door, self._reference.key)
        if own is not None:
            return own.method(spec.name)
        if spec.is_generator and not spec.registration.is_request:
            raise UsageError(
                f"{spec.label} yields items, over which workers can iterate only if it is registered with a Route; "
                "return a list"
            )
        if is_direct(spec) and self._is_direct and not self._workers.is_stopped:
            return DirectMethod(self, self._submitter, spec)
        return RelayedMethod(self, self._relay, spec, {})

    @property
    def _is_over(self) -> bool:
        """Whether the group is known to be closed, or has neither lanes nor open calls."""
        sent = self.__dict__.get("_workers")
        if sent is not None:
            return not sent.check()
        return not (self._controller.check() and self._relay.work.unanswered())

    @cached_property
    def _is_direct(self) -> bool:
        """Whether each rank can be reached from this host."""
        reach = self._reference.reach
        return reach == "links" or (reach == "lanes" and is_here(self._reference.door))

    @cached_property
    def _workers(self) -> ReachedWorkers:
        """The ranks, as they are reached by lanes."""
        return ReachedWorkers(self._reference.door, self._reference.key, self.world_size, self.name)

    @cached_property
    def _submitter(self) -> Submitter:
        """Sends requests to the ranks; kept, as lanes take long to make, and keys go to the replica they went to."""
        workers = self._workers
        _keep(self)
        made = Submitter(lambda: workers, self._cls, self.mesh, self.name, self._reference.prefix, self._methods)
        made.work.first_replica = os.getpid()  # so that callers begin with different ones
        made.refused = dict.fromkeys((RAISE, RESTART, REPLACE, FUNCTION), "only calls of the controller are watched")
        return made

    @cached_property
    def _controller(self) -> ReachedWorkers:
        """The controller, which relays calls."""
        door = self._reference.door
        found: ReachedWorkers = _one_of((n_forks(), door), lambda: ReachedWorkers(door, "", 1, self.name))
        return found

    @cached_property
    def _relay(self) -> Submitter:
        """Sends calls to the controller."""
        workers = self._controller
        return Submitter(lambda: workers, self._cls, _ONE, self.name, f"{self._reference.key}/")

    @cached_property
    def _chains(self) -> OpenChains:
        workers = self._controller
        submitter = Submitter(lambda: workers, Circles, _ONE, self.name, CONTROLLER)
        spec = MethodSpec.of(Circles, WAITS, _RELAYED, _ONE, {})
        return OpenChains(workers, RequestMethod[Any, Any](self, submitter, spec).submit)

    def _watch(self, request: Request, path: Sequence[Step], method: str, ranks: Sequence[int] = ()) -> None:
        """Find out if a call with a path waits for a call that waits for it; ``ranks`` are those of a relayed one."""
        alone = [step for step in path if step.is_alone]
        if alone:
            request.waiting = partial(Waiting, self._chains, Wait(alone, method, self._reference.key, ranks))

    def __reduce__(self) -> tuple[Any, ...]:
        return called_group, (self._reference, self._cls, self.mesh, self.meshes)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._methods})

    def __repr__(self) -> str:
        return f"<{self.name}, {self.world_size} ranks of another group, {self.mesh!r}>"


def _told_of_calls() -> str:
    """The calls of this worker to other groups that have not ended, a line for each method of a group."""
    ranks: dict[tuple[str, str], set[int]] = {}
    for group in living(_known.valuerefs()):
        for name in ("_submitter", "_relay"):
            made = group.__dict__.get(name)
            for request in made.work.unanswered() if made is not None else ():
                found = ranks.setdefault((request.site.method, group.name), set())
                found.update(request.missing if name == "_submitter" else ())
    lines = []
    for (method, name), found in ranks.items():
        where = f", rank {', '.join(map(str, sorted(found)))}" if found else ""
        lines.append(f"  it waits for {method} of group {name!r}{where}")
    return "\n".join(lines)


here.told_of_calls = _told_of_calls


class CalledMethod(RequestMethod[Any, Any]):
    """A method of a group that was given to a worker."""

    _group: CalledGroup

    def map(self, /, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse.

        Raises:
            UsageError: Always.
        """
        raise UsageError(f"{self._spec.label}.map(...) is for the controller; await single requests")

    def _made(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Target | None = None, beside: Beside = ()
    ) -> Request:
        """The request, whose arguments are values: the rows of a future belong to a group of this process alone."""
        request = super()._made(args, kwargs, target, beside)
        assert request.arguments is not None, "it was not sent"
        for group in request.arguments.rows:
            raise ArgumentError(
                f"argument {group.names[0]!r} of {self._spec.label} is a future, but group {self._group.name!r} was "
                "given to this worker, and gets its arguments by value; pass the value that `await` or result() returns"
            )
        return request


class DirectMethod(CalledMethod):
    """A method of a group whose requests a worker sends to the replicas itself."""

    def _made(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Target | None = None, beside: Beside = ()
    ) -> Request:
        """The request, which avoids the ranks that wait for this very call."""
        path = path_of_this_call()
        request = super()._made(args, kwargs, target, [*beside, (PATH, path)])
        router, where, reached = request.router, request.target, self._group._workers
        request.parents = self._group._last_collectives()
        if where.min_version is not None:
            reached.reach_all()  # so that they tell their versions
        processes = reached.processes_for(path)
        if processes:
            request.calls_back = any(step.process in processes.values() for step in path)
            steps = _conflicts(path, processes, router.is_exclusive)
            free = [n for n, replica in enumerate(router.replicas) if steps.keys().isdisjoint(replica.ranks)]
            if steps and (where.is_all or not free or where.replica not in (None, *free)):
                asked = f"{self._spec.label}.all" if where.is_all else self._spec.label
                raise UsageError(refusal(path, next(iter(steps.values())), asked))
            request.avoids = frozenset(steps)
        self._group._watch(request, path, self._spec.label)
        return request


def _conflicts(path: tuple[Step, ...], processes: Mapping[int, Process], is_alone: bool) -> dict[int, Step]:
    """The ranks that would begin a call only when a call of its path has ended, with that call."""
    alone = next((step for step in path if step.is_alone and step.process in processes.values()), None)
    if alone is not None:  # perhaps on all ranks, which would wait for each other
        return dict.fromkeys(processes, alone)
    found = {rank: conflict(path, process, is_alone) for rank, process in processes.items()}
    return {rank: step for rank, step in found.items() if step is not None}


class RelayedMethod(CalledMethod):
    """A method of a group that the controller calls for a worker.

    Args:
        group: The group.
        submitter: Sends calls to the controller.
        spec: The method.
        given: The options that the controller gets.
    """

    def __init__(self, group: object, submitter: Submitter, spec: MethodSpec, given: Mapping[str, Any]) -> None:
        function = _yields if spec.is_generator else _is_awaited
        relayed = replace(spec, function=function, registration=_RELAYED, mesh=_ONE)
        super().__init__(group, submitter, relayed, None, replace(ANY, maxsize=given.get("maxsize", ANY.maxsize)))
        protocol: Any = spec.registration.protocol
        self._n_replicas = len(replicas(spec.mesh, protocol)) if spec.registration.is_request else 0
        self._asked, self._given = spec, given

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the method: wait for its value, or return a future of it, as the controller's group does."""
        future = self.submit(*args, **kwargs)
        is_waited_for = self._asked.registration.is_blocking and not self._n_replicas
        return future.result_or_cancel() if is_waited_for else future

    def submit(self, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call the method, and return the future of its value without waiting."""
        future = super().__call__(*args, **kwargs)
        _keep(self._group)  # for the controller would cancel the call if this process dropped the lane
        return future

    def options(self, /, **options: Any) -> RelayedMethod:
        """A copy of this method with other options; the controller checks those of calls of all ranks."""
        given = {**self._given, **options}
        if self._n_replicas:
            ANY.but({name: value for name, value in given.items() if name not in LIMITS}, self._n_replicas)
        return type(self)(self._group, self._submitter, self._asked, given)

    def all(self, /, *args: Any, **kwargs: Any) -> Future[list[Any]]:
        """Send the request to all replicas; see `RequestMethod.all`."""
        if not self._n_replicas:
            raise AttributeError(f"{self._spec.label} is for all ranks anyway; all(...) is for methods with a Route")
        given = {**self._given, ALL: True}
        return type(self)(self._group, self._submitter, self._asked, given).submit(*args, **kwargs)

    def _made(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Target | None = None, beside: Beside = ()
    ) -> Request:
        """The request, with what the controller is to know of the call."""
        path = path_of_this_call()
        request = super()._made(args, kwargs, target, [*beside, (OPTIONS, self._given), (PATH, path)])
        if self._n_replicas <= 1 or ALL in self._given:  # else the controller alone knows the replica
            self._group._watch(request, path, self._spec.label, self._asked.ranks)
        last = self._group._last_collectives()
        request.parents = [*last, *(() if self._n_replicas else self._group._requests())]
        if not self._n_replicas:
            self._group._collectives[RequestFuture(request, self._group)] = None
            for one in last:
                self._group._collectives.pop(one, None)
        return request


async def _is_awaited() -> None:
    """Stand for the methods of relayed calls: the controller runs them beside each other."""


async def _yields() -> AsyncGenerator[None, None]:
    """Stand for the methods of relayed streams."""
    yield
