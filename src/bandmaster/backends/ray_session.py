"""The connection to Ray over which a pool or a group was made. It may have ended although the process has a new one."""

from __future__ import annotations

import weakref

import ray
from ray._private import worker as _worker

from bandmaster.errors import ClosedError
from bandmaster.platform.forks import n_forks

__all__ = ["RaySession"]


class RaySession:
    """A connection of this process to Ray, from `ray.init` to `ray.shutdown`. It is not valid in forks."""

    def __init__(self) -> None:
        self._node = weakref.ref(_worker.global_worker.node)  # Ray makes a node object for each `ray.init`
        self._n_forks = n_forks()

    def __reduce__(self) -> tuple[object, ...]:
        return RaySession, ()  # in another process it is the connection of that process

    @property
    def is_current(self) -> bool:
        """Whether Ray uses this connection. If not, Ray's calls start an instance, reach another, or hang in a fork."""
        is_here = ray.is_initialized() and _worker.global_worker.node is self._node()
        return is_here and self._n_forks == n_forks()

    @property
    def ends_with_process(self) -> bool:
        """Whether the cluster ends with this process, which has started it."""
        return bool(_worker.global_worker.node.head)

    def check(self, what: str) -> None:
        """Check that Ray can still be called for a pool or group that was made in this session.

        Args:
            what: The pool or group, as the message names it.

        Raises:
            ClosedError: The session has ended.
        """
        if not self.is_current:
            raise ClosedError(self.ended(what))

    def ended(self, what: str) -> str:
        """The message of errors about a pool or group whose session has ended."""
        return f"the Ray session of {what} has ended (ray.shutdown()); create the pool and its groups again"
