"""The words of a notice of a call: what has stalled, where each set of ranks alike is, and what those wait for."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bandmaster.calls.open_work import OpenWork
from bandmaster.calls.request import CallSite
from bandmaster.contract import QUEUED, Signs, Workers
from bandmaster.errors.failure import is_in_collective, is_in_debugger

_FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>[^,]*), in (?P<function>.*)', re.MULTILINE)
_HEADING = re.compile(r"^  (?:in .*|it runs requests|the event loop runs):$", re.MULTILINE)  # of tasks and threads
_CALLS = re.compile(
    r"^  it waits for (?P<method>\S+) of group '(?P<group>.*)'(?:, rank (?P<ranks>[\d, ]+))?$", re.MULTILINE
)
_ENTERED = re.compile(
    r"^  collective: (?P<name>\S+), number (?P<number>\d+) of process group (?P<group>.*), (?:not )?ended$",
    re.MULTILINE,
)
_WRAPPERS = "wrapper", "wrapped", "inner"
_PACKAGE = f"{Path(__file__).parents[1]}/"
_LIBRARY = re.compile(rf"/(site|dist)-packages/|/lib/python3|^<|^{re.escape(_PACKAGE)}")
_STATES = {
    "": "has ended",
    "T": "is stopped, by SIGSTOP or Ctrl-Z; kill -CONT {pid} lets it go on",
    "t": "is held by a debugger such as gdb or strace",
    "D": "waits in the kernel for a disk or a driver",
}
IDLE = "  idle"
MOST_RANKS = 8  # that a notice names for each place
MOST_CALLS = 8  # that a chain follows
DEFAULT = "default_pg"  # the process group of torch that all ranks are in
Find = Callable[[str], tuple[Workers, OpenWork] | None]  # the workers and the calls of an open group, by its name


class Awaited(NamedTuple):
    """A call to another group that a rank waits for.

    Attributes:
        method: ``"Class.method"``.
        group: The name of the group.
        ranks: The ranks that have not replied; none if no replica was chosen, or the controller has made the call.
    """

    method: str
    group: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        ranks = f", rank {', '.join(map(str, self.ranks))}" if self.ranks else ""
        return f"{self.method} of group {self.group!r}{ranks}"


class RankFacts(NamedTuple):
    """The facts about a rank that runs a call.

    Attributes:
        signs: Its signs of life.
        stack: Its stack; "" if it gave none.
        host: Its host.
        pid: Its process there.
        moves: Whether it uses the processor.
    """

    signs: Signs
    stack: str
    host: str
    pid: int
    moves: bool = False


Ranks = Mapping[int, RankFacts]


def facts_of(workers: Workers, signs: Mapping[int, Signs], stacks: Mapping[int, str]) -> Ranks:
    """The facts about ranks, by their signs of life and their stacks."""
    return {
        rank: RankFacts(one, stacks.get(rank, ""), *workers.records[rank][:2], moves=one.state == "R")
        for rank, one in signs.items()
    }


def awaited_by(stack: str) -> list[Awaited]:
    """The calls to other groups that a rank waits for."""
    return [
        Awaited(found["method"], found["group"], tuple(map(int, (found["ranks"] or "").replace(",", " ").split())))
        for found in _CALLS.finditer(stack)
    ]


def notice(
    site: CallSite,
    seconds: float,
    ranks: Ranks,
    n_more: int = 0,
    lines: Sequence[str] = (),
    waits: str = "",
    owner: str = "",
) -> str:
    """The text about a call that has stalled.

    Args:
        site: The call.
        seconds: Seconds without progress.
        ranks: The ranks that owe a reply.
        n_more: Further calls and requests that are behind it, or wait for the same ranks.
        lines: Further lines, such as those about the ranks of other groups that these ranks wait for.
        waits: The reason why it was not sent; "" if it was.
        owner: The name of the group that has the workers; "" if the call's group does, and is no role.
    """
    more = f", and {n_more} other call{'s' * (n_more > 1)} with it" if n_more else ""
    shown = [f"  {named(alike, site)}: {words}" for words, alike in places(ranks).items()]
    option, scope = "options(timeout=...)", "options"
    if site.method.endswith(".__init__"):
        option, scope = "start_timeout=... of the group", "bandmaster.set_default_options"
    ends = f"  `bandmaster stack {shlex.quote(owner or site.group)}` shows the stacks; {option} ends such a wait, and "
    ends += f"{scope}(stall_after=None) this notice"
    what = "has waited for a place" if waits else "has made no progress"
    head = f"{words_of(site)} {what} for {seconds:.0f} s{more}:"
    return "\n".join([head, *([f"  {waits}"] if waits else []), *shown, *lines, ends])


def words_of(site: CallSite) -> str:
    """A call in words."""
    return f"{site.method} of group {site.group!r}"


def guilty(ranks: Ranks) -> tuple[int, ...]:
    """The ranks that others wait for: those of the places that come first."""
    weights = {rank: place_of(facts)[0] for rank, facts in ranks.items()}
    return tuple(rank for rank, weight in weights.items() if weight == min(weights.values()))


def places(ranks: Ranks) -> dict[str, list[int]]:
    """The places of ranks in words, each with the ranks that are there; those that others wait for come first."""
    found: dict[tuple[int, str], list[int]] = {}
    for rank, facts in ranks.items():
        found.setdefault(place_of(facts), []).append(rank)
    return {words: alike for (_, words), alike in sorted(found.items())}


def place_of(facts: RankFacts) -> tuple[int, str]:
    """The place of a rank in words, behind a number by which places are sorted: others wait for the lowest."""
    process = f"its process {facts.pid} on host {facts.host}"
    state = _STATES.get(facts.signs.state)
    if state is not None:
        return 0, f"{process} {state.format(pid=facts.pid)}"
    if not facts.stack:
        return 1, f"{process} shows no stack, in state {facts.signs.state}"
    is_queued, place = facts.stack.startswith(QUEUED), where(facts.stack.removeprefix(QUEUED))
    first = "not at this call yet, " if is_queued else ""
    if is_in_debugger(facts.stack):
        return 2, f"{first}in a debugger, in {place}"
    if is_in_collective(facts.stack):
        return 4, f"{first}waiting for other ranks in {place}"
    if calls := awaited_by(facts.stack):
        return 3, f"{first}waiting for {'; '.join(map(str, calls))}, in {place}"
    if facts.stack.removeprefix(QUEUED).startswith(IDLE):
        return 2, f"{first}idle"
    return 2, f"{first}{'computing, ' if facts.moves else ''}in {place}"


def where(stack: str) -> str:
    """The innermost frame of the user's code, and the function that it has called."""
    stack = next(filter(_FRAME.search, _HEADING.split(stack)), stack)
    frames = list(_FRAME.finditer(stack))
    users = [n for n, frame in enumerate(frames) if not _LIBRARY.search(frame["file"])]
    if not users:
        return frames[-1]["function"] if frames else stack.strip().split("\n")[0]
    frame, called = frames[users[-1]], [one for one in frames[users[-1] + 1 :] if one["function"] not in _WRAPPERS]
    called = [] if called and called[0]["file"].startswith(_PACKAGE) else called
    place = f"{frame['function']} ({frame['file'].rpartition('/')[2]}:{frame['line']})"
    following = stack[frame.end() + 1 :].partition("\n")[0]
    code = f": {following.strip()}" if following.startswith("    ") else ""
    return f"{called[0]['function']}, called by {place}{code}" if called else f"{place}{code}"


