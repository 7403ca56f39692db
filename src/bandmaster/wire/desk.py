"""What can be seen of a worker, and done to it, from outside while its method runs: stacks, and giving a call up.

::

    worker                                             anybody of the same user on its host
    Desk(Nameplate)  a memfd with a telling name ◄──── look(pid), everybody() find it among its descriptors
      a page: numbers of calls given up          ◄──── give_up(pid, number), and a signal: the method is interrupted
      at its end: the call that runs, if asked   ────► announced(pid)
      behind it: stacks, by faulthandler         ────► stacks(pids), after a signal: also where C code is stuck

No thread and no socket is needed for it, so it works whatever the worker does; and nothing is left when it is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import mmap
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bandmaster.proc import pids
from bandmaster.wire.stacks import readable

__all__ = ["Desk", "Interrupted", "Nameplate", "announced", "everybody", "give_up", "look", "stacks"]

GIVE_UP_SIGNAL = signal.SIGRTMAX - 7
STACKS_SIGNAL = signal.SIGRTMAX - 8
N_SLOTS = mmap.PAGESIZE // 8 - 1  # of numbers; more calls than that are not on their way to one worker
ANNOUNCED = N_SLOTS  # where a worker says which call it runs
STACKS_TIMEOUT_S = 0.5

_MARK = "bandmaster-worker"
_MAX_NAME_NBYTES = 200  # the kernel takes 249
_NAMEPLATE = re.compile(rf"/memfd:{_MARK} ([0-9]+) ([0-9]+) ([0-9]+) ([0-9]+) (.*) \(deleted\)", re.DOTALL)
_MAX_PID = 1 << 22
_MAX_SIZE = 1 << 31
_SETTLED_S = 0.01  # stacks that have not grown for so long are whole


class Interrupted(KeyboardInterrupt):
    """Raised in a worker's method whose call was given up by the controller."""


@dataclass(frozen=True)
class Nameplate:
    """Who a worker is, as anybody can read it beside its descriptors.

    Attributes:
        pid: Its process.
        controller: The process of its controller, 0 when that is on another host.
        rank: Its number in its group.
        world_size: How many the group has.
        group: The group's name.
    """

    pid: int
    controller: int
    rank: int
    world_size: int
    group: str

    def __str__(self) -> str:
        text = f"{_MARK} {self.pid} {self.controller} {self.rank} {self.world_size} {self.group}"
        return text.replace("/", "|").encode()[:_MAX_NAME_NBYTES].decode(errors="ignore")

    @classmethod
    def read(cls, link: str) -> Nameplate | None:
        """From what the kernel shows of a descriptor, which can be anything; None if it is no nameplate."""
        found = _NAMEPLATE.fullmatch(link)
        if found is None:
            return None
        pid, controller, rank, world_size = map(int, found.groups()[:4])
        if not (0 < pid <= _MAX_PID and controller <= _MAX_PID and rank < world_size < _MAX_SIZE):
            return None
        group = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in found[5])
        return cls(pid, controller, rank, world_size, group)


