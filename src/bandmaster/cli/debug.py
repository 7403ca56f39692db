"""``bandmaster debug``: attach this terminal to the debugger of a rank that waits at ``breakpoint()``."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from collections.abc import Iterator

from bandmaster.cli.discovery import Group, discover
from bandmaster.cli.names import complaints_about, named
from bandmaster.wire.control_page import WorkerIdentity
from bandmaster.wire.debugging import connected, pids_in_debuggers

__all__ = ["debug"]


def debug(name: str, rank: int | None, controller: int | None = None) -> int:
    """Attach to a rank.

    Args:
        name: The group's name; ``name@controller`` where groups of several controllers have it.
        rank: The rank; None for the one that waits.
        controller: Pid of the only controller whose groups are considered.

    Returns:
        The exit status: 0, or 1 if there is no such rank, or it does not wait.
    """
    try:
        identity = _chosen(_group(name, controller), rank)
        with connected(identity.pid) as sock:
            return _talk(sock, f"rank {identity.rank} of {identity.group}")
    except (LookupError, OSError) as error:
        print(f"bandmaster debug: {error.args[0] if isinstance(error, LookupError) else error}", file=sys.stderr)
        return 1


def _group(name: str, controller: int | None) -> Group:
    """The group of a name.

    Raises:
        LookupError: There is none, or several controllers have one.
    """
    discovered = discover(controller)
    if complaints := complaints_about([name], discovered):
        raise LookupError(complaints[0])
    (group,) = named([name], discovered)
    return group


def _chosen(group: Group, rank: int | None) -> WorkerIdentity:
    """The rank to attach to.

    Raises:
        LookupError: There is none, or several wait.
    """
    pids = pids_in_debuggers(identity.pid for identity, _ in group.workers)
    waiting = {identity.rank: identity for identity, _ in group.workers if identity.pid in pids}
    ranks = ", ".join(map(str, waiting))
    if rank is None and len(waiting) == 1:
        return next(iter(waiting.values()))
    if rank in waiting:
        return waiting[rank]
    if rank is None and waiting:
        raise LookupError(f"ranks {ranks} of {group.name} wait in debuggers; choose one: bandmaster debug NAME RANK")
    who = f"rank {rank}" if rank is not None else "no rank"
    verb = "does not wait" if rank is not None else "waits"
    others = f"; rank {ranks} does" if waiting else "; call breakpoint() in a method"
    raise LookupError(f"{who} of {group.name} {verb} in a debugger on this host{others}")


def _talk(sock: socket.socket, who: str) -> int:
    """Show what the debugger says, and send what is typed, until the method goes on."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # input() has history and keys for editing by it
    said = ""
    try:
        for said in _said(sock):
            sock.sendall(json.dumps(_typed(said) + "\n").encode() + b"\n")
    except EOFError:
        print(f"\ndetached; {who} still waits")
        return 0
    except KeyboardInterrupt:
        print(f"\ndetached; {who} goes on with what it does")
        return 0
    except ConnectionError:
        pass
    print(f"{who} goes on without the debugger")
    return 0


def _said(sock: socket.socket) -> Iterator[str]:
    with sock.makefile("r", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def _typed(said: str) -> str:
    """Show a text that ends in a prompt, and read a line."""
    shown, newline, prompt = said.rpartition("\n")
    print(f"{shown}{newline}", end="", flush=True)
    while True:
        try:
            return input(prompt)
        except KeyboardInterrupt:  # begins a new line, as in a shell
            print()
