"""A few seconds of the soak: that it runs, and that it would not run on for ever."""

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).with_name("soak.py")


@pytest.mark.timeout(90)
def test_the_soak_runs_for_a_few_seconds():
    done = subprocess.run([sys.executable, SOAK, "--minutes", "0.1"], capture_output=True, text=True, timeout=80)
    assert done.returncode == 0, done.stdout + done.stderr
    seed, *_, summary, _ = [line for line in done.stdout.splitlines() if line.startswith(("seed", " ", "slowest"))]
    assert seed.startswith("seed ")
    assert "Traceback" not in done.stderr


def test_what_went_wrong_is_told_with_the_seed():
    program = f"""
import sys; sys.path.insert(0, {str(SOAK.parent)!r}); sys.argv = ["soak", "--minutes", "0.05", "--seed", "7"]
import soak
soak.Episode.run = lambda self: self.soak.watchdog.within(0.1, "a wait").__enter__() and None or __import__("time").sleep(20)
soak.main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=80)
    assert done.returncode == 1
    assert "seed 7" in done.stdout
    assert "FAILED: too slow: a wait" in done.stdout
    assert "most recent call first" in done.stderr, "the stacks"
