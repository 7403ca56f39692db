"""Applies each mutant to a copy of the project, and runs what may find it; see `mutants`."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from mutants.mutants import MUTANTS, TESTS, Mutant

ROOT = Path(__file__).parents[2]
LONGER_S = 130.0  # than a program may take that does not end
LEFT_OUT = (".git", ".v*", ".agents", ".bench", "__pycache__", ".*_cache", "site", "dist", "*.egg-info")
FINDERS = ("simulation", "tests", "fuzz")


def main() -> int:
    """Try all mutants, and print a line for each."""
    parser = argparse.ArgumentParser("mutants", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each mutant and finder")
    parser.add_argument("--by", default="simulation,tests", help=f"who looks for them, in order: {','.join(FINDERS)}")
    parser.add_argument("names", nargs="*", help="only these")
    args = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if not args.names or mutant.name in args.names]
    finders = args.by.split(",")
    if unknown := set(finders).difference(FINDERS):
        parser.error(f"--by has {sorted(unknown)}, expected some of {', '.join(FINDERS)}")
    n_found = sum([_is_found(mutant, finders, args.seconds) for mutant in chosen])
    print(f"found {n_found} of {len(chosen)}")
    return 0 if n_found == len(chosen) else 1


def _is_found(mutant: Mutant, finders: list[str], seconds: float) -> bool:
    with tempfile.TemporaryDirectory(prefix="bandmaster-mutant-") as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_OUT))
        file = copy / "src" / "bandmaster" / mutant.file
        text = file.read_text()
        if text.count(mutant.old) != 1:
            sys.exit(f"mutant {mutant.name!r}: {mutant.file} has {text.count(mutant.old)} such places, expected 1")
        file.write_text(text.replace(mutant.old, mutant.new))
        for finder in finders:
            began = time.monotonic()
            said = next(filter(None, (_failure(one, copy, seconds) for one in _commands(finder, mutant, seconds))), "")
            took = f"{time.monotonic() - began:4.0f} s" if said else "     -"
            print(f"{mutant.name:22} {finder:10} {took}  {mutant.says}\n{'':42}{said[:90]}", flush=True)
            if said:
                return True
        return False


def _commands(finder: str, mutant: Mutant, seconds: float) -> Iterator[list[str]]:
    """What a finder runs; the first that fails has found the mutant."""
    room = mutant.file.split("/")[0]
    if finder == "tests":
        for name in TESTS[room]:
            *on_hosts, name = name.split(":")
            module = "on_hosts" if on_hosts else "pytest"
            yield [module, "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", f"tests/{name}.py"]
    elif (finder, room) != ("simulation", "rl"):  # the simulated world has no weights
        yield [finder, "--minutes", f"{seconds / 60:.3f}"]


def _failure(command: list[str], copy: Path, seconds: float) -> str:
    """The last line of a command that fails or hangs; "" if it ends well."""
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join([f"{copy}/src", f"{copy}/tests"])}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *command], env=paths, cwd=copy, stdout=output, stderr=output, start_new_session=True
        )
        try:
            if process.wait(seconds + LONGER_S) == 0:
                return ""
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"{command[-1]} hangs"
        output.seek(0)
        lines = output.read().strip().splitlines()
        return next((line for line in lines if line.startswith(("FAILED", "ERROR"))), (lines or ["it fails"])[-1])


if __name__ == "__main__":
    sys.exit(main())
