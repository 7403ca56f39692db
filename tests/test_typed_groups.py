"""Typed groups: what mypy and pyright say of their calls, and that they are groups like any other."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import bandmaster as bm

TESTS = Path(__file__).parent
CALLS = TESTS / "typed" / "calls.py"
CONFIG = TESTS.parent / "pyproject.toml"  # torch and Ray are not followed, which takes half a minute
sys.path.insert(0, str(CALLS.parent))
from calls import Actor, ActorGroup  # noqa: E402

CHECKERS = {
    "mypy": ["mypy", f"--config-file={CONFIG}", "--no-incremental", "--hide-error-context"],
    "pyright": ["pyright", "--pythonpath", sys.executable],
}


@pytest.mark.parametrize("checker", CHECKERS)
def test_a_type_checker_finds_every_mistake_and_nothing_else(checker, tmp_path):
    run = subprocess.run(
        [Path(sys.executable).with_name(CHECKERS[checker][0]), *CHECKERS[checker][1:], CALLS],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    found = {int(line) for line in re.findall(r"calls\.py:(\d+)(?::\d+)?(?: -)?:? error", run.stdout)}
    expected = {n for n, line in enumerate(CALLS.read_text().splitlines(), 1) if line.endswith("# error")}
    assert found == expected, run.stdout + run.stderr


def test_a_typed_group_is_a_group_like_any_other(pool):
    with ActorGroup(pool, Actor, scale=2.0) as actor:
        assert actor.act(["a", "b"], times=3) == ["aaa", "bbb"]
        assert actor.where() == [0, 1]
        assert actor.act.__doc__ == "Repeat each row."
        assert "act" in dir(actor)
        assert actor.each([1, 2]) == [2.0, 4.0]
        with pytest.raises(AttributeError, match=r"Actor\.helper is not registered"):
            actor.helper()
        with pytest.raises(AttributeError, match="no attribute 'rank'"):
            _ = actor.rank
        assert repr(actor).startswith("<ActorGroup ")


def test_a_typed_group_takes_the_worker_class_that_it_names(pool):
    class Other(bm.Worker):
        pass

    with pytest.raises(bm.ArgumentError, match="the worker class of ActorGroup must be Actor or a subclass, got Other"):
        ActorGroup(pool, Other)
    with pytest.raises(bm.UsageError, match="must not be a group class, got ActorGroup; pass the worker class"):
        bm.WorkerGroup(pool, ActorGroup)


@pytest.fixture
def pool():
    with bm.ResourcePool([2], backend="inprocess") as pool:
        yield pool
