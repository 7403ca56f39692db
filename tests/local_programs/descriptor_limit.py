"""With few descriptors left there is a clear error, not a hang, and the group goes on."""

import resource

import numpy as np

import bandmaster as bm
from bandmaster import Dispatch, register

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))


class Holds(bm.Worker):
    def __init__(self):
        self.held = []

    @register(Dispatch.ONE_TO_ALL)
    def hold(self, array):
        self.held.append(array)
        return len(self.held)

    @register(Dispatch.ONE_TO_ALL)
    def make(self, value):
        return np.full(10_000, value)

    @register(Dispatch.ONE_TO_ALL)
    def drop(self):
        self.held.clear()


def error_of(function):
    try:
        function()
    except (bm.ResourceError, bm.PlacementError, bm.RemoteError) as error:
        return str(error)
    raise AssertionError("there was no error")


with bm.ResourcePool([200]) as pool:
    assert "too many open files" in error_of(lambda: bm.WorkerGroup(pool, Holds)).lower()

with bm.ResourcePool([2]) as pool, bm.WorkerGroup(pool, Holds) as group:

    def hold_many():
        for _ in range(300):
            group.hold(np.zeros(100_000))

    message = error_of(hold_many)
    assert "open files" in message.lower(), message
    group.drop()
    group.drop()
    assert group.hold(np.zeros(100_000)) == [1, 1]

    kept = [group.make(n) for n in range(600)]  # more than there are descriptors, on either side
    assert all((array == n).all() for n, arrays in enumerate(kept) for array in arrays)
    kept.clear()
    for _ in range(20):
        group.drop()
        assert group.hold(np.zeros(100_000)) == [1, 1]
