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
    ├── ResourceError               the world: no memory, processes, …    (OSError)
    ├── WorkerDied                  the world: a process is gone          (RuntimeError)
    ├── CallTimeout                 the world: no answer in time          (TimeoutError)
    └── CallCancelled               the caller cancelled the call           (RuntimeError)

Every leaf is also the honest builtin named beside it, so ``except ValueError`` works as one would hope.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bandmaster.failure import Failure, FailureKind

__all__ = [
    "ArgumentError",
    "BandmasterError",
    "BatchError",
    "CallCancelled",
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
        self,
        method: str,
        failures: Mapping[int, Failure],
        coordinates: Mapping[int, Mapping[str, int]] | None = None,
        group: str = "",
    ) -> None:
        self.method, self.group = method, group
        self.failures = dict(sorted(failures.items(), key=lambda item: (*self._order(item[1]), item[0])))
        self.coordinates = {rank: dict((coordinates or {}).get(rank, {})) for rank in sorted(self.failures)}
        self.rank = next(iter(self.failures))
        self.__cause__ = self.failures[self.rank].exception
        super().__init__("\n".join(self._message()))

    @staticmethod
    def _order(failure: Failure) -> tuple[Any, ...]:
        """What decides which failure is named first."""
        return failure.may_follow

    def _message(self) -> Iterator[str]:
        first, *others = self.failures.values()
        ranks = [str(rank) for rank in self.failures if rank != self.rank]
        also = f", and on rank {', '.join(ranks)}" if ranks else ""
        yield f"{self.method} {self._verb} on rank {self.rank}{self._where(self.rank)}{also}: {first.summary}"
        if first.traceback:
            yield f"--- on rank {self.rank} ---\n{first.traceback.rstrip()}"
        if any(other.summary != first.summary for other in others):
            yield "--- on the other ranks ---"
            yield from (f"rank {rank}{self._where(rank)}: {self.failures[rank].summary}" for rank in map(int, ranks))

    def _where(self, rank: int) -> str:
        failure = self.failures[rank]
        known = [f"{axis}={index}" for axis, index in self.coordinates[rank].items()]
        known += [f"host {failure.host}, pid {failure.pid}"] if failure.host else []
        known += [f"device {failure.device}"] if failure.device else []
        known += [f"group {self.group}"] if self.group and rank == self.rank else []
        return f" ({', '.join(known)})" if known else ""

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.method, self.failures, self.coordinates, self.group)


class RemoteError(_RankError):
    """A method raised on one or more ranks.

    The original exception of the first cause is ``__cause__``; its remote traceback is in the message.

    Attributes:
        method: ``"Class.method"``.
        group: The group's name.
        rank: The rank with the first cause: the lowest that failed by itself, not in a collective that another rank
            left, nor because the controller interrupted it.
        failures: What happened on each failing rank, by rank; the first cause first, what may follow from it behind.
        coordinates: Where each failing rank lies on the mesh, by rank.
    """


class ConstructorError(RemoteError):
    """A worker's ``__init__`` raised; the group was not made and its places were given back."""


class CollectError(RemoteError, TypeError):
    """A method returned, on some rank, what cannot be pickled or what its protocol cannot join."""


class PlacementError(BandmasterError, RuntimeError):
    """A pool that does not fit, or a place that has no room for one more group."""


class ResourceError(BandmasterError, OSError):
    """No memory, descriptor, thread or process is left for a call or for a worker; nothing was sent."""


class WorkerDied(_RankError):
    """A worker process ended while the group still needed it.

    Attributes:
        method: ``"Class.method"`` that was waiting.
        group: The group's name.
        rank: The lowest rank that died.
        failures: What is known of each rank that died or failed, by rank; those that died first.
        coordinates: Where each of them lies on the mesh, by rank.
    """

    _verb = "lost its process"

    @staticmethod
    def _order(failure: Failure) -> tuple[Any, ...]:
        return failure.kind is not FailureKind.DIED, *failure.may_follow


class CallTimeout(BandmasterError, TimeoutError):
    """A call that did not answer in the time given; it can still be waited for, or cancelled.

    Constructors that take longer than ``start_timeout`` raise it too. Then the workers were ended, and there is no
    ``future``.

    Attributes:
        method: ``"Class.method"``.
        missing: The ranks that have not answered.
        stacks: Where each of them is: its Python stack, innermost frame last; without those that could not be had.
        future: The call, for ``future.result()`` or ``future.cancel()``; None after a pickle, and for a constructor,
            whose worker is ended.
    """

    def __init__(
        self,
        method: str,
        missing: tuple[int, ...],
        timeout_s: float,
        stacks: Mapping[int, str] | None = None,
        what_next: str = "the call still runs: wait for it with result() again, or cancel it with cancel()",
    ) -> None:
        self.method, self.missing, self._timeout_s, self.stacks = method, missing, timeout_s, dict(stacks or {})
        self._what_next = what_next
        self.future: Any = None
        ranks_by_stack: dict[str, list[str]] = {}
        for rank, stack in self.stacks.items():
            ranks_by_stack.setdefault(stack, []).append(str(rank))
        shown = [f"\n--- rank {', '.join(ranks)} is at ---\n{text}" for text, ranks in ranks_by_stack.items()]
        super().__init__(
            f"{method} has no answer from rank {', '.join(map(str, missing))} after {timeout_s:g} s; "
            f"{what_next}{''.join(shown)}"
        )

    def but(self, what_next: str) -> CallTimeout:
        """The same error with other advice."""
        return type(self)(self.method, self.missing, self._timeout_s, self.stacks, what_next)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.method, self.missing, self._timeout_s, self.stacks, self._what_next)


class CallCancelled(BandmasterError, RuntimeError):
    """The result of a call that was cancelled with `Future.cancel`, or by Ctrl-C while it was waited for."""
