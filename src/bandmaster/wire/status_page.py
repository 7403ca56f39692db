"""The status page of a worker: shared memory that shows what the worker runs, and by which others interrupt it.

::

    worker: StatusPage(identity)                         any process of the same user on its host
      a memfd whose name says who the worker is       ◄── find(pid), find_all() look among descriptors in /proc
      words: the method that runs, and since when      ──► Activity.of(pid)
      word: the failed call after which it may go on  ◄── resume(pid, number)
      words: numbers of calls to interrupt            ◄── interrupt(pid, number), then a signal
      the names of methods
      behind the page: stacks, tasks, collectives      ──► stacks(pids), after a signal to the thread that writes them
      or the main thread's stack, by faulthandler          after a signal to that, where C code holds the GIL

To interrupt, the page needs no thread and no socket, so it works whatever the worker does; nothing is left when the
worker is gone. The version of the layout is in the name, so that processes with another version do not misread it.
"""

from __future__ import annotations

import _weakrefset
import contextlib
import ctypes
import errno
import faulthandler
import fcntl
import json
import mmap
import os
import re
import signal
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from types import FrameType
from typing import Any

from bandmaster.contract import CONSTRUCT, Signs
from bandmaster.errors import ResourceError
from bandmaster.errors.failure import IN_DEBUGGER
from bandmaster.platform.limits import start_thread
from bandmaster.platform.locks import SigintSafeLock
from bandmaster.platform.proc import cpu_s_of_family, descriptors, is_runnable, pids, stat
from bandmaster.wire.stacks import END, TOLD, is_told, of_this_process, readable

_LAST_SIGNAL = int(getattr(signal, "SIGRTMAX", 64))  # there is none on systems where no worker has its own process
INTERRUPT_SIGNAL = _LAST_SIGNAL - 7
STACKS_SIGNAL = _LAST_SIGNAL - 8

# The layout: words of 8 bytes, then the names of methods, each followed by a zero byte; the first name has the index 1.
# The spare word is for workers of other kinds; the last one is the thread that writes stacks, 0 for none.
RUNNING, SINCE, N_MORE, N_TASKS, SPARE, RESUMED, TELLER = range(7)
N_SLOTS = 512  # words for the numbers of calls to interrupt; fewer calls than that are on their way to one worker
_SLOTS_AT = 8
_NAMES_AT = (_SLOTS_AT + N_SLOTS) * 8
PAGE_NBYTES = 16 * 1024
_ACTIVITY = struct.Struct("<QdQQ")  # the first words

MAX_NAME_NBYTES = 200  # of an identity, of which the kernel takes 249, and of a method
TOLD_TIMEOUT_S, STACKS_TIMEOUT_S = 0.8, 1.0  # until faulthandler is asked, and in all
MOST_TOLD_NBYTES = 128 * 1024  # of memory behind the page, before a worker writes again
_BLOCK_NBYTES = 512  # in which Linux counts the memory of a file
AGENT, DEBUGGER = "bandmaster-agent", "bandmaster-in-debugger"  # marks of `announce`
AGAIN_S = 0.02  # after an interrupt that was put off
IMPORTS = "<frozen importlib._bootstrap>"  # the file of the frames of an import
# Python lets no exception out of a finalizer, and a module that is imported in part cannot be used later.
_NOT_IN = {IMPORTS, weakref.__file__, _weakrefset.__file__}
_PAUSE_S = 0.001
_SETTLED_S = 0.01  # stacks of faulthandler that have not grown for so long are whole
_MOST_READS = 8

_MARK = "bandmaster-worker-4"
_DETACHED = "bandmaster-detached-4"  # in place of it
_MEMFD, _DELETED = "/memfd:", " (deleted)"  # around the name of an anonymous file in /proc
_NUMBERS = " ".join(["([0-9]+)"] * 5)
_NAME = re.compile(rf"{_MEMFD}({_MARK}|{_DETACHED}) {_NUMBERS} (.*) \(deleted\)", re.DOTALL)
_MAX_PID = 1 << 22
_MAX_SIZE = 1 << 31


