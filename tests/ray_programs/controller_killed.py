"""A controller that is killed leaves no actor, no process and no slot that others need on a cluster that goes on."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ray
from ray.util import placement_group, placement_group_table

import bandmaster as bm

sys.path.append(str(Path(__file__).parents[1]))
from clock import idle_time
from ends import runs
from small_ray import small_cluster

CONTROLLER = """
import os, time
import bandmaster as bm
from bandmaster import Dispatch, register

class Busy(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def pid(self):
        return os.getpid()

    @register(Dispatch.ONE_TO_ALL)
    def spin(self):
        while True:
            pass

pool = bm.ResourcePool([2], backend="ray")
group = bm.WorkerGroup(pool, Busy)
pids = group.pid()
group.spin.submit()
print("pids", *pids, flush=True)
time.sleep(300)
"""

cluster = small_cluster(num_cpus=4)
ray.init(address=cluster.address, log_to_driver=False)


def main():
    controller = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "RAY_ADDRESS": cluster.address},
    )
    with controller:
        for line in controller.stdout:
            if line.startswith("pids"):
                pids = [int(word) for word in line.split()[1:]]
                break
        assert len(pids) == 2
        controller.send_signal(signal.SIGKILL)
        killed = idle_time()
    while True:
        groups = [g for g in ray.util.placement_group_table().values() if g["state"] != "REMOVED"]
        left = [pid for pid in pids if runs(pid)]
        if not groups and not left:
            break
        assert idle_time() - killed < 10, (groups, left)
        time.sleep(0.05)  # polling for Ray
    print(f"nothing left after {idle_time() - killed:.1f} s")


@ray.remote(num_cpus=0, max_retries=1)
def controller_in_a_task(mark):
    with bm.ResourcePool([4], backend="ray", placement_timeout=30) as pool:
        pool.reserve()
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)  # Ray runs the task again
    return "done"


try:
    main()
    names = "ablation #7 of the learning rate, in its third week", "pool 'sweep #2' (1 slots)"
    other = placement_group([{"memory": 1}], name=names[0])
    ray.get(other.ready())
    with bm.ResourcePool([1], backend="ray", cpus_per_worker=0, name_prefix="sweep #2") as mine:
        mine.reserve()
        with tempfile.TemporaryDirectory() as folder:
            assert ray.get(controller_in_a_task.remote(Path(folder, "mark"))) == "done"
        left = [one["name"] for one in placement_group_table().values() if one["state"] == "CREATED"]
        assert all(any(name.startswith(start) for name in left) for start in names), left
finally:
    ray.shutdown()
    cluster.shutdown()
