"""The stacks of a process as text, and what users read: the user's threads, innermost frame last, with source lines.

A worker writes `TOLD` and the stacks of all its threads, in the form of faulthandler; then what else it knows, each a
mark and a line of JSON: of the tasks of its event loop, `TASKS`, and of the operations in its process groups of torch,
`COLLECTIVES`; and `END`. One that cannot, as C code holds the GIL, has faulthandler write the stack of its main thread.
"""

from __future__ import annotations

import json
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from itertools import dropwhile, islice, takewhile
from pathlib import Path
from threading import get_ident, main_thread
from types import FrameType
from typing import Any

from bandmaster.errors.failure import with_source_lines

TOLD, TASKS, COLLECTIVES, END = "\n\nTold:\n", "\n\nTasks: ", "\n\nCollectives: ", "\n\nEnd\n"
MOST_FRAMES = 100  # of each thread, as faulthandler writes
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)')
_PACKAGE = f"{Path(__file__).parents[1]}/"
_LIBRARIES = tuple({f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_DEBUGGER = f"{_PACKAGE}debugging/", f"{sysconfig.get_path('stdlib')}/bdb.py"
_IDLE = "  idle: it runs no method"
_ELSEWHERE = "  an async method that Ray's event loop runs"
_RUNS = "  it runs requests:"
_WAITS = "  idle: it waits for the ranks that still run a call which failed here"
_AT_THE_FENCE = f"{_PACKAGE}worker_process/loop.py _wait_at_the_fence\n"
_NEXT_CALL = f" next_message\n{_PACKAGE}wire/lane.py receive\n"  # of a loop, or one of an actor of verl's layer
_NEXT_REQUEST = f"{_PACKAGE}answering/requests.py next_message\n"
_NEXT_TASK = "/ray/_private/worker.py main_loop\n"
_AWAITS = f"{_PACKAGE}worker_process/executor.py wait_for\n"  # where that thread waits for async methods
_MAIN, _OTHER = "Stack (most recent call first):", "Thread (most recent call first):"  # as faulthandler says
_IS_SILENT = "  it does not answer: C code holds the GIL, or the host is overloaded; other threads are not shown"


def readable(text: str, runs: bool = False) -> str:
    """The stack of the thread that runs the methods, without this library's outermost frames, or that it is idle; of
    the coroutine that it waits for; of other threads that run a user's code, and of other tasks; and calls that it
    waits for.

    Args:
        text: The text behind a status page.
        runs: Whether a method runs, by the status page: Ray runs those that overlap in other threads.
    """
    _, mark, behind = text.partition(TOLD)
    text = (behind if mark else text).partition(END)[0]  # several readers make a worker write as often
    awaited, tasks, calls = _told(text, TASKS) or ("", "", "")
    threads = list(_threads(text.partition(TASKS)[0]))
    mine = next((frames for heading, frames in threads if heading == _MAIN), [])
    running = [frames for heading, frames in threads if heading != _MAIN and not all(map(_is_not_users, frames))]
    loops = [frames for frames in running if f"{_PACKAGE}worker_process/event_loop.py _serve\n" in _places(frames)]
    stack = awaited or _waits(mine, runs) or ("" if running and _awaits(mine) else _shown(mine))
    if _places(mine[-1:]) == _NEXT_REQUEST and (tasks or loops):
        stack = _RUNS
    others = [_shown_from_users("in another thread", frames) for frames in running if frames not in loops]
    told = [stack, *[_shown_from_users("the event loop runs", frames) for frames in loops], tasks, *others]
    told += [calls if _is_in_this_library(mine) else "", _told(text, COLLECTIVES), "" if mark else _IS_SILENT]
    return with_source_lines("\n".join(filter(None, told)))


def of_this_process() -> str:
    """The stacks of all threads of this process but the one that asks."""
    frames, main = sys._current_frames(), main_thread().ident
    frames.pop(get_ident())
    return "\n\n".join(
        "\n".join([_MAIN if thread == main else _OTHER, *map(_line, islice(traceback.walk_stack(frame), MOST_FRAMES))])
        for thread, frame in frames.items()
    )


def _line(place: tuple[FrameType, int]) -> str:
    frame, line = place
    text = f'  File "{frame.f_code.co_filename}", line {line or "???"} in {frame.f_code.co_name}'
    return text if text.isprintable() else ascii(text)[1:-1]  # a name may have line ends


def is_told(text: str) -> bool:
    """Whether a worker has told all that it knows: another reader may have removed the beginning."""
    return END in text.partition(TOLD)[2]


def _told(text: str, mark: str) -> Any:
    said, is_whole, _ = text.partition(mark)[2].partition("\n")
    return json.loads(said) if is_whole else None


def _shown_from_users(heading: str, frames: list[re.Match[str]]) -> str:
    return f"  {heading}:\n{_shown(list(dropwhile(_is_not_users, frames)))}"


def _is_in_this_library(frames: list[re.Match[str]]) -> bool:
    """Whether the thread that runs the methods waits in this library, perhaps for calls."""
    return _places(frames[-1:]).startswith(_PACKAGE) or _awaits(frames)


def _awaits(frames: list[re.Match[str]]) -> bool:
    return _AWAITS in _places(frames[-4:])


def _threads(text: str) -> Iterator[tuple[str, list[re.Match[str]]]]:
    """Yield the heading of each thread, and its frames, outermost first."""
    for block in text.split("\n\n"):
        heading, *lines = block.strip("\n").split("\n")
        yield heading, [match for match in map(_FRAME.match, reversed(lines)) if match]


def _waits(frames: list[re.Match[str]], runs: bool) -> str:
    """The text for a thread that waits for the next call, or until it may begin one, or for a task of Ray."""
    innermost = _places(frames[-2:])
    if innermost.endswith(_AT_THE_FENCE):
        return _WAITS
    if runs and innermost.endswith(_NEXT_TASK):
        return _ELSEWHERE
    return _IDLE if innermost.endswith((_NEXT_CALL, _NEXT_TASK, _NEXT_REQUEST)) else ""


def _places(frames: list[re.Match[str]]) -> str:
    return "".join(f"{frame['file']} {frame['function']}\n" for frame in frames)


def _shown(frames: list[re.Match[str]]) -> str:
    return "\n".join(f'  File "{f["file"]}", line {f["line"]}, in {f["function"]}' for f in _users_part(frames))


def _users_part(frames: list[re.Match[str]]) -> list[re.Match[str]]:
    """The frames inside this library's innermost frame, without those of a debugger; all if that is the innermost."""
    frames = list(takewhile(lambda frame: not frame["file"].startswith(_DEBUGGER), frames))
    ours = [n for n, frame in enumerate(frames) if frame["file"].startswith(_PACKAGE)]
    return frames[ours[-1] + 1 :] or frames if ours else frames


def _is_not_users(frame: re.Match[str]) -> bool:
    return frame["file"].startswith((_PACKAGE, "<frozen", *_LIBRARIES))