# --- who a worker is ---


@dataclass(frozen=True)
class WorkerIdentity:
    """The identity of a worker, as any process of the same user can read it in /proc.

    Attributes:
        pid: Its process.
        controller: The process of its controller, 0 when that is on another host.
        controllers_start: The start time of that process, in clock ticks since boot, as a pid is used again.
        rank: Its rank in its group.
        world_size: Number of ranks of the group.
        group: The group's name.
        is_detached: Whether the worker outlives its controller.
    """

    pid: int
    controller: int
    controllers_start: int
    rank: int
    world_size: int
    group: str
    is_detached: bool = False

    @classmethod
    def here(cls, rank: int, world_size: int, group: str, is_detached: bool = False) -> WorkerIdentity:
        """The identity of a worker to come, whose controller is this process; its pid is 0."""
        found = stat(os.getpid())
        return cls(0, os.getpid(), found.start if found else 0, rank, world_size, group, is_detached)

    def __str__(self) -> str:
        mark = _DETACHED if self.is_detached else _MARK
        numbers = f"{self.pid} {self.controller} {self.controllers_start} {self.rank} {self.world_size}"
        return _file_name(f"{mark} {numbers} {self.group}")

    @classmethod
    def read(cls, name: str) -> WorkerIdentity | None:
        """Parse the name of a descriptor in /proc; None if it is not that of a status page."""
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        pid, controller, start, rank, world_size = map(int, found.groups()[1:6])
        if not (0 < pid <= _MAX_PID and controller <= _MAX_PID and rank < world_size < _MAX_SIZE):
            return None
        group = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in found[7])
        return cls(pid, controller, start, rank, world_size, group, found[1] == _DETACHED)


def _file_name(text: str) -> str:
    return text.replace("/", "|").encode()[:MAX_NAME_NBYTES].decode(errors="ignore")


def announce(mark: str, text: str) -> int:
    """Show a text to other processes under a mark, as long as the returned descriptor is open, which the caller owns.

    It is the name of an anonymous file: other users can neither read nor change it.
    """
    return os.memfd_create(_file_name(f"{mark} {text}"), os.MFD_CLOEXEC)


def announcement(pid: int, mark: str) -> str | None:
    """Return the text that a process of this host shows under a mark; None if it shows none."""
    for _, name in descriptors(pid):
        if name.startswith(f"{_MEMFD}{mark} "):
            return "".join(c for c in name.partition(" ")[2].removesuffix(_DELETED) if c.isprintable())
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


# --- the side of other processes ---


@contextlib.contextmanager
def opened(pid: int, mode: str) -> Iterator[int]:
    """The descriptor of a worker's page within the block.

    Raises:
        OSError: There is no such worker, or it is not ours to see.
    """
    found = find(pid)
    if found is None:
        raise ProcessLookupError(errno.ESRCH, "no worker has this pid")
    with open(found[1], mode, buffering=0) as page:
        yield page.fileno()


def interrupt(pid: int, number: int) -> None:
    """Interrupt a worker's call, or have the worker skip it if it has not begun."""
    with contextlib.suppress(OSError):
        _write(pid, _SLOTS_AT + number % N_SLOTS, number)
        _signal(pid, INTERRUPT_SIGNAL)


def resume(pid: int, number: int) -> None:
    """Let a worker begin the next call that has failed a call, which all ranks have ended."""
    with contextlib.suppress(OSError):
        _write(pid, RESUMED, number)


def _write(pid: int, word: int, number: int) -> None:
    with opened(pid, "r+b") as page:
        os.pwrite(page, number.to_bytes(8, "little"), word * 8)


