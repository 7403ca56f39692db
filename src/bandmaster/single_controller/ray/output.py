"""Standard output and error of a Ray actor: fewer lines for progress bars, and redirection to a file of its own."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

from bandmaster.output.screen import SELDOM_S
from bandmaster.output.streams import Lines

__all__ = ["BarStream", "redirect", "tame_bars"]


class BarStream:
    """A text stream that writes a progress bar as one line when it has ended, and one every ten seconds until then.

    Text without ``\\r`` passes unchanged.

    Args:
        stream: The stream to write to.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._lines = Lines()
        self._lock = threading.RLock()
        self._is_mid_line = False  # whether the text that has passed ended without the end of a line
        self._told = 0.0

    def write(self, text: str) -> int:
        """Write text, but hold back the part that belongs to a bar."""
        if "\r" not in text and self._lines.is_between_lines:
            self._is_mid_line = not text.endswith("\n") if text else self._is_mid_line
            return self._stream.write(text)  # type: ignore[no-any-return]
        with self._lock:
            if self._is_mid_line:
                self._stream.write("\n")
                self._is_mid_line = False
            if not self._lines.bar:
                self._told = time.monotonic()
            lines = self._lines.feed(text.encode(errors="surrogatepass"))
            if self._lines.bar and time.monotonic() - self._told >= SELDOM_S:
                self._told = time.monotonic()
                lines.append(self._lines.bar)
            if lines:
                self._stream.write("".join(f"{line}\n" for line in lines))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def tame_bars() -> None:
    """Replace this process's output streams by `BarStream`, so that a progress bar does not write a line per state."""
    sys.stdout, sys.stderr = BarStream(sys.stdout), BarStream(sys.stderr)


def redirect(path: str) -> None:
    """Append all output of this process and its children to a file.

    Raises:
        OSError: The file or its directory cannot be made.
    """
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
