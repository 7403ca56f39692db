"""A detached group, whose workers outlive their controller: how it gets its name, is described, found again and ended.

The description is the group's `Launch` without its reservation. It has the class, by value if that is defined in a
script, so that a controller that attaches does not need the script.
"""

from __future__ import annotations

import contextlib
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeGuard

from bandmaster.codec import decode, encode
from bandmaster.contract import Backend, DetachedGroups, DetachingBackend, Launch, Workers
from bandmaster.errors import UsageError
from bandmaster.failure import reraise_if_from_signal, summary_of

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["DetachedGroup", "check_detachable", "is_or_was", "nodes_of"]


@dataclass(frozen=True)
class DetachedGroup:
    """What a controller of a detached group has of it: the one that has started it, and each that is attached to it.

    Attributes:
        name: The group's name.
        identity: Tells it from later groups of the same name.
        backend: The backend that it is on.
    """

    name: str
    identity: str
    backend: DetachingBackend

    @classmethod
    def new(cls, name: str, backend: DetachingBackend) -> Self:
        """A group that is about to start."""
        return cls(name, uuid.uuid4().hex, backend)

    def check_free(self) -> None:
        """Raise UsageError if there is no cluster for detached groups, or a detached group on it has this name."""
        with self.backend.detached_groups() as groups:
            groups.check_free(self.name)

    @contextlib.contextmanager
    def starting(self, launch: Launch) -> Iterator[None]:
        """The context in which the workers start. Others can attach to the group afterwards, unless that has failed.

        Raises:
            UsageError: The name was taken meanwhile.
        """
        description = encode(replace(launch, slots=tuple(replace(slot, reservation=None) for slot in launch.slots)))
        with self.backend.detached_groups() as groups:
            groups.claim(launch, self.identity, description)
            try:
                yield
                groups.publish(self.name)
            except BaseException:
                groups.end(self.name, self.identity)
                raise

    @classmethod
    def attach(cls, name: str, backend: DetachingBackend) -> tuple[Self, Launch, Workers, Callable[[], object]]:
        """Find a group by its name.

        Returns:
            The group, its launch, its workers, and a function that disconnects this process from the cluster.

        Raises:
            UsageError: There is no such group, it has not started, or its class cannot be loaded here.
        """
        with contextlib.ExitStack() as connection:
            groups: DetachedGroups = connection.enter_context(backend.detached_groups())
            identity, description = groups.find(name)
            try:
                launch: Launch = decode(description)
            except BaseException as error:  # the user's modules may raise anything when they are imported
                reraise_if_from_signal(error)
                raise UsageError(
                    f"the class of detached group {name!r} cannot be loaded here: {summary_of(error)}; a class of a "
                    "module, rather than of a script, needs that module in every process that attaches"
                ) from error
            return cls(name, identity, backend), launch, groups.attach(launch), connection.pop_all().close

    def end(self) -> None:
        """End the workers, dead or alive, and release their slots and the name."""
        with self.backend.detached_groups() as groups:
            groups.end(self.name, self.identity)


def check_detachable(
    backend: Backend, called: str, name: str | None, is_pool_detached: bool = True
) -> DetachingBackend:
    """Refuse a detached group that could not be detached, or not be found again.

    Args:
        backend: The pool's backend.
        called: Its name.
        name: The group's name, if it has been given one.
        is_pool_detached: Whether the pool's slots outlive its process.

    Returns:
        The backend.

    Raises:
        UsageError: The backend has no detached groups, the pool is not detached, or the group has no name.
    """
    if not _detaches(backend):
        raise UsageError(
            f"a detached group needs a pool on backend 'ray': workers on backend {called!r} end with their controller"
        )
    if not is_pool_detached:
        raise UsageError(
            "a detached group needs slots that outlive its controller: ResourcePool(..., is_detached=True)"
        )
    if name is None:
        raise UsageError(
            "a detached group needs a name by which controllers attach to it: WorkerGroup(..., name='actor', "
            "is_detached=True)"
        )
    return backend


def _detaches(backend: Any) -> TypeGuard[DetachingBackend]:
    return hasattr(backend, "detached_groups")


def nodes_of(launch: Launch) -> list[int]:
    """The number of slots on each node of the pool that a group was launched on."""
    return list(Counter(slot.node_rank for slot in launch.slots).values())


def is_or_was(cls: type, base: type) -> bool:
    """Whether a class from another process is a subclass of one of this process.

    A class of a script is pickled by value, so that its copy here is another object with the same name.
    """
    names = {(parent.__module__, parent.__qualname__) for parent in cls.__mro__}
    return issubclass(cls, base) or (base.__module__, base.__qualname__) in names
