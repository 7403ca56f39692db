"""Reads the output of workers from their pipes in a thread.

::

    worker of rank 2 ── standard output, error ──► WorkerOutput ──► show: [actor 2] a line
                     │                                         └──► or output/actor-2.out
                     └── records of `logging` ───────────────────► the loggers of the controller

On another host, the agent sends the output to the controller, which shows it.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import select
import socket
import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from bandmaster.contract import Launch, ShowOutput, Written
from bandmaster.errors import UsageError
from bandmaster.errors.failure import N_LAST_LINES
from bandmaster.output.log_records import MAX_RECORD_NBYTES
from bandmaster.output.screen import show
from bandmaster.platform.limits import start_thread
from bandmaster.platform.locks import SigintSafeLock

MAX_LINE_NCHARS = 64 * 1024
LAST_LINE_NCHARS = 1000  # characters shown of each of the last lines of standard error
LAST_LINES_S = 1.0  # time for the thread to read them


class Lines:
    """Decodes a stream line by line. If ``\\r`` restarts a line, such as a bar, only its last state counts.

    Lines of more than `MAX_LINE_NCHARS` characters are split.
    """

    def __init__(self) -> None:
        self._rest = ""  # the incomplete line, from its last state on
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that this data completes, without their endings."""
        *lines, rest = (self._rest + self._decoder.decode(data)).split("\n")
        self._rest = rest[max(0, rest.rstrip("\r").rfind("\r")) :]
        while len(self._rest) > MAX_LINE_NCHARS:
            lines.append(self._rest[:MAX_LINE_NCHARS])
            self._rest = self._rest[MAX_LINE_NCHARS:]
        return [_shown(line) for line in lines]

    @property
    def bar(self) -> str:
        """The last state of an incomplete line that ``\\r`` has restarted; "" for any other line, or if it is blank."""
        return _shown(self._rest) if "\r" in self._rest else ""

    @property
    def is_between_lines(self) -> bool:
        """Whether there is no incomplete line."""
        return not self._rest

    def rest(self) -> list[str]:
        """Return the incomplete line at the end of the stream; no line if the stream ended in a complete one."""
        line, self._rest = _shown(self._rest + self._decoder.decode(b"", final=True)), ""
        return [line] if line else []


def _shown(line: str) -> str:
    """Return a line as a terminal shows it; "" if blanks have erased an earlier state."""
    _, again, state = line.rstrip("\r").rpartition("\r")
    return state if state.strip() or not again else ""


@dataclass
class _Source:
    """A pipe or socket of a worker.

    Attributes:
        rank: The worker's rank.
        kind: ``"stdout"``, ``"stderr"`` or ``"log"``.
        lines: Splits the stream into lines.
        last: The last lines.
        ended: Set once everything was read.
    """

    rank: int
    kind: str
    lines: Lines = field(default_factory=Lines)
    last: deque[str] = field(default_factory=lambda: deque(maxlen=N_LAST_LINES))
    ended: threading.Event = field(default_factory=threading.Event)


class WorkerOutput:
    """Forwards the standard output and error of a group's workers. Its thread ends with the last worker.

    Args:
        launch: The group: its name is the first word of the prefix ``[name rank]`` of each line; ``output`` is the
            directory of its files, if it has any; with a ``log_level``, its log records are read as well.
        shows: Called with the output that is not written to files; by default this process shows it.

    Raises:
        UsageError: The directory cannot be made, or not be written to.
    """

    def __init__(self, launch: Launch, shows: ShowOutput | None = None) -> None:
        self._launch, self._shows = launch, shows or show
        self._sources: dict[int, _Source] = {}  # by descriptor, which the thread closes
        self._errors: dict[int, _Source] = {}  # standard error, by rank
        self._lock = SigintSafeLock()  # guards the sources and the thread
        self._thread: threading.Thread | None = None
        self._poll: select.epoll
        if launch.output is not None:
            _make_directory(launch.output)

    def add(self, rank: int) -> list[int]:
        """Read the standard output and error of a worker from now on, and its log records if the launch has a level.

        Returns:
            The write ends. The caller closes them once the worker has them.

        Raises:
            OSError: No descriptor is left.
            ResourceError: The thread cannot be started.
        """
        with self._lock, contextlib.ExitStack() as if_it_fails:
            readers, writers = [], []
            for kind in ("stdout", "stderr", *(() if self._launch.log_level is None else ("log",))):
                reader, writer = _log_socket() if kind == "log" else os.pipe2(os.O_CLOEXEC)
                if_it_fails.callback(os.close, reader)
                if_it_fails.callback(os.close, writer)
                readers.append((reader, _Source(rank, kind)))
                writers.append(writer)
            if self._thread is None:
                self._poll = if_it_fails.enter_context(select.epoll())
                self._thread = start_thread(f"bandmaster-output-{self._launch.group}", self._read)
            if_it_fails.pop_all()
            for reader, source in readers:
                self._sources[reader] = source
                self._poll.register(reader, select.EPOLLIN)
            self._errors[rank] = readers[1][1]
            return writers

    def last_errors(self, rank: int) -> str:
        """Return the last lines that a worker that has ended wrote to standard error, at most `N_LAST_LINES`."""
        source = self._errors[rank]
        source.ended.wait(LAST_LINES_S)  # the thread that reads them may have to wait for the terminal
        return "\n".join(line[:LAST_LINE_NCHARS] for line in source.last)

    def finish(self, timeout_s: float) -> None:
        """Wait until all output of workers that have ended is written, for at most ``timeout_s`` seconds."""
        with self._lock:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def _read(self) -> None:
        while True:
            with self._lock:  # a thread that has just been started waits here for its first sources
                if not self._sources:
                    self._poll.close()
                    self._thread = None
                    return
            for fd, _ in self._poll.poll():
                source, data = self._sources[fd], os.read(fd, MAX_RECORD_NBYTES)
                if data or source.kind != "log":
                    self._take(source, data)
                if not data:
                    with self._lock:
                        self._poll.unregister(fd)  # closing is not enough while a fork of this process has it, too
                        os.close(fd)
                        del self._sources[fd]
                    source.ended.set()

    def _take(self, source: _Source, data: bytes) -> None:
        """Forward output. The start of an incomplete line is kept until the line or the worker ends."""
        is_log, group, path = source.kind == "log", self._launch.group, self._launch.output_file(source.rank)
        lines = [data.decode()] if is_log else source.lines.feed(data) if data else source.lines.rest()
        source.last.extend(lines)
        if is_log or path is None:
            self._shows(Written(source.kind, group, source.rank, lines, source.lines.bar))
        elif lines:
            try:
                with open(path, "a", encoding="utf-8", errors="replace") as file:
                    file.write("".join(f"{line}\n" for line in lines))
            except OSError as error:  # the disk is full: workers go on, and their output is lost
                complaint = f"cannot write to {path}, so that output is lost: {error}"
                self._shows(Written("stderr", group, source.rank, [complaint]))


def _log_socket() -> tuple[int, int]:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return mine.detach(), theirs.detach()


def _make_directory(path: str) -> None:
    """Make the directory of files of output, unless it exists.

    Raises:
        UsageError: The directory cannot be made, or is not writable.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the directory output={path!r} for the output of workers: {error}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"cannot write to the directory output={path!r} for the output of workers; choose another one")
