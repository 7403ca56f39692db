"""A table of the hosts on which the nodes of a pool are, or would be."""

from __future__ import annotations

from dataclasses import dataclass

from bandmaster.plan.placement import Node, Request
from bandmaster.plan.render import html_table, text_table

_HEADER = ("node", "host", "ranks", "slots", "takes")


@dataclass(frozen=True)
class PlannedNode:
    """One node of a pool.

    Attributes:
        host: The host that it is on; None if that is lost.
        ranks: The ranks that a group on the pool has there; none on a spare node.
        n_slots: Number of slots.
    """

    host: Node | None
    ranks: range
    n_slots: int


@dataclass(frozen=True)
class PoolPlan:
    """The hosts of the ranks of a group on a pool; prints as a table, also in a notebook.

    Attributes:
        pool: The pool, in words.
        is_reserved: Whether this is reserved; else it is where the slots would be now.
        nodes: The nodes of the pool.
        spares: Its spare nodes.
        request: What is reserved for each slot.
    """

    pool: str
    is_reserved: bool
    nodes: tuple[PlannedNode, ...]
    spares: tuple[PlannedNode, ...]
    request: Request

    @property
    def _title(self) -> str:
        return f"{self.pool}, {'reserved' if self.is_reserved else 'not reserved yet'}"

    @property
    def _rows(self) -> list[tuple[object, ...]]:
        named = [*enumerate(self.nodes), *(("spare", node) for node in self.spares)]
        return [(name, _host(node.host), _ranks(node.ranks), node.n_slots, self._takes(node)) for name, node in named]

    def _takes(self, node: PlannedNode) -> str:
        amounts = () if node.host is None else node.host.amounts(self.request)
        taken = [f"{node.n_slots * each:g} of {total:g} {what}" for what, each, _, total in amounts if each]
        return ", ".join(taken) or "nothing that is counted"

    def __str__(self) -> str:
        return text_table(self._title, _HEADER, self._rows)

    def _repr_html_(self) -> str:
        return html_table(self._title, _HEADER, self._rows)


def _host(node: Node | None) -> str:
    if node is None:
        return "lost"
    return f"{node.name} ({node.hostname})" if node.hostname and node.hostname != node.name else node.name


def _ranks(ranks: range) -> str:
    if not ranks:
        return "-"
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
