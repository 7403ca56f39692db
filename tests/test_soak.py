"""A few seconds of `make soak`."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(100)
def test_a_short_soak_finds_nothing():
    program = Path(__file__).parent / "soak.py"
    done = subprocess.run([sys.executable, program, "--minutes", "0.1"], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr
