"""Assigns the slots of a resource pool to nodes, given an inventory of the nodes. Pure: no process, no cluster."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bandmaster.errors import PlacementError, UsageError

RESERVING = (
    "a signal handler cannot reserve slots while another reservation is in progress; set a flag in the handler, and "
    "reserve after it has returned"
)
STRATEGIES = ("spread", "strict_spread", "pack")
_FORMS = (
    "give the address or the host name of a node, a dict of labels such as {'zone': 'a'} or {'zone': ['a', 'b']}, None "
    "for any node, or a list with one of these for each node of the pool"
)


@dataclass(frozen=True)
class NodeChoice:
    """Nodes onto which an entry of a pool may go.

    Attributes:
        name: Address or host name of the only one; None if any name will do.
        labels: The labels that it must have, and which values each may have.
    """

    name: str | None = None
    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def __str__(self) -> str:
        if self.name is not None:
            return f"node {self.name}"
        return " and ".join(f"{label}={'|'.join(values)}" for label, values in self.labels) or "any node"


ANY_NODE = NodeChoice()


@dataclass(frozen=True)
class Node:
    """One host in a backend's inventory.

    Attributes:
        name: The host in messages, usually its address.
        total: Its resources by Ray's names: ``"CPU"`` (logical ones), ``"GPU"``, and custom ones.
        free: The resources that are not reserved, by the same names.
        holders: Descriptions of the pools and groups that have reserved resources of the host.
        key: The backend's identifier of the host.
        hostname: Its own host name.
        labels: Its labels.
        is_many: Whether it stands for as many nodes as a request has, with all labels, and counts GPUs alone.
    """

    name: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    holders: tuple[str, ...] = ()
    key: str = ""
    hostname: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    is_many: bool = False

    def capacity(self, request: Request, *, free: bool = True) -> int | None:
        """Number of workers of ``request`` that fit on this node; None if the request needs no counted resource.

        Args:
            request: The resources per worker.
            free: Count only resources that are not reserved; otherwise all resources of the node.
        """
        fits = [(there if free else total) / each for _, each, there, total in self.amounts(request) if each]
        return int(min(fits) + 1e-6) if fits else None

    def amounts(self, request: Request) -> list[tuple[str, float, float, float]]:
        """The name of each resource that counts for a request, with the amounts per worker, free, and in total."""
        return [
            (f"{name}s" if name in ("GPU", "CPU") else name, each, self.free.get(name, 0.0), self.total.get(name, 0.0))
            for name, each in request.each.items()
            if name == "GPU" or not self.is_many
        ]

    def allows(self, choice: NodeChoice) -> bool:
        """Whether an entry with this choice of nodes may go here."""
        is_named = choice.name in (None, self.name, self.hostname, self.key)
        has_labels = all(self.labels.get(label) in values for label, values in choice.labels)
        return self.is_many or (is_named and has_labels)


@dataclass(frozen=True)
class Request:
    """The slots that a resource pool reserves.

    Attributes:
        name: Name of the pool, for messages.
        workers: Number of slots on each node.
        cpus_per_worker: CPUs reserved for each slot.
        gpus_per_worker: GPUs reserved for each slot; 0 for none.
        resources_per_worker: Custom resources reserved for each slot, as name and amount.
        choices: The nodes that each entry may go onto; empty if all entries may go onto any node.
        strategy: One of `STRATEGIES`.
        n_spares: Number of entries at the end that are spare: each is alone on its node.
    """

    name: str
    workers: tuple[int, ...]
    cpus_per_worker: float
    gpus_per_worker: int
    resources_per_worker: tuple[tuple[str, float], ...] = ()
    choices: tuple[NodeChoice, ...] = ()
    strategy: str = "spread"
    n_spares: int = 0

    @property
    def each(self) -> dict[str, float]:
        """The resources that are reserved for each slot, by Ray's names; GPUs only if there are any."""
        gpus = {"GPU": float(self.gpus_per_worker)} if self.gpus_per_worker else {}
        return {**gpus, "CPU": self.cpus_per_worker, **dict(self.resources_per_worker)}

    @property
    def words(self) -> str:
        """Description for messages, such as ``"4 GPU workers as [2, 2] (1 GPU each)"``."""
        each = [f"{amount:g} {name}" for name, amount in self.each.items() if amount]
        kind = "GPU workers" if self.gpus_per_worker else "workers"
        n_used = len(self.workers) - self.n_spares
        used, spare = list(self.workers[:n_used]), list(self.workers[n_used:])
        spares = f" and spare {spare}" if spare else ""
        alone = ", each on a node of its own" if self.strategy == "strict_spread" else ""
        return f"{sum(used)} {kind} as {used}{spares} ({_listed(each) or 'nothing'} each){alone}"

    def choice(self, entry: int) -> NodeChoice:
        """The nodes that an entry may go onto."""
        return self.choices[entry] if self.choices else ANY_NODE

    def is_alone(self, entry: int) -> bool:
        """Whether an entry has to have a node of its own."""
        return self.strategy == "strict_spread" or entry >= len(self.workers) - self.n_spares

    def kind(self, entry: int) -> object:
        """Equal for entries that are alike."""
        return self.workers[entry], self.choice(entry), self.is_alone(entry)


