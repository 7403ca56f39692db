"""Workers end with the process that they were forked from, and new groups get a new one."""

import os
import subprocess
import sys
from pathlib import Path

import psutil

sys.path.append(str(Path(__file__).parents[1]))
from ends import wait_until_gone

import bandmaster as bm
from bandmaster import Dispatch, register


class Mine(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def pid(self):
        return os.getpid()

    @register(Dispatch.ONE_TO_ALL)
    def start_child(self):
        return subprocess.Popen(["sleep", "300"]).pid


with bm.ResourcePool([2]) as pool:
    group = bm.WorkerGroup(pool, Mine)
    pids = [*group.pid(), *group.start_child()]
    psutil.Process(pids[0]).parent().kill()
    try:
        for _ in range(1000):
            group.pid()
    except bm.WorkerDied as error:
        assert "the process that workers are forked from has ended" in str(error), error
    else:
        raise AssertionError("nobody noticed")
    wait_until_gone(pids)
    group.close()
    assert len(bm.WorkerGroup(pool, Mine).pid()) == 2
