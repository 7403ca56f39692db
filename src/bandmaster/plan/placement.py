"""Assigns the slots of a resource pool to nodes, given an inventory of the nodes. Pure: no process, no cluster."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from bandmaster.errors import PlacementError

__all__ = ["RESERVING", "Node", "Request", "assign_nodes", "cannot_place", "could_ever_fit"]

RESERVING = (
    "a signal handler cannot reserve slots while another reservation is in progress; set a flag in the handler, and "
    "reserve after it has returned"
)

MAX_DEAD_ENDS = 10_000  # limit of the search; requests with few different sizes never reach it


@dataclass(frozen=True)
class Node:
    """One host in a backend's inventory.

    Attributes:
        name: The host in messages, usually its address.
        cpus_total: Number of logical CPUs; None if the backend does not count CPUs.
        cpus_free: Number of CPUs that are not reserved; None if the backend does not count CPUs.
        gpus_total: Number of GPUs.
        gpus_free: Number of GPUs that are not reserved.
        holders: Descriptions of the pools and groups that have reserved resources of the host.
        key: The backend's identifier of the host.
    """

    name: str
    cpus_total: float | None
    cpus_free: float | None
    gpus_total: float
    gpus_free: float
    holders: tuple[str, ...] = ()
    key: str = ""

    def capacity(self, request: Request, *, free: bool = True) -> int | None:
        """How many workers of ``request`` fit on this node; None if the request needs nothing that is counted.

        Args:
            request: The resources per worker.
            free: Count only resources that are not reserved; otherwise all resources of the node.
        """
        fits = []
        if request.gpus_per_worker:
            fits.append((self.gpus_free if free else self.gpus_total) / request.gpus_per_worker)
        cpus = self.cpus_free if free else self.cpus_total
        if request.cpus_per_worker and cpus is not None:
            fits.append(cpus / request.cpus_per_worker)
        return int(min(fits) + 1e-6) if fits else None


@dataclass(frozen=True)
class Request:
    """The slots that a resource pool reserves.

    Attributes:
        name: Name of the pool, for messages.
        workers: Number of slots on each node.
        cpus_per_worker: CPUs reserved for each slot.
        gpus_per_worker: GPUs reserved for each slot, 0 or 1.
        is_detached: Whether the slots stay reserved when the pool is closed or its process ends; only on Ray.
    """

    name: str
    workers: tuple[int, ...]
    cpus_per_worker: float
    gpus_per_worker: int
    is_detached: bool = False

    @property
    def words(self) -> str:
        """Description for messages, such as ``"4 GPU workers as [2, 2] (1 GPU each)"``."""
        each = [f"{self.cpus_per_worker:g} CPU"] if self.cpus_per_worker else []
        each += [f"{self.gpus_per_worker} GPU"] if self.gpus_per_worker else []
        kind = "GPU workers" if self.gpus_per_worker else "workers"
        return f"{sum(self.workers)} {kind} as {list(self.workers)} ({' and '.join(each) or 'nothing'} each)"


def assign_nodes(request: Request, nodes: Sequence[Node], *, free: bool = True) -> tuple[int, ...] | None:
    """Choose a node for each entry of ``request.workers``.

    All slots of an entry go onto one node. Entries get separate nodes if there are enough, the tightest fit first, and
    share nodes otherwise. Entries of equal size follow the order of the nodes' addresses.

    Whether a request fits is a bin packing problem, whose exact solution can take exponential time. The search stops
    with None after 10,000 dead ends (about a second). It can therefore miss a solution if many entries of many
    different sizes leave almost nothing free.

    Args:
        request: The requested slots.
        nodes: The inventory.
        free: Count only resources that are not reserved; otherwise all resources of the nodes.

    Returns:
        An index into ``nodes`` for each entry; None if the request does not fit.
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
    """Choose a node for each entry of ``wanted``, which is sorted in descending order; None if none is found.

    A depth-first search without recursion. It reverts a choice as soon as the remaining entries cannot fit, or have
    failed before with the same free room.
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
        hopeless.add(tuple(sorted(left)))  # sorted, because nodes with equal room are interchangeable
        untried.pop()
        if not chosen:
            return None
        index = chosen.pop()
        left[index] += wanted[len(chosen)]
        used[index] -= 1
    return tuple(chosen) if len(chosen) == len(wanted) else None


def _candidates(wanted: Sequence[int], left: Sequence[int], used: Sequence[int]) -> Iterator[int]:
    """Nodes for ``wanted[0]``: unused before used, tightest first; one node stands for all with equal room."""
    if not wanted:
        return iter(())
    alike: dict[tuple[bool, int], int] = {}
    for index, fits in enumerate(left):
        if fits >= wanted[0]:
            alike.setdefault((used[index] > 0, fits), index)
    return iter([alike[key] for key in sorted(alike)])


def _may_fit(wanted: Sequence[int], left: Sequence[int]) -> bool:
    """A necessary condition: for every unit size, the nodes hold at least as many units as the entries need."""
    return all(sum(fits // unit for fits in left) >= sum(size // unit for size in wanted) for unit in {1, *wanted})


def could_ever_fit(request: Request, nodes: Sequence[Node]) -> bool:
    """Whether the request fits on these nodes when no resource is reserved."""
    return assign_nodes(request, nodes, free=False) is not None


def cannot_place(
    request: Request, nodes: Sequence[Node], *, free: bool = True, waited_s: float | None = None
) -> PlacementError:
    """The error for a request that does not fit; it names the request, each node's resources, and a request that fits.

    Args:
        request: The requested slots.
        nodes: The inventory.
        free: Whether the request exceeds the free resources, or all resources of the nodes.
        waited_s: Seconds that the pool waited for resources; None if it did not wait.
    """
    rooms = [(node, node.capacity(request, free=free)) for node in nodes]
    there = "; ".join(_describe(node, fits, request, free) for node, fits in rooms) or "there are no nodes"
    fitting = sorted((fits for _, fits in rooms if fits), reverse=True)
    advice = f"ask for {fitting}" if fitting else "no node has room"
    if request.gpus_per_worker and not any(node.gpus_total for node in nodes):
        advice = "no node has a GPU; make the pool with use_gpu=False"
    elif free and any(node.holders for node in nodes):
        advice += ", or close pools and groups that hold the rest"
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
    """Sort key that orders addresses numerically: 10.0.0.9 comes before 10.0.0.10."""
    try:
        address = ipaddress.ip_address(node.name)
    except ValueError:
        return 9, 0, node.name, node.key
    return address.version, int(address), "", node.key
