"""Reads the output of workers from their pipes in a thread, and writes it line by line with a prefix."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
from collections import deque
from typing import NamedTuple

from bandmaster.failure import N_LAST_LINES
from bandmaster.platform.limits import start_thread
from bandmaster.platform.locks import SigintSafeLock

__all__ = ["WorkerOutput"]

MAX_LINE_NBYTES = 64 * 1024
LAST_LINE_NCHARS = 1000  # to keep of each of the last lines of standard error


class WorkerOutput:
    """Forwards the standard output and error of a group's workers. Its thread ends with the last worker.

    Args:
        label: First word of the prefix ``[label rank]`` of each line.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._sources: dict[int, tuple[int, str]] = {}  # rank and stream of each descriptor
        self._lines: dict[int, _Lines] = {}  # of each descriptor
        self._last: dict[int, deque[_Line]] = {}
        self._poll = select.epoll()
        self._lock = SigintSafeLock()  # guards the sources and the thread
        self._thread: threading.Thread | None = None
        self._is_finished = False  # whether `finish` was called: no more workers are added

    def add(self, rank: int) -> tuple[int, int]:
        """Open pipes for the standard output and error of a worker.

        Returns:
            The write ends. The caller closes them once the worker has them.
        """
        self._last[rank] = deque(maxlen=N_LAST_LINES)
        with self._lock:
            out_reader, out_writer = os.pipe2(os.O_CLOEXEC)
            try:
                err_reader, err_writer = os.pipe2(os.O_CLOEXEC)
            except OSError:
                os.close(out_writer)
                os.close(out_reader)
                raise
            for reader, stream in ((out_reader, "stdout"), (err_reader, "stderr")):
                self._sources[reader], self._lines[reader] = (rank, stream), _Lines()
                self._poll.register(reader, select.EPOLLIN)
        return out_writer, err_writer

    def start(self) -> None:
        """Start the thread that reads, unless it is running. Call this each time after workers were added."""
        with self._lock:
            if self._thread is None and self._sources:
                self._thread = start_thread(f"bandmaster-output-{self._label}", self._read)

    def last_errors(self, rank: int) -> str:
        """The last lines that a worker wrote to standard error, at most `N_LAST_LINES`."""
        return "\n".join(line.text for line in self._last[rank])

    def finish(self, timeout_s: float) -> None:
        """Wait until all output of workers that have ended is written, for at most ``timeout_s`` seconds."""
        with self._lock:
            thread, self._is_finished = self._thread, True
            if thread is None:
                for fd in self._sources:
                    os.close(fd)
                self._sources.clear()
                self._poll.close()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def _read(self) -> None:
        while True:
            with self._lock:
                if not self._sources:
                    self._thread = None
                    if self._is_finished:
                        self._poll.close()
                    return
            for fd, _ in self._poll.poll():
                data = os.read(fd, 65536)
                self._write(fd, data)
                if not data:
                    with self._lock:
                        self._poll.unregister(fd)
                        os.close(fd)
                        del self._sources[fd], self._lines[fd]

    def _write(self, fd: int, data: bytes) -> None:
        """Write complete lines. The start of an incomplete line is kept until the line or the worker ends."""
        rank, stream = self._sources[fd]
        lines = self._lines[fd].feed(data) if data else self._lines[fd].rest()
        if stream == "stderr":
            for line in lines:
                if self._last[rank] and self._last[rank][-1].is_overwritten:
                    self._last[rank].pop()
                self._last[rank].append(line._replace(text=line.text[:LAST_LINE_NCHARS]))
        target = getattr(sys, stream)
        if lines and target is not None:
            with contextlib.suppress(Exception):  # a broken pipe, for example, must not block workers
                target.write("".join(f"[{self._label} {rank}] {line.text}\n" for line in lines))
                target.flush()


class _Line(NamedTuple):
    """A line of output.

    Attributes:
        text: The line without its ending.
        is_overwritten: Whether a terminal shows the next line in place of this one.
    """

    text: str
    is_overwritten: bool = False


class _Lines:
    """Splits a stream of bytes into lines, in linear time: at ``\\n``, ``\\r\\n``, and the ``\\r`` of progress bars.

    Lines longer than `MAX_LINE_NBYTES` are split.
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = []  # of the incomplete line
        self._nbytes = 0
        self._is_after_return = False  # whether the data ended in a ``\r``, so that a ``\n`` may follow

    def feed(self, data: bytes) -> list[_Line]:
        """The lines that this data completes, without their endings."""
        lines = []
        for piece in data.splitlines(keepends=True):
            text = piece.rstrip(b"\r\n")
            if piece.endswith(b"\n"):
                if text or not self._is_after_return:
                    lines.append(_Line(self._ended(text)))
            elif piece.endswith(b"\r"):
                line = self._ended(text)
                if line.strip():  # blank lines begin a progress bar, or erase it
                    lines.append(_Line(line, is_overwritten=True))
            else:
                self._parts.append(text)
                self._nbytes += len(text)
                if self._nbytes >= MAX_LINE_NBYTES:
                    lines.append(_Line(self._cut()))
            self._is_after_return = piece.endswith(b"\r")
        return lines

    def rest(self) -> list[_Line]:
        """The incomplete line at the end of the stream; no line if the stream ended in a complete one."""
        return [_Line(self._ended())] if self._nbytes else []

    def _ended(self, text: bytes = b"", n_kept: int = 0) -> str:
        """The line that this text completes, without its last ``n_kept`` bytes, which begin the next line."""
        line = b"".join([*self._parts, text])
        split = len(line) - n_kept
        self._parts, self._nbytes = [line[split:]], n_kept
        return line[:split].decode(errors="replace")

    def _cut(self) -> str:
        """The incomplete line so far, without a partial UTF-8 character at its end."""
        end = b"".join(self._parts[-3:])[-3:]
        return self._ended(n_kept=next((n for n in range(1, len(end) + 1) if end[-n] >= 0xC0), 0))
