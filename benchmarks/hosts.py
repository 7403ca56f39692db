"""What do calls and rows cost to ranks on other hosts? On three hosts, which are namespaces of this machine.

Needs root for them. Writes a dated page; the parts are noop, broadcast, split, chain, rows, many and idle.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness import machine
from harness.rows import Row, as_text
from harness.stage import say
from harness.targets import target_table
from on_hosts import page, testbed
from on_hosts.goals import GOALS
from on_hosts.parts import PARTS, WITHOUT_HOSTS, Run
from on_hosts.peers import versions

RESULTS = Path(__file__).resolve().parent / "results"


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--smoke", action="store_true", help="tiny sizes and few ranks: does it work at all?")
    arguments.add_argument("--only", default=",".join(PARTS), help="parts, comma-separated; default: %(default)s")
    arguments.add_argument("--rounds", type=int, help="turns of each peer; default: 7, with --smoke 2")
    arguments.add_argument("--results", type=Path, default=RESULTS, help="folder of the page; default: results/")
    return arguments


def chosen_parts(text: str) -> list[str]:
    """Names of parts, in the order of the page."""
    asked = text.split(",")
    unknown = [name for name in asked if name not in PARTS]
    if unknown:
        raise SystemExit(f"no part is called {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return [name for name in PARTS if name in asked]


@contextlib.contextmanager
def hosts_for(names: Sequence[str]) -> Iterator[Any]:
    """The hosts, if one of the parts needs them; else None."""
    if all(name in WITHOUT_HOSTS for name in names):
        yield None
        return
    reason = testbed.why_not()
    if reason is not None:
        raise SystemExit(
            f"there are no hosts to measure on, because {reason}; --only {','.join(WITHOUT_HOSTS)} needs none"
        )
    with testbed.Hosts() as hosts:
        yield hosts


def measure(names: Sequence[str], is_smoke: bool, rounds: int) -> list[Row]:
    """The rows of all parts, each of which is printed when it is there."""
    rows: list[Row] = []
    with hosts_for(names) as hosts:
        for name in names:
            found = PARTS[name](Run(hosts, is_smoke, rounds))
            say(f"--- {name}\n{page.text(found)}\n")
            rows += found
    return rows


def main() -> None:
    """Measure, print, and write the page."""
    parsed = parser().parse_args()
    names = chosen_parts(parsed.only)
    now = datetime.datetime.now(datetime.timezone.utc)
    facts: dict[str, object] = {"date": now.strftime("%Y-%m-%d %H:%M UTC"), **machine.facts(), "versions": versions()}
    begun = time.monotonic()
    rows = measure(names, parsed.smoke, parsed.rounds or (2 if parsed.smoke else 7))
    facts["took"] = f"{(time.monotonic() - begun) / 60:.1f} minutes"
    written = page.write(parsed.results, facts, rows, has_goals=not parsed.smoke)
    if not parsed.smoke:
        print(as_text(target_table(rows, GOALS)))
    print(f"written: {written}")
    if any(row.why_not.startswith("failed") for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
