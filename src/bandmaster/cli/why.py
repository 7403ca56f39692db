"""``bandmaster why``: where the ranks of groups are, those first that others wait for."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from bandmaster.cli.discovery import Group, discover, no_groups
from bandmaster.cli.names import complaints_about, named, ranges
from bandmaster.contract import Signs
from bandmaster.watching.calls import BUSY
from bandmaster.watching.notice import RankFacts, place_of
from bandmaster.wire.status_page import signs_of, stacks

LOOK_S = 0.5  # between the two looks whose difference is the processor time
IDLE = 3, "idle"  # a place, see `place_of`


def why(name: str | None, is_json: bool, controller: int | None = None) -> int:
    """Print what the ranks of groups on this machine run, for how long, and where they are.

    Args:
        name: The only group to show; None for all.
        is_json: Print one object for each group, a line each.
        controller: Pid of the only controller whose groups are considered.

    Returns:
        The exit status: 0, or 1 if the name is unknown or ambiguous.
    """
    discovered = discover(controller)
    names = [] if name is None else [name]
    for complaint in complaints_about(names, discovered):
        print(f"bandmaster why: {complaint}", file=sys.stderr)
        return 1
    groups = named(names, discovered) if names else discovered.groups
    for group, said in zip(groups, seen(groups), strict=True):
        print(json.dumps(said) if is_json else _text(group, said["places"]))
    if not groups and not is_json:
        print(no_groups(controller))
    return 0


def seen(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """For each group its name, its controller, and the places of its ranks, as JSON has them; takes a second."""
    pids = [identity.pid for group in groups for identity, _ in group.workers]
    before = {pid: signs_of(pid) for pid in pids}
    time.sleep(LOOK_S)
    after, texts = {pid: signs_of(pid) for pid in pids}, stacks(pids)
    found = []
    for group in groups:
        said = [
            {"method": method, "seconds": round(seconds, 1), "place": place, "ranks": ranks}
            for method, seconds, place, ranks in _said(group, before, after, texts)
        ]
        found.append({"group": group.name, "controller": group.controller, "places": said})
    return found


def _said(
    group: Group, before: Mapping[int, Signs], after: Mapping[int, Signs], texts: Mapping[int, str]
) -> list[tuple[str, float, str, list[int]]]:
    """Each method and place with the longest time and the ranks there, sorted by `place_of`; the method is "" for none.

    Idle ranks come behind those that others may wait for, but before those in a collective: they may have skipped it.
    """
    found: dict[tuple[int, bool, str, str], dict[int, float]] = {}
    for identity, _ in group.workers:
        signs = after[identity.pid]
        moves = signs.cpu_s - before[identity.pid].cpu_s >= BUSY * LOOK_S
        facts = RankFacts(signs, texts.get(identity.pid, ""), os.uname().nodename, identity.pid, moves)
        is_idle = not signs.method and facts.stack and signs.state in "RS"
        weight, place = IDLE if is_idle else place_of(facts)
        found.setdefault((weight, not signs.method, place, signs.method), {})[identity.rank] = signs.seconds
    return [(method, max(ranks.values()), place, sorted(ranks)) for (*_, place, method), ranks in sorted(found.items())]


def _text(group: Group, said: Sequence[Mapping[str, object]]) -> str:
    lines = [f"{group.full_name}, {group.world_size} ranks"]
    for one in said:
        running = f"{one['method']} for {one['seconds']:.0f} s, " if one["method"] else ""
        lines.append(f"  rank {ranges(one['ranks'])}: {running}{one['place']}")  # type: ignore[arg-type]
    return "\n".join(lines)
