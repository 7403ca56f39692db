"""Workers are processes of their own that have what the controller has now, and end with their group."""

import os
import pathlib
import random
import sys
import tempfile

import numpy as np
import psutil
import torch

import bandmaster as bm
from bandmaster import Dispatch, register

FROM_MAIN = 17  # found by workers, though this file has no `if __name__ == "__main__"`


class Looks(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def look(self):
        threads = {name: os.environ[name] for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        return os.getpid(), os.getcwd(), os.environ.get("SET_LATE"), FROM_MAIN, threads, sys.argv[0]

    @register(Dispatch.ONE_TO_ALL)
    def use_threads(self):
        """How many torch would use, and how many this process has once OpenBLAS has worked."""
        matrix = np.ones((800, 800))
        assert (matrix @ matrix)[0, 0] == 800
        return torch.get_num_threads(), len(os.listdir("/proc/self/task"))

    @register(Dispatch.ONE_TO_ALL)
    def draw(self):
        return random.random(), np.random.random()

    @register(Dispatch.ONE_TO_ALL)
    def sockets(self):
        return [c.laddr.port for c in psutil.Process().net_connections(kind="inet") if c.status == "LISTEN"]


for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.pop(name, None)
with bm.ResourcePool([2]) as first:
    bm.WorkerGroup(first, Looks)  # starts the zygote, before what follows
    os.environ["SET_LATE"] = "yes"
    os.environ["OPENBLAS_NUM_THREADS"] = "7"
    os.chdir(tempfile.gettempdir())
    with bm.ResourcePool([1, 1]) as pool:
        group = bm.WorkerGroup(pool, Looks)
        seen = group.look()
        pids = [pid for pid, *_ in seen]
        assert len({os.getpid(), *pids}) == 3
        share = str(max(1, len(os.sched_getaffinity(0)) // 2))
        expected = (os.getcwd(), "yes", 17, {"OMP_NUM_THREADS": share, "OPENBLAS_NUM_THREADS": "7"}, sys.argv[0])
        assert [rest for _, *rest in seen] == [list(expected)] * 2, seen
        for n_torch, n_tasks in group.use_threads():
            assert n_torch == int(share), "libraries that the zygote has imported obey as well"
            assert n_tasks >= 7, "OpenBLAS, too"
        draws = group.draw()
        assert len({*draws[0], *draws[1]}) == 4, "forks do not draw the same numbers"
        assert [pathlib.Path(f"/proc/{pid}").exists() for pid in pids] == [True, True]
        assert [w.pid for w in group.workers] == pids
    assert [pathlib.Path(f"/proc/{pid}").exists() for pid in pids] == [False, False]
    os.environ["OMP_NUM_THREADS"] = "3"
    assert bm.WorkerGroup(first, Looks).use_threads()[0][0] == 3, "the user's word counts"
