"""Random programs: a few of the same seeds each time, and that a defect is found and shrunk to a script."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from fuzz.campaign import Campaign
from fuzz.generate import program_of
from fuzz.steps import expectations

import bandmaster as bm

SEED, N_PROGRAMS = 20_000, 8


@pytest.fixture(autouse=True)
def pandas_and_torch_may_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.backends("inprocess", "local")
def test_programs_do_what_the_oracle_expects(backend):
    said = []
    with Campaign([backend], say=said.append) as campaign:
        for number in range(N_PROGRAMS):
            campaign.run(SEED + number)
    assert not campaign.failures, "\n".join(map(str, said))


def test_a_seed_is_a_program():
    assert program_of(7) == program_of(7) != program_of(8)
    assert list(map(str, expectations(program_of(7)))) == list(map(str, expectations(program_of(7))))


@pytest.mark.slow
def test_a_planted_defect_is_found_and_shrunk_to_a_script(monkeypatch, tmp_path):
    monkeypatch.setattr(bm.Future, "repeat", lambda self, n: bm.concat([self[:0], *[self] * n]))  # in another order
    said = []
    with Campaign(["inprocess"], say=said.append) as campaign:
        seed = SEED
        while not campaign.failures and seed < SEED + 500:
            campaign.run(seed)
            seed += 1
    found, _, failure, script = campaign.failures[0]
    assert failure.kind == "another value"
    assert len(script.strip().splitlines()) <= 30, script
    assert f"seed {found}".lower() in script.lower() and ".repeat(2)" in script
    assert ends_with(script, tmp_path) == 0, "without the defect it ends well"
    defect = "import bandmaster as bm\nbm.Future.repeat = lambda self, n: bm.concat([self[:0], *[self] * n])\n"
    assert ends_with(defect + script, tmp_path) == 1


def ends_with(script, folder):
    path = Path(folder) / "failing.py"
    path.write_text(script)
    return subprocess.run([sys.executable, path], capture_output=True, timeout=50).returncode
