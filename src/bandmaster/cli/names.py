"""Selects groups by name, reports unknown and ambiguous names, and formats ranges of ranks. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from itertools import groupby

from bandmaster.cli.discovery import Discovered, Group, no_groups


def complaints_about(names: Sequence[str], discovered: Discovered) -> list[str]:
    """Return an error message for each name that does not select one group, because it is unknown or ambiguous.

    Args:
        names: ``name`` of a group, or ``name@controller``.
        discovered: The groups on this machine.
    """
    return [complaint for name in names if (complaint := _complaint(_shown(name), discovered))]


def named(names: Sequence[str], discovered: Discovered) -> list[Group]:
    """Return the groups that names select; see `complaints_about`."""
    asked = set(map(_shown, names))
    return [group for group in discovered.groups if not asked.isdisjoint((group.name, group.full_name))]


def ranges(ranks: Sequence[int]) -> str:
    """Format ranks as ranges, such as ``0-2,5``."""
    runs = [list(run) for _, run in groupby(enumerate(sorted(ranks)), key=lambda item: item[1] - item[0])]
    return ",".join(f"{run[0][1]}-{run[-1][1]}" if len(run) > 1 else str(run[0][1]) for run in runs)


def _shown(name: str) -> str:
    """The name as a status page shows it, which has no slashes."""
    return name.replace("/", "|")


def _complaint(name: str, discovered: Discovered) -> str:
    found = [group.full_name for group in named([name], discovered)]
    if len(found) > 1:
        return f"several controllers have a group {name!r}; give one of {', '.join(found)}"
    if found:
        return ""
    known = list(dict.fromkeys(group.name for group in discovered.groups))
    near = [other for other in known if name.lower() in other.lower()] or difflib.get_close_matches(name, known)
    if not known:
        return f"there is no group {name!r}; {no_groups(discovered.controller)}"
    words = f"did you mean {' or '.join(map(repr, near))}" if near else f"your groups are {', '.join(map(repr, known))}"
    return f"there is no group {name!r}; {words}"
