"""What went wrong on one rank, as plain data that any process can unpickle."""

from __future__ import annotations

import os
import pickle
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Any

import cloudpickle

__all__ = ["N_LAST_LINES", "Failure", "FailureKind", "reraise_if_from_signal", "summary_of"]

N_LAST_LINES = 60  # of standard error, shown of a process that has died: Ray and C libraries end with long dumps


class FailureKind(Enum):
    """Whose code failed on the rank."""

    RAISED = "raised"  # the user's method or constructor
    RESULT = "result"  # the method returned what cannot be pickled or joined
    DIED = "died"  # the process is gone
    CANCELLED = "cancelled"  # the controller interrupted or ended it: the call was cancelled, or had failed elsewhere


@dataclass(frozen=True)
class Failure:
    """One rank's failure.

    Attributes:
        kind: Whose code failed.
        summary: The exception's type and message.
        traceback: The remote traceback as text, without this library's own outermost frames.
        exception: The original exception; None when it cannot be pickled or unpickled.
        host: Name of the host it happened on, "" when it is not known.
        pid: The process it happened in, 0 when it is not known.
        device: Of the worker, "" when it is not known.
        in_collective: Whether torch.distributed raised it: then it may only follow from another rank's failure.
        at: When, in seconds since the epoch on that host; 0 when it is not known.
    """

    kind: FailureKind
    summary: str
    traceback: str = ""
    exception: BaseException | None = None
    host: str = ""
    pid: int = 0
    device: str = ""
    in_collective: bool = False
    at: float = 0.0

    @classmethod
    def of(cls, error: BaseException, kind: FailureKind = FailureKind.RAISED, device: str = "") -> Failure:
        """Describe ``error``, raised in this process."""
        text = "".join(traceback.format_exception(type(error), error, _user_frames(error.__traceback__)))
        summary = summary_of(error)
        in_collective = _COLLECTIVES in _innermost_file(error.__traceback__)
        host, pid, now = os.uname().nodename, os.getpid(), time.time()
        return cls(kind, summary, text, error, host, pid, device, in_collective, now)

    @classmethod
    def of_death(cls, summary: str, last_errors: str, host: str, pid: int, device: str) -> Failure:
        """Describe how another process ended, with the last that it wrote to standard error."""
        text = f"{summary}; the last it wrote to standard error:\n{last_errors}" if last_errors else summary
        return cls(FailureKind.DIED, text, host=host, pid=pid, device=device, at=time.time())

    @property
    def may_follow(self) -> tuple[bool, bool, float]:
        """To sort by: what can be the first cause comes before what another rank's failure may have led to."""
        return self.kind is FailureKind.CANCELLED, self.in_collective, self.at if self.in_collective else 0.0

    @classmethod
    def unreadable(cls, error: BaseException, was_interrupted: bool = False) -> Failure:
        """Describe why the controller cannot unpickle what a method returned.

        Args:
            error: What was raised.
            was_interrupted: Whether the same value has raised `KeyboardInterrupt` before. Then one more is the value's
                own doing, not that of Ctrl-C.

        Raises:
            BaseException: ``error`` itself, if it was a signal that interrupted the controller there.
        """
        if not (was_interrupted and isinstance(error, KeyboardInterrupt)):
            reraise_if_from_signal(error)
        seen = cls.of(error)
        summary = f"the returned value cannot be unpickled in the controller: {seen.summary}"
        return cls(FailureKind.RESULT, summary, seen.traceback, error)

    def __reduce__(self) -> tuple[object, ...]:
        known = {name: getattr(self, name) for name in ("host", "pid", "device", "in_collective", "at")}
        return _revive, (self.kind, self.summary, self.traceback, _dump(self.exception), known)


_COLLECTIVES = f"{os.sep}torch{os.sep}distributed{os.sep}"
_PACKAGE = f"{os.path.dirname(__file__)}{os.sep}"


def _user_frames(frames: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame that is not this library's on; all of it when there is no other."""
    rest = frames
    while rest is not None and rest.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        rest = rest.tb_next
    return rest or frames


def _innermost_file(frames: TracebackType | None) -> str:
    while frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
    return frames.tb_frame.f_code.co_filename if frames is not None else ""


def summary_of(error: BaseException) -> str:
    """The type and message of an exception, also of one whose ``__str__`` raises."""
    return "".join(traceback.format_exception_only(error)).strip()


def reraise_if_from_signal(error: BaseException) -> None:
    """Raise an exception again if Ctrl-C or another signal's handler, when that is a function, has raised it.

    Pickling and unpickling run the user's code, which may raise anything: what it raises belongs to the value. But a
    handler that ends the program, for SIGTERM say, raises its SystemExit wherever the program is, there too.
    """
    if isinstance(error, Exception):
        return
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = [getattr(getattr(handler, "__func__", handler), "__code__", None) for handler in handlers]
    is_from_handler = any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))
    if is_from_handler or isinstance(error, KeyboardInterrupt):
        raise error


def _dump(error: BaseException | None) -> bytes | None:
    try:
        return None if error is None else cloudpickle.dumps(error)
    except BaseException as why:  # the user's exception may hold anything; its text has been taken already
        reraise_if_from_signal(why)
        return None


def _revive(kind: FailureKind, summary: str, text: str, dumped: bytes | None, known: Mapping[str, Any]) -> Failure:
    try:
        exception = None if dumped is None else pickle.loads(dumped)
    except BaseException as why:  # many exception classes cannot be unpickled: their __init__ takes other arguments
        reraise_if_from_signal(why)
        exception = None
    return Failure(kind, summary, text, exception if isinstance(exception, BaseException) else None, **known)
