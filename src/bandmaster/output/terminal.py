"""What a terminal makes of a stream of output: complete lines, and a line that is written again and again."""

from __future__ import annotations

from typing import Any

__all__ = ["MAX_LINE_NBYTES", "TerminalLines", "is_seen"]

MAX_LINE_NBYTES = 64 * 1024


def is_seen(stream: Any) -> bool:
    """Whether a stream is a terminal or the output of a notebook's cell, where ``\\r`` begins a line again."""
    try:
        return stream is not None and (bool(stream.isatty()) or type(stream).__module__.startswith("ipykernel."))
    except (AttributeError, ValueError):  # it is no file, or closed
        return False


class TerminalLines:
    """Splits a stream of bytes into lines as a terminal shows them once they are complete, in linear time.

    A progress bar begins its line again with ``\\r``: of such a line, the last text counts, or none where blanks have
    erased it. Lines longer than `MAX_LINE_NBYTES` are split.
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = []  # of the incomplete line, since the last return
        self._nbytes = 0
        self._before = ""  # what the incomplete line showed when it was last begun again
        self._is_overwritten = False  # whether the incomplete line was begun again

    def feed(self, data: bytes) -> list[str]:
        """The lines that this data completes, without their endings."""
        lines = []
        for piece in data.splitlines(keepends=True):
            text = piece.rstrip(b"\r\n")
            if text:
                self._parts.append(text)
                self._nbytes += len(text)
            if piece.endswith(b"\n"):
                lines.append(self._shown())
                self._parts, self._nbytes, self._before, self._is_overwritten = [], 0, "", False
            elif piece.endswith(b"\r"):
                self._before, self._is_overwritten = self._shown(), True
                self._parts, self._nbytes = [], 0
            elif self._nbytes >= MAX_LINE_NBYTES:
                lines.append(self._cut())
        return lines

    @property
    def state(self) -> str:
        """What a terminal shows of a line that was begun again and is not complete; "" for any other line."""
        return self._shown("ignore") if self._is_overwritten else ""

    @property
    def is_between_lines(self) -> bool:
        """Whether nothing is known of an incomplete line."""
        return not self._nbytes and not self._is_overwritten

    def rest(self) -> list[str]:
        """The incomplete line at the end of the stream; no line if the stream ended in a complete one."""
        line = self._shown()
        self._parts, self._nbytes, self._before, self._is_overwritten = [], 0, "", False
        return [line] if line else []

    def _shown(self, errors: str = "replace") -> str:
        """What a terminal shows of the incomplete line."""
        if not self._nbytes:
            return self._before
        line = b"".join(self._parts).decode(errors=errors)
        return line if not self._is_overwritten or line.strip() else ""

    def _cut(self) -> str:
        """The incomplete line so far, without a partial UTF-8 character at its end, which begins the next line."""
        line = b"".join(self._parts)
        n_kept = next((n for n in range(1, len(line[-3:]) + 1) if line[-n] >= 0xC0), 0)
        split = len(line) - n_kept
        self._parts, self._nbytes, self._before, self._is_overwritten = [line[split:]], n_kept, "", False
        return line[:split].decode(errors="replace")
