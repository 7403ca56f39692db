"""`bandmaster.testing.trials`: faults from a seed, that name it, around a program that is to survive them."""

import numpy as np
import pytest

import bandmaster as bm
from bandmaster import Dispatch, register
from bandmaster.testing import BadResult, Delay, Exit, Hang, InjectedError, Kill, LeakError, Raise, trials, unchanged

pytestmark = pytest.mark.backends("inprocess", "local")
KINDS = [Raise, Delay, Kill, Exit, Hang, BadResult]


class Doubler(bm.Worker):
    @register(Dispatch.DP_PROTO)
    def double(self, rows):
        return 2 * rows


def drawn(seed, n=20, **options):
    return [trial.faults for trial in trials(n, ranks=3, calls=4, seed=seed, **options)]


def test_a_seed_gives_the_faults_again():
    assert repr(drawn(7)) == repr(drawn(7)) != repr(drawn(8))
    assert repr(drawn(7)[3:4]) == repr(drawn(10, n=1))
    assert {len(faults) for faults in drawn(7)} == {1, 2, 3}
    every = [fault for faults in drawn(1, n=200, kinds=KINDS) for fault in faults]
    assert {type(fault) for fault in every} == set(KINDS)
    assert {fault.rank for fault in every} == {0, 1, 2}
    assert {fault.call for fault in every} == {1, 2, 3, 4}
    assert 1 not in {fault.call for fault in every if isinstance(fault, Kill | Exit)}


def test_the_faults_occur_in_the_workers(backend):
    n_failed = 0
    for trial in trials(6, ranks=2, calls=2, seed=3, most=1, kinds=[Raise]):
        with trial, bm.ResourcePool([2], backend=backend) as pool:
            group = bm.WorkerGroup(pool, trial.faulty(Doubler))
            (fault,) = trial.faults
            for call in (1, 2, 3):
                future = group.double.submit(np.arange(4))
                if call == fault.call:
                    assert future.exception().rank == fault.rank
                    assert isinstance(future.exception().__cause__, InjectedError)
                    n_failed += 1
                else:
                    assert future.result().tolist() == [0, 2, 4, 6]
    assert n_failed == 6


@pytest.mark.parametrize("how", ["error", "leak"])
def test_an_error_says_which_trial_it_was(how):
    (trial,) = trials(1, ranks=2, calls=2, seed=5)
    trial.leak_timeout = 0.1
    pool = bm.ResourcePool([1], backend="local")
    with pytest.raises(ZeroDivisionError if how == "error" else LeakError) as raised, trial:
        group = bm.WorkerGroup(pool, Doubler)  # left open
        if how == "error":
            raise ZeroDivisionError
    group.close()
    pool.close()
    (note,) = getattr(raised.value, "__notes__", ["seed=5" + repr(trial.faults)])  # Python 3.10 has no notes
    assert "seed=5" in note
    assert repr(trial.faults[0]) in note


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"n": 0}, "n must be a positive integer, got 0"),
        ({"ranks": -1}, "ranks must be a positive integer, got -1"),
        ({"calls": 1.5}, r"calls must be a positive integer, got 1\.5"),
        ({"kinds": []}, "got 'none'"),
        ({"kinds": [int]}, "Raise, Delay, Kill, Exit, Hang, BadResult, got <class 'int'>"),
        ({"calls": 1}, "Kill would end a worker in its first call .* calls=2 or more"),
    ],
)
def test_mistakes_are_refused(options, says):
    asked = {"n": 1, "ranks": 2, "calls": 2, **options}
    with pytest.raises(bm.UsageError, match=says):
        trials(asked.pop("n"), **asked)


def test_values_that_a_block_changes_are_found():
    batch, other = {"a": np.arange(3), "b": ["x", [1]]}, [np.zeros(2)]
    with unchanged(batch, other):
        assert batch["a"].sum() == 3
    with pytest.raises(AssertionError, match="has changed value 1, a list"), unchanged(batch, other):
        other[0][1] = 1
