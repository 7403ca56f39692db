"""Ranks of a process group of torch whose operations do not match, from what they tell with their stacks. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bandmaster.watching.notice import is_in_collective, named

DEFAULT = "default_pg"  # the process group that all ranks are in
_LINE = re.compile(
    r"^  collective: (?P<name>\S+), number (?P<number>\d+) of process group (?P<group>.*), (?:not )?ended$",
    re.MULTILINE,
)


class _Entered(NamedTuple):
    """The last operation that a rank has entered in a process group."""

    number: int
    name: str


def mismatches(stacks: Mapping[int, str]) -> tuple[list[str], list[int]]:
    """Lines about ranks that are behind others of their process group, or in another operation; and the ranks behind.

    Args:
        stacks: The stacks of ranks, with what they tell of collectives.
    """
    groups: dict[str, dict[int, _Entered]] = {}
    for rank, stack in stacks.items():
        for told in _LINE.finditer(stack):
            groups.setdefault(told["group"], {})[rank] = _Entered(int(told["number"]), told["name"])
    waiting = {rank for rank, stack in stacks.items() if is_in_collective(stack)}
    lines, late = list[str](), list[int]()
    for group, entered in sorted(groups.items()):
        if group == DEFAULT:  # ranks in an operation that they had no time to tell of are left out
            untold = stacks.keys() - entered.keys() - waiting
            entered = {**entered, **dict.fromkeys(untold, _Entered(0, ""))}
        last = max(one.number for one in entered.values())
        by_name: dict[str, list[int]] = {}
        for rank, one in entered.items():
            if one.number == last:
                by_name.setdefault(one.name, []).append(rank)
        there = [rank for ranks in by_name.values() for rank in ranks if rank in waiting]
        behind = [rank for rank, one in entered.items() if one.number < last]
        if there and len(by_name) > 1:
            each = ", ".join(f"{named(ranks)} in {name}" for name, ranks in by_name.items())
            lines.append(f"  they are in different operations, number {last} of process group {group}: {each}")
        if there and behind:
            late += behind
            names = " or ".join(by_name)
            lines.append(f"  {_are(behind)} not in {names} (number {last} of process group {group}), {_wait(there)}")
    return lines, late


def _are(ranks: Sequence[int]) -> str:
    return f"{named(ranks)} {'is' if len(ranks) == 1 else 'are'}"


def _wait(ranks: Sequence[int]) -> str:
    return f"in which {named(ranks)} wait{'s' if len(ranks) == 1 else ''}"
