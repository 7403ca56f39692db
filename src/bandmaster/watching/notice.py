"""The words of a notice: what has stalled, and for each set of ranks alike where they are, the guilty first. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bandmaster.calls.request import CallSite
from bandmaster.contract import QUEUED, Signs

_FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>[^,]*), in (?P<function>.*)', re.MULTILINE)
_HEADING = re.compile(r"^  (?:in .*|it runs requests|the event loop runs):$", re.MULTILINE)  # of tasks and threads
_WRAPPERS = "wrapper", "wrapped", "inner"
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3|^<")
_COLLECTIVE = "/torch/distributed/"
_STATES = {
    "": "has ended",
    "T": "is stopped, by SIGSTOP or Ctrl-Z; kill -CONT {pid} lets it go on",
    "t": "is held by a debugger such as gdb or strace",
    "D": "waits in the kernel for a disk or a driver",
}
MOST_RANKS = 8  # that a notice names for each place


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


def is_in_collective(stack: str) -> bool:
    """Whether a rank is in a collective operation of torch, where it waits for other ranks."""
    return _COLLECTIVE in stack


def notice(site: CallSite, seconds: float, ranks: Mapping[int, RankFacts], n_more: int = 0) -> str:
    """The text about a call that has stalled.

    Args:
        site: The call.
        seconds: Seconds without progress.
        ranks: The ranks that owe a reply.
        n_more: Further calls and requests that are behind it, or wait for the same ranks.
    """
    more = f", and {n_more} calls with it" if n_more else ""
    shown = [f"  {_named(alike, site)}: {words}" for words, alike in places(ranks).items()]
    ends = (
        f"  `bandmaster stack {site.group}` shows the stacks; options(timeout=...) ends such a wait, and "
        "options(stall_after=None) this notice"
    )
    head = f"{site.method} of group {site.group!r} has made no progress for {seconds:.0f} s{more}:"
    return "\n".join([head, *shown, ends])


def places(ranks: Mapping[int, RankFacts]) -> dict[str, list[int]]:
    """The places of ranks in words, each with the ranks that are there; those that others wait for come first."""
    found: dict[tuple[int, str], list[int]] = {}
    for rank, facts in ranks.items():
        found.setdefault(_place(facts), []).append(rank)
    return {words: alike for (_, words), alike in sorted(found.items())}


def _place(facts: RankFacts) -> tuple[int, str]:
    """The place of a rank in words, behind a number by which places are sorted."""
    process = f"its process {facts.pid} on host {facts.host}"
    state = _STATES.get(facts.signs.state)
    if state is not None:
        return 0, f"{process} {state.format(pid=facts.pid)}"
    if not facts.stack:
        return 1, f"{process} shows no stack, in state {facts.signs.state}"
    where = _frame(facts.stack)
    if is_in_collective(facts.stack):
        return 3, f"waiting for other ranks in {where}"
    if facts.stack.startswith(QUEUED):
        return 2, "not at this call yet"
    return 2, f"{'computing, ' if facts.moves else ''}in {where}"


def _frame(stack: str) -> str:
    """The innermost frame of the user's code, and the function that it has called."""
    stack = next(filter(_FRAME.search, _HEADING.split(stack)), stack)
    frames = list(_FRAME.finditer(stack))
    users = [n for n, frame in enumerate(frames) if not _LIBRARY.search(frame["file"])]
    if not users:
        return frames[-1]["function"] if frames else stack.strip().split("\n")[0]
    frame, called = frames[users[-1]], [one for one in frames[users[-1] + 1 :] if one["function"] not in _WRAPPERS]
    place = f"{frame['function']} ({frame['file'].rpartition('/')[2]}:{frame['line']})"
    following = stack[frame.end() + 1 :].partition("\n")[0]
    code = f": {following.strip()}" if following.startswith("    ") else ""
    return f"{called[0]['function']}, called by {place}{code}" if called else f"{place}{code}"


def _named(ranks: Sequence[int], site: CallSite) -> str:
    if len(ranks) == 1:
        where = ", ".join(f"{axis}={n}" for axis, n in site.mesh.coordinates(ranks[0]).items())
        return f"rank {ranks[0]} ({where})"
    n_more = len(ranks) - MOST_RANKS
    return "ranks " + ", ".join(map(str, ranks[:MOST_RANKS])) + (f" and {n_more} more" if n_more > 0 else "")
