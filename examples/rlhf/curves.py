"""Run a program with several seeds, with a frozen policy, and supervised by right labels; draw all curves.

    python examples/rlhf/curves.py grpo --plot docs/rlhf/grpo.svg
    python examples/rlhf/curves.py grpo --engines toy vllm --train dp=1 --plot docs/rlhf/grpo-vllm.svg

It fails unless every seed reaches what `main` says, and the frozen policy stays where it was.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
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
    parser.add_argument("--engines", nargs="+", default=[""], help="of grpo, to compare; by default the actor itself")
    parser.add_argument("--plot", type=Path, help="file to draw to")
    parser.add_argument("--data", type=Path, help="file for the metrics of all runs, as JSON")
    known, others = parser.parse_known_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        runs = {}
        for engine in known.engines:
            options = [*others, "--engine", engine] if engine else others
            for seed in known.seeds:
                name = f"{engine} seed {seed}".strip()
                runs[name] = metrics_of(known.program, Path(folder, name), "--seed", str(seed), *options)
        frozen, options = "frozen", ["--lr", "0", "--seed", str(known.seeds[0]), *options]
        runs[frozen] = metrics_of(known.program, Path(folder, frozen), *options)
        (ceiling,) = metrics_of(known.program, Path(folder, "ceiling"), "--labels", "right", "--steps", "0", *others)
    for name, lines in runs.items():
        print(f"{name:12} {lines[0]['accuracy']:.3f} -> {lines[-1]['accuracy']:.3f}{errors_of(lines)}")
    print(f"{'supervised':12} {ceiling['accuracy']:.3f}, by right labels")
    print(f"{time.monotonic() - begun:.0f} s in all")
    if known.data:
        known.data.write_text("".join(json.dumps({"run": name, **one}) + "\n" for name in runs for one in runs[name]))
    if known.plot:
        plot(known.plot, runs, known.program.upper(), {"supervised by right labels": ceiling["accuracy"]})
    if faults := check(runs, frozen):
        raise SystemExit("\n".join(faults))


def errors_of(lines: Metrics) -> str:
    """How far the log-probabilities of an engine were from the trainer's, if an engine answered."""
    errors = [line["log_probs_error"] for line in lines if "log_probs_error" in line]
    return f", log-probabilities differ by {max(errors):.1e} at most" if errors else ""


if __name__ == "__main__":
    main()