class Desk:
    """The worker's side. Made in its main thread, where signals are handled.

    Attributes:
        running: Number of the call that is running; 0 between calls.
    """

    def __init__(self, nameplate: Nameplate) -> None:
        self.running = 0
        self._fd = os.memfd_create(str(nameplate), os.MFD_CLOEXEC)
        os.ftruncate(self._fd, mmap.PAGESIZE)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, os.O_APPEND)  # stacks go behind the page
        self._slots = memoryview(mmap.mmap(self._fd, mmap.PAGESIZE)).cast("Q")
        faulthandler.register(STACKS_SIGNAL, file=self._fd, all_threads=True, chain=False)
        signal.signal(GIVE_UP_SIGNAL, self._interrupt)

    def begin(self, number: int) -> None:
        """A call is about to run.

        Raises:
            Interrupted: It was given up already; or at any moment until `end`.
        """
        self.running = number
        if self._slots[number % N_SLOTS] == number:
            self._interrupt()

    @contextlib.contextmanager
    def announce(self, number: int) -> Iterator[None]:
        """Let others know that this call runs, who cannot tell from the order of its answers."""
        self._slots[ANNOUNCED] = number
        try:
            yield
        finally:
            self._slots[ANNOUNCED] = 0

    def end(self) -> None:
        """It has ended: it cannot be interrupted any more."""
        self.running = 0

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Interruptions wait until this is left.

        Raises:
            Interrupted: The call was given up, perhaps meanwhile.
        """
        number, self.running = self.running, 0
        try:
            yield
        finally:
            self.begin(number)

    def _interrupt(self, *_: object) -> None:
        number = self.running
        if number and self._slots[number % N_SLOTS] == number:
            self.running = 0  # so that it is interrupted once
            raise Interrupted("the controller gave the call up")


def everybody() -> Iterator[Nameplate]:
    """The workers of this user on this host, whoever their controllers are."""
    yield from (found[0] for found in map(look, pids()) if found is not None)


def look(pid: int) -> tuple[Nameplate, str] | None:
    """A worker's nameplate and the path to its desk; None if there is no such worker or it is not ours to see."""
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                nameplate = Nameplate.read(os.readlink(path))
                if nameplate is not None and nameplate.pid == pid:  # a fork of a worker has its desk too
                    return nameplate, str(path)
    return None


def give_up(pid: int, number: int) -> bool:
    """Interrupt a worker's call, or have it passed over if it has not begun; whether the worker could be told."""
    found = look(pid)
    if found is None:
        return False
    with contextlib.suppress(OSError):
        with open(found[1], "r+b", buffering=0) as desk:
            os.pwrite(desk.fileno(), number.to_bytes(8, "little"), number % N_SLOTS * 8)
        _signal(pid, GIVE_UP_SIGNAL)
        return True
    return False


def announced(pid: int) -> int:
    """Number of the call that a worker says it runs; 0 if it says nothing, or is not there."""
    found = look(pid)
    with contextlib.suppress(OSError):
        if found is not None:
            with open(found[1], "rb", buffering=0) as desk:
                return int.from_bytes(os.pread(desk.fileno(), 8, ANNOUNCED * 8), "little")
    return 0


def stacks(pids: Sequence[int], timeout_s: float = STACKS_TIMEOUT_S) -> dict[int, str]:
    """The Python stacks of workers, innermost frame last, as far as they could be had in time."""
    with contextlib.ExitStack() as close_all:
        desks: dict[int, int] = {}
        for pid in pids:
            found = look(pid)
            with contextlib.suppress(OSError):
                if found is not None:
                    desk = close_all.enter_context(open(found[1], "r+b", buffering=0)).fileno()
                    os.ftruncate(desk, mmap.PAGESIZE)
                    _signal(pid, STACKS_SIGNAL)
                    desks[pid] = desk
        texts = _settled(desks, time.monotonic() + timeout_s)
    return {pid: readable(text) for pid, text in texts.items() if text}


def _signal(pid: int, number: int) -> None:
    """Signal the main thread: one that is sent to the process may reach another thread, and leave this one waiting."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.tgkill(pid, pid, number):
        raise OSError(ctypes.get_errno(), "tgkill")


def _settled(desks: dict[int, int], deadline: float) -> dict[int, str]:
    """What is written on each desk behind its page, once nothing more is added."""
    sizes: dict[int, int] = {}
    while time.monotonic() < deadline:
        before, sizes = sizes, {pid: os.fstat(desk).st_size for pid, desk in desks.items()}
        if before == sizes and all(size > mmap.PAGESIZE for size in sizes.values()):
            break
        time.sleep(_SETTLED_S)  # a signal handler writes there: there is nothing to wait on
    return {
        pid: os.pread(desk, os.fstat(desk).st_size, mmap.PAGESIZE).decode(errors="replace")
        for pid, desk in desks.items()
    }
