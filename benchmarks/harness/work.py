"""The calls that are timed, each with its input, and a check that its result is right."""

from __future__ import annotations

from typing import Any

import numpy as np
from peers.desk import full_sum, make_rows, sample_sum, sampled


class WrongResult(Exception):
    """A peer gave another result than the work has."""


class Work:
    """One kind of call on so many bytes. Only `call` is timed.

    Args:
        peer: A started peer.
        n_workers: Its ranks.
        nbytes: Of the input, or of all results together.
    """

    def __init__(self, peer: Any, n_workers: int, nbytes: int) -> None:
        self.peer = peer
        self.n_workers = n_workers
        self.nbytes = nbytes
        self.n_calls = 0
        self.set_up()

    def set_up(self) -> None:
        """Make the input."""

    def prepare(self) -> None:
        """Before every call."""
        self.n_calls += 1

    def call(self) -> Any:
        """The call."""
        raise NotImplementedError

    def check(self, result: Any) -> None:
        """Raise `WrongResult` unless the result is right."""
        raise NotImplementedError

    def expect(self, is_right: Any, result: Any) -> None:
        if not is_right:
            raise WrongResult(f"{type(self).__name__} of {self.nbytes} bytes, call {self.n_calls}: {result!r}")


class Noop(Work):
    """1 to every rank, and back."""

    def call(self) -> Any:
        return self.peer.noop()

    def check(self, result: Any) -> None:
        self.expect(result == [1] * self.n_workers, result)


class Broadcast(Work):
    """One array to every rank; each reads 64 places of it. The places hold something else in every call."""

    def set_up(self) -> None:
        self.array = make_rows(self.nbytes)

    def prepare(self) -> None:
        super().prepare()
        sampled(self.array)[:] = self.n_calls % 1000
        self.sum = self.expected()

    def expected(self) -> float:
        return sample_sum(self.array)

    def call(self) -> Any:
        return self.peer.broadcast(self.array)

    def check(self, result: Any) -> None:
        self.expect(result == [self.sum] * self.n_workers, result)


class BroadcastReadAll(Broadcast):
    """One array to every rank; each reads all of it."""

    def expected(self) -> float:
        return full_sum(self.array)

    def call(self) -> Any:
        return self.peer.broadcast_read_all(self.array)

    def check(self, result: Any) -> None:
        self.expect(len(result) == self.n_workers and np.allclose(result, self.sum, rtol=1e-4), result)


class SplitIncConcat(Broadcast):
    """Rows over the ranks, each adds 1, joined in order. The first result is compared whole, then in places."""

    def call(self) -> Any:
        return self.peer.split_inc_concat(self.array)

    def check(self, result: Any) -> None:
        self.expect(result.shape == self.array.shape, result.shape)
        self.expect((sampled(result) == sampled(self.array) + 1).all(), sampled(result))
        if self.n_calls == 1:
            pairs = zip(np.array_split(result, 64), np.array_split(self.array, 64), strict=True)
            self.expect(all((after == before + 1).all() for after, before in pairs), "differs in other places")


class Gather(Work):
    """An array from every rank, ``nbytes`` in all, and the controller reads all of it."""

    def call(self) -> Any:
        arrays = self.peer.gather(self.nbytes // self.n_workers, self.n_calls)
        return arrays, [full_sum(array[1:]) for array in arrays]

    def check(self, result: Any) -> None:
        arrays, sums = result
        n_items = self.nbytes // self.n_workers // 4
        self.expect([array.size for array in arrays] == [n_items] * self.n_workers, "wrong sizes")
        self.expect([array[0] for array in arrays] == [self.n_calls] * self.n_workers, "an earlier call's result")
        expected = [rank * (n_items - 1) for rank in range(self.n_workers)]
        self.expect(np.allclose(sums, expected, rtol=1e-4), sums)


class Chain(Work):
    """Rows that n ranks make, n/2 others add 1 to, and the n ranks read: a sum from each."""

    def call(self) -> Any:
        return self.peer.chain(self.nbytes, self.n_calls % 1000)

    def check(self, result: Any) -> None:
        n_items = self.nbytes // self.n_workers // 4
        self.expect(result == [float((self.n_calls % 1000 + 1) * n_items)] * self.n_workers, result)


class MakeAndRead(Work):
    """Rows that a worker on one host makes, and a worker on another reads in 64 places. Each call has its own rows."""

    def call(self) -> Any:
        return self.peer.read_on_second(self.peer.make_on_first(self.nbytes, self.n_calls % 1000))

    def check(self, result: Any) -> None:
        n_read = sampled(np.empty(self.nbytes // 4, np.float32)).size
        self.expect(result == [float(self.n_calls % 1000 * n_read)], result)


class ReadMade(MakeAndRead):
    """The same; only reading is timed."""

    def prepare(self) -> None:
        super().prepare()
        self.rows = self.peer.make_on_first(self.nbytes, self.n_calls % 1000)
        self.peer.await_rows(self.rows)

    def call(self) -> Any:
        return self.peer.read_on_second(self.rows)

    def check(self, result: Any) -> None:
        super().check(result)
        del self.rows  # which frees them


class MiniBatch(Work):
    """Ten rows of those that the ranks hold, in an order that was shuffled: each rank gets its share of them."""

    n_rows_of_call = 10

    def set_up(self) -> None:
        self.n_rows = 10_000 if self.nbytes >= 1 << 20 else 64
        self.order = np.random.default_rng(0).permutation(self.n_rows)
        self.hold()

    def hold(self) -> None:
        self.peer.hold(self.nbytes, self.n_rows)

    def prepare(self) -> None:
        super().prepare()
        start = self.n_calls * self.n_rows_of_call % (self.n_rows - self.n_rows_of_call + 1)
        self.numbers = self.order[start : start + self.n_rows_of_call]

    def call(self) -> Any:
        return self.peer.mini_batch(self.numbers)

    def check(self, result: Any) -> None:
        self.expect(result == [float(part.sum()) for part in np.array_split(self.numbers, self.n_workers)], result)


class MiniBatchOfObjects(MiniBatch):
    """The same; each row is an object of its own where a library has a store of objects."""

    def hold(self) -> None:
        self.peer.hold(self.nbytes, self.n_rows, is_each_an_object=True)


class LongTail(Work):
    """Rows of which a few take much longer than most: Pareto-distributed, drawn anew for every ``nbytes``."""

    def set_up(self) -> None:
        n_rows, mean_s = (8, 0.001) if self.n_workers == 2 else (128, 0.012)
        drawn = 1 + np.random.default_rng(self.nbytes).pareto(1.5, n_rows)
        self.seconds = drawn * mean_s / 3

    def call(self) -> Any:
        return self.peer.long_tail(self.seconds)

    def check(self, result: Any) -> None:
        self.expect((np.asarray(result) == self.seconds).all(), result)


class LongTailSplit(LongTail):
    """The same rows in equal parts."""

    def call(self) -> Any:
        return self.peer.long_tail_split(self.seconds)


WORKS = {
    "noop": Noop,
    "broadcast": Broadcast,
    "broadcast_read_all": BroadcastReadAll,
    "split_inc_concat": SplitIncConcat,
    "gather": Gather,
    "chain": Chain,
    "make_and_read": MakeAndRead,
    "read_made": ReadMade,
    "mini_batch": MiniBatch,
    "mini_batch_of_objects": MiniBatchOfObjects,
    "long_tail": LongTail,
    "long_tail_split": LongTailSplit,
}
