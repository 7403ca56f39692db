"""Rows by reference: random calls and operations on futures, and the rows that have to come of them."""

from typing import Any, NamedTuple

import numpy as np
from soaking.expected import Wrong, outcome_of

import bandmaster as bm

N_STEPS = 10
LARGEST_NBYTES = 1 << 22
NAMES = ["id", "x", "what"]


class Known(NamedTuple):
    """A future, or the error that came in its place, and what its result has to be."""

    future: Any
    value: Any

    def then(self, operation, value):
        """What an operation makes of the future, and its value."""
        failed = isinstance(self.future, Exception)
        return Known(self.future if failed else outcome_of(operation, self.future), value)

    def take(self, operation, index):
        """Some of the rows, chosen by an operation on the future, and by their numbers."""
        return self.then(operation, taken(self.value, index))

    @property
    def n_rows(self):
        return len(self.value["id"])

    def outcome(self):
        """What comes of the future: a value or an error."""
        return self.future if isinstance(self.future, Exception) else outcome_of(self.future.result)


def taken(rows, index):
    numbers = np.arange(len(rows["id"]))[index]
    return {k: [v[i] for i in numbers] if isinstance(v, list) else v[numbers] for k, v in rows.items()}


def random_rows(rng):
    n_rows, n_columns = rng.choice([0, 1, 2, 5, rng.randrange(6, 60)]), int(2 ** rng.uniform(0, 14))
    x = np.frombuffer(rng.randbytes(n_rows * n_columns), "u1").reshape(n_rows, n_columns)
    return {"id": np.arange(n_rows), "x": x, "what": [rng.choice([None, "a", rng.random()]) for _ in range(n_rows)]}


class Chain:
    """Futures that come from each other. All of them can be used again, and none may change.

    Args:
        rng: Draws what is done.
        group: Of `Subject`.

    Attributes:
        known: The futures of rows.
        kept: Those of calls by which ranks keep rows, and check those that they keep.
        lost: Those whose rows were released.
    """

    def __init__(self, rng, group):
        self._rng, self._group = rng, group
        self.kept, self.lost = [], []
        rows = random_rows(rng)
        self.known = [Known(outcome_of(group.put, rows), rows)]
        self.known.append(self.call(self.known[0]))
        steps = [self.call, self.call, self.some, self.some, self.batch, self.repeat, self.shuffle, self.sort]
        steps += [self.select, self.join, self.join, self.concat, self.keep, self.release]
        for _ in range(rng.randint(1, N_STEPS)):
            made = rng.choice(steps)(rng.choice(self.known))
            if made is not None:
                self.known.append(made)

    def call(self, known):
        """The workers write into the rows that they get."""
        return known.then(self._group.add_one.submit, {**known.value, "x": known.value["x"] + np.uint8(1)})

    def keep(self, known):
        self.kept.append(known.then(self._group.keep.submit, [True] * self._group.world_size))

    def release(self, known):
        """Rows that are released as soon as they are there; what was made of them before is as it was."""
        made = self.call(known)
        copy = made.then(lambda rows: self._group.add_one(rows[::-1]), None)

        def release(future):
            len(future)
            future.release()
            return future

        self.lost.append(made.then(release, None))
        again = taken({**made.value, "x": made.value["x"] + np.uint8(1)}, slice(None, None, -1))
        return copy.then(self._group.put, again)

    def some(self, known):
        rng, n = self._rng, known.n_rows
        index = rng.choice([
            slice(rng.randint(-n, n), rng.randint(-n, n), rng.choice([None, 1, 2, -1])),
            np.array([rng.randrange(-n, n) for _ in range(min(n, 1) * rng.randint(0, 20))], dtype=int),
            np.array([rng.random() < 0.5 for _ in range(n)], dtype=bool),
        ])  # fmt: skip
        return known.take(lambda rows: rows[index], index)

    def batch(self, known):
        if not known.n_rows:
            return None
        n = self._rng.randint(1, known.n_rows)
        number = self._rng.randrange(-(-known.n_rows // n))
        return known.take(lambda rows: [*rows.batches(n)][number], slice(number * n, number * n + n))

    def repeat(self, known):
        n = self._rng.randint(0, 4)
        if n * known.value["x"].nbytes > LARGEST_NBYTES:
            return None
        return known.take(lambda rows: rows.repeat(n), np.repeat(np.arange(known.n_rows), n))

    def shuffle(self, known):
        seed = self._rng.randrange(100)
        return known.take(lambda rows: rows.shuffle(seed), np.random.default_rng(seed).permutation(known.n_rows))

    def sort(self, known):
        return known.take(lambda rows: rows.sort_by("id"), np.argsort(known.value["id"], kind="stable"))

    def select(self, known):
        dropped = [name for name in known.value if name not in NAMES]
        value = {name: known.value[name] for name in NAMES}
        by_name = self._rng.random() < 0.5
        return known.then(lambda rows: rows.select(*NAMES) if by_name else rows.drop(*dropped), value)

    def join(self, known):
        """With rows of equal number, its own perhaps, under new names."""
        others = [other for other in self.known if other.n_rows == known.n_rows]
        other, suffix = self._rng.choice(others), f"_{len(known.value)}"
        if isinstance(other.future, Exception) or len(known.value) > 8:
            return None
        names = {name: name + suffix for name in NAMES}
        value = {**known.value, **{names[name]: other.value[name] for name in NAMES}}
        return known.then(lambda rows: rows.join(other.future.select(*NAMES).rename(**names)), value)

    def concat(self, known):
        other = self._rng.choice(self.known)
        nbytes = known.value["x"].nbytes + other.value["x"].nbytes
        if isinstance(other.future, Exception) or [*other.value] != [*known.value] or nbytes > LARGEST_NBYTES:
            return None
        value = {
            name: column + other.value[name]
            if isinstance(column, list)
            else np.concatenate([column, other.value[name]])
            for name, column in known.value.items()
        }
        return known.then(lambda rows: bm.concat([rows, other.future]), value)

    def check_lost(self, may_fail):
        """Released rows are gone.

        Raises:
            Wrong: They are not.
        """
        for known in self.lost:
            if not isinstance(outcome := known.outcome(), bm.RowsLost) and not may_fail:
                raise Wrong(f"rows were released, and came to {outcome!r}")
