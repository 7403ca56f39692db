"""Reads what workers write from their pipes in a thread: lines go to the controller's streams or to files.

::

    worker of rank 2 ── standard output, error ──► WorkerOutput ──► SCREEN: [actor 2] a line
                     │                                         └──► or output/actor-2.out
                     └── records of `logging` ───────────────────► the loggers of the controller
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple, Protocol

from bandmaster.contract import Launch
from bandmaster.errors import UsageError
from bandmaster.errors.failure import N_LAST_LINES
from bandmaster.output.log_sender import MAX_RECORD_NBYTES
from bandmaster.output.log_sink import pass_on
from bandmaster.output.screen import SCREEN
from bandmaster.output.terminal import TerminalLines
from bandmaster.platform.limits import start_thread
from bandmaster.platform.locks import SigintSafeLock

__all__ = ["SCREEN_SINK", "Sink", "WorkerOutput"]

LAST_LINE_NCHARS = 1000  # to keep of each of the last lines of standard error
LAST_LINES_S = 1.0  # time for the thread to read them


class Sink(Protocol):
    """Where the output of workers goes: to the controller's streams and loggers, directly or by way of a link."""

    def write(self, source: object, stream: str, prefix: str, lines: Sequence[str], bar: str) -> None:
        """As `Screen.write`."""

    def refresh(self) -> float | None:
        """As `Screen.refresh`."""

    def record(self, data: bytes, group: str, rank: int) -> None:
        """As `bandmaster.output.log_sink.pass_on`."""


class _ScreenSink:
    """The streams and loggers of this process."""

    write, refresh, record = SCREEN.write, SCREEN.refresh, staticmethod(pass_on)


SCREEN_SINK: Sink = _ScreenSink()


class _Source(NamedTuple):
    """A descriptor that something of a worker's is read from.

    Attributes:
        rank: The worker's rank.
        kind: ``"stdout"``, ``"stderr"`` or ``"log"``.
        lines: The lines of a stream.
        close: Closes the descriptor.
    """

    rank: int
    kind: str
    lines: TerminalLines
    close: Callable[[], object]


