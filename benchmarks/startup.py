"""How long from an interpreter that has loaded nothing to the first result of every worker?

The import of the library, the start of its workers, and a first call; once with workers that need only numpy, and once
with torch imported in each of them.
"""

from __future__ import annotations

from harness.cli import Options, run
from harness.environments import Found
from harness.peer_process import PeerFailed, PeerProcess
from harness.rows import Row
from harness.stage import LIGHT, START_TIMEOUT_S, say

PLAIN = "first result"
WITH_TORCH = "first result, torch in every worker"
IMPORTS_TORCH_ANYWAY = {"verl"}
SLOW = {PLAIN: {"verl"}, WITH_TORCH: {"bandmaster_ray", "plain_ray", "monarch"}}  # one round is enough


def measure(options: Options) -> list[Row]:
    """Rounds that alternate between the peers."""
    rows = []
    for n_workers in options.n_workers or ((2,) if options.is_smoke else (8,)):
        peers = options.peers_for(n_workers)
        for what in (PLAIN,) if options.is_smoke else (PLAIN, WITH_TORCH):
            rows += _measure(what, peers, n_workers, 1 if options.is_smoke else 5)  # Ray may take a second more
    return [_as_with_torch(row, rows) for row in rows]


def _measure(what: str, peers: list[Found], n_workers: int, n_rounds: int) -> list[Row]:
    samples: dict[str, list[tuple[float]]] = {found.kind.name: [] for found in peers}
    why_not = {found.kind.name: found.why_not for found in peers}
    for turn in range(n_rounds):
        for found in peers:
            name = found.kind.name
            if why_not[name] or (turn and name in SLOW[what]) or (what == WITH_TORCH and name in IMPORTS_TORCH_ANYWAY):
                continue
            if what == WITH_TORCH and "torch" not in found.versions:
                why_not[name] = "torch is not installed"
                continue
            try:
                samples[name].append((_start(found, n_workers, what),))
                say(f"startup: {what}, {found.kind.title}, {n_workers} workers: {samples[name][-1][0]:.2f} s")
            except PeerFailed as error:
                why_not[name] = f"failed: {error}"
    return [
        Row("startup", what, name, n_workers, "s", () if why_not[name] else tuple(rounds), why_not[name])
        for name, rounds in samples.items()
    ]


def _start(found: Found, n_workers: int, what: str) -> float:
    needs_torch = what == WITH_TORCH or found.kind.name in IMPORTS_TORCH_ANYWAY
    process = PeerProcess(found, {} if needs_torch else LIGHT)
    try:
        return process.ask("start", START_TIMEOUT_S, n_workers=n_workers, with_torch=needs_torch)["seconds"]
    finally:
        process.close()


def _as_with_torch(row: Row, rows: list[Row]) -> Row:
    """For a peer that imports torch anyway, the figure that it has already."""
    if row.peer not in IMPORTS_TORCH_ANYWAY or row.why_not:
        return row
    plain = next(other for other in rows if (other.peer, other.n_workers) == (row.peer, row.n_workers))
    note = "imports torch anyway: one figure for both"
    return Row(row.question, row.what, row.peer, row.n_workers, row.unit, plain.rounds, plain.why_not, note)


if __name__ == "__main__":
    run(__doc__, measure)
