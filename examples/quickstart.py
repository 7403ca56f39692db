"""Four worker processes, called as if they were one object. Run it with ``python examples/quickstart.py``."""

import numpy as np

import bandmaster as bm
from bandmaster import Dispatch, register


class Accumulator(bm.Worker):
    def __init__(self, start=0.0):
        self.value = np.zeros(1) + start + self.rank  # rank, world_size, device... are there already

    @register(Dispatch.ONE_TO_ALL)
    def add(self, x):
        """Add x to every rank's value."""
        self.value += x
        return self.value.copy()

    @register(Dispatch.DP_PROTO)
    def double(self, rows):
        return rows * 2


with bm.ResourcePool([4]) as pool:
    group = bm.WorkerGroup(pool, Accumulator, start=0.0)
    print(group.describe())
    print("add(10), one value per rank: ", group.add(10))
    print("double(0..9), rows in order: ", group.double(np.arange(10)))
    print("the same call, not waiting:  ", group.double.submit(np.arange(10)).result(timeout=5))
    print()
    print(bm.plan(Dispatch.DP_PROTO, group.mesh, rows=10))