def assign_nodes(request: Request, nodes: Sequence[Node], *, free: bool = True) -> tuple[int, ...] | None:
    """Choose a node for each entry of ``request.workers``.

    All slots of an entry go onto one node. By default, entries get separate nodes if there are enough, the tightest fit
    first, and share nodes otherwise; the request's strategy can change that. Equal entries follow the order of the
    nodes' addresses.

    Whether a request fits is a bin packing problem. This places the entries one by one, those that the fewest nodes are
    left to first, and does not revise a choice. Entries of different sizes that have to share nodes, and leave almost
    nothing free there, may therefore not be placed although they fit.

    Args:
        request: The requested slots.
        nodes: The inventory.
        free: Count only resources that are not reserved; otherwise all resources of the nodes.

    Returns:
        An index into ``nodes`` for each entry; None if the request does not fit.
    """
    order = sorted(range(len(nodes)), key=lambda index: _address(nodes[index]))
    rooms = [(nodes[index], nodes[index].capacity(request, free=free)) for index in order]
    is_packed = request.strategy == "pack"
    found = _placed(request, rooms, is_packed) or _placed(request, rooms, not is_packed)
    if found is None:
        return None
    alike: dict[object, list[int]] = {}
    for entry, position in found.items():
        alike.setdefault(request.kind(entry), []).append(position)
    queues = {kind: iter(sorted(positions)) for kind, positions in alike.items()}
    return tuple(order[next(queues[request.kind(entry)])] for entry in range(len(found)))


def _placed(request: Request, rooms: Sequence[tuple[Node, int | None]], packs: bool) -> dict[int, int] | None:
    """Place entries one by one: on nodes of their own where ``packs`` is false, else on those that have some already.

    Args:
        request: The requested slots.
        rooms: The nodes, and how many workers each has room for.
        packs: Whether a node that has an entry already is preferred to one that has none.

    Returns:
        The position of the node of each entry; None if an entry finds none.
    """
    left = [sum(request.workers) if fits is None else fits for _, fits in rooms]
    n_asked = Counter(map(request.choice, range(len(request.workers))))
    open_to = {choice: [at for at, (node, _) in enumerate(rooms) if node.allows(choice)] for choice in n_asked}
    wanted = Counter(at for choice, n in n_asked.items() for at in open_to[choice] * n)  # by how many entries
    on: dict[int, list[int]] = {}  # the entries on each node

    def takes(at: int, entry: int) -> bool:
        is_apart = request.is_alone(entry) or any(map(request.is_alone, on.get(at, ())))
        return left[at] >= request.workers[entry] and (at not in on or rooms[at][0].is_many or not is_apart)

    def nodes_for(entry: int) -> list[int]:
        return [at for at in open_to[request.choice(entry)] if takes(at, entry)]

    def preference(at: int) -> tuple[bool, int, int]:
        is_used = at in on
        return is_used != packs, wanted[at], -left[at] if packs and not is_used else left[at]

    n_fitting = [len(nodes_for(entry)) for entry in range(len(request.workers))]
    urgency = [(n, not request.is_alone(e), -request.workers[e]) for e, n in enumerate(n_fitting)]
    for entry in sorted(range(len(urgency)), key=urgency.__getitem__):
        at = min(nodes_for(entry), key=preference, default=None)
        if at is None:
            return None
        left[at] -= request.workers[entry]
        on.setdefault(at, []).append(entry)
    return {entry: at for at, entries in on.items() for entry in entries}


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
    waited = f" within {waited_s:g} s" if waited_s is not None else ""
    advice = _advice(request, rooms, free)
    return PlacementError(f"pool {request.name!r} cannot place {request.words}{waited}: {there}; {advice}")


