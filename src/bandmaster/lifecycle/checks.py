"""What a group is made of, as users give it: the worker class, its arguments, and the mesh. Pure."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from bandmaster.calls.options import check_seconds
from bandmaster.errors import ArgumentError, MeshError, UsageError
from bandmaster.plan.mesh import Mesh
from bandmaster.worker import ClassWithInitArgs, Worker

__all__ = ["check_names", "check_options", "checked_mesh", "unwrap"]


def unwrap(
    worker_class: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[type[Worker], tuple[Any, ...], dict[str, Any], Mapping[str, Any]]:
    """The class itself, the arguments of its constructor, and what ``@ray.remote(...)`` was told.

    Raises:
        ArgumentError: Arguments both in `ClassWithInitArgs` and beside it.
        UsageError: No worker class, or its constructor is async.
    """
    if isinstance(worker_class, ClassWithInitArgs):
        if args or kwargs:
            raise ArgumentError("constructor arguments are in ClassWithInitArgs already; give all of them there")
        worker_class, args, kwargs = worker_class.cls, worker_class.args, worker_class.kwargs
    cls = getattr(worker_class, "__ray_actor_class__", worker_class)  # as @ray.remote leaves it
    options = getattr(worker_class, "_default_options", {}) if cls is not worker_class else {}
    if not (inspect.isclass(cls) and issubclass(cls, Worker)):
        raise UsageError(f"{cls!r} is no subclass of bandmaster.Worker; write class MyWorker(bandmaster.Worker)")
    if inspect.iscoroutinefunction(cls.__init__):
        raise UsageError(
            f"{cls.__name__}.__init__ is async, and nothing would await it; make it a plain method, and await in an "
            "async method that is called once the group is there"
        )
    return cls, tuple(args), dict(kwargs), options


def check_names(cls: type[Worker], methods: Collection[str], taken: Collection[str]) -> None:
    """Refuse registered methods that could not be called on a group.

    Args:
        cls: The worker class.
        methods: The names that it registers.
        taken: What a group itself has.

    Raises:
        UsageError: A name is taken, private, or that of an attribute of every worker.
    """
    hidden = [name for name in methods if name in taken or name.startswith("_")]
    if hidden:
        raise UsageError(
            f"{cls.__name__} registers {', '.join(map(repr, hidden))}, which would hide what WorkerGroup itself has "
            "under that name or keep there; rename the method"
        )
    unreachable = [name for name in methods if name in Worker.__annotations__]
    if unreachable:
        raise UsageError(
            f"{cls.__name__} registers {', '.join(map(repr, unreachable))}, which every Worker has as an attribute "
            "of that name, so that the method cannot be reached; rename the method"
        )


def check_options(owner: str, name_prefix: object, start_timeout: object) -> None:
    """Refuse what is given in the place of another option.

    Raises:
        UsageError: A value of the wrong type, or a time that is none.
    """
    if not isinstance(name_prefix, str | None):
        raise UsageError(f"name_prefix of {owner} is a string, or None for the pool's own, not {name_prefix!r}")
    check_seconds(f"start_timeout of {owner}", start_timeout)


def checked_mesh(mesh: Mesh | None, n_slots: int, pool: object) -> Mesh:
    """The mesh of a group on a pool; one axis ``dp`` if none is given.

    Raises:
        MeshError: It is none, or has another size than the pool.
    """
    if mesh is None:
        return Mesh(dp=n_slots)
    if not isinstance(mesh, Mesh):
        raise MeshError(f"mesh= takes a Mesh, such as Mesh(dp={n_slots}), not {mesh!r}")
    if mesh.size != n_slots:
        raise MeshError(
            f"{mesh!r} has {mesh.size} ranks, but {pool!r} has {n_slots} places; make them equal, for "
            f"example with Mesh(dp={n_slots})"
        )
    return mesh
