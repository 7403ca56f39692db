"""Every exception this library raises, sorted by whose fault it was.

::

    BandmasterError
    ├── UsageError                  the caller: nothing was sent, the group stays usable
    │   ├── ArgumentError             (TypeError)   wrong, missing or unpicklable arguments
    │   ├── BatchError                (ValueError)  rows that cannot be split as asked
    │   ├── MeshError                 (ValueError)  axes, coordinates, sizes
    │   ├── ProtocolError             (ValueError)  a transfer protocol that makes no sense
    │   └── ClosedError               (RuntimeError) a pool or group that was closed
    ├── RemoteError                 the worker's code: a method raised   (RuntimeError)
    │   ├── ConstructorError          … in ``__init__``
    │   └── CollectError              … or returned what cannot be sent or joined  (TypeError)
    ├── PlacementError              the world: not enough room            (RuntimeError)
    ├── ResourceError               the world: no memory or descriptors   (OSError)
    ├── WorkerDied                  the world: a process is gone          (RuntimeError)
    └── CallTimeout                 the world: no answer in time          (TimeoutError)

Every leaf is also the honest builtin named beside it, so ``except ValueError`` works as one would hope.
"""

from __future__ import annotations

from collections.abc import Mapping

from bandmaster.failure import Failure

__all__ = [
    "ArgumentError",
    "BandmasterError",
    "BatchError",
    "CallTimeout",
    "ClosedError",
    "CollectError",
    "ConstructorError",
    "MeshError",
    "PlacementError",
    "ProtocolError",
    "RemoteError",
    "ResourceError",
    "UsageError",
    "WorkerDied",
]


class BandmasterError(Exception):
    """The root of the tree."""


class UsageError(BandmasterError):
    """The caller asked for something that cannot be; nothing was sent."""


class ArgumentError(UsageError, TypeError):
    """Arguments that do not fit a method's signature, its protocol, or a pickle."""


class BatchError(UsageError, ValueError):
    """A value whose rows cannot be split, padded or joined as asked."""


class MeshError(UsageError, ValueError):
    """An axis, a coordinate or a size that a mesh does not have."""


class ProtocolError(UsageError, ValueError):
    """A transfer protocol that is unknown or contradicts itself."""


class ClosedError(UsageError, RuntimeError):
    """A call on a pool or a group that was closed."""


class _RankError(BandmasterError, RuntimeError):
    """Something happened on one or more ranks."""

    _verb = "failed"

    def __init__(
        self, method: str, failures: Mapping[int, Failure], coordinates: Mapping[int, Mapping[str, int]] | None = None
    ) -> None:
        self.method = method
        self.failures = dict(sorted(failures.items()))
        self.coordinates = {rank: dict((coordinates or {}).get(rank, {})) for rank in self.failures}
        self.rank = next(iter(self.failures))
        first = self.failures[self.rank]
        self.__cause__ = first.exception
        others = [str(rank) for rank in self.failures if rank != self.rank]
        also = f", and on rank {', '.join(others)}" if others else ""
        text = f"{method} {self._verb} on rank {self.rank}{self._where(first)}{also}: {first.summary}"
        super().__init__(
            f"{text}\n--- on rank {self.rank} ---\n{first.traceback.rstrip()}" if first.traceback else text
        )

    def _where(self, failure: Failure) -> str:
        known = [f"{axis}={index}" for axis, index in self.coordinates[self.rank].items()]
        known += [f"host {failure.host}, pid {failure.pid}"] if failure.host else []
        return f" ({', '.join(known)})" if known else ""

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.method, self.failures, self.coordinates)


class RemoteError(_RankError):
    """A method raised on one or more ranks.

    The original exception of the first failing rank is ``__cause__``; its remote traceback is in the message.

    Attributes:
        method: ``"Class.method"``.
        rank: The lowest rank that failed.
        failures: What happened on each failing rank, by rank, in rank order.
        coordinates: Where each failing rank lies on the mesh, by rank.
    """


class ConstructorError(RemoteError):
    """A worker's ``__init__`` raised; the group was not made and its places were given back."""


class CollectError(RemoteError, TypeError):
    """A method returned, on some rank, what cannot be pickled or what its protocol cannot join."""


class PlacementError(BandmasterError, RuntimeError):
    """A pool that does not fit, or a place that has no room for one more group."""


class ResourceError(BandmasterError, OSError):
    """No memory, or no descriptor, is left for what a call has to send; nothing was sent."""


class WorkerDied(_RankError):
    """A worker process ended while the group still needed it.

    Attributes:
        method: ``"Class.method"`` that was waiting.
        rank: The lowest rank that died.
        failures: What is known of each rank that died or failed, by rank, in rank order.
        coordinates: Where each of them lies on the mesh, by rank.
    """

    _verb = "lost its process"


class CallTimeout(BandmasterError, TimeoutError):
    """A call that did not answer in the time given; it can still be waited for.

    Attributes:
        method: ``"Class.method"``.
        missing: The ranks that have not answered.
    """

    def __init__(self, method: str, missing: tuple[int, ...], timeout_s: float) -> None:
        self.method, self.missing, self._timeout_s = method, missing, timeout_s
        super().__init__(
            f"{method} has no answer from rank {', '.join(map(str, missing))} after {timeout_s:g} s; "
            "the call still runs: wait for it with result() again"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.method, self.missing, self._timeout_s)
