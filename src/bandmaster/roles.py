"""`Roles`: the worker of a colocated group, which holds one worker of every role in its process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from bandmaster.codec import Payload, decode
from bandmaster.plan.mesh import Mesh
from bandmaster.worker import Report, Worker, WorkerContext, load_class, make_worker

SEPARATOR = "/"  # in "role/method", the name of a role's method in a call


class Role(NamedTuple):
    """A worker class in a colocated group.

    Attributes:
        constructor: The encoded ``(cls, args, kwargs)``, so that each role has its own copy of shared arguments.
        mesh: The mesh of the role's group.
        meshes: Its further meshes, by name.
    """

    constructor: Payload
    mesh: Mesh
    meshes: dict[str, Mesh]


class Roles(Worker):
    """Constructs and holds the workers of all roles, in the given order.

    Args:
        given: The roles by name.
    """

    def __init__(self, given: dict[str, Role]) -> None:
        workers: dict[str, Worker] = {}
        self.roles = workers
        for name, (constructor, mesh, meshes) in given.items():
            cls, args, kwargs = load_class(decode, constructor, self.device)
            context = replace(WorkerContext.of(self), mesh=mesh, meshes=meshes)
            workers[name] = make_worker(cls, context, args, kwargs, workers)

    def drop_workers(self) -> None:
        """Release the workers. They refer to each other, so clearing the dict frees them without garbage collection."""
        if isinstance(self.roles, dict):
            self.roles.clear()

    @property
    def __bandmaster_reports__(self) -> Mapping[str, Report]:  # type: ignore[override]  # here it is computed
        """The reports of the roles, by the prefix of their methods."""
        all_of_them = [(name, worker.__bandmaster_reports__) for name, worker in self.roles.items()]
        return {name + SEPARATOR: reports[""] for name, reports in all_of_them if reports}

    def __getattr__(self, name: str) -> Any:
        role, separator, method = name.partition(SEPARATOR)
        if separator:
            return getattr(self.roles[role], method)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def on_restart(self, state: dict[str, Any] | None) -> Any:
        """Call the hook of every role that has one, with its own part of the state."""
        return self._call_hooks("on_restart", state, [])

    def on_replace(self, rank: int, state: dict[str, Any] | None) -> Any:
        """Call the hook of every role, with its own part of the state."""
        return self._call_hooks("on_replace", state, [rank])

    def _call_hooks(self, hook: str, state: dict[str, Any] | None, args: Sequence[Any]) -> Any:
        """Call the plain hooks. Returns a coroutine that then awaits the async ones, if there are any."""
        pending = []
        for name, worker in self.roles.items():
            if callable(method := getattr(worker, hook, None)):
                call = partial(method, *args, (state or {}).get(name))
                if inspect.iscoroutinefunction(method):
                    pending.append(call)
                else:
                    call()
        return _await_all(pending) if pending else None


async def _await_all(calls: Sequence[Callable[[], Coroutine[Any, Any, Any]]]) -> None:
    for call in calls:
        await call()
