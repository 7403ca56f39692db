"""``bandmaster stack``: prints where the ranks of a group are in their Python code, without stopping them."""

from __future__ import annotations

import sys

from bandmaster.cli.discovery import Group, discover
from bandmaster.cli.names import complaints_about, named, ranges
from bandmaster.errors.failure import stacks_by_equality
from bandmaster.wire.status_page import stacks


def stack(name: str, rank: int | None, controller: int | None = None) -> int:
    """Print the Python stacks of a group's ranks on this machine, innermost frame last, grouped by equality.

    Args:
        name: Name of the group; ``name@controller`` where groups of several controllers have the same name.
        rank: The only rank to show; None for all ranks on this machine.
        controller: Pid of the only controller whose groups are considered.

    Returns:
        The exit status: 0, or 1 if the name is unknown or ambiguous, or a rank is not here or gave no stack.
    """
    discovered = discover(controller)
    complaints = complaints_about([name], discovered)
    if complaints:
        return _fail(complaints[0])
    group = named([name], discovered)[0]
    here = {identity.rank: identity.pid for identity, _ in group.workers}
    if rank is not None and rank not in here:
        return _fail(_not_here(group, rank, list(here)))
    asked = here if rank is None else {rank: here[rank]}
    texts = stacks(list(asked.values()))
    found = {rank: texts[pid] for rank, pid in asked.items() if texts.get(pid)}
    if found:
        print(stacks_by_equality(found))
    silent = {rank: pid for rank, pid in asked.items() if rank not in found}
    if silent:
        pids = " ".join(map(str, silent.values()))
        return _fail(
            f"rank {ranges(list(silent))} of {group.full_name} gave no stack (pid {pids}): the process is stopped or "
            f"has ended; ps -o pid,stat,wchan:20 {pids} says which"
        )
    return 0


def _not_here(group: Group, rank: int, here: list[int]) -> str:
    if rank >= group.world_size or rank < 0:
        return f"group {group.full_name} has ranks 0 to {group.world_size - 1}, got rank {rank}"
    return (
        f"rank {rank} of {group.full_name} does not run on this machine, where rank {ranges(here)} does; run the "
        "command on the host that group.describe() names"
    )


def _fail(message: str) -> int:
    print(f"bandmaster stack: {message}", file=sys.stderr)
    return 1
