"""Runs on the first host: one call to ranks of two other hosts, for a test that does something to one of these.

python sleep.py SECONDS [replace | restart]
"""

import json
import os
import sys
import time

import bandmaster as bm
from bandmaster import Dispatch, register


class Sleeper(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def place(self):
        return os.uname().nodename

    @register(Dispatch.ONE_TO_ALL)
    def sleep(self, seconds):
        time.sleep(seconds)

    def on_replace(self, rank, state):
        """Nothing: ranks do not know each other."""


def tell(**facts):
    print(json.dumps(facts), flush=True)


replaces, restarts = (sys.argv[2:] == [word] for word in ("replace", "restart"))
with bm.ResourcePool([1, 1] if replaces else [2, 2], backend="ray", spares=[2] if restarts else []) as pool:
    group = bm.WorkerGroup(pool, Sleeper)
    channels = {record.channel for record in group._ownership.workers().records}
    tell(hosts=group.place(), channels=sorted(channels))
    call = group.sleep.submit(float(sys.argv[1]))
    tell(is_asleep=True)
    began = time.monotonic()
    try:
        call.result()
        tell(slept=time.monotonic() - began)
    except bm.WorkerDied as error:
        tell(died=time.monotonic() - began, message=str(error))
        tell(is_healthy=group.healthy)
    if replaces:
        group.replace(1)
    if restarts:
        restarted = time.monotonic()
        group.restart()
        tell(plan=str(pool.plan()), took=time.monotonic() - restarted)
    if replaces or restarts:
        tell(hosts=group.place())
tell(is_over=True)
