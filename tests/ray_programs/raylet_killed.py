"""Workers on the controller's own host end with the process by which Ray keeps that host, and the error says so."""

import contextlib
import os
import sys
import time
from pathlib import Path

import psutil
import ray

sys.path.append(str(Path(__file__).parents[1]))
from ends import wait_until_gone

import bandmaster as bm
from bandmaster import Dispatch, register


class Naps(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def pid(self):
        return os.getpid()

    @register(Dispatch.ONE_TO_ALL)
    def nap(self):
        time.sleep(300)


ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
pool = bm.ResourcePool([2], backend="ray")
group = bm.WorkerGroup(pool, Naps)
pids, pending = group.pid(), group.nap.submit()
others = psutil.Process().children(recursive=True)
(raylet,) = [process for process in others if process.name() == "raylet"]
raylet.kill()
try:
    error = pending.exception(timeout=5)
    assert isinstance(error, bm.WorkerDied) and "Ray has ended on this host" in str(error), error
    wait_until_gone(pids)
finally:
    for process in others:  # without that process, Ray takes long to end
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
os._exit(0)
