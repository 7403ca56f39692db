"""Applies each mutant to a copy of the sources, and runs the simulation on it; see `mutants`."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mutants.mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
LONGER_S = 130.0  # than a program may take that does not end


def main() -> int:
    """Try all mutants, and print a line for each."""
    parser = argparse.ArgumentParser("mutants", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each mutant")
    parser.add_argument("names", nargs="*", help="only these")
    args = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if not args.names or mutant.name in args.names]
    n_found = sum([_is_found(mutant, args.seconds) for mutant in chosen])
    print(f"found {n_found} of {len(chosen)}")
    return 0 if n_found == len(chosen) else 1


def _is_found(mutant: Mutant, seconds: float) -> bool:
    with tempfile.TemporaryDirectory(prefix="bandmaster-mutant-") as folder:
        shutil.copytree(ROOT / "src", Path(folder) / "src", ignore=shutil.ignore_patterns("__pycache__"))
        file = Path(folder) / "src" / "bandmaster" / mutant.file
        text = file.read_text()
        if text.count(mutant.old) != 1:
            sys.exit(f"mutant {mutant.name!r}: {mutant.file} has {text.count(mutant.old)} such places, expected 1")
        file.write_text(text.replace(mutant.old, mutant.new))
        paths = {**os.environ, "PYTHONPATH": os.pathsep.join([f"{folder}/src", str(ROOT / "tests")])}
        began = time.monotonic()
        command = [sys.executable, "-m", "simulation", "--minutes", f"{seconds / 60:.3f}"]
        try:
            done = subprocess.run(command, env=paths, capture_output=True, text=True, timeout=seconds + LONGER_S)
            is_found, said = done.returncode != 0, (done.stdout + done.stderr).strip().splitlines()
        except subprocess.TimeoutExpired:
            is_found, said = True, ["it hangs"]
        last = said[-1][:90] if said else ""
        took = f"{time.monotonic() - began:4.0f} s" if is_found else "     -"
        print(f"{mutant.name:22} {took}  {mutant.says}\n{'':31}{last}", flush=True)
        return is_found


if __name__ == "__main__":
    sys.exit(main())