def stacks(pids: Sequence[int]) -> dict[int, str]:
    """The Python stacks of workers, innermost frame last, as far as they could be had in time."""
    with contextlib.ExitStack() as close_all:
        pages: dict[int, tuple[int, int]] = {}  # each with its size: what is written from now on is behind that
        for pid in pids:
            with contextlib.suppress(OSError):
                page = close_all.enter_context(opened(pid, "rb"))
                if (process := stat(pid)) is None or process.state in "tTZX":
                    continue  # it can answer nothing
                pages[pid] = page, max(PAGE_NBYTES, os.fstat(page).st_size)
                if teller := _word(page, TELLER):
                    _signal(pid, STACKS_SIGNAL, teller)
        begun = time.monotonic()
        texts = _texts(pages, begun + TOLD_TIMEOUT_S, _PAUSE_S, lambda text, _: is_told(text))
        silent = {pid: page for pid, page in pages.items() if not texts[pid]}
        for pid in silent:
            _signal(pid, STACKS_SIGNAL)
        deadline = begun + STACKS_TIMEOUT_S
        texts.update(_texts(silent, deadline, _SETTLED_S, lambda text, before: text != "" and text == before))
        shown = {pid: readable(text, _word(pages[pid][0], RUNNING) != 0) for pid, text in texts.items() if text}
    heading = f"{IN_DEBUGGER}: bandmaster debug attaches to it, and deadlines wait\n"
    return {**shown, **{pid: heading + shown.get(pid, "") for pid in in_debuggers(pids)}}


def _texts(
    pages: dict[int, tuple[int, int]], deadline: float, pause_s: float, is_whole: Callable[[str, str], bool]
) -> dict[int, str]:
    """The text behind each page, once each is whole, told from it and what was read before; or the time is over.

    Others may read there, too: zero bytes stand for texts that the worker has removed.
    """
    texts: dict[int, str] = {}
    while True:
        before, texts = texts, {pid: _text(*page) for pid, page in pages.items()}
        if all(is_whole(text, before.get(pid, "")) for pid, text in texts.items()) or time.monotonic() >= deadline:
            return texts
        time.sleep(pause_s)  # there is nothing to wait on


def _text(page: int, start: int) -> str:
    return os.pread(page, max(0, os.fstat(page).st_size - start), start).decode(errors="replace")


def _word(page: int, word: int) -> int:
    return int.from_bytes(os.pread(page, 8, word * 8), "little")


def _signal(pid: int, number: int, thread: int = 0) -> None:
    """Signal a thread, by default the main thread: what is sent to the process may reach another one than meant.

    A thread that has ended is left alone.
    """
    ctypes.CDLL(None).tgkill(pid, thread or pid, number)


@dataclass(frozen=True)
class Activity:
    """The activity of a worker at one moment.

    Attributes:
        method: Name of the running method, with its role if it has one; "" if the worker waits for calls.
        seconds: How long the method has been running; 0 if none is.
        n_more: Number of calls that run besides, where async methods overlap.
        n_tasks: Number of tasks of the event loop of async methods.
    """

    method: str
    seconds: float = 0.0
    n_more: int = 0
    n_tasks: int = 0

    @classmethod
    def of(cls, pid: int) -> Activity | None:
        """Read the page of a worker; None if the process is gone, not ours to see, or has no such page."""
        with contextlib.suppress(OSError), opened(pid, "rb") as page:
            return cls._read(page)
        return None

    @classmethod
    def _read(cls, page: int) -> Activity | None:
        """Read the words until two readings agree: the worker writes them one after the other."""
        words = os.pread(page, _ACTIVITY.size, 0)
        for _ in range(_MOST_READS):
            before, words = words, os.pread(page, _ACTIVITY.size, 0)
            if before == words:
                break
        if len(words) < _ACTIVITY.size:  # the worker is just making the page
            return None
        running, since, n_more, n_tasks = _ACTIVITY.unpack(words)
        if not running:
            return cls("", n_tasks=n_tasks)
        names = os.pread(page, PAGE_NBYTES - _NAMES_AT, _NAMES_AT).split(b"\0")
        if running > len(names):
            return None
        method = names[running - 1].decode(errors="replace")
        shown = "".join(c if c.isprintable() else "?" for c in method)
        return cls(shown, max(0.0, time.monotonic() - since), n_more, n_tasks)


