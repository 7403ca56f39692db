"""What Linux knows of processes that have ended: how, and whether memory ran out."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from bandmaster.cgroups import Cgroups
from bandmaster.wire.steady import SteadyLock

__all__ = ["Ended", "MemoryPressure", "memory_file", "prctl"]

GiB = 1 << 30


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes:
        status: As `os.wait4` gives it.
        peak_nbytes: The most memory that it had at once.
        out_of_memory: What the kernel says about memory that ran out, "" if nothing.
    """

    status: int
    peak_nbytes: int
    out_of_memory: str

    def in_words(self) -> str:
        """Exit code or signal by its name, and for what the kernel may have killed, what is known about memory."""
        code = os.waitstatus_to_exitcode(self.status)
        if code >= 0:
            return f"exit code {code}"
        text = f"killed by {signal.Signals(-code).name}"
        if code != -signal.SIGKILL:
            return text
        return f"{text}; it had up to {self.peak_nbytes / GiB:.1f} GiB of {_limit()}{self.out_of_memory}"


class MemoryPressure:
    """How often the kernel has killed a process because memory ran out, since this was made or asked the last time."""

    def __init__(self) -> None:
        self._seen = dict(_out_of_memory_kills())

    def words(self) -> str:
        """For a message, "" if it has not."""
        before, self._seen = self._seen, dict(_out_of_memory_kills())
        places = [place for place, n in self._seen.items() if n > before.get(place, n)]
        return f", and the kernel killed for want of memory meanwhile ({', '.join(places)})" if places else ""


@contextlib.contextmanager
def memory_file(content: bytes) -> Iterator[IO[bytes]]:
    """A file without a name, to be read from its beginning by whoever is given its descriptor."""
    with SteadyLock():  # so that Ctrl-C leaves no descriptor that nobody closes
        made = open(os.memfd_create("bandmaster-spawn", os.MFD_CLOEXEC), "w+b", buffering=0)  # noqa: SIM115
    with made as file:
        view = memoryview(content)
        while view:
            view = view[file.write(view) :]
        file.seek(0)
        yield file


def prctl(operation: int, argument: int) -> None:
    """The system call."""
    ctypes.CDLL(None, use_errno=True).prctl(operation, argument)


def _out_of_memory_kills() -> Iterator[tuple[str, int]]:
    events = Cgroups().directory("memory") / "memory.events"
    for place, path in (("on this machine", Path("/proc/vmstat")), ("in its control group", events)):
        with contextlib.suppress(OSError):
            counts = dict(line.split() for line in path.read_text().splitlines())
            if "oom_kill" in counts:
                yield place, int(counts["oom_kill"])


def _limit() -> str:
    limit = Cgroups().memory()
    if limit is not None:
        return f"the {limit.most / GiB:.1f} GiB that its control group may have"
    return f"the {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / GiB:.1f} GiB that this machine has"
