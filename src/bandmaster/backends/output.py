"""What workers print: read from their pipes by a thread, and written line by line with a prefix."""

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
LAST_LINE_NCHARS = 1000  # of a line of standard error that is kept


class WorkerOutput:
    """The standard output and error of the workers of one group. Its thread ends with the last of them.

    Args:
        label: Name of the group in ``[label rank]``.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._sources: dict[int, tuple[int, str]] = {}  # rank and stream of each descriptor
        self._lines: dict[int, _Lines] = {}  # of each descriptor
        self._last: dict[int, deque[_Line]] = {}
        self._poll = select.epoll()
        self._lock = SigintSafeLock()  # the sources, and whether the thread runs
        self._thread: threading.Thread | None = None
        self._is_finished = False  # whether no worker will be added any more

    def add(self, rank: int) -> tuple[int, int]:
        """Descriptors for a worker to write its standard output and error to; close them once it has them."""
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
        """Begin to read, or go on with it when workers have been added."""
        with self._lock:
            if self._thread is None and self._sources:
                self._thread = start_thread(f"bandmaster-output-{self._label}", self._read)

    def last_errors(self, rank: int) -> str:
        """The last lines of a worker's standard error."""
        return "\n".join(line.text for line in self._last[rank])

    def finish(self, timeout_s: float) -> None:
        """Wait until everything that ended workers have printed is written."""
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
        """Write whole lines; the rest of a line waits for its end, or for the end of the worker."""
        rank, stream = self._sources[fd]
        lines = self._lines[fd].feed(data) if data else self._lines[fd].rest()
        if stream == "stderr":
            for line in lines:
                if self._last[rank] and self._last[rank][-1].is_overwritten:
                    self._last[rank].pop()
                self._last[rank].append(line._replace(text=line.text[:LAST_LINE_NCHARS]))
        target = getattr(sys, stream)
        if lines and target is not None:
            with contextlib.suppress(Exception):  # a broken pipe, say: workers must not block because nobody listens
                target.write("".join(f"[{self._label} {rank}] {line.text}\n" for line in lines))
                target.flush()


class _Line(NamedTuple):
    """A line, and whether a terminal shows the next one in its place."""

    text: str
    is_overwritten: bool = False


class _Lines:
    """Cuts a stream of bytes into lines, in linear time: at ``\\n``, ``\\r\\n``, and the ``\\r`` of progress bars.

    A line that has no end for `MAX_LINE_NBYTES` is cut there.
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = []  # of the line that has no end yet
        self._nbytes = 0
        self._is_after_return = False  # whether the last line was ended by a ``\r``, of which a ``\n`` may be a part

    def feed(self, data: bytes) -> list[_Line]:
        """The lines that end in this data, without what ends them."""
        lines = []
        for piece in data.splitlines(keepends=True):
            text = piece.rstrip(b"\r\n")
            if piece.endswith(b"\n"):
                if text or not self._is_after_return:
                    lines.append(_Line(self._ended(text)))
            elif piece.endswith(b"\r"):
                line = self._ended(text)
                if line.strip():  # bars begin with it, or are wiped out with it
                    lines.append(_Line(line, is_overwritten=True))
            else:
                self._parts.append(text)
                self._nbytes += len(text)
                if self._nbytes >= MAX_LINE_NBYTES:
                    lines.append(_Line(self._cut()))
            self._is_after_return = piece.endswith(b"\r")
        return lines

    def rest(self) -> list[_Line]:
        """The line that has no end, if there is one, at the end of the stream."""
        return [_Line(self._ended())] if self._nbytes else []

    def _ended(self, text: bytes = b"", n_kept: int = 0) -> str:
        """The line that is ended by this text, but for its last bytes, which are kept for the next."""
        line = b"".join([*self._parts, text])
        split = len(line) - n_kept
        self._parts, self._nbytes = [line[split:]], n_kept
        return line[:split].decode(errors="replace")

    def _cut(self) -> str:
        """What there is of the line, but for the beginning of a character of UTF-8."""
        end = b"".join(self._parts[-3:])[-3:]
        return self._ended(n_kept=next((n for n in range(1, len(end) + 1) if end[-n] >= 0xC0), 0))
