"""What went wrong on one rank, as plain data that any process can unpickle."""

from __future__ import annotations

import os
import pickle
import socket
import traceback
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import TracebackType

import cloudpickle

__all__ = ["Failure", "FailureKind"]


class FailureKind(Enum):
    """Whose code failed on the rank."""

    RAISED = "raised"  # the user's method or constructor
    RESULT = "result"  # the method returned what cannot be pickled or joined
    DIED = "died"  # the process is gone


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
    """

    kind: FailureKind
    summary: str
    traceback: str = ""
    exception: BaseException | None = None
    host: str = ""
    pid: int = 0

    @classmethod
    def of(cls, error: BaseException, kind: FailureKind = FailureKind.RAISED) -> Failure:
        """Describe ``error``, raised in this process."""
        text = "".join(traceback.format_exception(type(error), error, _user_frames(error.__traceback__)))
        summary = "".join(traceback.format_exception_only(error)).strip()
        return cls(kind, summary, text, error, socket.gethostname(), os.getpid())

    @classmethod
    def unreadable(cls, error: BaseException) -> Failure:
        """Describe why the controller cannot unpickle what a method returned."""
        seen = cls.of(error)
        summary = f"the returned value cannot be unpickled in the controller: {seen.summary}"
        return cls(FailureKind.RESULT, summary, seen.traceback, error)

    def __reduce__(self) -> tuple[object, ...]:
        return _revive, (self.kind, self.summary, self.traceback, _dump(self.exception), self.host, self.pid)


_PACKAGE = f"{Path(__file__).parent}{os.sep}"


def _user_frames(frames: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame that is not this library's on; all of it when there is no other."""
    rest = frames
    while rest is not None and rest.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        rest = rest.tb_next
    return rest or frames


def _dump(error: BaseException | None) -> bytes | None:
    try:
        return None if error is None else cloudpickle.dumps(error)
    except Exception:  # the user's exception may hold anything; its text has been taken already
        return None


def _revive(kind: FailureKind, summary: str, text: str, dumped: bytes | None, host: str, pid: int) -> Failure:
    try:
        exception = None if dumped is None else pickle.loads(dumped)
    except Exception:  # many exception classes cannot be unpickled: their __init__ takes other arguments
        exception = None
    return Failure(kind, summary, text, exception if isinstance(exception, BaseException) else None, host, pid)
