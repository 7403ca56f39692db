"""Shows the output of all groups on the controller's own standard output and error.

Each complete line is written at once, after the prefix of its rank. The progress bars of ranks, and groups that start
slowly, are shown in one live region below the lines if standard error is a terminal and rich is installed. Otherwise a
bar becomes a line with its state every ten seconds, and one when it has ended; a start becomes a line every ten seconds
on a terminal or in a notebook, and a log record elsewhere.

::

    WorkerOutput, links ── Written ──► show ──► standard output and error, loggers
                                        └──► Region ◄── watched ◄── Start of a group
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from bandmaster.contract import Written
from bandmaster.lifecycle.construction import WATCHERS, Start
from bandmaster.output.log_records import pass_on
from bandmaster.platform.limits import start_thread

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

SELDOM_S = 10.0  # between two lines about the same bar or start
QUIET_S = 2.0  # shorter starts show nothing
MOST_RANKS = 8  # named in a line
_log = logging.getLogger(__name__)


class _Region:
    """The live region at the bottom of the terminal: it exists as long as there are texts to show in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._texts: dict[object, Callable[[], str]] = {}
        self._live: Live | None = None

    def put(self, source: object, text: Callable[[], str]) -> bool:
        """Show the present text of a source in a line of its own. Returns False if no region can be drawn."""
        with self._lock:
            if self._live is None:
                self._live = _begun(self._render)
            if self._live is not None:
                self._texts[source] = text
            return self._live is not None

    def remove(self, source: object) -> None:
        """Remove the line of a source."""
        with self._lock:
            self._texts.pop(source, None)
            if not self._texts and self._live is not None:
                live, self._live = self._live, None
                with contextlib.suppress(Exception):  # the terminal is gone
                    live.stop()

    def _render(self) -> RenderableType:  # in a thread of rich, which holds the lock that `stop` needs
        from rich.console import Group
        from rich.text import Text

        texts = list(self._texts.values())
        return Group(*[Text.from_ansi(text(), no_wrap=True, overflow="ellipsis") for text in texts])


def _begun(render: Callable[[], RenderableType]) -> Live | None:
    """Begin a live region on the terminal of standard error; None without a terminal or rich."""
    if _is_seen(sys.stderr):
        with contextlib.suppress(ImportError, OSError):  # the terminal is gone
            from rich.console import Console
            from rich.live import Live

            console, is_shared = Console(stderr=True), _is_seen(sys.stdout)
            if console.is_interactive:  # a notebook is not
                live = Live(console=console, get_renderable=render, transient=True, redirect_stdout=is_shared)
                live.start()
                return live
    return None


def _is_seen(stream: Any) -> bool:
    """Return whether a stream of this process is a terminal or the output of a notebook's cell."""
    with contextlib.suppress(AttributeError, ValueError):  # it is None, not a file, or closed
        return bool(stream.isatty()) or type(stream).__module__.startswith("ipykernel.")
    return False


_REGION = _Region()  # of this process
_told: dict[object, float] = {}  # time of the last line about a bar that is not in the region


def show(written: Written) -> None:
    """Write the lines of a rank and show its bar, or pass its log record to a logger.

    Errors of the streams are ignored: a broken pipe, for example, must not block workers.
    """
    if written.kind == "log":
        pass_on(written)
        return
    lines, source = list(written.lines), (written.prefix, written.kind)
    if not written.bar:
        _told.pop(source, None)
        _REGION.remove(source)
    elif not _REGION.put(source, lambda: f"{written.prefix}{written.bar}"):
        now = time.monotonic()
        if now - _told.setdefault(source, now) >= SELDOM_S:
            _told[source] = now
            lines.append(written.bar)
    stream: Any = getattr(sys, written.kind)
    if lines and stream is not None:
        text = "".join(f"{written.prefix}{line}\n" for line in lines)
        with contextlib.suppress(Exception):
            try:
                stream.write(text)
            except UnicodeEncodeError:  # in Latin-1, for example: the characters that it lacks are escaped
                stream.write(text.encode(stream.encoding, "backslashreplace").decode(stream.encoding))
            stream.flush()


@contextlib.contextmanager
def watched(start: Start) -> Iterator[None]:
    """Show the progress of a slow start until the block ends."""
    is_over, thread = threading.Event(), None
    try:
        thread = start_thread("bandmaster-start-progress", _show, start, is_over)
        yield
    finally:
        is_over.set()
        if thread is not None:
            thread.join()


def _show(start: Start, is_over: threading.Event) -> None:
    if is_over.wait(QUIET_S):
        return
    if _REGION.put(start, partial(_progress, start)):
        is_over.wait()
        _REGION.remove(start)
    while not is_over.is_set():
        if _is_seen(sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # the terminal is gone, or the stream was closed
                print(_progress(start), file=sys.stderr, flush=True)
        else:
            _log.info(_progress(start))
        is_over.wait(SELDOM_S)


def _progress(start: Start) -> str:
    late, title, so_far = start.late, f"starting {start.group}{start.doing}", f"{start.seconds:.0f} s"
    if late is None:
        return f"{title}: waiting for the processes of {start.n_ranks} ranks, {so_far}"
    named = ", ".join([*map(str, late[:MOST_RANKS]), *(["…"] if len(late) > MOST_RANKS else [])])
    return f"{title}: {start.n_ranks - len(late)} of {start.n_ranks} ranks, {so_far}; late: rank {named or '-'}"


WATCHERS.append(watched)
