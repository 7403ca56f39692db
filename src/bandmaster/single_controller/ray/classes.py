"""Worker classes with their arguments, and several of them in one process, in verl's spellings."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from bandmaster.errors import UsageError
from bandmaster.roles import Roles
from bandmaster.single_controller.base.decorator import MAGIC_ATTR, Dispatch
from bandmaster.single_controller.base.megatron.worker import MegatronWorker
from bandmaster.single_controller.base.worker import Worker
from bandmaster.worker import ClassWithInitArgs, WorkerContext, make_worker

__all__ = [
    "Colocated",
    "RayClassWithInitArgs",
    "create_colocated_worker_cls",
    "create_colocated_worker_cls_fused",
    "create_colocated_worker_raw_cls",
    "registered_by_verl",
    "unwrapped",
]


class RayClassWithInitArgs(ClassWithInitArgs):
    """A worker class together with the arguments of its constructor and options of its actors.

    Args:
        cls: A subclass of `Worker`, plain or wrapped by ``@ray.remote``.
        *args: Positional arguments of its constructor.
        **kwargs: Keyword arguments of its constructor.

    Attributes:
        fused_worker_used: Whether the class was made by `create_colocated_worker_raw_cls`.
    """

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(cls, *args, **kwargs)
        self.fused_worker_used = issubclass(unwrapped(cls), Colocated)
        self.options: dict[str, Any] = {}

    def update_options(self, options: Mapping[str, Any]) -> None:
        """Set options of ``@ray.remote`` for the actors of this class, such as ``runtime_env``.

        Raises:
            UsageError: The group or its pool decides about one of them.
        """
        taken = sorted(set(options) & {"name", "num_cpus", "num_gpus", "scheduling_strategy", "lifetime"})
        if taken:
            raise UsageError(
                f"{', '.join(taken)} cannot be set here: the group names its actors (name_prefix=), and the pool "
                "places them (cpus_per_worker=, use_gpu=, detached=)"
            )
        self.options.update(options)

    def set_additional_resource(self, additional_resource: Mapping[str, float]) -> None:
        """Refuse additional resources: a slot has only CPUs and GPUs.

        Raises:
            UsageError: There is any resource.
        """
        if additional_resource:
            raise UsageError(
                f"additional resources {dict(additional_resource)} are not supported: the slots of a pool contain only "
                "CPUs and GPUs, so the actor could never start"
            )


def unwrapped(cls: Any) -> Any:
    """The class that ``@ray.remote`` has wrapped; a plain class as it is."""
    return getattr(cls, "__ray_actor_class__", cls)


def registered_by_verl(cls: type) -> dict[str, dict[str, Any]]:
    """The modes of each method that verl's ``register`` has marked, by name of the method."""
    found = {name: getattr(inspect.getattr_static(cls, name, None), MAGIC_ATTR, None) for name in dir(cls)}
    return {name: attributes for name, attributes in found.items() if attributes is not None}


class Colocated(Roles, Worker):
    """Holds a worker of each of several classes in one process.

    Each worker is an attribute named after its role, and finds the others in its ``roles`` and ``fused_worker_dict``.
    """

    colocated: ClassVar[Mapping[str, tuple[type, tuple[Any, ...], Mapping[str, Any]]]] = {}

    def __init__(self) -> None:
        Worker.__init__(self)
        workers: dict[str, Any] = {}
        self.roles = self.fused_worker_dict = self.worker_dict = workers
        for name, (cls, args, kwargs) in self.colocated.items():
            workers[name] = make_worker(cls, WorkerContext.of(self), args, kwargs, workers)
            workers[name].fused_worker_dict = workers
            setattr(self, name, workers[name])


def create_colocated_worker_raw_cls(class_dict: Mapping[str, ClassWithInitArgs]) -> type[Colocated]:
    """A class whose instances hold a worker of each of these classes; it may be subclassed.

    Args:
        class_dict: By name of the role, its class and constructor's arguments.
    """
    colocated = {name: (unwrapped(given.cls), given.args, given.kwargs) for name, given in class_dict.items()}
    classes = {name: cls for name, (cls, _, _) in colocated.items()}
    knows_megatron = any(issubclass(cls, MegatronWorker) for cls in classes.values())
    bases = (Colocated, MegatronWorker) if knows_megatron else (Colocated,)
    return type("_".join(["FusedWorker", *class_dict]), bases, {"colocated": colocated, "raw_cls_dict": classes})


def create_colocated_worker_cls_fused(class_dict: Mapping[str, ClassWithInitArgs]) -> RayClassWithInitArgs:
    """The class of `create_colocated_worker_raw_cls`, for a `RayWorkerGroup`: `spawn` makes a group for each role."""
    return RayClassWithInitArgs(create_colocated_worker_raw_cls(class_dict))


def create_colocated_worker_cls(class_dict: Mapping[str, ClassWithInitArgs]) -> RayClassWithInitArgs:
    """A class for a `RayWorkerGroup` that holds a worker of each role and has the registered methods of all of them.

    ``role_method`` calls ``method`` of that role. A method with DIRECT_ROLLOUT_METHOD has its own name.
    """
    cls = create_colocated_worker_raw_cls(class_dict)
    cls.__name__ = cls.__qualname__ = "WorkerDict"
    for role, (role_cls, _, _) in cls.colocated.items():
        for name, attributes in registered_by_verl(role_cls).items():
            is_direct = attributes["dispatch_mode"] is Dispatch.DIRECT_ROLLOUT_METHOD
            setattr(cls, name if is_direct else f"{role}_{name}", _delegating(role, name, getattr(role_cls, name)))
    return RayClassWithInitArgs(cls)


def _delegating(role: str, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Colocated, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.worker_dict[role], name)(*args, **kwargs)

    async def call_async(self: Colocated, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self.worker_dict[role], name)(*args, **kwargs)

    return functools.wraps(method)(call_async if inspect.iscoroutinefunction(method) else call)  # with the same modes
