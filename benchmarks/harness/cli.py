"""What every benchmark's command line has in common."""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness import machine
from harness.environments import KINDS, Found, find
from harness.rows import Row, as_text, save, table

N_WORKERS = {  # from and to, without --full, for the time it takes
    "bandmaster_ray": (1, 32),
    "plain_ray": (1, 32),
    "monarch": (1, 32),
    "verl": (8, 8),
}
ONLY_FULL = "only with --full"
WORKER_NBYTES = {"bandmaster_ray": 100 << 20, "plain_ray": 80 << 20, "monarch": 80 << 20, "verl": 500 << 20}


@dataclass(frozen=True)
class Options:
    """What is asked for.

    Attributes:
        peers: Those to measure, present or not.
        is_smoke: Tiny sizes and two workers: does it work at all?
        is_full: Every size and every number of workers for every peer, however long it takes.
        n_workers: Only these numbers of workers.
    """

    peers: tuple[Found, ...]
    is_smoke: bool
    is_full: bool
    n_workers: tuple[int, ...] | None = None

    def peers_for(self, n_workers: int) -> list[Found]:
        """The peers, and of those that had better not start so many workers, why."""
        return [replace(found, why_not=found.why_not or self._too_many(found, n_workers)) for found in self.peers]

    def sparing(self, *names: str) -> Options:
        """The same without these peers, which are slow to start; with --full, with them."""
        if self.is_full:
            return self
        return self.without(names, ONLY_FULL)

    def without(self, names: Sequence[str], why_not: str) -> Options:
        """The same without these peers, for a reason."""
        peers = [replace(p, why_not=p.why_not or why_not) if p.kind.name in names else p for p in self.peers]
        return replace(self, peers=tuple(peers))

    def _too_many(self, found: Found, n_workers: int) -> str:
        least, most = N_WORKERS.get(found.kind.name, (0, n_workers))
        if not (least <= n_workers <= most or self.is_full or self.is_smoke):
            return f"{n_workers} workers {ONLY_FULL}"
        needed, available = n_workers * WORKER_NBYTES.get(found.kind.name, 0), machine.available_nbytes()
        if needed > 0.8 * available:
            return f"{n_workers} workers take about {needed / (1 << 30):.0f} GiB, {available / (1 << 30):.0f} are free"
        return ""


def parser(doc: str) -> argparse.ArgumentParser:
    """The arguments that all benchmarks have."""
    arguments = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--peers", default=",".join(KINDS), help="comma-separated; default: %(default)s")
    arguments.add_argument(
        "--workers", default="", help="numbers of workers, comma-separated; default: as the file says"
    )
    arguments.add_argument("--smoke", action="store_true", help="tiny sizes, two workers: does it work at all?")
    arguments.add_argument("--full", action="store_true", help="every size and number of workers for every peer")
    arguments.add_argument("--here", action="store_true", help="use this interpreter for every peer, not .bench")
    arguments.add_argument("--json", type=Path, help="write the figures to this file, too")
    return arguments


def options_of(arguments: argparse.Namespace) -> Options:
    """The parsed arguments as options."""
    names = arguments.peers.split(",")
    unknown = [name for name in names if name not in KINDS]
    if unknown:
        raise SystemExit(f"no peer is called {', '.join(unknown)}; there are {', '.join(KINDS)}")
    n_workers = tuple(map(int, arguments.workers.split(","))) if arguments.workers else None
    return Options(tuple(find(names, arguments.here)), arguments.smoke, arguments.full, n_workers)


def run(doc: str, measure: Callable[[Options], list[Row]]) -> None:
    """The ``main`` of a benchmark: parse, measure, print."""
    arguments = parser(doc).parse_args()
    options = options_of(arguments)
    facts = facts_of(options)
    rows = measure(options)
    print(as_text([[key, str(value)] for key, value in facts.items()]))
    print()
    print(as_text(table(rows)))
    if arguments.json:
        save(arguments.json, facts, rows)
    broken = [row for row in rows if row.why_not.startswith("failed")]
    if broken:
        raise SystemExit(1)


def facts_of(options: Options) -> dict[str, object]:
    """Date, machine, and the peers' versions."""
    versions = {
        found.kind.title: found.why_not or ", ".join(f"{name} {version}" for name, version in found.versions.items())
        for found in options.peers
    }
    now = datetime.datetime.now(datetime.timezone.utc)
    return {"date": now.strftime("%Y-%m-%d %H:%M UTC"), **machine.facts(), **versions}