def signs_of(pid: int) -> Signs:
    """The signs of life of a worker."""
    process, activity = stat(pid), Activity.of(pid) or Activity("")
    state = "" if process is None or process.state in "ZX" else process.state
    if state == "S" and is_runnable(pid):
        state = "R"
    return Signs(state, cpu_s_of_family(pid), activity.method, activity.seconds)


# --- the side of the worker ---


class Interrupted(KeyboardInterrupt):
    """Raised in the running method of a worker when the controller interrupts its call."""


class StatusPage:
    """The status page of this worker. Calls can be interrupted if the main thread makes it, which then runs them.

    Args:
        identity: The worker's identity, which the name of the page's descriptor shows to other processes.

    Attributes:
        activity: Shows which method runs.
        words: The words of the page.
        running: Number of the call that may be interrupted; 0 between calls and while interrupts are deferred.
        told: Functions of what is told behind stacks, by the marks of their values; see `bandmaster.wire.stacks`.
    """

    def __init__(self, identity: WorkerIdentity) -> None:
        self.running, self.told = 0, dict[str, Callable[[], Any]]()
        self._put_off: SimpleQueue[None] | None = None  # an item for each interrupt that has to come again
        libc = ctypes.CDLL(None)
        for number in (INTERRUPT_SIGNAL, STACKS_SIGNAL):  # before others find the page: by default these signals kill
            libc.signal(number, ctypes.c_void_p(signal.SIG_IGN))
        self._fd = os.memfd_create(str(identity), os.MFD_CLOEXEC)
        os.ftruncate(self._fd, PAGE_NBYTES)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, os.O_APPEND)  # stacks are appended after the page
        page = memoryview(mmap.mmap(self._fd, PAGE_NBYTES))
        self.words, self.activity = page.cast("Q"), ActivityWords(page)
        # Of the main thread alone: others may run Python code, whose frames must not be read while they change.
        faulthandler.register(STACKS_SIGNAL, file=self._fd, all_threads=False, chain=False)
        with contextlib.suppress(ResourceError):
            start_thread("bandmaster-stacks", self._tell)
        if threading.current_thread() is threading.main_thread():  # where Python handles signals
            signal.signal(INTERRUPT_SIGNAL, lambda _, frame: self._interrupt(frame))

    def begin(self, number: int) -> None:
        """Allow a call to be interrupted from now on.

        Args:
            number: Number of the call.

        Raises:
            Interrupted: The controller interrupted the call, perhaps before it began. A signal handler may raise this
                at any moment until `end`.
        """
        self.running = number
        if self.words[_SLOTS_AT + number % N_SLOTS] == number:
            self._interrupt()

    def end(self) -> None:
        """Stop allowing the call to be interrupted."""
        self.running = 0

    def is_resumed(self, number: int) -> bool:
        """Whether all ranks have ended a call that has failed here."""
        return self.words[RESUMED] == number

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Defer interrupts until the block is left.

        Raises:
            Interrupted: The call was interrupted before or within the block.
        """
        number, self.running = self.running, 0
        try:
            yield
        finally:
            if number and not self.running:  # else another thread has held back a call that has ended since
                self.begin(number)

    def _tell(self) -> None:
        """Write the stacks each time that the thread which runs this is asked.

        It reads frames as Python code does, which meets none that is half made; faulthandler, which also writes where
        C code holds the GIL, may meet one, and crash.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # of this thread alone
        self.words[TELLER] = threading.get_native_id()
        with contextlib.suppress(OSError):  # the user's code has closed all descriptors
            while signal.sigwait([STACKS_SIGNAL]):
                file = os.fstat(self._fd)
                if file.st_blocks * _BLOCK_NBYTES > PAGE_NBYTES + MOST_TOLD_NBYTES:
                    os.ftruncate(self._fd, PAGE_NBYTES)
                    os.ftruncate(self._fd, file.st_size)  # a hole: the place of a text tells readers that it is new
                self._write(TOLD + of_this_process())
                for mark, tell in self.told.items():
                    with contextlib.suppress(Exception):  # stacks can do without
                        self._write(f"{mark}{json.dumps(tell())}\n")
                self._write(END)

    def _write(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def _interrupt(self, frame: FrameType | None = None) -> None:
        number = self.running
        if number and self.words[_SLOTS_AT + number % N_SLOTS] == number:
            while frame is not None:
                if frame.f_code.co_name == "__del__" or frame.f_code.co_filename in _NOT_IN:
                    self._signal_again()  # until it is over
                    return
                frame = frame.f_back
            if (lock := SigintSafeLock.of_main_thread()) is not None:  # the method calls another group
                lock.defer(self._interrupt)
                return
            self.running = 0  # so that the call is interrupted only once
            raise Interrupted("the controller cancelled the call")

    def _signal_again(self) -> None:
        """Signal this thread again in a moment, by one thread for good."""
        if self._put_off is None:
            self._put_off = SimpleQueue()
            start_thread("bandmaster-interrupts", _signal_later, self._put_off, threading.get_ident())
        self._put_off.put(None)


def _signal_later(put_off: SimpleQueue[None], thread: int) -> None:
    while True:
        put_off.get()
        time.sleep(AGAIN_S)
        signal.pthread_kill(thread, INTERRUPT_SIGNAL)


class ActivityWords:
    """Shows which method runs. `Executor.call` writes the words itself, since a call of a method takes as long again.

    Attributes:
        words: Word `RUNNING` is the index of the running method, 0 if none runs.
        times: The same memory; word `SINCE` is the moment at which the method began, by `time.monotonic`. It is
            written first.
        indices: The index of each method by its name; a name that is looked up for the first time gets one.

    Args:
        page: The memory of a status page; by default memory that nobody else reads.
    """

    __slots__ = ("indices", "times", "words")

    def __init__(self, page: memoryview | None = None) -> None:
        page = memoryview(bytearray(PAGE_NBYTES)) if page is None else page
        self.words, self.times = page.cast("Q"), page.cast("d")
        self.indices = _Indices(page)

    def rename(self, method: str) -> None:
        """Show the running call under the name of a method of the user's, since when it has been running."""
        self.words[RUNNING] = self.indices[method]

    def show(self, running: Mapping[Any, tuple[str, float]]) -> None:
        """Show the first of the methods that run, given with the moments since when, and how many more there are."""
        method, self.times[SINCE] = next(iter(running.values()), ("", 0.0))
        self.words[N_MORE] = max(0, len(running) - 1)
        self.words[RUNNING] = self.indices[method] if method else 0

    def end(self) -> None:
        """Show that no method runs."""
        self.words[RUNNING] = 0


class _Indices(dict[str, int]):
    """Indices of names; a new name is written to the page. Names for which there is no room share the first index."""

    def __init__(self, page: memoryview) -> None:
        self._page, self._end, self._n_names = page, _NAMES_AT, 0
        self._add("(another method)")

    def __missing__(self, method: str) -> int:
        self[method] = index = self._add("__init__" if method == CONSTRUCT else method.replace("/", "."))
        return index

    def _add(self, name: str) -> int:
        text = name.encode(errors="replace")[:MAX_NAME_NBYTES].replace(b"\0", b"?")
        end = self._end + len(text) + 1
        if end > PAGE_NBYTES:
            return 1
        self._page[self._end : end - 1] = text
        self._end, self._n_names = end, self._n_names + 1
        return self._n_names
