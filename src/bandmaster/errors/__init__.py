"""The exceptions of this library, sorted by cause: the caller, the worker's code, or the system.

::

    BandmasterError
    ├── UsageError                  the caller: nothing was sent, the group stays usable
    │   ├── ArgumentError             (TypeError)   wrong, missing or unpicklable arguments
    │   ├── BatchError                (ValueError)  rows that cannot be split as asked
    │   ├── MeshError                 (ValueError)  axes, coordinates, sizes
    │   ├── LayoutError               (ValueError)  layouts of tensors that do not fit
    │   ├── ProtocolError             (ValueError)  an unknown or inconsistent transfer protocol
    │   └── ClosedError               (RuntimeError) a pool or group that was closed
    ├── RemoteError                 the worker's code: a method raised   (RuntimeError)
    │   ├── ConstructorError          … in ``__init__``
    │   └── CollectError              … or returned a value that cannot be sent or joined  (TypeError)
    ├── PlacementError              the system: not enough free resources       (RuntimeError)
    ├── ResourceError               the system: no memory, processes, …         (OSError)
    ├── WorkerDied                  the system: a worker process ended          (RuntimeError)
    ├── RowsLost                    the system: rows that were kept are gone    (RuntimeError)
    ├── CallTimeout                 the system: no reply in time                (TimeoutError)
    ├── Stalled                     the system: a call made no progress         (TimeoutError)
    ├── TurnTimeout                 other groups had their turns for too long   (TimeoutError)
    └── CallCancelled               the caller cancelled the call               (RuntimeError)

Every leaf also inherits the builtin exception named beside it, so that ``except ValueError`` catches a `MeshError`.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from bandmaster.errors.failure import (
    Failure,
    FailureKind,
    is_in_debugger,
    shows_all_frames,
    stacks_by_equality,
    with_source_lines,
    without_library_frames,
)


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of a message about a wrong name: the most similar known name, or "" if none is similar."""
    import difflib  # here, as only errors need it, and `import bandmaster` has to be quick

    near = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {near[0]!r}?" if near else ""


class BandmasterError(Exception):
    """Base class of all exceptions of this library.

    In notebooks and pytest, and in the message of a `RemoteError`, the frames of this library are left out of its
    traceback, unless the environment variable BANDMASTER_FULL_TRACEBACKS is 1.
    """

    def _render_traceback_(self) -> list[str]:
        """Format the traceback for IPython, which calls this method of an exception."""
        frames = self.__traceback__ if shows_all_frames() else without_library_frames(self.__traceback__)
        shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
        if shell is None:  # the caller is not IPython
            return traceback.format_exception(type(self), self, frames)
        lines: list[str] = shell.InteractiveTB.structured_traceback(type(self), self, frames)
        return lines


def hide_library_frames() -> None:
    """Make pytest omit frames of the loaded modules of this library from tracebacks of the library's errors."""
    for name, module in list(sys.modules.items()):
        if name.startswith("bandmaster.") and module is not None:
            vars(module)["__tracebackhide__"] = _hides  # pytest also looks for it among a frame's globals


def _hides(seen: Any) -> bool:
    """Whether pytest leaves out the frames of this library. ``seen`` is its ``ExceptionInfo``."""
    return isinstance(seen.value, BandmasterError) and not shows_all_frames()


class UsageError(BandmasterError):
    """The caller made an invalid request. Nothing was sent. The group stays usable, except after `ClosedError`."""


class ArgumentError(UsageError, TypeError):
    """Arguments do not match the method's signature or its transfer protocol, or cannot be pickled."""


class BatchError(UsageError, ValueError):
    """The rows of a value cannot be split, padded or joined as requested."""


class MeshError(UsageError, ValueError):
    """An axis, a coordinate or a size is invalid for a mesh."""


class LayoutError(UsageError, ValueError):
    """A layout of tensors over ranks contradicts itself, or two layouts do not fit together."""


class ProtocolError(UsageError, ValueError):
    """A transfer protocol is unknown or contradicts itself."""


class ClosedError(UsageError, RuntimeError):
    """The resource pool or worker group that the caller used is closed."""


