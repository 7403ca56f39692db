"""Trials: a program of yours runs again and again under faults and delays that are drawn from a seed.

::

    for trial in trials(100, ranks=4, calls=20):
        with trial:                                        checks for leaks, and names the seed in an error
            train(trial.faulty(Trainer))                   Trainer, as `with_faults` makes it with trial.faults
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from bandmaster.errors import UsageError
from bandmaster.plan.numbers import as_whole
from bandmaster.testing.faults import BadResult, Delay, Exit, Fault, Hang, Kill, Raise
from bandmaster.testing.faulty import WorkerClass, with_faults
from bandmaster.testing.leaks import no_leaks

LONGEST_DELAY_S = 0.02  # enough to change the order in which ranks act, and short enough for tests


class InjectedError(Exception):
    """Raised in a worker by the fault `Raise` of a trial."""


_MAKERS: dict[type[Fault], Callable[[random.Random, int, int], Fault]] = {
    Raise: lambda rng, rank, call: Raise(rank, call, InjectedError(f"injected on rank {rank} in call {call}")),
    Delay: lambda rng, rank, call: Delay(rank, call, round(rng.uniform(0, LONGEST_DELAY_S), 4)),
    Kill: lambda rng, rank, call: Kill(rank, call),
    Exit: lambda rng, rank, call: Exit(rank, call, rng.randrange(256)),
    Hang: lambda rng, rank, call: Hang(rank, call),
    BadResult: lambda rng, rank, call: BadResult(rank, call),
}
_DEADLY = (Kill, Exit)


@dataclass
class Trial:
    """One run of a program, as a context manager around it.

    Attributes:
        seed: The seed of its faults.
        faults: The faults, in the order of their calls.
        leak_timeout: Seconds that `no_leaks` waits after the block.
    """

    seed: int
    faults: tuple[Fault, ...]
    leak_timeout: float = 10.0
    _leaks: AbstractContextManager[None] | None = field(default=None, repr=False)

    def faulty(self, worker_class: WorkerClass) -> WorkerClass:
        """Return a subclass of a worker class in which the faults of this trial occur, as `with_faults` makes it."""
        return with_faults(worker_class, *self.faults)

    def __enter__(self) -> Trial:
        self._leaks = no_leaks(self.leak_timeout)
        self._leaks.__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        leaks, self._leaks = self._leaks, None
        assert leaks is not None, "it was entered"
        try:
            leaks.__exit__(kind, error, traceback)
        except BaseException as raised:
            error = raised
            raise
        finally:
            if error is not None and hasattr(error, "add_note"):  # not before Python 3.11
                error.add_note(f"in the trial with seed={self.seed}, whose faults are {list(self.faults)}")


def trials(
    n: int,
    *,
    ranks: int,
    calls: int,
    seed: int | None = None,
    kinds: Sequence[type[Fault]] = (Raise, Delay, Kill),
    most: int = 3,
) -> Iterator[Trial]:
    """Yield trials whose faults are drawn at random. The same seed gives the same trials.

    Args:
        n: How many trials.
        ranks: Faults fall on ranks 0 to ``ranks - 1``; the group has at least as many.
        calls: Faults fall on calls 1 to ``calls`` of a rank; those that end its process on call 2 or a later one, since
            a worker that was restarted counts from 1 again.
        seed: The seed of the first trial; the next ones have ``seed + 1`` and so on. By default a random number.
            To repeat one trial, give its seed and ``n=1``.
        kinds: The kinds of faults: some of `Raise` (an `InjectedError`), `Delay`, `Kill`, `Exit`, `Hang` and
            `BadResult`.
        most: How many faults a trial has at most. It has at least one.

    Raises:
        UsageError: A number is not positive, a kind cannot be drawn, or ``calls`` is 1 and a kind ends processes.

    Example:
        >>> import bandmaster as bm
        >>> from bandmaster.testing import Delay, Raise, trials
        >>> class Doubler(bm.Worker):
        ...     @bm.register(bm.Dispatch.DP_PROTO)
        ...     def double(self, rows): return [2 * row for row in rows]
        >>> for trial in trials(3, ranks=2, calls=1, seed=1, kinds=[Raise, Delay]):
        ...     with trial, bm.ResourcePool([2], backend="inprocess") as pool:
        ...         group = bm.WorkerGroup(pool, trial.faulty(Doubler))
        ...         if group.double.submit([1, 2]).exception() is not None:
        ...             assert group.double([1, 2]) == [2, 4]  # again, after an injected error
    """
    for name, number in (("n", n), ("ranks", ranks), ("calls", calls), ("most", most)):
        if as_whole(number, 1) is None:
            raise UsageError(f"trials: {name} must be a positive integer, got {number!r}")
    unknown = [kind for kind in kinds if kind not in _MAKERS]
    if unknown or not kinds:
        known = ", ".join(kind.__name__ for kind in _MAKERS)
        raise UsageError(f"trials draws faults of the kinds {known}, got {unknown[0] if unknown else 'none'!r}")
    if calls == 1 and (deadly := [kind.__name__ for kind in kinds if kind in _DEADLY]):
        raise UsageError(
            f"trials: {', '.join(deadly)} would end a worker in its first call each time that it is restarted; give "
            "calls=2 or more, or other kinds"
        )
    first = random.SystemRandom().randrange(10**9) if seed is None else seed
    return (_trial(first + number, ranks, calls, kinds, most) for number in range(n))


def _trial(seed: int, ranks: int, calls: int, kinds: Sequence[type[Fault]], most: int) -> Trial:
    rng = random.Random(seed)
    faults = []
    for kind in rng.choices(kinds, k=rng.randint(1, most)):
        faults.append(_MAKERS[kind](rng, rng.randrange(ranks), rng.randint(2 if kind in _DEADLY else 1, calls)))
    return Trial(seed, tuple(sorted(faults, key=lambda fault: fault.call)))


@contextmanager
def unchanged(*values: Any) -> Iterator[None]:
    """Check that a block does not change some values, such as the arguments of calls.

    Args:
        *values: Anything that pickle or cloudpickle can handle.

    Raises:
        AssertionError: The block has changed a value; the message says which.

    Example:
        >>> rows = [1, 2]
        >>> with unchanged(rows):
        ...     rows.append(3)
        Traceback (most recent call last):
        AssertionError: the block has changed value 0, a list
    """
    before = [_pickled(value) for value in values]
    yield
    for number, (value, then) in enumerate(zip(values, before, strict=True)):
        if _pickled(value) != then:
            raise AssertionError(f"the block has changed value {number}, a {type(value).__name__}")


def _pickled(value: Any) -> bytes:
    """The pickle of a copy, which does not depend on how the value was made."""
    made: bytes = cloudpickle.dumps(pickle.loads(cloudpickle.dumps(value)))
    return made
