"""Measures what random programs find: each mend of the past undone by a patch, and the seconds until it is noticed.

The command ``python -m fuzz.undone fuzz/mends/02b*.patch``, in tests/, prints a line for each patch.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
OF_WEIGHTS = ("04", "05", "17m")  # what the names of patches begin with
OF_HOSTS = ("01", "14")
OF_ROWS = ("02", "03", "11e", "17a", "17c", "17d", "17e", "17f", "17g", "17h", "17j", "18", "19b", "19c", "22f", "22g")
OF_ROWS += ("f1", "f2", "19f", "20")


def main() -> None:
    """Print, for each patch, the seconds and the failure, and whether its program ends well without the patch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("patches", nargs="+", type=Path)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--backends", help="in place of those that the patch concerns")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tree = f"{folder}/tree"
        git(ROOT, "worktree", "add", "--detach", tree, "HEAD")
        try:
            for patch in given.patches:
                backends = given.backends or backends_of(patch.stem)
                git(tree, "apply", str(patch.resolve()))
                seconds, line = found(tree, backends, given.seconds)
                git(tree, "reset", "--hard")
                well = ""
                if seed := re.search(r"seed (\d+)", line):
                    again = subprocess.run(fuzz(backends, "--seed", seed[1], "--programs", "1"), **inside(tree))
                    well = f"; without the patch: {again.returncode}"
                print(f"{patch.stem}: {seconds:.0f} s, {backends}: {line or 'nothing'}{well}", flush=True)
        finally:
            git(ROOT, "worktree", "remove", "--force", tree)


def backends_of(name):
    """The backends on which a defect can be met fastest."""
    if name.startswith(OF_HOSTS):
        return "hosts"
    return "weights" if name.startswith(OF_WEIGHTS) else "inprocess" if name.startswith(OF_ROWS) else "local"


def found(tree, backends, seconds):
    """The seconds until a program has failed, and what was said of it; nothing if none has failed in time."""
    start = time.monotonic()
    command = fuzz(backends, "--minutes", str(seconds / 60))
    with subprocess.Popen(command, start_new_session=True, text=True, errors="replace", **inside(tree)) as process:
        try:
            line = next((line for line in process.stdout if line.startswith("FAILED")), "")
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    return time.monotonic() - start, line.strip()[:160]


def fuzz(backends, *options):
    return [sys.executable, "-u", "-m", "fuzz", "--backends", backends, *options]


def inside(tree):
    environment = {**os.environ, "PYTHONPATH": f"{tree}/src:{tree}/tests", "PYTHONDONTWRITEBYTECODE": "1"}
    return {"cwd": tree, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}


def git(tree, *command):
    subprocess.run(["git", "-C", str(tree), *command], check=True, capture_output=True)


if __name__ == "__main__":
    main()