class _RankError(BandmasterError, RuntimeError):
    """Base class of errors that name one or more failing ranks."""

    _verb = "failed"

    def __init__(
        self,
        method: str,
        failures: Mapping[int, Failure],
        coordinates: Mapping[int, Mapping[str, int]] | None = None,
        group: str = "",
        axes: Collection[str] | None = None,
    ) -> None:
        self.method, self.group, self._axes = method, group, axes
        self.failures = dict(sorted(failures.items(), key=lambda item: (*self._order(item[1]), item[0])))
        self.coordinates = {rank: dict((coordinates or {}).get(rank, {})) for rank in sorted(self.failures)}
        self.rank = next(iter(self.failures))
        self.__cause__ = self.failures[self.rank].exception
        super().__init__("\n".join(self._message()))

    @staticmethod
    def _order(failure: Failure) -> tuple[Any, ...]:
        """Sort key of a failure; the message begins with the failure that sorts first."""
        return failure.may_follow

    def _message(self) -> Iterator[str]:
        first, *others = self.failures.values()
        ranks = [rank for rank in self.failures if rank != self.rank]
        alike = sorted(rank for rank in ranks if self.failures[rank].kind is first.kind)
        also = f", and on rank {', '.join(map(str, alike))}" if alike else ""
        yield f"{self.method} {self._verb} on rank {self.rank}{self._where(self.rank)}{also}: {_headline(first)}"
        if first.traceback:
            yield f"--- on rank {self.rank} ---\n{with_source_lines(first.traceback.rstrip())}"
        if any(other.summary != first.summary for other in others):
            yield "--- on the other ranks ---"
            yield from (f"rank {rank}{self._where(rank)}: {_headline(self.failures[rank])}" for rank in ranks)

    def _where(self, rank: int) -> str:
        failure = self.failures[rank]
        is_shown = self.coordinates[rank] if self._axes is None else self._axes
        known = [f"{axis}={index}" for axis, index in self.coordinates[rank].items() if axis in is_shown]
        known += [f"host {failure.host}, pid {failure.pid}"] if failure.host else []
        known += [f"device {failure.device}"] if failure.device else []
        known += [f"group {self.group}"] if self.group and rank == self.rank else []
        return f" ({', '.join(known)})" if known else ""

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.method, self.failures, self.coordinates, self.group, self._axes)


def _headline(failure: Failure) -> str:
    """A failure's summary, without lines that its traceback repeats."""
    return failure.summary.partition("\n")[0] if failure.traceback else failure.summary


class RemoteError(_RankError):
    """A method raised on one or more ranks.

    ``__cause__`` is the original exception of ``rank``, or None if it cannot be pickled; the message contains its
    remote traceback.

    Attributes:
        method: ``"Class.method"``.
        group: Name of the worker group.
        rank: The rank of the root cause: the lowest rank that failed independently, and neither in a collective
            that another rank had left, nor because the controller interrupted it.
        failures: By rank, a `Failure` (kind, summary, traceback, exception, host, pid, device); the root cause comes
            first, possible consequences last.
        coordinates: The mesh coordinates of each failing rank, by rank.
    """


class ConstructorError(RemoteError):
    """A worker's ``__init__`` raised; the worker group was not created, and its slots were released."""


class CollectError(RemoteError, TypeError):
    """A method returned a value that cannot be pickled or unpickled, or that its protocol cannot combine."""


class PlacementError(BandmasterError, RuntimeError):
    """A resource pool does not fit on the nodes, a slot is full, or a worker process could not be started."""


class ResourceError(BandmasterError, OSError):
    """The system has no memory, descriptor, thread or process left for a call, a worker or a callback."""


class WorkerDied(_RankError):
    """A worker process ended before it replied: it died, or the group was closed or restarted.

    Attributes:
        method: ``"Class.method"`` of the call that failed.
        group: Name of the worker group.
        rank: The lowest rank whose process ended.
        failures: By rank, a `Failure` (kind, summary, traceback, exception, host, pid, device); ranks that died come
            first.
        coordinates: The mesh coordinates of these ranks, by rank.
    """

    _verb = "lost its process"

    def _message(self) -> Iterator[str]:
        yield from super()._message()
        if self.failures[self.rank].pid and not self.method.endswith(".__init__"):
            yield "call restart() on the group, or replace(rank) if its class supports that"

    @staticmethod
    def _order(failure: Failure) -> tuple[Any, ...]:
        return failure.kind is not FailureKind.DIED, *failure.may_follow


