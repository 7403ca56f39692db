"""The worker's side of the page that shows which method runs; `bandmaster.wire.activity` describes the page."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from time import monotonic

from bandmaster.contract import CONSTRUCT
from bandmaster.wire.activity import MAX_NAME_NBYTES, N_MORE, NAMES_AT, PAGE_NBYTES, RUNNING, SINCE, page_name

__all__ = ["ActivityPage"]


class ActivityPage:
    """Shows which method runs. `Executor.call` writes the words itself, since a call of a method takes as long again.

    Attributes:
        words: Word `RUNNING` is the index of the running method, 0 if none runs.
        times: The same memory; word `SINCE` is the moment at which the method began, by `time.monotonic`. It is
            written first.
        indices: The index of each method by its name; a name that is looked up for the first time gets one.

    Args:
        is_shared: Whether other processes can read it.
    """

    __slots__ = ("_beside", "indices", "times", "words")

    def __init__(self, is_shared: bool = False) -> None:
        page: mmap.mmap | bytearray = _shared() if is_shared else bytearray(PAGE_NBYTES)
        self.words, self.times = memoryview(page).cast("Q"), memoryview(page).cast("d")
        self.indices = _Indices(memoryview(page))
        self._beside: dict[object, tuple[str, float]] = {}

    def begin(self, method: str) -> None:
        """Show that a method runs from now on."""
        self.times[SINCE] = monotonic()
        self.words[RUNNING] = self.indices[method]

    def rename(self, method: str) -> None:
        """Show the running call under the name of a method of the user's, since when it has been running."""
        self.words[RUNNING] = self.indices[method]

    def end(self) -> None:
        """Show that no method runs."""
        self.words[RUNNING] = 0

    @contextlib.contextmanager
    def beside(self, method: str) -> Iterator[None]:
        """Show, until the block is left, that a method runs, perhaps besides others: the oldest is shown by name."""
        token = object()
        self._beside[token] = method, monotonic()
        self._show_oldest()
        try:
            yield
        finally:
            del self._beside[token]
            self._show_oldest()

    def _show_oldest(self) -> None:
        method, since = next(iter(self._beside.values()), ("", 0.0))
        self.times[SINCE] = since
        self.words[N_MORE] = max(0, len(self._beside) - 1)
        self.words[RUNNING] = self.indices[method] if method else 0


class _Indices(dict[str, int]):
    """Indices of names; a new name is written to the page. Names for which there is no room share the first index."""

    def __init__(self, page: memoryview) -> None:
        self._page, self._end = page, NAMES_AT
        self._add("(another method)")

    def __missing__(self, method: str) -> int:
        self[method] = index = self._add(_shown(method))
        return index

    def _add(self, name: str) -> int:
        text = name.encode(errors="replace")[:MAX_NAME_NBYTES].replace(b"\0", b"?")
        end = self._end + len(text) + 1
        if end > PAGE_NBYTES:
            return 1
        self._page[self._end : end - 1] = text
        self._end = end
        return bytes(self._page[NAMES_AT:end]).count(0)


def _shown(method: str) -> str:
    return "__init__" if method == CONSTRUCT else method.replace("/", ".")


def _shared() -> mmap.mmap:
    fd = os.memfd_create(page_name(os.getpid()), os.MFD_CLOEXEC)  # open as long as the process is, to be found
    os.ftruncate(fd, PAGE_NBYTES)
    return mmap.mmap(fd, PAGE_NBYTES)
