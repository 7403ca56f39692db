"""The connection to Ray that a pool or a group was made over, which may have ended though the process has another."""

from __future__ import annotations

import weakref

import ray
from ray._private import worker as _worker

from bandmaster.errors import ClosedError
from bandmaster.platform.forks import n_forks

__all__ = ["RaySession"]


class RaySession:
    """This process's connection to Ray: from `ray.init` to `ray.shutdown`, and not in forks of this process."""

    def __init__(self) -> None:
        self._node = weakref.ref(_worker.global_worker.node)  # Ray makes one for each `ray.init`
        self._n_forks = n_forks()

    @property
    def is_current(self) -> bool:
        """Whether calls of Ray's go there. If not, they start a Ray, go to another one, or hang in a fork."""
        is_here = ray.is_initialized() and _worker.global_worker.node is self._node()
        return is_here and self._n_forks == n_forks()

    def check(self, what: str) -> None:
        """Make sure that Ray can be called for something that was made in this session.

        Raises:
            ClosedError: The session has ended.
        """
        if not self.is_current:
            raise ClosedError(self.ended(what))

    def ended(self, what: str) -> str:
        """That it has ended, for a message."""
        return f"the Ray session that {what} was made in has ended (ray.shutdown()); make the pool and its groups again"
