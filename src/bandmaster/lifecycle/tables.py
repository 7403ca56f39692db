"""The tables of a group, as text and as HTML: its ranks, and its methods with their protocols."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bandmaster.calls.spec import MethodSpec
from bandmaster.contract import WorkerRecord
from bandmaster.plan.mesh import Mesh
from bandmaster.plan.render import html_table, text_table
from bandmaster.plan.transfer import Custom, Dispatch

FACTS = ("host", "pid", "device", "channel")  # of a rank that runs
Held = Mapping[int, int]


def as_text(title: str, names: Sequence[str], mesh: Mesh, records: Sequence[WorkerRecord], held: Held) -> str:
    """A table with one line per rank: worker, coordinates on the axes that are larger than 1, place, and rows held.

    Args:
        title: The first line.
        names: The worker of each rank.
        mesh: The group's mesh.
        records: The host, process, device and channel of each rank.
        held: The bytes of rows that futures hold, by rank.
    """
    return text_table(title, *_ranks(names, mesh, records, held))


def as_html(
    title: str,
    names: Sequence[str],
    mesh: Mesh,
    running: tuple[Sequence[WorkerRecord], Held] | None,
    methods: Iterable[MethodSpec],
) -> str:
    """HTML tables of the ranks, see `as_text`, and of the methods.

    Args:
        title: The first line.
        names: The worker of each rank.
        mesh: The group's mesh.
        running: The records of the ranks, and the bytes of rows that futures hold; None for a closed group.
        methods: The group's methods.
    """
    header, rows = _named(names, mesh) if running is None else _ranks(names, mesh, *running)
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
    """The protocol and mesh with which a method was registered; one of the six protocols is shown by its name."""
    protocol, mesh = spec.registration.protocol, spec.registration.mesh
    named = [str(member) for member in Dispatch if member.value == protocol]
    shown = "functions of its own" if isinstance(protocol, Custom) else (named or [repr(protocol)])[0]
    return shown if mesh is None else f"{shown} on mesh {mesh!r}"
