"""Pure checks of the arguments of `WorkerGroup`: the worker class, its constructor's arguments, options and mesh."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from bandmaster.errors import ArgumentError, MeshError, UsageError
from bandmaster.plan.mesh import Mesh
from bandmaster.worker import ClassWithInitArgs, Worker

ON_YIELD, ON_RESUME = "on_yield", "on_resume"  # methods by which a class takes turns on its slots


def unwrap(
    worker_class: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[type[Worker], tuple[Any, ...], dict[str, Any], Mapping[str, Any]]:
    """Separate a worker class from its wrappers.

    Args:
        worker_class: A subclass of `Worker`, plain, wrapped by ``@ray.remote``, or in `ClassWithInitArgs`.
        args: Positional arguments of the constructor, as given to the group.
        kwargs: Keyword arguments of the constructor, as given to the group.

    Returns:
        The class, the constructor's positional and keyword arguments, and the options of ``@ray.remote(...)``.

    Raises:
        ArgumentError: Constructor arguments are given both in `ClassWithInitArgs` and to the group.
        UsageError: ``worker_class`` is not a worker class, or its constructor is async.
    """
    if isinstance(worker_class, ClassWithInitArgs):
        if args or kwargs:
            raise ArgumentError(
                "constructor arguments are given both in ClassWithInitArgs and beside it; put all in ClassWithInitArgs"
            )
        worker_class, args, kwargs = worker_class.cls, worker_class.args, worker_class.kwargs
    cls = getattr(worker_class, "__ray_actor_class__", worker_class)  # the class inside of @ray.remote
    options = getattr(worker_class, "_default_options", {}) if cls is not worker_class else {}
    if isinstance(cls, Worker):
        raise UsageError(
            f"got a {type(cls).__name__} in place of its class; pass the class, and the arguments of its constructor "
            "beside it"
        )
    if not (inspect.isclass(cls) and issubclass(cls, Worker)):
        raise UsageError(f"{cls!r} is not a subclass of bandmaster.Worker; write class MyWorker(bandmaster.Worker)")
    if inspect.iscoroutinefunction(cls.__init__):
        raise UsageError(
            f"{cls.__name__}.__init__ is async, and nothing would await it; make it a plain method, and await in an "
            "async method that you call once the group is constructed"
        )
    return cls, tuple(args), dict(kwargs), options


def check_names(cls: type[Worker], methods: Collection[str], taken: Collection[str]) -> None:
    """Refuse registered methods that could not be called on a group.

    Args:
        cls: The worker class.
        methods: The names of its registered methods.
        taken: The names of the group's own attributes.

    Raises:
        UsageError: A method has the name of an attribute of the group or of every worker, or a private name.
    """
    reserved = {*taken, *Worker.__annotations__}
    hidden = [name for name in methods if name in reserved or name.startswith("_")]
    if hidden:
        public = ", ".join(sorted(name for name in reserved if not name.startswith("_")))
        raise UsageError(
            f"{cls.__name__} registers {', '.join(map(repr, hidden))}; rename the method: groups and workers have "
            f"attributes called {public}; names with a leading underscore are reserved as well"
        )


def check_options(owner: str, name: object, name_prefix: object) -> None:
    """Check the types of a group's options.

    Args:
        owner: Name of the group's class, for messages.
        name: The name of the group, or None.
        name_prefix: The option of that name, which is put before the name of the class.

    Raises:
        UsageError: ``name`` is neither a string of printable characters nor None, ``name_prefix`` is neither a string
            nor None, or both are given.
    """
    if name is not None and not (isinstance(name, str) and name and name.isprintable()):
        raise UsageError(f"name of {owner} must be a string of printable characters, got {name!r}")
    if not isinstance(name_prefix, str | None):
        raise UsageError(f"name_prefix of {owner} must be a string, or None for the pool's prefix, got {name_prefix!r}")
    if name is not None and name_prefix is not None:
        raise UsageError(
            f"{owner} got both name={name!r} and name_prefix={name_prefix!r}, which is put before the name of the "
            "class; give one of them"
        )


def checked_output(owner: str, output: object) -> str | None:
    """Return the absolute path of a directory for output.

    Args:
        owner: Name of the group's class, for messages.
        output: The option of that name.

    Raises:
        UsageError: ``output`` is neither a path nor None.
    """
    if output is None:
        return None
    if not isinstance(output, str | os.PathLike) or not os.fspath(output):
        raise UsageError(f"output of {owner} must be the path of a directory, such as 'logs', or None, got {output!r}")
    return os.path.abspath(os.fsdecode(output))


def checked_level(owner: str, level: object) -> int | None:
    """Return a level of `logging` as a number.

    Args:
        owner: Name of the group's class, for messages.
        level: The option ``logging``.

    Raises:
        UsageError: ``level`` is neither the name or number of a level, nor None.
    """
    number = logging.getLevelName(level) if isinstance(level, str) else level
    if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 0):
        raise UsageError(f"logging of {owner} must be a level of logging, such as 'INFO', or None, got {level!r}")
    return number


def checked_meshes(meshes: Mapping[str, Mesh] | None, n_slots: int, pool: object) -> dict[str, Mesh]:
    """Return the further meshes of a group on a pool, by name.

    Args:
        meshes: The meshes as the user gave them.
        n_slots: Number of slots of the pool.
        pool: The pool, for messages.

    Raises:
        MeshError: ``meshes`` is not a dict of meshes by name, or the size of one differs from the pool's.
    """
    if not isinstance(meshes, Mapping | None) or any(not isinstance(name, str) for name in meshes or {}):
        raise MeshError(f"meshes must be a dict of meshes by name, such as {{'rollout': Mesh(dp=2)}}, got {meshes!r}")
    for name, mesh in (meshes or {}).items():
        try:
            if checked_mesh(mesh, n_slots, pool) is not mesh:  # the default
                raise MeshError(f"got None, expected a Mesh, such as Mesh(dp={n_slots})")
        except MeshError as error:
            raise MeshError(f"mesh {name!r}: {error}") from None
    return dict(meshes or {})


def checked_mesh(mesh: Mesh | None, n_slots: int, pool: object) -> Mesh:
    """Return the mesh of a group on a pool, by default one axis ``dp`` over all slots.

    Args:
        mesh: The mesh as the user gave it.
        n_slots: Number of slots of the pool.
        pool: The pool, for messages.

    Raises:
        MeshError: ``mesh`` is not a `Mesh`, or its size differs from the pool's.
    """
    if mesh is None:
        return Mesh(dp=n_slots)
    if not isinstance(mesh, Mesh):
        raise MeshError(f"mesh must be a Mesh, such as Mesh(dp={n_slots}), got {type(mesh).__name__} ({mesh!r})")
    if mesh.size != n_slots:
        raise MeshError(
            f"{mesh!r} has {mesh.size} ranks, but {pool!r} has {n_slots} slots; make them equal, for "
            f"example with Mesh(dp={n_slots})"
        )
    return mesh


def turn_hooks(cls: type) -> list[str]:
    """The hooks of a worker class; one that has any takes turns on its slots from the beginning."""
    return [hook for hook in (ON_YIELD, ON_RESUME) if callable(getattr(cls, hook, None))]


def why_not_replaced(cls: type[Worker], mesh: Mesh, where: str = "") -> str:
    """The reason why one rank cannot be replaced, "" if each can; ``where`` says for messages where the class is."""
    if not callable(getattr(cls, "on_replace", None)):
        return (
            f"{cls.__name__} does not support the replacement of one rank: define a method "
            f"on_replace(self, rank, state){where}, or restart() the whole group"
        )
    refuse = getattr(cls, "why_not_replaced", None)
    return "" if refuse is None else str(refuse(mesh))
