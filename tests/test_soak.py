"""A few groups of the soak: that it runs, and that it would not run on for ever."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
SOAK = Path(__file__).with_name("soak.py")


def test_the_soak_runs_a_few_groups():
    command = [sys.executable, SOAK, "--minutes", "1", "--groups", "12"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("seed ")
    assert re.search(r"\ndone:\n +[1-9]", done.stdout) and "\nslowest: " in done.stdout, done.stdout


TOO_SLOW = """
import sys, time
sys.path.insert(0, sys.argv.pop(1))
import soak

def run(self):
    with self.within(0.1, "a nap"):
        time.sleep(60)

soak.Episode.run = run
soak.main()
"""


def test_a_wait_that_is_too_long_is_told_with_all_stacks():
    command = [sys.executable, "-c", TOO_SLOW, SOAK.parent, "--minutes", "0.1", "--seed", "7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert done.stdout.startswith("seed 7\nFAILED: too slow: a nap")
    assert "in run" in done.stderr, "the stacks"
