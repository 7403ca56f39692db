"""How a terminal reaches the debugger of a worker on its host: an abstract Unix socket, which is there while it waits.

::

    worker                                                    bandmaster debug, as the same user
    breakpoint() ── listens on @bandmaster-debugger-<pid> ◄── connects; both look at who the other is
      {"text": "> file(3)method()...(Pdb) "} ──────────────► shows it, and reads a line
                                            "p self\\n"   ◄── sends it

Lines of JSON go both ways. That a worker waits is shown by one of its descriptors, an anonymous file of a certain name:
other users can give sockets any names, and so have any lines in /proc/net/unix, but cannot change its descriptors.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

from bandmaster.failure import IN_DEBUGGER

__all__ = ["announced", "connected", "is_trusted", "listening", "pids_in_debuggers", "with_debuggers"]

_PREFIX = "bandmaster-debugger-"
_ANNOUNCED = "bandmaster-in-debugger"


def listening(pid: int) -> socket.socket:
    """The socket at which the debugger of this process can be reached. The caller owns it.

    Raises:
        OSError: It could not be made.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(f"\0{_PREFIX}{pid}")
        sock.listen(1)
    except BaseException:
        sock.close()
        raise
    return sock


def connected(pid: int) -> socket.socket:
    """Connect to the debugger of a process. The caller owns the socket.

    Raises:
        OSError: No debugger waits there, or it is not that of this process, or not one of this user's.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(f"\0{_PREFIX}{pid}")
        if not is_trusted(sock) or _peer(sock)[0] != pid:
            raise PermissionError(f"the debugger of process {pid} belongs to somebody else")
    except BaseException:
        sock.close()
        raise
    return sock


def is_trusted(sock: socket.socket) -> bool:
    """Whether the other end is a process of this user, or of root."""
    return _peer(sock)[1] in (os.geteuid(), 0)


def announced() -> int:
    """A descriptor that shows to other processes of this user that this one is in a debugger, as long as it is open."""
    return os.memfd_create(_ANNOUNCED, os.MFD_CLOEXEC)


def pids_in_debuggers(pids: Iterable[int]) -> set[int]:
    """Of some processes of this host, those whose debuggers wait, or are attached to a terminal."""
    return {pid for pid in pids if _is_in_debugger(pid)}


def _is_in_debugger(pid: int) -> bool:
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(path) == f"/memfd:{_ANNOUNCED} (deleted)":
                    return True
    return False


def with_debuggers(stacks: dict[int, str], pids: Sequence[int]) -> dict[int, str]:
    """Stacks, by pid; those of processes in debuggers say so, even if there is no more to be said of them.

    Args:
        stacks: The stacks that could be had.
        pids: The processes that were asked for them.
    """
    in_debuggers = pids_in_debuggers(pids)
    heading = f"{IN_DEBUGGER}: bandmaster debug attaches to it, and deadlines wait\n"
    return {**stacks, **{pid: heading + stacks.get(pid, "") for pid in in_debuggers}}


def _peer(sock: socket.socket) -> tuple[int, int]:
    """Process and user of the other end."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid
