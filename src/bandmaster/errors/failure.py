"""`Failure` describes an error on one rank as plain data that any process can unpickle."""

from __future__ import annotations

import copyreg
import io
import linecache
import os
import pickle
import re
import signal
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from itertools import takewhile
from types import TracebackType
from typing import Any

from bandmaster.codec import Pickler

IN_DEBUGGER = "  in a debugger"  # the beginning of the stack of a rank that waits in a debugger
REPLACED = "ended by the controller, because it is being replaced"  # how a rank has died that gets a new process
N_LAST_LINES = 90  # of the standard error of a process that died; Ray, C libraries and Python end with long dumps
N_SHORT = 4000  # characters of a text that has no room for more


class FailureKind(Enum):
    """The cause of a failure on a rank."""

    RAISED = "raised"  # the user's method or constructor
    RESULT = "result"  # the method returned a value that cannot be pickled or joined
    DIED = "died"  # the worker process ended
    LOST = "lost"  # rows that the call takes are gone
    UNRECEIVED = "unreceived"  # the process that the rank replied to has no descriptor or no mapping for the reply
    RELAYED = "relayed"  # the controller, which has passed the call on, tells of this error
    CANCELLED = "cancelled"  # the controller interrupted or ended the rank, because of a cancel or a failure elsewhere


@dataclass(frozen=True)
class Failure:
    """The failure of one rank.

    Attributes:
        kind: The cause of the failure.
        summary: Type and message of the exception.
        traceback: The remote traceback as text, without this library's outermost frames; of an error of this library
            without all its frames, unless the environment variable BANDMASTER_FULL_TRACEBACKS is 1.
        exception: The original exception; None if it cannot be pickled or unpickled.
        host: Host name of the failing process; "" if unknown.
        pid: Process id of the failing process; 0 if unknown.
        device: Device of the worker; "" if unknown.
        in_collective: Whether torch.distributed raised the exception, so that it may be a consequence of another
            rank's failure.
        at: Time of the failure in seconds since the epoch, by the clock of its host; 0 if unknown.
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
        """The failure for an exception that was raised in the current process."""
        is_short = type(error).__module__ == __package__ and not shows_all_frames()
        frames = (without_library_frames if is_short else _user_frames)(error.__traceback__)
        summary = summary_of(error)
        try:
            text = "".join(traceback.format_exception(type(error), error, frames))
        except Exception:  # of an attribute that the exception, or a worker, computes
            text = "".join(["Traceback (most recent call last):\n", *traceback.format_tb(frames), summary, "\n"])
        innermost = [frame.tb_frame.f_code.co_filename for frame in _each(error.__traceback__)][-1:]
        in_collective = any(_COLLECTIVES in file for file in innermost)
        host, pid, now = os.uname().nodename, os.getpid(), time.time()
        return cls(kind, summary, text, error, host, pid, device, in_collective, now)

    @classmethod
    def of_death(cls, summary: str, last_errors: str, host: str, pid: int, device: str) -> Failure:
        """The failure for a worker process that ended.

        Args:
            summary: The cause of its end, such as ``"killed by SIGKILL"``.
            last_errors: The last lines that it wrote to standard error.
            host: Host name of the process.
            pid: Its process id.
            device: Device of the worker.
        """
        text = f"{summary}; its last lines on standard error:\n{last_errors}" if last_errors else summary
        return cls(FailureKind.DIED, text, host=host, pid=pid, device=device, at=time.time())

    @property
    def may_follow(self) -> tuple[bool, bool, float]:
        """Sort key that puts possible root causes before possible consequences of another rank's failure."""
        return self.kind is FailureKind.CANCELLED, self.in_collective, self.at if self.in_collective else 0.0

    @classmethod
    def unreadable(cls, error: BaseException, was_interrupted: bool = False) -> Failure:
        """The failure for a return value that the controller cannot unpickle.

        Args:
            error: The exception that unpickling raised.
            was_interrupted: Whether unpickling the same value has raised `KeyboardInterrupt` before. A repeated one
                comes from the value, not from Ctrl-C.

        Raises:
            BaseException: ``error`` itself, if Ctrl-C or a signal handler raised it.
        """
        if not (was_interrupted and isinstance(error, KeyboardInterrupt)):
            reraise_if_from_signal(error)
        seen = cls.of(error)
        summary = f"the returned value cannot be unpickled in the controller: {seen.summary}"
        return cls(FailureKind.RESULT, summary, seen.traceback, error)

    def shortened(self, why: OSError) -> Failure:
        """The beginning of this failure, without the exception, where all of it cannot be sent.

        Args:
            why: The reason, which the traceback ends with.
        """
        text = f"{self.traceback[:N_SHORT]}\n(the rest of this error could not be sent: {why})"
        return replace(self, summary=self.summary[:N_SHORT], traceback=text, exception=None)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "exception": _dump(self.exception)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, exception=_loaded(state["exception"]))


_COLLECTIVES = f"{os.sep}torch{os.sep}distributed{os.sep}"
_FRAME = re.compile(r'(?P<indent>  )File "(?P<file>[^"]+)", line (?P<line>\d+), in ')
_BETWEEN_STACKS = re.compile(r"^  (?!File | ).*", re.MULTILINE)  # such as the heading of another thread
_OF_TORCH = re.compile(  # but no code of a module; the environment may lie in a folder named torch
    r"/torch/(?!nn/|.*/(?:site|dist)-packages/)|/lib/python3[^/]*/(?!site-packages/|dist-packages/)|^<"
)
_PACKAGE = f"{os.path.dirname(os.path.dirname(__file__))}{os.sep}"


