"""The faults that `with_faults` can give to a worker class: frozen values, each with its rank and call."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from signal import SIGKILL, valid_signals
from typing import Any, ClassVar

from bandmaster.errors import UsageError

__all__ = ["BadResult", "Delay", "Exit", "FailToUnpickle", "Fault", "Hang", "Kill", "Raise"]

FOREVER_S = 1e6  # eleven days


@dataclass(frozen=True)
class Fault:
    """Base of the faults, and of your own: override `strike`, `spoil` or both.

    Attributes:
        rank: Whose; None for every rank.
        call: During which of its calls of registered methods, from 1.
        method: Where given, only calls of this method count.
    """

    needs_process: ClassVar[bool] = False  # whether the controller has to be another process than the worker

    rank: int | None
    call: int
    method: str | None = field(default=None, kw_only=True)

    @property
    def wait_s(self) -> float:
        """Seconds to wait, after `strike` and before the method runs."""
        return 0.0

    def strike(self) -> None:
        """Called in the worker before the method runs."""

    def spoil(self, value: Any) -> Any:
        """Called in the worker with what the method returned; what is to be returned instead."""
        return value

    def falls_on(self, rank: int, counts: Mapping[str | None, int]) -> bool:
        """Whether it is due on a rank, by the numbers of a call: among all (None), and among those of its method."""
        return self.rank in (None, rank) and counts.get(self.method) == self.call

    def check(self, class_name: str, methods: Iterable[str]) -> None:
        """Compare with the class that it is for, which registers ``methods``.

        Raises:
            UsageError: It makes no sense.
        """
        if self.rank is not None and not _is_count(self.rank, 0):
            raise UsageError(f"{self!r}: rank is a number from 0, or None for every rank")
        if not _is_count(self.call, 1):
            raise UsageError(f"{self!r}: call is a number from 1, which is the first call")
        names = sorted(methods)
        if self.method is not None and self.method not in names:
            known = f"it has {', '.join(names)}" if names else "it has none"
            raise UsageError(f"{self!r}: {class_name} registers no method {self.method!r}; {known}")


@dataclass(frozen=True)
class Kill(Fault):
    """The process gets a signal. If it survives that, as a debugger's SIGSTOP, the method runs.

    Attributes:
        signal: Its number.
    """

    needs_process = True
    signal: int = SIGKILL

    def strike(self) -> None:
        """Send the signal."""
        os.kill(os.getpid(), self.signal)

    def check(self, class_name: str, methods: Iterable[str]) -> None:
        """The rest of it too."""
        super().check(class_name, methods)
        if self.signal not in valid_signals():
            raise UsageError(f"{self!r}: there is no signal {self.signal!r}")


@dataclass(frozen=True)
class Exit(Fault):
    """The process ends at once, without tidying up.

    Attributes:
        code: Its exit code, 0 to 255.
    """

    needs_process = True
    code: int = 3

    def strike(self) -> None:
        """End the process."""
        os._exit(self.code)

    def check(self, class_name: str, methods: Iterable[str]) -> None:
        """The rest of it too."""
        super().check(class_name, methods)
        if not _is_count(self.code, 0) or self.code > 255:
            raise UsageError(f"{self!r}: an exit code is a number from 0 to 255")


@dataclass(frozen=True)
class Raise(Fault):
    """The method raises instead of running.

    Attributes:
        error: An exception or a class of exceptions.
    """

    error: BaseException | type[BaseException]

    def strike(self) -> None:
        """Raise it."""
        raise self.error

    def check(self, class_name: str, methods: Iterable[str]) -> None:
        """The rest of it too."""
        super().check(class_name, methods)
        is_class = isinstance(self.error, type) and issubclass(self.error, BaseException)
        if not (is_class or isinstance(self.error, BaseException)):
            raise UsageError(f"{self!r}: error is an exception, such as ValueError('boom')")


@dataclass(frozen=True)
class Delay(Fault):
    """The method runs later.

    Attributes:
        seconds: By how much.
    """

    seconds: float

    @property
    def wait_s(self) -> float:
        """The seconds."""
        return self.seconds

    def check(self, class_name: str, methods: Iterable[str]) -> None:
        """The rest of it too."""
        super().check(class_name, methods)
        is_number = isinstance(self.seconds, int | float) and not isinstance(self.seconds, bool)
        if not is_number or not 0 <= self.seconds <= FOREVER_S:
            raise UsageError(f"{self!r}: seconds is a number from 0 to {FOREVER_S:g}; to wait for ever there is Hang")


@dataclass(frozen=True)
class Hang(Fault):
    """The method never runs, and the call does not end by itself; it can be cancelled."""

    needs_process = True  # nobody could give it up

    @property
    def wait_s(self) -> float:
        """For ever, as these things go."""
        return FOREVER_S


@dataclass(frozen=True)
class BadResult(Fault):
    """The method runs, and returns what cannot be pickled. Nobody notices where the value is not collected."""

    def spoil(self, value: Any) -> Any:
        """A lock."""
        return threading.Lock()


@dataclass(frozen=True)
class FailToUnpickle(Fault):
    """The method runs, and returns what can be pickled, but raises where it is unpickled: in the controller."""

    def spoil(self, value: Any) -> Any:
        """Its pickle calls what raises."""
        return _Unreadable()


class _Unreadable:
    def __reduce__(self) -> tuple[object, ...]:
        return _refuse, ()


def _refuse() -> None:
    raise ValueError("this value was made to fail when it is unpickled")


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
