"""The user's choice of nodes for an entry of a resource pool: by name, or by labels. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bandmaster.errors import UsageError

__all__ = ["ANY_NODE", "NodeChoice", "node_choices"]

_FORMS = (
    "give the address or the host name of a node, a dict of labels such as {'zone': 'a'} or {'zone': ['a', 'b']}, None "
    "for any node, or a list with one of these for each node of the pool"
)


@dataclass(frozen=True)
class NodeChoice:
    """Nodes onto which an entry of a pool may go.

    Attributes:
        name: Address or host name of the only such node; None for a node of any name.
        labels: The labels that a node must have, each with its permitted values.
    """

    name: str | None = None
    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def allows(self, names: Sequence[str], labels: Mapping[str, str]) -> bool:
        """Whether a node of these names and labels is permitted."""
        is_named = self.name is None or self.name in names
        return is_named and all(labels.get(label) in values for label, values in self.labels)

    def __str__(self) -> str:
        if self.name is not None:
            return f"node {self.name}"
        return " and ".join(f"{label}={'|'.join(values)}" for label, values in self.labels) or "any node"


ANY_NODE = NodeChoice()


def node_choices(nodes: Any, n_entries: int, n_spares: int) -> tuple[NodeChoice, ...]:
    """The choice of each entry and of each spare entry.

    Args:
        nodes: The user's argument: one choice for all entries, or a list with one for each entry. Spare entries may go
            onto any node, unless the list also has one for each of them.
        n_entries: Number of entries.
        n_spares: Number of spare entries.

    Raises:
        UsageError: ``nodes`` has another type or length.
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
