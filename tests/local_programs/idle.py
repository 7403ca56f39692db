"""Idle workers and an idle controller use no CPU: everybody blocks in the kernel."""

import time

import psutil

import bandmaster as bm
from bandmaster import Dispatch, register


class Idles(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def switches(self):
        return sum(psutil.Process().num_ctx_switches())


with bm.ResourcePool([4]) as pool:
    group = bm.WorkerGroup(pool, Idles)
    before, ours = group.switches(), sum(psutil.Process().num_ctx_switches())
    time.sleep(2.0)  # what is measured is this time
    assert sum(psutil.Process().num_ctx_switches()) - ours < 50
    assert all(after - then < 50 for after, then in zip(group.switches(), before, strict=True))
