"""Where the workers of a pool go, decided from an inventory of nodes. Pure: no process, no cluster."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from bandmaster.errors import PlacementError

__all__ = ["RESERVING", "Node", "Request", "assign_nodes", "cannot_place", "could_ever_fit"]

RESERVING = "a signal handler asked for places while places were being reserved; set a flag in the handler instead"

MAX_DEAD_ENDS = 10_000  # of the search for nodes; never reached by requests of a few sizes


@dataclass(frozen=True)
class Node:
    """One host, as a backend sees it.

    Attributes:
        name: What a person calls it, its address mostly.
        cpus_total: Logical CPUs, free or not; None where they are not counted.
        cpus_free: Those not taken.
        gpus_total: GPUs, free or not.
        gpus_free: Those not taken.
        holders: Who has taken what, in words.
        key: The backend's own name for it.
    """

    name: str
    cpus_total: float | None
    cpus_free: float | None
    gpus_total: float
    gpus_free: float
    holders: tuple[str, ...] = ()
    key: str = ""

    def capacity(self, request: Request, *, free: bool = True) -> int | None:
        """How many workers of ``request`` fit here; None for as many as you like."""
        fits = []
        if request.gpus_per_worker:
            fits.append((self.gpus_free if free else self.gpus_total) / request.gpus_per_worker)
        cpus = self.cpus_free if free else self.cpus_total
        if request.cpus_per_worker and cpus is not None:
            fits.append(cpus / request.cpus_per_worker)
        return int(min(fits) + 1e-6) if fits else None


@dataclass(frozen=True)
class Request:
    """What a pool asks for.

    Attributes:
        name: The pool's, for messages.
        workers: Places on each node.
        cpus_per_worker: CPUs reserved for each place.
        gpus_per_worker: GPUs reserved for each place, 0 or 1.
    """

    name: str
    workers: tuple[int, ...]
    cpus_per_worker: float
    gpus_per_worker: int

    @property
    def words(self) -> str:
        """The request as a person would say it."""
        each = [f"{self.cpus_per_worker:g} CPU"] if self.cpus_per_worker else []
        each += [f"{self.gpus_per_worker} GPU"] if self.gpus_per_worker else []
        kind = "GPU workers" if self.gpus_per_worker else "workers"
        return f"{sum(self.workers)} {kind} as {list(self.workers)} ({' and '.join(each) or 'nothing'} each)"


def assign_nodes(request: Request, nodes: Sequence[Node], *, free: bool = True) -> tuple[int, ...] | None:
    """The index of the node that takes each entry of ``request.workers``; None when they do not fit.

    Each entry goes whole onto one node. Entries go to nodes of their own where there are enough, the tightest
    fit first, and share nodes otherwise. Entries of equal size follow the order of the nodes' addresses.

    The answer is exact unless many entries of many sizes leave next to nothing free: finding out is bin packing,
    which can take forever, so that the search stops after 10,000 dead ends (about a second) with None.

    Args:
        request: What is asked for.
        nodes: What there is.
        free: Count what is free now, or everything there is.
    """
    order = sorted(range(len(nodes)), key=lambda index: _address(nodes[index]))
    wanted = sorted(request.workers, reverse=True)
    room = [nodes[index].capacity(request, free=free) for index in order]
    unbounded = sum(wanted)
    found = _search(tuple(wanted), tuple(unbounded if fits is None else fits for fits in room))
    if found is None:
        return None
    by_size: dict[int, list[int]] = {}
    for size, position in zip(wanted, found, strict=True):
        by_size.setdefault(size, []).append(position)
    queues = {size: iter(sorted(positions)) for size, positions in by_size.items()}
    return tuple(order[next(queues[size])] for size in request.workers)


@lru_cache(maxsize=256)
def _search(wanted: tuple[int, ...], room: tuple[int, ...]) -> tuple[int, ...] | None:
    """A node for each entry of ``wanted``, which descends.

    Depth first, without recursion. A choice is taken back as soon as what remains cannot fit, or did not before.
    """
    left, used = list(room), [0] * len(room)
    chosen: list[int] = []
    hopeless: set[tuple[int, ...]] = set()
    untried = [_candidates(wanted, left, used)]
    while len(chosen) < len(wanted) and len(hopeless) < MAX_DEAD_ENDS:
        index = next(untried[-1], None)
        if index is not None:
            chosen.append(index)
            left[index] -= wanted[len(chosen) - 1]
            used[index] += 1
            rest = wanted[len(chosen) :]
            is_dead = tuple(sorted(left)) in hopeless or not _may_fit(rest, left)
            untried.append(iter(()) if is_dead else _candidates(rest, left, used))
            continue
        hopeless.add(tuple(sorted(left)))  # sorted: it does not matter which node has how much
        untried.pop()
        if not chosen:
            return None
        index = chosen.pop()
        left[index] += wanted[len(chosen)]
        used[index] -= 1
    return tuple(chosen) if len(chosen) == len(wanted) else None


def _candidates(wanted: Sequence[int], left: Sequence[int], used: Sequence[int]) -> Iterator[int]:
    """Nodes for the first of ``wanted``: empty ones before shared ones, the tightest first, one of those alike."""
    if not wanted:
        return iter(())
    alike: dict[tuple[bool, int], int] = {}
    for index, fits in enumerate(left):
        if fits >= wanted[0]:
            alike.setdefault((used[index] > 0, fits), index)
    return iter([alike[key] for key in sorted(alike)])


def _may_fit(wanted: Sequence[int], left: Sequence[int]) -> bool:
    """False when they cannot fit: counted in units of any size, the nodes hold less than the entries take."""
    return all(sum(fits // unit for fits in left) >= sum(size // unit for size in wanted) for unit in {1, *wanted})


def could_ever_fit(request: Request, nodes: Sequence[Node]) -> bool:
    """Whether the request fits once everything on these nodes is free."""
    return assign_nodes(request, nodes, free=False) is not None


def cannot_place(
    request: Request, nodes: Sequence[Node], *, free: bool = True, waited_s: float | None = None
) -> PlacementError:
    """The error for a request that does not fit: what was asked, what each node has, what would fit.

    Args:
        request: What was asked for.
        nodes: What there is.
        free: Whether it is too much for what is free, or for everything there is.
        waited_s: How long was waited, if it was.
    """
    rooms = [(node, node.capacity(request, free=free)) for node in nodes]
    there = "; ".join(_describe(node, fits, request, free) for node, fits in rooms) or "there are no nodes"
    fitting = sorted((fits for _, fits in rooms if fits), reverse=True)
    advice = f"ask for {fitting}" if fitting else "nothing of that kind is free"
    if request.gpus_per_worker and not any(node.gpus_total for node in nodes):
        advice = "there is no GPU: make the pool with use_gpu=False"
    elif free and any(node.holders for node in nodes):
        advice += ", or close what holds the rest"
    waited = f" within {waited_s:g} s" if waited_s is not None else ""
    return PlacementError(f"pool {request.name!r} cannot place {request.words}{waited}: {there}; {advice}")


def _describe(node: Node, fits: int | None, request: Request, free: bool) -> str:
    amounts = [(node.gpus_free, node.gpus_total, "GPUs")] if request.gpus_per_worker else []
    if node.cpus_free is not None and node.cpus_total is not None:
        amounts.append((node.cpus_free, node.cpus_total, "CPUs"))
    parts = [f"{left:g} of {total:g} {what}" if free else f"{total:g} {what}" for left, total, what in amounts]
    held = f", held by {', '.join(node.holders)}" if free and node.holders else ""
    has = f"{' and '.join(parts) or 'room'}{' free' if free else ''}"
    return f"node {node.name} has {has}, room for {fits}{held}"


def _address(node: Node) -> tuple[int, int, str, str]:
    """Numeric order of addresses: 10.0.0.9 comes before 10.0.0.10."""
    try:
        address = ipaddress.ip_address(node.name)
    except ValueError:
        return 9, 0, node.name, node.key
    return address.version, int(address), "", node.key