def named(ranks: Sequence[int], site: CallSite | None = None) -> str:
    """Ranks in words, a single one with its coordinates if the call is known."""
    if len(ranks) == 1:
        coordinates = ", ".join(f"{axis}={n}" for axis, n in site.mesh.coordinates(ranks[0]).items()) if site else ""
        return f"rank {ranks[0]} ({coordinates})" if coordinates else f"rank {ranks[0]}"
    n_more = len(ranks) - MOST_RANKS
    return "ranks " + ", ".join(map(str, ranks[:MOST_RANKS])) + (f" and {n_more} more" if n_more > 0 else "")


# --- the ranks that stalled ranks wait for ---


def chain(ranks: Ranks, find: Find) -> list[str]:
    """The lines about the ranks that some ranks wait for, and about those that these wait for.

    Args:
        ranks: The ranks.
        find: Finds other groups.
    """
    lines = list[str]()
    visited = set[Awaited]()
    todo = _awaited(ranks)
    while todo and len(visited) < MOST_CALLS:
        call = todo.pop(0)
        found = find(call.group)
        if call in visited or found is None:
            continue
        visited.add(call)
        facts = _facts(*found, call)
        lines += [f"  {named(alike)} of group {call.group!r}: {words}" for words, alike in places(facts).items()]
        todo += _awaited(facts)
    return list(dict.fromkeys(lines))


