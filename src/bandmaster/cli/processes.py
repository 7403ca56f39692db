"""``bandmaster ps`` and ``bandmaster kill``: list and end the user's groups on this machine."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bandmaster.cli.discovery import Discovered, Group, Process, age_s, discover, is_orphaned_zygote, no_groups
from bandmaster.cli.names import complaints_about, named, ranges
from bandmaster.errors import UsageError
from bandmaster.plan.render import text_table
from bandmaster.wire.status_page import WorkerIdentity, find

GONE_WITHIN_S = 2.0


def ps(controller: int | None = None) -> int:
    """Print the user's groups on this machine, or only those of one controller. Returns the exit status 0."""
    print(shown(discover(controller)))
    return 0


def kill(
    names: Sequence[str], is_all: bool, is_orphans: bool, is_sure: bool = False, controller: int | None = None
) -> int:
    """End groups, and print the pids of the ended processes.

    Args:
        names: Names of groups; ``name@controller`` where groups of several controllers have the same name.
        is_all: End all groups and orphaned zygotes instead.
        is_orphans: End only groups and zygotes whose controller has ended instead.
        is_sure: Whether ``is_all`` needs no confirmation; without it, the command asks the user in the terminal.
        controller: Pid of the only controller whose groups are considered; see `discover`.

    Returns:
        The exit status: 0, or 1 if a name is unknown or ambiguous, the user did not confirm, or a process could not be
        ended.

    Raises:
        UsageError: ``is_all`` needs a confirmation, but standard input is not a terminal.
    """
    if is_all and not is_sure and not (sys.stdin and sys.stdin.isatty()):
        raise UsageError("--all asks before it ends groups, but standard input is not a terminal; add --yes")
    discovered = discover(controller)
    if names and (complaints := complaints_about(names, discovered)):
        print("\n".join(f"bandmaster kill: {complaint}" for complaint in complaints), file=sys.stderr)
        return 1
    discovered = chosen(discovered, names, is_all, is_orphans)
    if not (discovered.groups or discovered.orphaned_zygotes):
        print("nothing to end")
        return 0
    if is_all and not is_sure and not _is_confirmed(discovered):
        print("nothing was ended")
        return 1
    left = _end(discovered)
    for group in discovered.groups:
        print(f"group {group.full_name}: {_outcome([identity.pid for identity, _ in group.workers], left)}")
    if discovered.orphaned_zygotes:
        print(f"zygotes: {_outcome([process.pid for process in discovered.orphaned_zygotes], left)}")
    return 1 if left else 0


def _is_confirmed(discovered: Discovered) -> bool:
    """Ask the user whether to end everything that `discover` found."""
    n_workers = sum(len(group.workers) for group in discovered.groups)
    what = [f"{_count(len(discovered.groups), 'group')} ({_count(n_workers, 'worker')})"] if discovered.groups else []
    n_zygotes = len(discovered.orphaned_zygotes)
    what += [f"{_count(n_zygotes, 'zygote')} without a controller"] if n_zygotes else []
    try:
        return input(f"end {' and '.join(what)}? [y/N] ").strip().lower() in ("y", "yes")
    except (EOFError, KeyboardInterrupt):
        print()
        return False


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def shown(discovered: Discovered) -> str:
    """Format the discovered groups and zygotes as tables for a terminal."""
    tables = []
    if discovered.groups:
        header = ["group", "controller", "ranks", "memory", "rows held", "age", "pids"]
        tables.append(text_table("groups on this machine", header, [_row(group) for group in discovered.groups]))
    if discovered.orphaned_zygotes:
        rows = [[process.pid, _memory([process]), _age([process])] for process in discovered.orphaned_zygotes]
        title = "zygotes (processes that fork workers) without a controller; end them with: bandmaster kill --orphans"
        tables.append(text_table(title, ["pid", "memory", "age"], rows))
    return "\n\n".join(tables) or no_groups(discovered.controller)


