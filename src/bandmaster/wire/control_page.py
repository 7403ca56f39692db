"""The page that each worker shares with processes of the same user on its host, as those use it while a method runs.

::

    worker                                             any process of the same user on its host
    ControlPage(identity)  a memfd whose name says who ◄── find(pid), find_all() look among descriptors in /proc
      a page: numbers of calls to interrupt            ◄── interrupt(pid, number), then a signal
      at its end: the call that runs, if announced     ──► announced(pid)
        and the failed call after which it may go on   ◄── resume(pid, number)
      behind it: stacks, written by faulthandler       ──► stacks(pids), after a signal: also where C code is stuck
      behind those: tasks of its event loop                after the signal of interrupt: if Python waits, and can tell

It takes no thread and no socket, so it works whatever the worker does, and nothing is left when the worker is gone.
The worker's side is `bandmaster.worker_process.control_page`.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from bandmaster.errors.failure import IN_DEBUGGER
from bandmaster.platform.proc import descriptors, pids
from bandmaster.wire.stacks import can_tell_of_tasks, readable, tells_of_tasks

__all__ = [
    "AGENT",
    "ANNOUNCED",
    "DEBUGGER",
    "INTERRUPT_SIGNAL",
    "N_SLOTS",
    "RESUMED",
    "STACKS_SIGNAL",
    "WorkerIdentity",
    "announce",
    "announced",
    "announcement",
    "find",
    "find_all",
    "in_debuggers",
    "interrupt",
    "resume",
    "stacks",
]

_LAST_SIGNAL = int(getattr(signal, "SIGRTMAX", 64))  # there is none on systems where no worker has its own process
INTERRUPT_SIGNAL = _LAST_SIGNAL - 7
STACKS_SIGNAL = _LAST_SIGNAL - 8
N_SLOTS = mmap.PAGESIZE // 8 - 2  # of numbers; more calls than that are not on their way to one worker
ANNOUNCED = N_SLOTS  # where a worker says which call it runs
RESUMED = N_SLOTS + 1  # where a worker is told that all ranks have ended a call that it has failed
STACKS_TIMEOUT_S = 0.5
AGENT, DEBUGGER = "bandmaster-agent", "bandmaster-in-debugger"  # marks of `announce`

_MARK = "bandmaster-worker"
_DETACHED = "bandmaster-detached"  # in place of it
_MAX_NAME_NBYTES = 200  # the kernel takes 249
_NAME = re.compile(rf"/memfd:({_MARK}|{_DETACHED}) ([0-9]+) ([0-9]+) ([0-9]+) ([0-9]+) (.*) \(deleted\)", re.DOTALL)
_MAX_PID = 1 << 22
_MAX_SIZE = 1 << 31
_SETTLED_S = 0.01  # stacks that have not grown for so long are whole


@dataclass(frozen=True)
class WorkerIdentity:
    """Who a worker is, as any process of the same user can read it in /proc.

    Attributes:
        pid: Its process.
        controller: The process of its controller, 0 when that is on another host.
        rank: Its rank in its group.
        world_size: Number of ranks of the group.
        group: The group's name.
        is_detached: Whether the worker outlives its controller.
    """

    pid: int
    controller: int
    rank: int
    world_size: int
    group: str
    is_detached: bool = False

    def __str__(self) -> str:
        mark = _DETACHED if self.is_detached else _MARK
        text = f"{mark} {self.pid} {self.controller} {self.rank} {self.world_size} {self.group}"
        return text.replace("/", "|").encode()[:_MAX_NAME_NBYTES].decode(errors="ignore")

    @classmethod
    def read(cls, link: str) -> WorkerIdentity | None:
        """Parse the name that the kernel shows of a descriptor; None if it is not that of a control page."""
        found = _NAME.fullmatch(link)
        if found is None:
            return None
        pid, controller, rank, world_size = map(int, found.groups()[1:5])
        if not (0 < pid <= _MAX_PID and controller <= _MAX_PID and rank < world_size < _MAX_SIZE):
            return None
        group = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in found[6])
        return cls(pid, controller, rank, world_size, group, found[1] == _DETACHED)


def announce(mark: str, text: str) -> int:
    """Show a text to other processes under a mark, as long as the returned descriptor is open, which the caller owns.

    It is the name of an anonymous file: other users can neither read nor change it.
    """
    return os.memfd_create(f"{mark} {text}".replace("/", "|")[:_MAX_NAME_NBYTES], os.MFD_CLOEXEC)


def announcement(pid: int, mark: str) -> str | None:
    """Return the text that a process of this host shows under a mark; None if it shows none."""
    for _, name in descriptors(pid):
        if name.startswith(f"/memfd:{mark} "):
            text = name.partition(" ")[2].removesuffix(" (deleted)")
            return "".join(c for c in text if c.isprintable())
    return None


def in_debuggers(pids: Iterable[int]) -> set[int]:
    """Return those of some processes of this host whose debuggers wait, or are attached to."""
    return {pid for pid in pids if announcement(pid, DEBUGGER) is not None}


def find_all() -> Iterator[WorkerIdentity]:
    """The workers of this user on this host, whoever their controllers are."""
    yield from (found[0] for found in map(find, pids()) if found is not None)


def find(pid: int) -> tuple[WorkerIdentity, str] | None:
    """A worker's identity and the path to its page; None if there is no such worker or it is not ours to see."""
    for path, name in descriptors(pid):
        identity = WorkerIdentity.read(name)
        if identity is not None and identity.pid == pid:  # a fork of a worker has its page too
            return identity, path
    return None


