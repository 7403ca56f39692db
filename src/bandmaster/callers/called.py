"""`CalledGroup`: a worker group as the workers have it to which it was given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, NoReturn

from bandmaster.callers.door import OPTIONS, Door, GivenGroup
from bandmaster.callers.reached import ReachedWorkers
from bandmaster.calls.future import Future
from bandmaster.calls.spec import MethodSpec, specs_of
from bandmaster.calls.submission import Submitter
from bandmaster.errors import UsageError, suggestion
from bandmaster.plan.arguments import ArgumentGroup
from bandmaster.plan.mesh import Mesh
from bandmaster.plan.rows import replicas
from bandmaster.plan.transfer import Only, Route, TransferProtocol
from bandmaster.platform.forks import n_forks
from bandmaster.requests.method import RequestMethod
from bandmaster.requests.request import Request
from bandmaster.requests.router import Router
from bandmaster.requests.target import Target
from bandmaster.wire.lanes import LaneClient
from bandmaster.worker import Registration, Worker, registrations
from bandmaster.worker_process.call_path import PATH, conflict, path_of_this_call, refusal

_ONE = Mesh(dp=1)
_NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
_RELAYED = Registration(TransferProtocol(Route("dp"), Only()), concurrency=1 << 20)
_called: dict[tuple[int, GroupReference], CalledGroup] = {}  # by the number of forks, too
_controllers: dict[tuple[int, str], ReachedWorkers] = {}  # that relay calls


@dataclass(frozen=True)
class GroupReference:
    """A group as it is pickled.

    Attributes:
        door: The address of its controller's door.
        key: Its key there.
        name: Its name.
        is_direct: Whether each rank can serve further callers.
        prefix: The prefix of the workers' names of its methods.
    """

    door: str
    key: str
    name: str
    is_direct: bool
    prefix: str = ""


def reference_to(group: GivenGroup, key: str, prefix: str) -> GroupReference:
    """The reference to a group of this process, which workers can reach from here on."""
    return GroupReference(Door.give(key, group), key, group.name, isinstance(group.workers(), LaneClient), prefix)


def called_group(reference: GroupReference, cls: type[Worker], mesh: Mesh, meshes: Mapping[str, Mesh]) -> CalledGroup:
    """The group of a reference, one in each process."""
    known = n_forks(), reference
    if known not in _called:
        _called[known] = CalledGroup(reference, cls, mesh, meshes)
    return _called[known]


class CalledGroup:
    """A worker group that was passed to a worker, which calls it: ``await group.method(x)``, or ``submit``.

    Arguments and values are passed by value. Requests go straight to the replica, by a lane of this process, if it is
    one rank; all other calls go by way of the controller. A method of a worker can wait for calls of other groups, but
    not for a call that waits for that method.

    The group belongs to its controller: it cannot be closed, restarted or resized here. Its streams are those of
    requests to replicas of one rank.

    Attributes:
        name: The group's name.
        mesh: Named axes over the ranks.
        meshes: Further meshes of the same ranks, by name.
        world_size: Number of ranks.
    """

    def __init__(self, reference: GroupReference, cls: type[Worker], mesh: Mesh, meshes: Mapping[str, Mesh]) -> None:
        self.name, self.mesh, self.meshes, self.world_size = reference.name, mesh, meshes, mesh.size
        self._reference, self._cls = reference, cls
        self._methods = specs_of(cls, registrations(cls), mesh, meshes)

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
        here = Door.here(self._reference.door, self._reference.key)
        if here is not None:
            return here.method(spec.name)
        protocol: Any = spec.registration.protocol
        is_request = spec.registration.is_request
        if is_request and self._reference.is_direct and all(len(r) == 1 for r in replicas(spec.mesh, protocol)):
            return DirectMethod(self, self._submitter, spec)
        if spec.is_generator:
            raise UsageError(
                f"{spec.label} yields items, over which workers can iterate only if it is registered with a Route to "
                "replicas of one rank; return a list"
            )
        relayed = replace(
            spec,
            function=_is_awaited,
            goes_everywhere=True,
            registration=_RELAYED,
            mesh=_ONE,
            ranks=(0,),
        )
        return RelayedMethod(self, self._relay, relayed, spec.registration.is_blocking and not is_request)

    @cached_property
    def _submitter(self) -> Submitter:
        """Sends requests to the ranks."""
        of = self._reference
        workers = ReachedWorkers(of.door, of.key, self.world_size, self.name)
        return Submitter(lambda: workers, self._cls, self.mesh, self.name, of.prefix)

    @cached_property
    def _relay(self) -> Submitter:
        """Sends calls to the controller."""
        of = self._reference
        known = n_forks(), of.door
        if known not in _controllers:
            _controllers[known] = ReachedWorkers(of.door, "", 1, self.name)
        workers = _controllers[known]
        return Submitter(lambda: workers, self._cls, _ONE, self.name, f"{of.key}/")

    def __reduce__(self) -> tuple[Any, ...]:
        return called_group, (self._reference, self._cls, self.mesh, self.meshes)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._methods})

    def __repr__(self) -> str:
        return f"<{self.name}, {self.world_size} ranks of another group, {self.mesh!r}>"


class DirectMethod(RequestMethod[Any, Any]):
    """A method of a group whose requests a worker sends to the replicas itself."""

    def _made(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Router, Request, Target]:
        """The router, the request and its target, which is no rank that waits for this very call."""
        self.beside = ((PATH, path := path_of_this_call()),)
        router, request, target = super()._made(args, kwargs)
        workers = router.workers
        assert isinstance(workers, ReachedWorkers), "the group has such ones"
        if target.min_version is not None:
            workers.reach_all()  # so that they tell their versions
        found = {rank: conflict(path, pid, router.is_exclusive) for rank, pid in workers.pids(path).items()}
        steps = {rank: step for rank, step in found.items() if step is not None}
        if steps:
            free = [n for n, replica in enumerate(router.replicas) if replica.ranks[0] not in steps]
            if not free or target.replica not in (None, *free):
                raise UsageError(refusal(path, next(iter(steps.values())), self._spec.label))
            target = target if target.replica is not None else replace(target, replica=free[0])
        return router, request, target


class RelayedMethod(RequestMethod[Any, Any]):
    """A method of a group that the controller calls for a worker."""

    def __init__(
        self,
        group: object,
        submitter: Submitter,
        spec: MethodSpec,
        waits: bool,
        given: Mapping[str, Any] = _NO_OPTIONS,
    ) -> None:
        super().__init__(group, submitter, spec)
        self._waits, self._given = waits, dict(given)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the method: wait for its value, or return a future of it, as the controller's group does."""
        future = self.submit(*args, **kwargs)
        return future.result() if self._waits else future

    def submit(self, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call the method, and return the future of its value without waiting."""
        return super().__call__(*args, **kwargs)

    def options(self, /, **options: Any) -> RelayedMethod:
        """A copy of this method with other options, which the controller checks."""
        given = {**self._given, **options}
        return type(self)(self._group, self._submitter, self._spec, self._waits, given)

    def all(self, /, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse.

        Raises:
            UsageError: Always.
        """
        raise UsageError(f"{self._spec.label}.all(...) is for the controller")

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ArgumentGroup:
        group = super()._arguments(args, kwargs)
        return group.beside([(OPTIONS, self._given), (PATH, path_of_this_call())])


async def _is_awaited() -> None:
    """Stand for the methods of relayed calls: the controller runs them beside each other."""