def chosen(discovered: Discovered, names: Sequence[str], is_all: bool, is_orphans: bool) -> Discovered:
    """Select the groups and zygotes to end; the arguments are those of `kill`."""
    if is_all:
        return discovered
    if is_orphans:
        return Discovered(tuple(group for group in discovered.groups if group.is_orphan), discovered.orphaned_zygotes)
    return Discovered(tuple(named(names, discovered)))


def _row(group: Group) -> list[object]:
    processes = [process for _, process in group.workers]
    ranks = f"{ranges([identity.rank for identity, _ in group.workers])} of {group.world_size}"
    controller = f"{group.controller} (gone)" if group.is_orphan else str(group.controller or "on another host")
    if group.agent_of and not group.is_orphan:
        controller = f"{group.controller} (agent of {group.agent_of})"
    if group.is_detached:
        controller = "detached"
    pids = " ".join(str(process.pid) for process in processes)
    held = _mib(group.held_nbytes) if group.held_nbytes else "-"
    return [group.name, controller, ranks, _memory(processes), held, _age(processes), pids]


def _memory(processes: Sequence[Process]) -> str:
    return _mib(sum(process.rss_nbytes for process in processes))


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.0f} MiB"


def _age(processes: Sequence[Process]) -> str:
    seconds = round(max(map(age_s, processes)))
    for size, unit, part, smaller_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= size:
            return f"{seconds // size} {unit} {seconds % size // part} {smaller_unit}"
    return f"{seconds} s"


# --- ending -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Target:
    """A process to end.

    Attributes:
        pid: Process id.
        is_still_it: Whether the pid still belongs to the discovered process, and was not reused.
    """

    pid: int
    is_still_it: Callable[[], bool]


def _end(discovered: Discovered) -> set[int]:
    """End all discovered processes, workers first.

    The kernel would end workers with their zygote, but not the processes that the workers started.

    Returns:
        The pids of processes that still run after two seconds.
    """
    targets = [_worker(identity) for group in discovered.groups for identity, _ in group.workers]
    targets += [_zygote(process.pid) for process in discovered.orphaned_zygotes]
    with contextlib.ExitStack() as close_all:
        waiting: dict[int, int] = {}  # pid by pidfd
        for target in targets:
            with contextlib.suppress(ProcessLookupError):
                pidfd = os.pidfd_open(target.pid)
                close_all.callback(os.close, pidfd)
                if target.is_still_it():
                    waiting[pidfd] = target.pid
                    _kill(target.pid)
        return _still_there(waiting)


def _worker(identity: WorkerIdentity) -> _Target:
    def is_still_it() -> bool:
        found = find(identity.pid)
        return found is not None and found[0] == identity

    return _Target(identity.pid, is_still_it)


def _zygote(pid: int) -> _Target:
    return _Target(pid, lambda: is_orphaned_zygote(pid))


def _kill(pid: int) -> None:
    """Kill a process, with its process group if it leads one. The process group of a Ray actor belongs to Ray."""
    with contextlib.suppress(PermissionError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)


def _still_there(waiting: dict[int, int]) -> set[int]:
    """The pids of processes that have not ended within `GONE_WITHIN_S`."""
    poll = select.poll()
    for pidfd in waiting:
        poll.register(pidfd, select.POLLIN)
    left = dict(waiting)
    deadline = time.monotonic() + GONE_WITHIN_S
    while left and (remaining_s := deadline - time.monotonic()) > 0:
        for pidfd, _ in poll.poll(remaining_s * 1e3):
            poll.unregister(pidfd)
            del left[pidfd]
    return set(left.values())


def _outcome(pids: Sequence[int], left: set[int]) -> str:
    ended = [str(pid) for pid in pids if pid not in left]
    alive = [str(pid) for pid in pids if pid in left]
    parts = [f"ended {' '.join(ended)}"] if ended else []
    return "; ".join(parts + ([f"could not end {' '.join(alive)} in {GONE_WITHIN_S:g} s"] if alive else []))
