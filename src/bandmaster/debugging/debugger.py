"""A pdb in a worker that uses the terminal of ``bandmaster debug``."""

from __future__ import annotations

import contextlib
import dis
import inspect
import itertools
import pdb
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, TextIO, cast

from bandmaster.debugging.terminal import Terminal, say_where
from bandmaster.wire.status_page import WorkerIdentity

_MODULES = ("bandmaster.", "asyncio.")
_COROUTINES = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Debugger(pdb.Pdb):
    """Stops at a ``breakpoint()`` call, and waits for a terminal. Interrupts of the call are deferred meanwhile.

    It ends when the method goes on without breakpoints, when it is quit, or when the method returns.

    Args:
        identity: The worker's identity.
        hold: Returns a context manager that defers interrupts.
    """

    def __init__(self, identity: WorkerIdentity, hold: Callable[[], AbstractContextManager[None]]) -> None:
        self._terminal = Terminal()
        file = cast(TextIO, self._terminal)
        super().__init__(stdin=file, stdout=file, nosigint=True)
        self.use_rawinput = False
        self._identity, self._hold = identity, hold
        self._is_announced = True  # whether the user knows of the last `breakpoint()`
        self._raised_in: FrameType | None = None  # the frame in which the last event was an exception
        self._callers: list[FrameType] = []  # library frames that called the debugged method or coroutine

    def set_trace(self, frame: FrameType | None = None, **options: Any) -> None:
        """Stop at the next line of a frame."""
        assert frame is not None, "the hook passes its caller"
        sys.settrace(None)  # else `bdb` would trace itself, before Python 3.14, if this is reached while stepping
        with self._holding():
            self._note_callers(frame)
            self._is_announced = False
        super().set_trace(frame)  # the last step, as every new frame is traced from then on

    def _note_callers(self, frame: FrameType) -> None:
        frames = [caller for caller, _ in traceback.walk_stack(frame.f_back)]
        self._callers = list(itertools.dropwhile(lambda caller: not _is_library(caller), frames))

    def interaction(self, frame: FrameType | None, *args: Any) -> None:
        """Ask for commands. From the announcement on, interrupts wait until the method goes on."""
        with self._holding():
            self._terminal.open()
            if not self._is_announced and frame is not None:
                self._is_announced = True
                command = f"bandmaster debug {shlex.quote(self._identity.group)} {self._identity.rank}"
                say_where(frame, f"attach a terminal with: {command}")
            super().interaction(frame, *args)

    @contextlib.contextmanager
    def _holding(self) -> Iterator[None]:
        """Defer interrupts; if the call was interrupted meanwhile, the debugger ends."""
        try:
            with self._hold():
                yield
        except BaseException:
            self._leave()
            raise

    def get_stack(self, frame: FrameType | None, traceback: Any) -> tuple[list[tuple[FrameType, int]], int]:
        """The frames that commands show, without the callers of the method."""
        stack, at = super().get_stack(frame, traceback)
        shown = [entry for entry in stack if entry[0] not in self._callers]
        return shown, at - (len(stack) - len(shown))

    def stop_here(self, frame: FrameType) -> bool:
        """Whether to stop in a frame; never in frames of libraries."""
        return bool(super().stop_here(frame)) and not (frame in self._callers or _is_library(frame))

    def dispatch_return(self, frame: FrameType, arg: Any) -> Any:
        """Step over an await, and from the end of a coroutine to its caller; `bdb` does not distinguish the two."""
        is_coroutine, caller = bool(frame.f_code.co_flags & _COROUTINES), frame.f_back
        is_await = is_coroutine and frame is not self._raised_in and _is_at_yield(frame)
        if is_await and self.stopframe is None:
            self.set_next(frame)
        traced = super().dispatch_return(frame, arg)
        if not is_await and self.stopframe in (None, frame):
            is_last = caller in self._callers or (is_coroutine and caller is not None and _is_library(caller))
            self.set_continue() if is_last else self.set_step()
        return traced

    def dispatch_exception(self, frame: FrameType, arg: Any) -> Any:
        """Note that a coroutine may end by an exception."""
        if arg[0] is not StopIteration or arg[2] is not None:  # else the awaited object has ended
            self._raised_in = frame
        return super().dispatch_exception(frame, arg)

    def dispatch_line(self, frame: FrameType) -> Any:
        """Note that an exception was handled."""
        self._raised_in = None
        return super().dispatch_line(frame)

    def set_continue(self) -> None:
        """Go on; without breakpoints, the debugger ends."""
        super().set_continue()
        if not self.breaks:
            self._leave()

    def do_interact(self, arg: str) -> None:
        """Refuse `interact`, whose console would use the worker's own input and output."""
        self.error("interact has no terminal in a worker; type statements at this prompt, such as !x = 1")

    def do_run(self, arg: str) -> None:
        """Refuse `run` and `restart`: the method belongs to a call of the controller."""
        self.error("a method cannot be restarted; c goes on with it, q ends it, and the script can call it again")

    do_restart = do_run

    def set_quit(self) -> None:
        """Make the method raise `bdb.BdbQuit`."""
        super().set_quit()
        self._leave()

    def _leave(self) -> None:
        self._callers, self._raised_in = [], None
        self._terminal.close()


def _is_library(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(_MODULES)


def _is_at_yield(frame: FrameType) -> bool:
    """Whether a frame is suspended: its last instruction is a yield, or, in some versions of Python, next to one."""
    code, last = frame.f_code.co_code, frame.f_lasti
    return any(dis.opname[code[at]].startswith("YIELD") for at in (last - 2, last, last + 2) if 0 <= at < len(code))
