"""What workers print: read from their pipes by a thread, and written line by line with a prefix."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
from collections import deque

from bandmaster.failure import N_LAST_LINES
from bandmaster.wire.steady import SteadyLock

__all__ = ["WorkerOutput"]


class WorkerOutput:
    """The standard output and error of the workers of one group. Its thread ends with the last of them.

    Args:
        label: Name of the group in ``[label rank]``.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._sources: dict[int, tuple[int, str]] = {}  # rank and stream of each descriptor
        self._partial: dict[int, bytes] = {}
        self._last: dict[int, deque[str]] = {}
        self._poll = select.epoll()
        self._lock = SteadyLock()  # the sources, and whether the thread runs
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
                self._sources[reader] = (rank, stream)
                self._poll.register(reader, select.EPOLLIN)
        return out_writer, err_writer

    def start(self) -> None:
        """Begin to read, or go on with it when workers have been added."""
        with self._lock:
            if self._thread is None and self._sources:
                name = f"bandmaster-output-{self._label}"
                self._thread = threading.Thread(target=self._read, name=name, daemon=True)
                self._thread.start()

    def last_errors(self, rank: int) -> str:
        """The last lines of a worker's standard error."""
        return "\n".join(self._last[rank])

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
                        del self._sources[fd]

    def _write(self, fd: int, data: bytes) -> None:
        """Write whole lines; the rest of a line waits for its end, or for the end of the worker."""
        rank, stream = self._sources[fd]
        *lines, rest = (self._partial.pop(fd, b"") + data).split(b"\n")
        if rest and not data:
            lines.append(rest)
        elif rest:
            self._partial[fd] = rest
        text = [line.decode(errors="replace") for line in lines]
        if stream == "stderr":
            self._last[rank].extend(text)
        target = getattr(sys, stream)
        if text and target is not None:
            with contextlib.suppress(Exception):  # a broken pipe, say: workers must not block because nobody listens
                target.write("".join(f"[{self._label} {rank}] {line}\n" for line in text))
                target.flush()
