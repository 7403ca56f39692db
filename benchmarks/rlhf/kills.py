"""Do runs go on when a replica of the engine dies? Agents learn in each of ten runs, and a replica is killed in each.

The program is `agent_grpo.py` with two replicas. The kill comes in another step of each run, while agents of two steps
play. A run must not fail; each episode must be learnt from once, and no more.

    python benchmarks/rlhf/kills.py --engine toy
    PYTHONPATH=src .vllm/bin/python benchmarks/rlhf/kills.py --engine vllm
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[2] / "examples" / "rlhf" / "agent_grpo.py"


def main() -> None:
    """Run the program, and print a line of a table for each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="toy", help="toy or vllm")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10)
    known, others = parser.parse_known_args()
    faults = 0
    print("| run | killed in step | episodes | lost | learnt from twice | oldest token, in updates | seconds | fails |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        for number in range(known.runs):
            out, kill_at = Path(folder, f"{number}.jsonl"), 2 + number % (known.steps - 2)
            options = ["--engine", known.engine, "--replicas", "2", "--steps", str(known.steps), "--seed", str(number)]
            options += ["--kill-at", str(kill_at), "--out", str(out), *others]
            begun = time.monotonic()
            done = subprocess.run([sys.executable, str(PROGRAM), *options], capture_output=True, text=True)
            seconds = time.monotonic() - begun
            lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
            lost, twice, episodes = (sum(int(line[name]) for line in lines) for name in ("lost", "twice", "episodes"))
            oldest = max((line["oldest"] for line in lines), default=0)
            does_fail = done.returncode != 0 or len(lines) != known.steps
            faults += does_fail + lost + twice
            told = f"| {number} | {kill_at} | {episodes} | {lost} | {twice} | {oldest:.0f} | {seconds:.0f} "
            print(f"{told}| {'yes' if does_fail else 'no'} |", flush=True)
            if does_fail:
                print(done.stdout[-2000:], done.stderr[-4000:], sep="\n", file=sys.stderr)
    if faults:
        raise SystemExit(f"{faults} faults")


if __name__ == "__main__":
    main()
