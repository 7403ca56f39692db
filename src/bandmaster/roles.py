"""`Roles`: the worker of a colocated group, which holds one worker of every role in its process."""

from __future__ import annotations

import inspect
from collections.abc import Coroutine, Sequence
from typing import Any, NamedTuple

from bandmaster.plan.mesh import Mesh
from bandmaster.worker import Worker, WorkerContext, make_worker

__all__ = ["SEPARATOR", "Role", "Roles"]

SEPARATOR = "/"  # in "role/method", the name of a role's method in a call


class Role(NamedTuple):
    """A worker class in a colocated group.

    Attributes:
        cls: The worker class.
        args: Positional arguments of its constructor.
        kwargs: Keyword arguments of its constructor.
        mesh: The mesh of the role's group.
        meshes: Its further meshes, by name.
    """

    cls: type[Worker]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    mesh: Mesh
    meshes: dict[str, Mesh]


class Roles(Worker):
    """Constructs and holds the workers of all roles, in the given order.

    Args:
        **roles: The roles by name.
    """

    def __init__(self, /, **roles: Role) -> None:
        workers: dict[str, Worker] = {}
        self.roles = workers
        for name, (cls, args, kwargs, mesh, meshes) in roles.items():
            context = WorkerContext(
                self.rank,
                self.world_size,
                self.local_rank,
                self.local_world_size,
                self.node_rank,
                self.device,
                mesh,
                meshes,
            )
            workers[name] = make_worker(cls, context, args, kwargs, workers)

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
        state = state or {}
        hooks = {name: getattr(worker, hook) for name, worker in self.roles.items() if hasattr(type(worker), hook)}
        outcomes = [function(*args, state.get(name)) for name, function in hooks.items()]
        pending = [outcome for outcome in outcomes if inspect.iscoroutine(outcome)]
        return _await_all(pending) if pending else None


async def _await_all(pending: Sequence[Coroutine[Any, Any, Any]]) -> None:
    for coroutine in pending:
        await coroutine