def _user_frames(frames: TracebackType | None) -> TracebackType | None:
    """The traceback without this library's outermost frames; the whole traceback if it has no other frames."""
    return next((frame for frame in _each(frames) if not _is_ours(frame)), frames)


def without_library_frames(frames: TracebackType | None) -> TracebackType | None:
    """A copy of a traceback without the frames of this library; the whole traceback if it has no other frames."""
    kept = [(f.tb_frame, f.tb_lasti, f.tb_lineno) for f in _each(frames) if not _is_ours(f)]
    copy = None
    for frame, instruction, line in reversed(kept):
        copy = TracebackType(copy, frame, instruction, line)
    return copy or frames


def shows_all_frames() -> bool:
    """Whether tracebacks of this library's errors have its own frames."""
    return os.environ.get("BANDMASTER_FULL_TRACEBACKS", "0") not in ("", "0")


def _each(frames: TracebackType | None) -> Iterator[TracebackType]:
    while frames is not None:
        yield frames
        frames = frames.tb_next


def _is_ours(frame: TracebackType) -> bool:
    return frame.tb_frame.f_code.co_filename.startswith(_PACKAGE)


def with_source_lines(text: str) -> str:
    """Add the source lines to a traceback that another process could not find and this one can.

    They belong to classes defined in a cell of a notebook, or in a script that the other host lacks.
    """
    lines = text.split("\n")
    shown = []
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        shown.append(line)
        place = _FRAME.match(line)
        if place and not following.startswith(place["indent"] + "  "):
            source = linecache.getline(place["file"], int(place["line"])).strip()
            shown += [f"{place['indent']}  {source}"] if source else []
    return "\n".join(shown)


def summary_of(error: BaseException) -> str:
    """Type and message of an exception in one text, whatever its attributes and ``__str__`` raise."""
    try:
        *where, what = traceback.format_exception_only(error)
    except Exception as why:
        return f"{type(error).__qualname__}, which cannot be shown as {type(why).__qualname__} is raised meanwhile"
    if isinstance(error, SyntaxError):  # whose place and code come before its type and message
        return "".join([what, *where]).strip()
    return "".join([*where, what]).strip()


def reraise_if_from_signal(error: BaseException) -> None:
    """Raise ``error`` again if it is a KeyboardInterrupt, or if the Python function that handles a signal raised it.

    Pickling and unpickling run the user's code, whose exceptions belong to the pickled value. A signal handler can
    raise at the same place, for example a SystemExit on SIGTERM, or a timeout on SIGALRM; its exception is the
    program's. Handlers run in the main thread alone.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = [getattr(getattr(handler, "__func__", handler), "__code__", None) for handler in handlers]
    is_from_handler = any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))
    if is_from_handler or isinstance(error, KeyboardInterrupt):
        raise error


class _Pickler(Pickler):
    def reducer_override(self, obj: Any) -> Any:
        cls: Any = type(obj)
        own = cls.__reduce__, cls.__reduce_ex__
        if own == (BaseException.__reduce__, BaseException.__reduce_ex__) and cls not in copyreg.dispatch_table:
            return _remade, (cls, obj.args), vars(obj) or None
        return super().reducer_override(obj)


def _remade(cls: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """An exception of these ``args``, also if ``__init__`` takes others, as that of many exception classes does."""
    try:
        return cls(*args)
    except Exception as why:
        reraise_if_from_signal(why)
        made = cls.__new__(cls, *args)
        made.args = args
        return made


def _dump(error: BaseException | None) -> bytes | None:
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(error)
        return buffer.getvalue()
    except BaseException as why:  # the exception may hold any value; the failure already has its text
        reraise_if_from_signal(why)
        return None


def _loaded(dumped: bytes | None) -> BaseException | None:
    try:
        exception = pickle.loads(dumped) if dumped else None
    except BaseException as why:  # what the exception holds may raise anything as it is unpickled
        reraise_if_from_signal(why)
        return None
    return exception if isinstance(exception, BaseException) else None


def is_in_debugger(stack: str) -> bool:
    """Whether a stack belongs to a rank whose debugger waits for a terminal, or is attached to one.

    The stack may begin with a line that says that the rank has not begun the call in question.
    """
    return any(line.startswith(IN_DEBUGGER) for line in stack.split("\n", 2)[:2])


def is_in_collective(stack: str) -> bool:
    """Whether a stack belongs to a rank that waits for other ranks in a collective operation of torch.

    FSDP has frames around those of a module, so only frames inside the innermost one of other code count. The import of
    a module of torch is no operation.
    """
    for frames in _BETWEEN_STACKS.split(stack):
        files = [frame["file"] for frame in _FRAME.finditer(frames)]
        innermost = "\n".join(takewhile(_OF_TORCH.search, reversed(files)))
        if _COLLECTIVES in innermost and "<frozen importlib" not in innermost:
            return True
    return False


def stacks_by_equality(stacks: Mapping[int, str]) -> str:
    """Format the stacks of ranks. Ranks with equal stacks share one heading, in the order of the given ranks.

    Args:
        stacks: The stack of each rank, by rank.

    Returns:
        For each different stack a heading that names its ranks, and the stack; "" if there are no stacks.
    """
    ranks_by_stack: dict[str, list[str]] = {}
    for rank, stack in stacks.items():
        ranks_by_stack.setdefault(stack, []).append(str(rank))
    shown = ((", ".join(ranks), with_source_lines(stack)) for stack, ranks in ranks_by_stack.items())
    return "\n".join(f"--- stack of rank {ranks} ---\n{stack}" for ranks, stack in shown)
