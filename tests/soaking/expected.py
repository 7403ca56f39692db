"""What must come of a call on a group that has been given faults, and may have lost ranks."""

import threading
from collections import Counter

from soaking.subject import Subject, same

import bandmaster as bm
from bandmaster.errors.failure import FailureKind
from bandmaster.plan.rows import sources
from bandmaster.testing import BadResult, Delay, Exit, FailToUnpickle, Kill, Raise
from bandmaster.worker import registrations

REGISTERED = registrations(Subject)


class Wrong(Exception):
    """The library did what it must not do."""


def random_faults(rng, n_ranks):
    """None, one or two."""
    return [_random_fault(rng, n_ranks) for _ in range(rng.choice([0, 0, 1, 2]))]


def _random_fault(rng, n_ranks):
    kind = rng.choice([Raise, Raise, Delay, BadResult, FailToUnpickle, Kill, Exit])
    more = {Raise: {"error": ValueError("planned")}, Delay: {"seconds": rng.random() * 0.05}}.get(kind, {})
    rank, method = rng.choice([None, *range(n_ranks)]), rng.choice([None, None, "echo", "rows", "rows_async"])
    return kind(rank, rng.randint(1, 8), method=method, **more)


class Prediction:
    """What the faults of the class make of one call: ranks, by what happens to them.

    Attributes:
        is_hopeless: Whether it was known already, when the call was sent, that a rank is dead.
    """

    def __init__(self, is_hopeless):
        self.is_hopeless = is_hopeless
        self.died, self.raised, self.spoiled = set(), set(), set()

    def __bool__(self):
        return bool(self.died or self.raised or self.spoiled)

    def __str__(self):
        return f"died {self.died}, raised {self.raised}, spoiled {self.spoiled}"

    def matches(self, error):
        if self.died:
            return isinstance(error, bm.WorkerDied) and error.rank in self.died
        own = {rank for rank, failure in error.failures.items() if failure.kind is not FailureKind.CANCELLED}
        are_all = own == self.raised | self.spoiled and error.rank == min(own)
        slow = error.failures.keys() - own  # interrupted, as another rank had failed long before
        return isinstance(error, bm.CollectError) != bool(self.raised & own) and (
            are_all or (slow and error.rank in own)
        )


class Expected:
    """Knows the calls that each rank has had, and judges what comes of the next ones.

    Attributes:
        may_be_dead: Ranks that were killed, or ended, as far as this knows.
        is_dead: Whether a call has told of that, so that all calls must.
        is_certain: Whether the number of calls that each rank has had is known; not after one that was cancelled, or
            that told of a death.
    """

    def __init__(self, mesh, faults, stats):
        self._mesh, self._faults, self._stats = mesh, faults, stats
        self._lock = threading.Lock()
        self.all_are_new()

    def all_are_new(self):
        self._counts = [Counter() for _ in range(self._mesh.size)]
        self.may_be_dead, self.is_dead, self.is_certain = set(), False, True

    def is_new(self, rank):
        self._counts[rank] = Counter()
        self.may_be_dead.discard(rank)
        self.is_dead = bool(self.may_be_dead)

    def count(self, method):
        """A call is sent; what the faults make of it."""
        prediction = Prediction(self.is_dead)
        collected = set(sources(self._mesh, REGISTERED[method].protocol.incoming))
        with self._lock:
            for rank, counts in enumerate(self._counts):
                counts.update([None, method])
                numbers = {name: counts[name] for name in (None, method)}
                due = [fault for fault in self._faults if fault.falls_on(rank, numbers)]
                strikes = [fault for fault in due if isinstance(fault, Kill | Exit | Raise)]
                if strikes:
                    (prediction.raised if isinstance(strikes[0], Raise) else prediction.died).add(rank)
                elif rank in collected and any(isinstance(fault, BadResult | FailToUnpickle) for fault in due):
                    prediction.spoiled.add(rank)
        return prediction

    def judge(self, prediction, outcome, value):
        """Whether an outcome, a value or an error, may be.

        Raises:
            Wrong: It may not.
        """
        with self._lock:
            self._stats.n_calls += 1
            if isinstance(outcome, BaseException):
                self._judge_error(prediction, outcome)
            elif prediction.is_hopeless:
                raise Wrong(f"a value, though ranks {self.may_be_dead} are dead")
            elif prediction and self.is_certain and not self.may_be_dead:
                raise Wrong(f"a value, though the faults are: {prediction}")
            elif not same(outcome, value):
                raise Wrong(f"another value than it should be: {str(outcome)[:300]}\nand not {str(value)[:300]}")

    def _judge_error(self, prediction, error):
        if isinstance(error, bm.WorkerDied):
            might_die = self.may_be_dead | (prediction.died if self.is_certain else self._fated(Kill | Exit))
            if error.rank not in might_die:
                raise Wrong(f"rank {error.rank} has died of nothing, only {might_die} might") from error
            died = {rank for rank, failure in error.failures.items() if failure.kind is FailureKind.DIED}
            self.may_be_dead |= died | prediction.died | {error.rank}
            self.is_dead, self.is_certain = True, False  # calls that are made from then on are not sent to any rank
        elif prediction.is_hopeless:
            raise Wrong(f"this is not WorkerDied, though ranks {self.may_be_dead} are dead") from error
        elif not isinstance(error, bm.RemoteError) or not error.failures:
            raise Wrong("an error for no reason") from error
        elif self.is_certain and not prediction.matches(error):
            raise Wrong(f"an error, but the faults are: {prediction}") from error
        elif error.rank not in self._fated(Raise | BadResult | FailToUnpickle):
            raise Wrong("an error of a rank that has no such faults") from error
        if any(failure.kind is FailureKind.CANCELLED for failure in error.failures.values()):
            self.is_certain = False  # it may not have begun with the call
        self._stats.faults[type(error).__name__] += 1

    def _fated(self, kinds):
        """Ranks that have faults of these kinds."""
        everyone = range(self._mesh.size)
        faults = [fault for fault in self._faults if isinstance(fault, kinds)]
        return {rank for fault in faults for rank in (everyone if fault.rank is None else [fault.rank])}


def outcome_of(function, *args, **kwargs):
    """Its value, or the error that it raised."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return error
