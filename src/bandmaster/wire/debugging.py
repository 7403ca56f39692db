"""How a debugger reaches a worker on its host, and how others see that the worker waits for one.

::

    worker                                                    bandmaster debug, as the same user
    breakpoint() ── listens on a socket without a path ◄───── connects; both look at who the other is
      {"text": "> file(3)method()...(Pdb) "} ──────────────► shows it, and reads a line
                                            "p self\\n"   ◄── sends it

Lines of JSON go both ways. That a worker waits, and where, is shown by the name of one of its descriptors, an anonymous
file: other users cannot change its descriptors. The kernel chooses the socket's name; nobody can take it before.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

from bandmaster.errors.failure import IN_DEBUGGER

__all__ = ["announced", "connected", "debugger_of", "is_trusted", "listening", "pids_in_debuggers", "with_debuggers"]

_ANNOUNCED = "bandmaster-in-debugger:"
_UNIX = "unix:"


def listening() -> tuple[socket.socket, str]:
    """A socket at which a debugger of this process can be reached, which the caller owns, and its address.

    Raises:
        OSError: It could not be made.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind("")  # Linux chooses a name that is free
        sock.listen(1)
    except BaseException:
        sock.close()
        raise
    return sock, _UNIX + bytes(sock.getsockname())[1:].decode()


def connected(pid: int) -> socket.socket:
    """Connect to the pdb of a process. The caller owns the socket.

    Raises:
        OSError: No pdb waits there, or it is not that of this process, or not one of this user's.
    """
    address = debugger_of(pid) or ""
    if not address.startswith(_UNIX):
        raise ConnectionRefusedError(f"process {pid} waits for an IDE at {address}" if address else "it does not wait")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(f"\0{address.removeprefix(_UNIX)}")
        if not is_trusted(sock) or _peer(sock)[0] != pid:
            raise PermissionError(f"the debugger of process {pid} belongs to somebody else")
    except BaseException:
        sock.close()
        raise
    return sock


def is_trusted(sock: socket.socket) -> bool:
    """Whether the other end is a process of this user, or of root."""
    return _peer(sock)[1] in (os.geteuid(), 0)


def announced(address: str) -> int:
    """A descriptor that shows to other processes of this user that this one is in a debugger, as long as it is open.

    Args:
        address: Of `listening`, or host and port where an IDE attaches.
    """
    return os.memfd_create(_ANNOUNCED + address, os.MFD_CLOEXEC)


def debugger_of(pid: int) -> str | None:
    """The address of the debugger that a process of this host is in; None if it is in none."""
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                _, found, address = os.readlink(path).partition(f"/memfd:{_ANNOUNCED}")
                if found:
                    return address.removesuffix(" (deleted)")
    return None


def pids_in_debuggers(pids: Iterable[int]) -> set[int]:
    """Of some processes of this host, those whose debuggers wait, or are attached to."""
    return {pid for pid in pids if debugger_of(pid) is not None}


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