def _awaited(ranks: Ranks) -> list[Awaited]:
    """The calls that some ranks wait for, one for each group and method, with the ranks of all."""
    found: dict[tuple[str, str], set[int]] = {}
    for facts in ranks.values():
        for call in awaited_by(facts.stack):
            found.setdefault((call.group, call.method), set()).update(call.ranks)
    return [Awaited(method, group, tuple(sorted(some))) for (group, method), some in found.items()]


def _facts(workers: Workers, work: OpenWork, call: Awaited) -> Ranks:
    """The facts about the ranks that a call waits for: those it was sent to; those of the same call of the controller,
    which may have relayed it; or all, if it waits for a replica."""
    relayed = {rank for one in work.unanswered() if one.site.method == call.method for rank in one.unanswered}
    ranks: Iterable[int] = call.ranks or sorted(relayed) or range(len(workers.records))
    tickets: dict[int, Any] = dict.fromkeys(ranks)
    signs = workers.signs(list(tickets))  # first: to show its stack, a rank has to run
    stacks = {rank: stack.removeprefix(QUEUED) for rank, stack in workers.stacks(tickets).items()}
    return facts_of(workers, signs, stacks)


def mismatches(stacks: Mapping[int, str]) -> tuple[list[str], list[int]]:
    """Lines about ranks that are behind others of their process group, or in another operation; and the ranks behind.

    A rank that is behind as it waits in another process group itself is left out, unless all ranks wait.

    Args:
        stacks: The stacks of ranks, with what they tell of collectives.
    """
    groups: dict[str, dict[int, tuple[int, str]]] = {}  # the number and name of the last operation that a rank entered
    for rank, stack in stacks.items():
        for told in _ENTERED.finditer(stack):
            groups.setdefault(told["group"], {})[rank] = int(told["number"]), told["name"]
    waiting = {rank for rank, stack in stacks.items() if is_in_collective(stack)}
    lines, late = list[str](), list[int]()
    for group, entered in sorted(groups.items()):
        if group == DEFAULT:  # ranks in an operation that they had no time to tell of are left out
            entered = {**entered, **dict.fromkeys(stacks.keys() - entered.keys() - waiting, (0, ""))}
        last = max(number for number, _ in entered.values())
        by_name: dict[str, list[int]] = {}
        for rank, (number, name) in entered.items():
            if number == last:
                by_name.setdefault(name, []).append(rank)
        there = [rank for ranks in by_name.values() for rank in ranks if rank in waiting]
        behind = [rank for rank, (number, _) in entered.items() if number < last]
        if there and len(by_name) > 1:
            each = ", ".join(f"{named(ranks)} in {name}" for name, ranks in by_name.items())
            lines.append(f"  they are in different operations, number {last} of process group {group}: {each}")
        if there and behind:
            late += behind
            are, wait = "is" if len(behind) == 1 else "are", "waits" if len(there) == 1 else "wait"
            what = f"{' or '.join(by_name)} (number {last} of process group {group})"
            lines.append(f"  {named(behind)} {are} not in {what}, in which {named(there)} {wait}")
    moving = stacks.keys() - waiting
    return lines, sorted(moving.intersection(late) if moving else set(late))
