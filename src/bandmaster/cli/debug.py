"""``bandmaster debug``: attach this terminal to the debugger of a rank that waits at ``breakpoint()``."""

from __future__ import annotations

import sys

from bandmaster.cli.discovery import Group, discover
from bandmaster.cli.names import complaints_about, named
from bandmaster.debugging.terminal import attach
from bandmaster.wire.status_page import WorkerIdentity, in_debuggers


def debug(name: str, rank: int | None, controller: int | None = None) -> int:
    """Attach to a rank.

    Args:
        name: The group's name; ``name@controller`` where groups of several controllers have it.
        rank: The rank; None for the only rank that waits.
        controller: Pid of the only controller whose groups are considered.

    Returns:
        The exit status: 0, or 1 if there is no such rank, or the rank does not wait.
    """
    try:
        identity = _chosen(_group(name, controller), rank)
        state = attach(identity.pid)
    except (LookupError, OSError) as error:
        print(f"bandmaster debug: {error.args[0] if isinstance(error, LookupError) else error}", file=sys.stderr)
        return 1
    print(f"rank {identity.rank} of {identity.group} {state}")
    return 0


def _group(name: str, controller: int | None) -> Group:
    """The group of a name.

    Raises:
        LookupError: There is no such group, or several controllers have one.
    """
    discovered = discover(controller)
    if complaints := complaints_about([name], discovered):
        raise LookupError(complaints[0])
    (group,) = named([name], discovered)
    return group


def _chosen(group: Group, rank: int | None) -> WorkerIdentity:
    """The rank to attach to.

    Raises:
        LookupError: No rank waits, the given rank does not wait, or several ranks wait.
    """
    pids = in_debuggers(identity.pid for identity, _ in group.workers)
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
