"""The tables of a group, as text and as HTML: its ranks, and its methods with their protocols."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from bandmaster.calls.spec import MethodSpec
from bandmaster.contract import WorkerRecord
from bandmaster.plan.mesh import Mesh
from bandmaster.plan.render import html_table, text_table
from bandmaster.plan.transfer import Custom, Dispatch

FACTS = ("host", "pid", "device", "channel")  # of a rank that runs


class Running(NamedTuple):
    """The ranks of a group that is open.

    Attributes:
        records: The host, process, device and channel of each rank.
        held: The bytes of rows that futures hold, by rank.
        requests: The ranks of each open request; none for one that waits for a replica.
    """

    records: Sequence[WorkerRecord]
    held: Mapping[int, int]
    requests: Sequence[Sequence[int]]


def as_text(title: str, names: Sequence[str], mesh: Mesh, running: Running) -> str:
    """A table with one line per rank: worker, coordinates on axes larger than 1, place, open requests, and rows held.

    Args:
        title: The first line, but for the requests that wait for a replica.
        names: The worker of each rank.
        mesh: The group's mesh.
        running: Facts about the ranks.
    """
    n_waiting = sum(not ranks for ranks in running.requests)
    waiting = f"; {n_waiting} requests wait for a replica" if n_waiting else ""
    return text_table(title + waiting, *_ranks(names, mesh, running))


def as_html(
    title: str, names: Sequence[str], mesh: Mesh, running: Running | None, methods: Iterable[MethodSpec]
) -> str:
    """HTML tables of the ranks, see `as_text`, and of the methods.

    Args:
        title: The first line.
        names: The worker of each rank.
        mesh: The group's mesh.
        running: Facts about the ranks; None for a closed group.
        methods: The group's methods.
    """
    header, rows = _named(names, mesh) if running is None else _ranks(names, mesh, running)
    calls = [[f"{spec.name}{spec.signature}", _protocol(spec)] for spec in methods]
    shown = html_table(title, header, rows)
    return shown + html_table("", ["method", "transfer protocol"], calls) if calls else shown


def _named(names: Sequence[str], mesh: Mesh) -> tuple[list[str], list[list[Any]]]:
    axes = mesh.shown_axes
    rows = [[rank, name, *(mesh.coordinates(rank)[axis] for axis in axes)] for rank, name in enumerate(names)]
    return ["rank", "worker", *axes], rows


def _ranks(names: Sequence[str], mesh: Mesh, running: Running) -> tuple[list[str], list[list[Any]]]:
    header, rows = _named(names, mesh)
    n_open = Counter(rank for ranks in running.requests for rank in ranks)
    for rank, record in enumerate(running.records):
        held = f"{running.held[rank]:,} B" if rank in running.held else "-"
        rows[rank] += [*(getattr(record, fact) for fact in FACTS), n_open[rank] or "-", held]
    return [*header, *FACTS, "requests", "rows held"], rows


def _protocol(spec: MethodSpec) -> str:
    """The protocol and mesh with which a method was registered; one of the six protocols is shown by its name."""
    protocol, mesh = spec.registration.protocol, spec.registration.mesh
    named = [str(member) for member in Dispatch if member.value == protocol]
    shown = "functions of its own" if isinstance(protocol, Custom) else (named or [repr(protocol)])[0]
    return shown if mesh is None else f"{shown} on mesh {mesh!r}"