STILL_RUNS = "the call still runs: wait again with error.future.result(), or cancel it with error.future.cancel()"
STILL_STOPS = "the call was cancelled and still runs: wait for its end with error.future.result()"
WAS_CANCELLED = "it was cancelled: make it again, with more time by options(timeout=seconds)"


class CallTimeout(BandmasterError, TimeoutError):
    """A call did not complete within its timeout. It still runs: the caller can wait for it again, or cancel it; but
    requests, and calls of workers, are cancelled when their own timeout is over, and the message says so.

    Also raised for constructors that take longer than ``start_timeout``. Their worker processes have been ended, and
    ``future`` is None.

    Attributes:
        method: ``"Class.method"``.
        missing: The ranks without a reply.
        stacks: The Python stacks of these ranks, by rank, innermost frame last; ranks whose stack could not be read
            are omitted.
        future: The call, for ``future.result()`` or ``future.cancel()``; None for constructors and streams, and after
            unpickling.
        stream: The stream, to iterate over it further or to close it; None for other calls, and after unpickling.
    """

    def __init__(
        self,
        method: str,
        missing: tuple[int, ...],
        timeout_s: float,
        stacks: Mapping[int, str] | None = None,
        what_next: str = STILL_RUNS,
        what: str | None = None,
        behind: str = "",
        why: str = "",
    ) -> None:
        self.method, self.missing, self._timeout_s, self.stacks = method, missing, timeout_s, dict(stacks or {})
        if what is None:
            what = f"got no reply from rank {', '.join(map(str, missing))}" if missing else "was not sent"
        self._what_next, self._what, self._behind, self._why = what_next, what, behind, why
        self.future: Any = None
        self.stream: Any = None
        super().__init__(self._text())

    def _text(self) -> str:
        cause = f"it is behind a call that failed: {self._behind}; " if self._behind else ""
        summary = f"{self.method} {self._what} within {self._timeout_s:g} s; {cause}{self._why}{self._what_next}"
        return "\n".join(filter(None, (summary, stacks_by_equality(self.stacks))))

    def has_cancelled(self) -> None:
        """Say in the message that the call was cancelled."""
        can_be_awaited = "error.future" in self._what_next  # else it says why there was no place
        self._what_next = WAS_CANCELLED if can_be_awaited else f"{self._what_next}; {WAS_CANCELLED}"
        self.args = (self._text(),)

    @property
    def is_debugged(self) -> bool:
        """Whether one of the ranks waits in a debugger. In that case the deadline of a call begins anew."""
        return any(map(is_in_debugger, self.stacks.values()))

    def __reduce__(self) -> tuple[object, ...]:
        known = self.method, self.missing, self._timeout_s, self.stacks, self._what_next, self._what, self._behind
        return type(self), (*known, self._why)


class Stalled(BandmasterError, TimeoutError):
    """A call made no progress for its ``stall_after``, and its ``on_stall`` has ended it. Unlike after a timeout, it
    was cancelled, and cannot be waited for again.

    Attributes:
        stall: The `Stall`, whose text is the message.
        renewal: A `concurrent.futures.Future` that is done when the group was restarted, or its guilty ranks replaced,
            so that the call can be made again, and that has the error if that failed. None for ``on_stall="raise"``,
            and after unpickling.
    """

    def __init__(self, message: str, stall: Any = None, renewal: Any = None) -> None:
        self.stall, self.renewal = stall, renewal
        super().__init__(message)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.stall)


class TurnTimeout(BandmasterError, TimeoutError):
    """A group did not get its turn in time, since other groups had theirs on the same slots; nothing was sent."""


class RowsLost(BandmasterError, RuntimeError):
    """Rows that a call had left on its ranks are gone: they were released, or their host or store has failed."""


class CallCancelled(BandmasterError, RuntimeError):
    """The call was cancelled: by `cancel` of its future or group, by `replace`, or with the task that awaited it."""
