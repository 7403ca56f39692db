"""Run a program with several seeds, with a frozen policy, and supervised by right labels; draw all curves.

    python examples/rlhf/curves.py grpo --plot docs/rlhf/grpo.svg

It fails unless every seed reaches what `main` says, and the frozen policy stays where it was.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from plotting import Metrics, plot

BEFORE, AFTER, STAYS = 0.3, 0.9, 0.05  # accuracy before at most, after at least; how far the frozen policy may move


def metrics_of(program: str, out: Path, *options: str) -> Metrics:
    """The metrics of a run."""
    path = Path(__file__).with_name(f"{program}.py")
    subprocess.run([sys.executable, str(path), "--out", str(out), "--save-every", "0", *options], check=True)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def check(runs: dict[str, Metrics], frozen: str) -> list[str]:
    """What has not come out as it should."""
    faults = []
    for name, lines in runs.items():
        before, after = lines[0]["accuracy"], lines[-1]["accuracy"]
        if name == frozen and abs(after - before) > STAYS:
            faults.append(f"{name}: the accuracy went from {before:.3f} to {after:.3f}")
        if name != frozen and not (before < BEFORE and after > AFTER):
            faults.append(f"{name}: from {before:.3f} to {after:.3f}, not from below {BEFORE} to above {AFTER}")
    return faults


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", help="grpo or ppo")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--plot", type=Path, help="file to draw to")
    known, others = parser.parse_known_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        runs, frozen = runs_of(known.program, known.seeds, Path(folder), others)
        (ceiling,) = metrics_of(known.program, Path(folder, "ceiling"), "--labels", "right", "--steps", "0", *others)
    for name, lines in runs.items():
        print(f"{name:12} {lines[0]['accuracy']:.3f} -> {lines[-1]['accuracy']:.3f}")
    print(f"{'supervised':12} {ceiling['accuracy']:.3f}, by right labels")
    print(f"{time.monotonic() - begun:.0f} s in all")
    if known.plot:
        plot(known.plot, runs, known.program.upper(), {"supervised by right labels": ceiling["accuracy"]})
    if faults := check(runs, frozen):
        raise SystemExit("\n".join(faults))


def runs_of(program: str, seeds: Sequence[int], folder: Path, options: Sequence[str]) -> tuple[dict[str, Metrics], str]:
    """The metrics of all runs by their names, and the name of the one with the frozen policy."""
    runs = {}
    for seed in seeds:
        runs[f"seed {seed}"] = metrics_of(program, folder / str(seed), "--seed", str(seed), *options)
    frozen = "frozen"
    runs[frozen] = metrics_of(program, folder / frozen, "--lr", "0", "--seed", str(seeds[0]), *options)
    return runs, frozen


if __name__ == "__main__":
    main()
