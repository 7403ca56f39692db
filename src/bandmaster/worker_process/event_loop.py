"""A worker's event loop in a thread of its own, and its tasks: how many, where they wait, and why some have died."""

from __future__ import annotations

import asyncio
import gc
import traceback
import weakref
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from threading import get_ident
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

from bandmaster.platform.limits import start_thread
from bandmaster.wire.status_page import N_TASKS, ActivityWords

MOST_STACKS = 8  # that are told of other tasks
MOST_DEAD = 8
MOST_FRAMES = 100
_PACKAGE = f"{Path(__file__).parents[1]}/"
_CHAIN = (("cr_frame", "cr_await"), ("ag_frame", "ag_await"), ("gi_frame", "gi_yieldfrom"))
_KINDS = (CoroutineType, AsyncGeneratorType, GeneratorType)


class EventLoopThread:
    """An event loop in a thread of its own, which counts its tasks, and tells where they wait.

    Tasks that a method leaves behind continue between calls. It also works if the calling thread runs an event loop
    itself, as in a notebook.

    Attributes:
        loop: The event loop, for what runs on it.

    Args:
        activity: Shows how many tasks there are.
    """

    def __init__(self, activity: ActivityWords) -> None:
        self.loop, self._words = asyncio.new_event_loop(), activity.words
        self.loop.set_task_factory(self._made)
        self.loop.set_exception_handler(self._is_collected)
        self._failed: deque[weakref.ref[asyncio.Task[Any]]] = deque(maxlen=MOST_DEAD)
        self._collected: deque[str] = deque(maxlen=MOST_DEAD)  # what is known of tasks that were collected
        self._is_closed = False
        try:
            self._thread = start_thread("bandmaster-async-methods", self._serve)
        except BaseException:
            self.loop.close()
            raise

    def _serve(self) -> None:
        while not self._is_closed:
            with suppress(SystemExit, KeyboardInterrupt):  # of a coroutine, raised in its caller too: the loop goes on
                self.loop.run_forever()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function on the event loop: now, if this is its thread."""
        if get_ident() == self._thread.ident:
            function(*args)
        else:
            self.loop.call_soon_threadsafe(function, *args)

    def close(self) -> None:
        """Cancel all tasks and end the thread."""
        self._is_closed = True
        self.loop.call_soon_threadsafe(self._end)  # in its own thread: another loop may run in this one
        self._thread.join()
        self.loop.close()

    def _end(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.call_soon(self.loop.stop)  # behind what that has scheduled

    def told(self, awaited: Coroutine[Any, Any, Any] | None) -> tuple[str, str]:
        """Tell where a coroutine waits, and of the other tasks: two texts. Any thread may call this.

        Tasks that wait at the same place are counted. Those that have died are told of as long as nobody has seen why.
        """
        others = [task.get_coro() for task in asyncio.all_tasks(self.loop) if task.get_coro() is not awaited]
        stacks = Counter(filter(None, map(_stack, others))).most_common()  # none of those that wait for items
        said = [
            f"  in {'another task' if n == 1 else f'{n} other tasks'}:\n{stack}" for stack, n in stacks[:MOST_STACKS]
        ]
        if n_more := sum(n for _, n in stacks[MOST_STACKS:]):
            said.append(f"  and {n_more} more tasks")
        failed: list[Any] = [known() for known in list(self._failed)]
        unseen = [task for task in failed if task is not None and task._log_traceback]
        said += [*self._collected, *[_died(f"a task of {_name(task)}", task._exception) for task in unseen]]
        return _stack(awaited), "\n".join(said)

    def _made(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, **options)
        self._words[N_TASKS] += 1
        task.add_done_callback(self._is_done)
        return task

    def _is_done(self, task: asyncio.Task[Any]) -> None:
        self._words[N_TASKS] -= 1
        if not task.cancelled() and task._exception is not None:  # exception() would count as seen
            self._failed.append(weakref.ref(task))

    def _is_collected(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A task was collected whose exception nobody had seen, or a callback has failed."""
        if context.get("exception") is not None:
            task = context.get("future")
            what = f"a task of {_name(task)}" if isinstance(task, asyncio.Task) else "a callback of the event loop"
            self._collected.append(_died(what, context["exception"]))
        loop.default_exception_handler(context)


async def ended(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Wait until a coroutine that was started on this event loop has ended."""
    for task in asyncio.all_tasks():
        if task.get_coro() is coroutine:
            await asyncio.wait([task])


def _died(what: str, error: BaseException) -> str:
    return f"  {what} has died, and nobody has seen why:\n{''.join(traceback.format_exception(error)).rstrip()}"


def _name(task: asyncio.Task[Any]) -> str:
    return str(getattr(task.get_coro(), "__qualname__", task.get_name()))


def _stack(awaitable: Any) -> str:
    """The frames of a coroutine, and of those that it awaits in turn, as far as they are known and not ours."""
    frames: list[str] = []
    for _ in range(MOST_FRAMES):
        known = next((names for names in _CHAIN if hasattr(awaitable, names[0])), None)
        if known is None:  # such as what `__anext__` returns, which refers to its generator
            awaitable = next((one for one in gc.get_referents(awaitable) if isinstance(one, _KINDS)), None)
        else:
            frame, awaitable = getattr(awaitable, known[0]), getattr(awaitable, known[1])
            if frame is not None and not (code := frame.f_code).co_filename.startswith(_PACKAGE):
                frames.append(f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}')
        if awaitable is None:
            break
    return "\n".join(frames)
