"""Makes the stacks that faulthandler writes readable: the user's threads, innermost frame last, with source lines."""

from __future__ import annotations

import linecache
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

__all__ = ["readable"]

_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)')
_PACKAGE = f"{Path(__file__).parents[1]}/"
_LIBRARIES = tuple({f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_OTHER_THREADS = "\n  in another thread:\n"  # between the stack of the thread that runs the methods, and others
_IDLE = "  idle: it runs no method"
_NEXT_CALL = f"{_PACKAGE}worker_process/loop.py _run\n{_PACKAGE}transport/lane.py receive\n"
_NEXT_TASK = "/ray/_private/worker.py main_loop\n"
_CURRENT = "Current thread"  # the one that the signal reached: the main thread, if it can be


def readable(text: str) -> str:
    """The stack of the thread that runs the methods, without this library's outermost frames, or that it is idle; and
    those of other threads that run a user's code."""
    threads = list(_threads(text))
    others = [frames for heading, frames in threads if not heading.startswith(_CURRENT) and any(map(_is_users, frames))]
    mine = [frames for heading, frames in threads if heading.startswith(_CURRENT)]
    shown = [_IDLE if _waits_for_calls(frames) else _shown(frames) for frames in [*mine, *others]]
    return _OTHER_THREADS.join(filter(None, shown))


def _threads(text: str) -> Iterator[tuple[str, list[re.Match[str]]]]:
    """Yield the heading of each thread, and its frames, outermost first."""
    for block in text.split("\n\n"):
        heading, *lines = block.strip("\n").split("\n")
        yield heading, [match for match in map(_FRAME.match, reversed(lines)) if match]


def _waits_for_calls(frames: list[re.Match[str]]) -> bool:
    """Whether a thread's innermost frames are those in which a worker waits for the next call, or Ray for a task."""
    innermost = "".join(f"{frame['file']} {frame['function']}\n" for frame in frames[-2:])
    return innermost.endswith((_NEXT_CALL, _NEXT_TASK))


def _shown(frames: list[re.Match[str]]) -> str:
    return "\n".join(map(_with_source, _users_part(frames)))


def _users_part(frames: list[re.Match[str]]) -> list[re.Match[str]]:
    """The frames inside this library's innermost frame; all frames if that is the innermost of all."""
    ours = [n for n, frame in enumerate(frames) if frame["file"].startswith(_PACKAGE)]
    return frames[ours[-1] + 1 :] or frames if ours else frames


def _is_users(frame: re.Match[str]) -> bool:
    return not frame["file"].startswith((_PACKAGE, "<frozen", *_LIBRARIES))


def _with_source(frame: re.Match[str]) -> str:
    place = f'  File "{frame["file"]}", line {frame["line"]}, in {frame["function"]}'
    source = linecache.getline(frame["file"], int(frame["line"])).strip() if frame["line"].isdigit() else ""
    return f"{place}\n    {source}" if source else place
