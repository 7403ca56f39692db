"""A controller in a process that multiprocessing has started afresh: there, the main script is called __mp_main__."""

import multiprocessing
import sys
from dataclasses import dataclass
from typing import NamedTuple

import bandmaster as bm
from bandmaster import Dispatch, register


@dataclass
class Row:
    n: int


class Pair(NamedTuple):
    first: int
    second: int


class OutOfRows(Exception):
    pass


def double(n):
    return 2 * n


class Rows(bm.Worker):
    @register(Dispatch.DP_PROTO)
    def doubled(self, rows):
        if not rows:
            raise OutOfRows(self.rank)
        return [Row(double(row.n)) for row in rows]

    @register(Dispatch.ONE_TO_ALL)
    def swapped(self, pair):
        assert type(pair).__name__ == "Pair"
        return pair._replace(first=pair.second, second=pair.first)


def control(backend):
    with bm.ResourcePool([2], backend=backend) as pool:
        group = bm.WorkerGroup(pool, Rows)
        assert group.doubled([Row(1), Row(2)]) == [Row(2), Row(4)]
        assert group.swapped(Pair(1, 2)) == [Pair(2, 1)] * 2
        try:
            group.doubled([Row(1)])
        except bm.RemoteError as error:
            assert isinstance(error.__cause__, OutOfRows), error
        else:
            raise AssertionError("rank 1 has no rows")


if __name__ == "__main__":
    for method in ("spawn", "forkserver"):
        for backend in ("inprocess", "local"):
            process = multiprocessing.get_context(method).Process(target=control, args=(backend,))
            process.start()
            process.join()
            if process.exitcode:
                sys.exit(f"{method}, {backend}: exit code {process.exitcode}")
