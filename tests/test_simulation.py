"""The simulated world: programs of fixed seeds, which repeat, and of new ones; and that it notices defects."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mutants.mutants import MUTANTS

TESTS = Path(__file__).parent


def run(module, *options, timeout=120.0, **variables):
    """The exit code and the output of a module of this folder."""
    command = [sys.executable, "-m", module, *options]
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, **variables}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    return done.returncode, done.stdout + done.stderr


def test_programs_of_fixed_seeds_find_nothing():
    code, said = run("simulation", "--seed", "1", "--programs", "5")
    assert code == 0 and "nothing was found" in said, said


def test_a_seed_repeats_a_program_in_another_process():
    options = "simulation", "--seed", "3", "--programs", "3", "--minutes", "60", "--digests"
    first = run(*options, PYTHONHASHSEED="1")
    second = run(*options, PYTHONHASHSEED="2")
    assert first[0] == 0 and "nothing was found" in first[1], first[1]
    assert first[1].splitlines()[:4] == second[1].splitlines()[:4]


def test_every_mutant_changes_one_place_of_the_library():
    room = TESTS.parent / "src" / "bandmaster"
    wrong = {one.name: n for one in MUTANTS if (n := (room / one.file).read_text().count(one.old)) != 1}
    assert not wrong, "places that there are for each, in place of one"
    assert len({one.name for one in MUTANTS}) == len(MUTANTS)


@pytest.mark.slow
def test_programs_of_new_seeds_find_nothing():
    code, said = run("simulation", "--minutes", "0.15")
    assert code == 0 and "nothing was found" in said, said


@pytest.mark.slow
def test_a_defect_is_found():
    code, said = run("mutants", "swapped", "--seconds", "60", timeout=280.0)  # 3 s alone, 24 s beside twelve busy loops
    assert code == 0, said
