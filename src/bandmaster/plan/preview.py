"""`plan` previews a call: the rows of each rank and the collected values. Pure: it starts nothing.

::

    >>> from bandmaster import Dispatch, Mesh
    >>> print(plan(Dispatch.DP_PROTO, Mesh(dp=4), rows=10))
    TransferProtocol(outgoing=Split('dp'), incoming=Concat('dp')) on Mesh(dp=4), 10 rows
    rank  dp  gets       back
    0     0   rows 0:3   part 0
    1     1   rows 3:6   part 1
    2     2   rows 6:8   part 2
    3     3   rows 8:10  part 3
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bandmaster.errors import BatchError, ProtocolError
from bandmaster.plan.mesh import Mesh
from bandmaster.plan.render import Cell, svg_bands, text_table
from bandmaster.plan.rows import part_numbers, row_ranges, shards, sources
from bandmaster.plan.transfer import Concat, Custom, Incoming, PerRank, Route, Split, TransferProtocol, as_protocol


@dataclass(frozen=True)
class TransferPlan:
    """The rows that each rank receives, and the ranks whose values are collected.

    It prints as a table, and shows in a notebook as a drawing.

    Attributes:
        protocol: The previewed transfer protocol.
        mesh: The mesh of the call.
        rows: Number of rows of the batch.
        received: For each rank ``(start, stop)`` of its rows, of which only the number counts if the split balances;
            None for every rank if the protocol does not split.
        collected: The collected ranks, in order; for a tuple of collect rules, the ranks that any of them collects.
    """

    protocol: TransferProtocol[Any, Any]
    mesh: Mesh
    rows: int
    received: tuple[tuple[int, int] | None, ...]
    collected: tuple[int, ...]

    def __str__(self) -> str:
        rows = [
            [rank, *self.mesh.coordinates(rank).values(), self._gets(rank), self._gives(rank)]
            for rank in range(self.mesh.size)
        ]
        title = f"{self.protocol} on {self.mesh}, {self.rows} rows"
        return text_table(title, ["rank", *self.mesh.axis_names, "gets", "back"], rows)

    def _repr_svg_(self) -> str:
        outgoing, incoming = self.protocol.outgoing, self.protocol.incoming
        bands = [
            (type(outgoing).__name__, self._sent_boxes()),
            *self._rank_bands(),
            *((type(collect).__name__, self._back_boxes(collect)) for collect in self.protocol.collects),
        ]
        return svg_bands(f"{outgoing} → {incoming}", f"{self.mesh}, {self.rows} rows", bands)

    def _gets(self, rank: int) -> str:
        received, first, outgoing = self.received[rank], self.received[0], self.protocol.outgoing
        if received is None or first is None:
            return "its own value" if isinstance(outgoing, PerRank) else "everything"
        (start, stop), largest = received, first[1] - first[0]
        assert isinstance(outgoing, Split), "only a split sends ranges of rows"
        padding = largest - (stop - start) if outgoing.pad else 0
        rows = f"rows {start}:{stop}" if outgoing.balance is None else f"{stop - start} rows by {outgoing.balance}"
        return rows + (f" + {padding} padding" if padding else "")

    def _gives(self, rank: int) -> str:
        """Describe the use of the rank's value in each collect, "-" if the rank is not collected."""
        given = [self._place(collect, rank) for collect in self.protocol.collects]
        return ", ".join(given) if rank in self.collected else "-"

    def _place(self, collect: Incoming, rank: int) -> str:
        """Describe the use of the rank's value in one collect, such as "part 0"."""
        ranks = sources(self.mesh, collect)
        kind = "part" if isinstance(collect, Concat) else "item"
        return f"{kind} {ranks.index(rank)}" if rank in ranks else "-"

    def _part(self, rank: int) -> int:
        """Index of the value that the rank receives; ranks that receive equal values have equal indices."""
        if isinstance(self.protocol.outgoing, Split):
            return part_numbers(self.mesh, self.protocol.outgoing)[rank]
        return rank if isinstance(self.protocol.outgoing, PerRank) else 0

    def _sent_boxes(self) -> list[Cell]:
        if isinstance(self.protocol.outgoing, PerRank):
            return [Cell((f"value {rank}",), rank) for rank in range(self.mesh.size)]
        any_rank = {self._part(rank): rank for rank in range(self.mesh.size)}
        return [Cell((self._gets(rank),), part) for part, rank in sorted(any_rank.items())]

    def _back_boxes(self, collect: Incoming) -> list[Cell]:
        ranks = sources(self.mesh, collect)
        return [
            Cell((self._place(collect, rank), f"from rank {rank}"), self._part(rank), is_framed=True) for rank in ranks
        ]

    def _rank_bands(self) -> list[tuple[str, list[Cell]]]:
        """A band of rank boxes for each coordinate of the slowest axis; a single band if the mesh has one axis."""
        slowest, *others = self.mesh.shape
        made_by_refining = [axis for axis in self.mesh.axis_names if axis not in self.mesh.shape]
        named = [axis for axis in self.protocol.axis_names if axis in made_by_refining]
        refined = [axis for axis in named if self.mesh.axis_size(axis) > 1]
        boxes: dict[str, list[Cell]] = {}
        for rank in range(self.mesh.size):
            where = self.mesh.coordinates(rank)
            lines = [", ".join(f"{axis} {where[axis]}" for axis in axes) for axes in (others or [slowest], refined)]
            text = (f"rank {rank}", *filter(None, lines), self._gets(rank))
            band = boxes.setdefault(f"{slowest} {where[slowest]}" if others else "ranks", [])
            band.append(Cell(text, self._part(rank), is_framed=rank in self.collected))
        return list(boxes.items())


def plan(protocol: object, mesh: Mesh, rows: int) -> TransferPlan:
    """Preview a call under ``protocol`` on ``mesh`` with a batch of ``rows`` rows. Starts nothing.

    Args:
        protocol: A `Dispatch` member, its name, or a `TransferProtocol`.
        mesh: The mesh of the group.
        rows: Rows of the batch, 0 or more.

    Raises:
        ProtocolError: ``protocol`` is not a transfer protocol, or has no plan: it is a pair of functions, or a `Route`.
        MeshError: The protocol names an axis that ``mesh`` does not have and that is not one of the six protocols'.
        BatchError: ``rows`` is negative.
    """
    parsed = as_protocol(protocol)
    if isinstance(parsed, Custom):
        raise ProtocolError(
            "a custom protocol cannot be planned, because its dispatch_fn runs at the call; pass a TransferProtocol"
        )
    if isinstance(parsed.outgoing, Route):
        raise ProtocolError(f"{parsed.outgoing!r} chooses a replica when a request is sent, so there is no plan")
    if rows < 0:
        raise BatchError(f"rows must be a non-negative number, got {rows}")
    received: tuple[tuple[int, int] | None, ...] = (None,) * mesh.size
    if isinstance(parsed.outgoing, Split):
        ranges = row_ranges(rows, len(shards(mesh, parsed.outgoing)), parsed.outgoing.pad)
        received = tuple(ranges[number] for number in part_numbers(mesh, parsed.outgoing))
    return TransferPlan(parsed, mesh, rows, received, sources(mesh, parsed.incoming))
