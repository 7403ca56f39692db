"""Makes the stacks that faulthandler writes readable: the user's threads, innermost frame last, with source lines.

Behind them, a worker with process groups of torch tells of its operations in them: `COLLECTIVES`, and a line of JSON;
and one whose Python code can run, of the tasks of its event loop: `TASKS`, and another such line.
"""

from __future__ import annotations

import json
import re
import sysconfig
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

from bandmaster.errors.failure import with_source_lines

TASKS = "\n\nTasks: "
COLLECTIVES = "\n\nCollectives: "
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)')
_PACKAGE = f"{Path(__file__).parents[1]}/"
_LIBRARIES = tuple({f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_DEBUGGER = f"{_PACKAGE}debugging/", f"{sysconfig.get_path('stdlib')}/bdb.py"
_OTHER_THREADS = "\n  in another thread:\n"  # between the stack of the thread that runs the methods, and others
_IDLE = "  idle: it runs no method"
_ELSEWHERE = "  an async method that Ray's event loop runs"
_RUNS = "  it runs requests:"
_WAITS = "  idle: it waits for the ranks that still run a call which failed here"
_AT_THE_FENCE = f"{_PACKAGE}worker_process/loop.py _wait_at_the_fence\n"
_NEXT_CALL = f" next_message\n{_PACKAGE}wire/lane.py receive\n"  # of a loop, or one of an actor of verl's layer
_NEXT_REQUEST = f"{_PACKAGE}answering/requests.py next_message\n"
_REPLIES = f" _wait\n{_PACKAGE}wire/poller.py receive\n"  # of ranks of other groups, which a method calls
_NEXT_TASK = "/ray/_private/worker.py main_loop\n"
_AWAITS = f"{_PACKAGE}worker_process/executor.py wait_for\n"  # where that thread waits for async methods
_CURRENT = "Current thread", "Stack (most recent"  # that the signal reached: the main thread, if it can be; or alone


def readable(text: str, runs: bool = False) -> str:
    """The stack of the thread that runs the methods, without this library's outermost frames, or that it is idle; of
    the coroutine that it waits for; of other threads that run a user's code, and of other tasks; and calls that it
    waits for.

    Args:
        text: The text behind a status page.
        runs: Whether a method runs, by the status page: Ray runs those that overlap in other threads.
    """
    awaited, tasks, *more = told(text, TASKS) or ("", "")
    more.append(told(text, COLLECTIVES))
    text = text.partition(TASKS)[0].partition(COLLECTIVES)[0]
    threads = list(_threads(text))
    others = [frames for heading, frames in threads if not heading.startswith(_CURRENT) and any(map(_is_users, frames))]
    mine = [frames for heading, frames in threads if heading.startswith(_CURRENT)]
    shown = [awaited] if awaited else [_waits(frames, runs) or _shown(frames) for frames in mine]
    if tasks and any(_places(frames[-1:]) == _NEXT_REQUEST for frames in mine):
        shown = [_RUNS]
    stacks = _OTHER_THREADS.join(filter(None, [*shown, *map(_shown, others)]))
    return with_source_lines("\n".join(filter(None, [stacks, tasks, *more])))


def told(text: str, mark: str) -> Any:
    """The texts that a worker tells behind a mark; None if they are not there, or not whole."""
    said, is_whole, _ = text.partition(mark)[2].partition("\n")  # a worker that is asked by several tells all of them
    return json.loads(said) if is_whole else None


def can_tell_of_tasks(text: str) -> bool:
    """Whether the thread that runs the methods waits in Python code of this library, so that it can tell of tasks."""
    mine = [frames for heading, frames in _threads(text) if heading.startswith(_CURRENT)]
    ends = _NEXT_CALL, _AT_THE_FENCE, _NEXT_REQUEST, _REPLIES
    return any(_places(frames[-2:]).endswith(ends) or _AWAITS in _places(frames[-4:]) for frames in mine)


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


def _is_users(frame: re.Match[str]) -> bool:
    return not frame["file"].startswith((_PACKAGE, "<frozen", *_LIBRARIES))