def _advice(request: Request, rooms: Sequence[tuple[Node, int | None]], free: bool) -> str:
    choices = dict.fromkeys(request.choice(entry) for entry in range(len(request.workers)))
    for choice in choices:
        if rooms and not any(node.allows(choice) for node, _ in rooms):
            return f"no node is {choice}" if choice.name is None else f"there is no {choice}"
    if request.gpus_per_worker and not any(node.total.get("GPU") for node, _ in rooms):
        return "no node has a GPU; make the pool with use_gpu=False"
    fitting = sorted((fits for node, fits in rooms if fits and any(map(node.allows, choices))), reverse=True)
    advice = f"ask for {fitting}" if fitting else "no node has room"
    if free and any(node.holders for node, _ in rooms):
        advice += ", or close pools and groups that hold the rest"
    return advice


def _describe(node: Node, fits: int | None, request: Request, free: bool) -> str:
    amounts = node.amounts(request)
    parts = [f"{there:g} of {total:g} {what}" if free else f"{total:g} {what}" for what, _, there, total in amounts]
    held = f", held by {', '.join(node.holders)}" if free and node.holders else ""
    has = f"{_listed(parts) or 'room'}{' free' if free else ''}"
    room = "any number" if fits is None else fits
    return f"node {node.name}{_labels(node, request)} has {has}, room for {room}{held}"


def _labels(node: Node, request: Request) -> str:
    """The labels of a node that a request asks for, with their values, in brackets; "" if it asks for none."""
    asked = dict.fromkeys(label for choice in request.choices for label, _ in choice.labels)
    said = [f"{label}={node.labels.get(label, '(none)')}" for label in asked]
    return f" ({', '.join(said)})" if said else ""


def _listed(parts: Sequence[str]) -> str:
    return ", ".join([*parts[:-2], " and ".join(parts[-2:])]) if parts else ""


def _address(node: Node) -> tuple[int, int, str, str]:
    """Sort key that orders addresses numerically: 10.0.0.9 comes before 10.0.0.10."""
    try:
        address = ipaddress.ip_address(node.name)
    except ValueError:
        return 9, 0, node.name, node.key
    return address.version, int(address), "", node.key


def node_choices(nodes: Any, n_entries: int, n_spares: int) -> tuple[NodeChoice, ...]:
    """The choice of each entry and of each spare entry.

    Args:
        nodes: What the user says: one choice for all, or a list with one for each entry; spare entries may go onto any
            node, unless the list goes on with one for each of them.
        n_entries: Number of entries.
        n_spares: Number of spare entries.

    Raises:
        UsageError: It is none of these.
    """
    n_all = n_entries + n_spares
    if nodes is None or isinstance(nodes, str | Mapping):
        return (_choice(nodes),) * n_all
    if not isinstance(nodes, Sequence):
        raise UsageError(f"nodes is {nodes!r}: {_FORMS}")
    if len(nodes) not in (n_entries, n_all):
        spares = f", or {n_all} with those of the spare nodes" if n_spares else ""
        raise UsageError(f"nodes has {len(nodes)} items, but the pool has {n_entries} nodes{spares}: {_FORMS}")
    return tuple(_choice(said) for said in nodes) + (ANY_NODE,) * (n_all - len(nodes))


def _choice(said: Any) -> NodeChoice:
    if said is None:
        return ANY_NODE
    if isinstance(said, str) and said:
        return NodeChoice(said)
    if isinstance(said, Mapping) and all(isinstance(label, str) for label in said):
        return NodeChoice(labels=tuple((label, _values(label, value)) for label, value in said.items()))
    raise UsageError(f"nodes has {said!r}: {_FORMS}")


def _values(label: str, value: Any) -> tuple[str, ...]:
    values = (value,) if isinstance(value, str) else value
    if isinstance(values, Sequence) and values and all(isinstance(one, str) for one in values):
        return tuple(values)
    raise UsageError(
        f"nodes has {value!r} for label {label!r}: give a string, or a list of strings any of which will do"
    )
