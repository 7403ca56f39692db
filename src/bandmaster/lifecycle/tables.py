"""The tables that a group shows of itself, as text and as HTML: its ranks, and its methods with their protocols."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bandmaster.calls.spec import MethodSpec
from bandmaster.contract import WorkerRecord
from bandmaster.plan.mesh import Mesh
from bandmaster.plan.render import html_table, text_table
from bandmaster.plan.transfer import Custom, Dispatch

__all__ = ["as_html", "as_text"]

FACTS = ("host", "pid", "device", "channel")  # of a rank that runs
Held = Mapping[int, int]


def as_text(title: str, names: Sequence[str], mesh: Mesh, records: Sequence[WorkerRecord], held: Held) -> str:
    """One line per rank: worker, coordinates on the axes that are larger than 1, and where it is.

    Args:
        title: The first line.
        names: The worker of each rank.
        mesh: The group's mesh.
        records: Where each rank is.
        held: By rank, the bytes of rows that futures hold.
    """
    return text_table(title, *_ranks(names, mesh, records, held))


def as_html(
    title: str,
    names: Sequence[str],
    mesh: Mesh,
    records: Sequence[WorkerRecord] | None,
    held: Held,
    methods: Iterable[MethodSpec],
) -> str:
    """A table of the ranks, as `as_text`, and one of the methods; without ``records`` of a group that is closed."""
    if records is None:
        header, rows = _named(names, mesh)
    else:
        header, rows = _ranks(names, mesh, records, held)
    calls = [[f"{spec.name}{spec.signature}", _protocol(spec)] for spec in methods]
    shown = html_table(title, header, rows)
    return shown + html_table("", ["method", "transfer protocol"], calls) if calls else shown


def _named(names: Sequence[str], mesh: Mesh) -> tuple[list[str], list[list[Any]]]:
    axes = mesh.shown_axes
    rows = [[rank, name, *(mesh.coordinates(rank)[axis] for axis in axes)] for rank, name in enumerate(names)]
    return ["rank", "worker", *axes], rows


def _ranks(
    names: Sequence[str], mesh: Mesh, records: Sequence[WorkerRecord], held: Held
) -> tuple[list[str], list[list[Any]]]:
    header, rows = _named(names, mesh)
    for rank, record in enumerate(records):
        rows[rank] += [*(getattr(record, fact) for fact in FACTS), f"{held[rank]:,} B" if rank in held else "-"]
    return [*header, *FACTS, "rows held"], rows


def _protocol(spec: MethodSpec) -> str:
    """What a method was registered with, by the name of the protocol if it is one of the six."""
    protocol, mesh = spec.registration.protocol, spec.registration.mesh
    named = [str(member) for member in Dispatch if member.value == protocol]
    shown = "functions of its own" if isinstance(protocol, Custom) else (named or [repr(protocol)])[0]
    return shown if mesh is None else f"{shown} on mesh {mesh!r}"