def interrupt(pid: int, number: int) -> bool:
    """Interrupt a worker's call, or have the worker skip it if it has not begun; whether the worker could be told."""
    with contextlib.suppress(OSError):
        if _write(pid, number % N_SLOTS, number):
            _signal(pid, INTERRUPT_SIGNAL)
            return True
    return False


def resume(pid: int, number: int) -> None:
    """Let a worker begin the next call that has failed a call, which all ranks have ended."""
    with contextlib.suppress(OSError):
        _write(pid, RESUMED, number)


def _write(pid: int, slot: int, number: int) -> bool:
    """Write a number to a worker's page; whether there is such a worker."""
    found = find(pid)
    if found is not None:
        with open(found[1], "r+b", buffering=0) as page:
            os.pwrite(page.fileno(), number.to_bytes(8, "little"), slot * 8)
    return found is not None


def announced(pid: int) -> int:
    """Number of the call that a worker has announced that it runs; 0 if it has announced none, or is not there."""
    found = find(pid)
    with contextlib.suppress(OSError):
        if found is not None:
            with open(found[1], "rb", buffering=0) as page:
                return int.from_bytes(os.pread(page.fileno(), 8, ANNOUNCED * 8), "little")
    return 0


def stacks(pids: Sequence[int], timeout_s: float = STACKS_TIMEOUT_S) -> dict[int, str]:
    """The Python stacks of workers, innermost frame last, as far as they could be had in time."""
    with contextlib.ExitStack() as close_all:
        pages: dict[int, int] = {}
        for pid in pids:
            found = find(pid)
            with contextlib.suppress(OSError):
                if found is not None:
                    page = close_all.enter_context(open(found[1], "r+b", buffering=0)).fileno()
                    os.ftruncate(page, mmap.PAGESIZE)
                    _signal(pid, STACKS_SIGNAL)
                    pages[pid] = page
        deadline = time.monotonic() + timeout_s
        texts = _settled(pages, deadline)
        waiting = {pid: page for pid, page in pages.items() if can_tell_of_tasks(texts[pid])}
        for pid in waiting:
            with contextlib.suppress(OSError):
                _signal(pid, INTERRUPT_SIGNAL)
        while not all(map(tells_of_tasks, (told := _texts(waiting)).values())) and time.monotonic() < deadline:
            time.sleep(_SETTLED_S)
        texts.update(told)
        for page in pages.values():  # an interrupt is not to tell of tasks
            os.ftruncate(page, mmap.PAGESIZE)
    shown = {pid: readable(text) for pid, text in texts.items() if text}
    heading = f"{IN_DEBUGGER}: bandmaster debug attaches to it, and deadlines wait\n"
    return {**shown, **{pid: heading + shown.get(pid, "") for pid in in_debuggers(pids)}}


def _signal(pid: int, number: int) -> None:
    """Signal the main thread: one that is sent to the process may reach another thread, and leave this one waiting."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.tgkill(pid, pid, number):
        raise OSError(ctypes.get_errno(), "tgkill")


def _settled(pages: dict[int, int], deadline: float) -> dict[int, str]:
    """The text behind each page, once nothing more is added."""
    sizes: dict[int, int] = {}
    while time.monotonic() < deadline:
        before, sizes = sizes, {pid: os.fstat(page).st_size for pid, page in pages.items()}
        if before == sizes and all(size > mmap.PAGESIZE for size in sizes.values()):
            break
        time.sleep(_SETTLED_S)  # a signal handler writes there: there is nothing to wait on
    return _texts(pages)


def _texts(pages: dict[int, int]) -> dict[int, str]:
    """The text behind each page."""
    return {
        pid: os.pread(page, os.fstat(page).st_size, mmap.PAGESIZE).decode(errors="replace")
        for pid, page in pages.items()
    }
