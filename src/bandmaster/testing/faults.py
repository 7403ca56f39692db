"""The faults that `with_faults` injects into a worker class, as frozen values that name a rank and a call."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from signal import SIGKILL, valid_signals
from typing import Any, ClassVar

from bandmaster.errors import UsageError

FOREVER_S = 1e6  # eleven days


@dataclass(frozen=True)
class Fault:
    """Base class of all faults. A fault of your own is a frozen dataclass that overrides `strike`, `spoil` or both.

    Attributes:
        rank: The rank on which the fault occurs; None for every rank.
        call: The call in which it occurs: the worker's calls of registered methods, counted from 1.
        method: If given, only calls of this method are counted.
        needs_process: Class variable: whether the fault can only occur in a worker with a process of its own.
    """

    needs_process: ClassVar[bool] = False

    rank: int | None
    call: int
    method: str | None = field(default=None, kw_only=True)

    @property
    def wait_s(self) -> float:
        """Seconds that the worker waits after `strike` and before the method runs."""
        return 0.0

    def strike(self) -> None:
        """Cause the fault. The worker calls this before the method runs."""

    def spoil(self, value: Any) -> Any:
        """Replace the method's return value. The worker calls this after the method, and uses the result instead."""
        return value

    def falls_on(self, rank: int, counts: Mapping[str | None, int]) -> bool:
        """Whether the fault occurs in a call.

        Args:
            rank: The worker's rank.
            counts: The call's number among the calls of each method, and, under None, among all calls.
        """
        return self.rank in (None, rank) and counts.get(self.method) == self.call

    def check(self, class_name: str, methods: Iterable[str]) -> None:
        """Check the fault's fields for a worker class.

        Args:
            class_name: Name of the worker class, for messages.
            methods: Names of its registered methods.

        Raises:
            UsageError: A field has the wrong type or range, or the class does not register ``method``.
        """
        if self.rank is not None and not _is_count(self.rank, 0):
            raise UsageError(f"{self!r}: rank must be a non-negative integer, or None for every rank")
        if not _is_count(self.call, 1):
            raise UsageError(f"{self!r}: call must be a positive integer; the first call is 1")
        names = sorted(methods)
        if self.method is not None and self.method not in names:
            known = f"it registers {', '.join(names)}" if names else "it registers none"
            raise UsageError(f"{self!r}: {class_name} has no registered method {self.method!r}; {known}")


@dataclass(frozen=True)
class Kill(Fault):
    """The worker's process gets a signal. If it survives the signal, as it does SIGSTOP and SIGCONT, the method runs.

    Attributes:
        signal: Number of the signal.
    """

    needs_process = True
    signal: int = SIGKILL

    def strike(self) -> None:
        """Send the signal."""
        os.kill(os.getpid(), self.signal)

    def check(self, class_name: str, methods: Iterable[str]) -> None:
        """Check the fields of `Fault`, and the signal."""
        super().check(class_name, methods)
        if self.signal not in valid_signals():
            raise UsageError(f"{self!r}: signal must be the number of a signal, got {self.signal!r}")


@dataclass(frozen=True)
class Exit(Fault):
    """The worker's process ends at once, by `os._exit`, without cleanup.

    Attributes:
        code: Exit code, 0 to 255.
    """

    needs_process = True
    code: int = 3

    def strike(self) -> None:
        """End the process."""
        os._exit(self.code)

    def check(self, class_name: str, methods: Iterable[str]) -> None:
        """Check the fields of `Fault`, and the exit code."""
        super().check(class_name, methods)
        if not _is_count(self.code, 0) or self.code > 255:
            raise UsageError(f"{self!r}: code must be an integer from 0 to 255")


@dataclass(frozen=True)
class Raise(Fault):
    """The method raises instead of running.

    Attributes:
        error: The exception to raise, or its class.
    """

    error: BaseException | type[BaseException]

    def strike(self) -> None:
        """Raise the error."""
        raise self.error

    def check(self, class_name: str, methods: Iterable[str]) -> None:
        """Check the fields of `Fault`, and the error."""
        super().check(class_name, methods)
        is_class = isinstance(self.error, type) and issubclass(self.error, BaseException)
        if not (is_class or isinstance(self.error, BaseException)):
            raise UsageError(f"{self!r}: error must be an exception, such as ValueError('boom')")


@dataclass(frozen=True)
class Delay(Fault):
    """The method runs after a delay.

    Attributes:
        seconds: The delay in seconds.
    """

    seconds: float

    @property
    def wait_s(self) -> float:
        """The delay in seconds."""
        return self.seconds

    def check(self, class_name: str, methods: Iterable[str]) -> None:
        """Check the fields of `Fault`, and the delay."""
        super().check(class_name, methods)
        is_number = isinstance(self.seconds, int | float) and not isinstance(self.seconds, bool)
        if not is_number or not 0 <= self.seconds <= FOREVER_S:
            raise UsageError(f"{self!r}: seconds must be a number from 0 to {FOREVER_S:g}; use Hang to wait forever")


@dataclass(frozen=True)
class Hang(Fault):
    """The method never runs, and the call does not end by itself; it can be cancelled."""

    needs_process = True  # in the controller's own process nothing could cancel it

    @property
    def wait_s(self) -> float:
        """`FOREVER_S`, longer than any test runs."""
        return FOREVER_S


@dataclass(frozen=True)
class BadResult(Fault):
    """The method runs, but returns a value that cannot be pickled; no error on a rank that is not collected."""

    def spoil(self, value: Any) -> Any:
        """Return a lock, which cannot be pickled, instead of the value."""
        return threading.Lock()


@dataclass(frozen=True)
class FailToUnpickle(Fault):
    """The method runs, but returns a value that raises when the controller unpickles it."""

    def spoil(self, value: Any) -> Any:
        """Return an object whose pickle calls a function that raises."""
        return _Unreadable()


class _Unreadable:
    def __reduce__(self) -> tuple[object, ...]:
        return _refuse, ()


def _refuse() -> None:
    raise ValueError("this value was made to fail when it is unpickled")


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
