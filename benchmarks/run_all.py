"""All benchmarks, and the dated page of their results. Peers that several benchmarks ask are started once for all."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import broadcast
import chain
import gather
import idle
import import_time
import long_tail
import many_calls
import memory
import minibatches
import noop
import scaling
import split_concat
import startup
from harness.cli import Options, facts_of, options_of, parser
from harness.page import write
from harness.rows import Row, as_text, table
from harness.stage import say, side_by_side
from harness.targets import target_table

ALL = (
    import_time,
    startup,
    noop,
    broadcast,
    split_concat,
    gather,
    chain,
    minibatches,
    long_tail,
    memory,
    idle,
    scaling,
    many_calls,
)
SIZED = (broadcast.QUESTION, split_concat.QUESTION, gather.QUESTION)
RESULTS = Path(__file__).resolve().parent / "results"


def measure(options: Options) -> Iterator[list[Row]]:
    """The rows of every part, as they come."""
    yield import_time.measure(options)
    yield startup.measure(options)
    sizes = options.n_workers or ((2,) if options.is_smoke else (2, 8, 32))
    for n_workers in sizes:
        cells = [cell for question in SIZED for cell in question.cells(options, n_workers)]
        yield side_by_side(options, n_workers, noop.cells(options) + scaling.cells(options, n_workers) + cells)
    if not options.is_smoke and options.n_workers is None:
        yield scaling.measure(options, least=max(sizes) + 1)
    if options.is_smoke or options.n_workers is None:
        yield chain.measure(options)
        yield minibatches.measure(options)
        yield long_tail.measure(options)
    yield idle.measure(options)
    yield memory.measure(options)
    yield many_calls.measure(options)


def main() -> None:
    """Measure, print, and write the page."""
    arguments = parser(__doc__)
    arguments.add_argument("--results", type=Path, default=RESULTS, help="folder of the page; default: results/")
    parsed = arguments.parse_args()
    options = options_of(parsed)
    facts = facts_of(options)
    begun = time.monotonic()
    rows: list[Row] = []
    for part in measure(options):
        rows += part
        say(f"--- after {time.monotonic() - begun:.0f} s\n{as_text(table(part))}\n")
    facts["took"] = f"{(time.monotonic() - begun) / 60:.1f} minutes"
    docs = {module.__name__: module.__doc__ or "" for module in ALL}
    page = write(parsed.results, facts, docs, rows, has_targets=not options.is_smoke)
    if not options.is_smoke:
        print(as_text(target_table(rows)))
    print(f"written: {page}")
    if any(row.why_not.startswith("failed") for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