class WorkerOutput:
    """Forwards the standard output and error of a group's workers. Its thread ends with the last worker.

    Args:
        launch: The group: its name is the first word of the prefix ``[name rank]`` of each line; ``output`` is the
            directory of its files, if it has any; ``log_level`` is given where its log records are read as well.
        sink: Gets what is not written to files.

    Raises:
        UsageError: The directory cannot be made, or not be written to.
    """

    def __init__(self, launch: Launch, sink: Sink) -> None:
        self._launch, self._sink = launch, sink
        self._sources: dict[int, _Source] = {}  # by descriptor
        self._files: dict[int, IO[str]] = {}  # by rank
        self._last: dict[int, deque[str]] = {}
        self._errors: dict[int, TerminalLines] = {}  # the incomplete line of standard error, by rank
        if launch.output is not None:
            make_directory(launch.output)
        self._poll = select.epoll()
        self._lock = SigintSafeLock()  # guards the sources and the thread
        self._thread: threading.Thread | None = None
        self._is_finished = False  # whether `finish` was called: no more workers are added

    def add(self, rank: int) -> list[int]:
        """Open pipes for the standard output and error of a worker, and a socket for its log records, if it has one.

        Returns:
            The write ends. The caller closes them once the worker has them.
        """
        self._last[rank] = deque(maxlen=N_LAST_LINES)
        writers: list[int] = []
        with self._lock:
            try:
                path = self._launch.output_file(rank)
                if path is not None and rank not in self._files:
                    self._files[rank] = open(path, "a", encoding="utf-8", errors="replace")  # noqa: SIM115
                for kind in ("stdout", "stderr"):
                    reader, writer = os.pipe2(os.O_CLOEXEC)
                    writers.append(writer)
                    self._read_from(reader, _Source(rank, kind, TerminalLines(), partial(os.close, reader)))
                if self._launch.log_level is not None:
                    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    writers.append(theirs.detach())
                    self._read_from(mine.fileno(), _Source(rank, "log", TerminalLines(), mine.close))
            except OSError:
                for writer in writers:  # the thread, or `finish`, closes the read ends
                    os.close(writer)
                raise
        return writers

    def _read_from(self, fd: int, source: _Source) -> None:
        self._sources[fd] = source
        if source.kind == "stderr":
            self._errors[source.rank] = source.lines
        self._poll.register(fd, select.EPOLLIN)

    def start(self) -> None:
        """Start the thread that reads, unless it is running. Call this each time after workers were added."""
        with self._lock:
            if self._thread is None and self._sources:
                self._thread = start_thread(f"bandmaster-output-{self._launch.group}", self._read)

    def last_errors(self, rank: int) -> str:
        """The last lines that a worker that has ended wrote to standard error, at most `N_LAST_LINES`."""
        deadline = time.monotonic() + LAST_LINES_S
        while self._has_unread_errors(rank) and time.monotonic() < deadline:
            time.sleep(0.001)  # the thread that reads them may have to wait for the terminal
        state = self._errors[rank].state
        lines = [*self._last[rank], *([state] if state else [])]
        return "\n".join(line[:LAST_LINE_NCHARS] for line in lines[-N_LAST_LINES:])

    def _has_unread_errors(self, rank: int) -> bool:
        poll = select.poll()
        with self._lock:  # what was read is known to `last_errors`
            for fd, source in self._sources.items():
                if (source.rank, source.kind) == (rank, "stderr"):
                    poll.register(fd, select.POLLIN)
            return any(events & select.POLLIN for _, events in poll.poll(0))

    def finish(self, timeout_s: float) -> None:
        """Wait until all output of workers that have ended is written, for at most ``timeout_s`` seconds."""
        with self._lock:
            thread, self._is_finished = self._thread, True
            if thread is None:
                for source in self._sources.values():
                    source.close()
                self._sources.clear()
                self._close()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def _close(self) -> None:
        self._poll.close()
        for file in self._files.values():
            file.close()

    def _read(self) -> None:
        while True:
            with self._lock:
                if not self._sources:
                    self._thread = None
                    if self._is_finished:
                        self._close()
                    return
            for fd, _ in self._poll.poll(self._sink.refresh()):
                source = self._sources[fd]
                is_log = source.kind == "log"
                with self._lock:
                    data = os.read(fd, MAX_RECORD_NBYTES if is_log else 65536)
                    lines = [] if is_log else source.lines.feed(data) if data else source.lines.rest()
                    if source.kind == "stderr":
                        self._last[source.rank].extend(lines)
                if is_log:
                    self._sink.record(data, self._launch.group, source.rank)
                else:
                    self._write(source, lines)
                if not data:
                    with self._lock:
                        self._poll.unregister(fd)
                        source.close()
                        del self._sources[fd]

    def _write(self, source: _Source, lines: Sequence[str]) -> None:
        """Write complete lines. The start of an incomplete line is kept until the line or the worker ends."""
        if self._launch.output is None:
            prefix = f"{self._launch.label(source.rank)} "
            key = id(self), source.rank, source.kind
            self._sink.write(key, source.kind, prefix, lines, source.lines.state)
        else:
            self._write_to_file(source.rank, lines)

    def _write_to_file(self, rank: int, lines: Sequence[str]) -> None:
        try:
            self._files[rank].write("".join(f"{line}\n" for line in lines))
            self._files[rank].flush()
        except OSError as error:  # the disk is full: workers go on, and what they write is lost
            complaint = f"cannot write to {self._launch.output_file(rank)}, so that output is lost: {error}"
            self._sink.write(None, "stderr", f"{self._launch.label(rank)} ", [complaint], "")


def make_directory(path: str) -> None:
    """Make the directory of files of output, unless it exists.

    Raises:
        UsageError: It cannot be made, or not be written to.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the directory output={path!r} for the output of workers: {error}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"cannot write to the directory output={path!r} for the output of workers; choose another one")
