"""What workers of agents have started ends with a controller that is killed, though Ray kills the agents' children."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from ends import wait_until_gone
from small_ray import small_cluster

CONTROLLER = """
import os, subprocess, time
import bandmaster as bm
from bandmaster import Dispatch, register

class Starts(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def start(self):
        own = subprocess.Popen(["sleep", "300"], start_new_session=True)
        return os.getpid(), own.pid, subprocess.Popen(["sleep", "300"]).pid

group = bm.WorkerGroup(bm.ResourcePool([1, 1], backend="ray"), Starts)
print("pids", *sum(group.start(), ()), flush=True)
time.sleep(300)
"""

cluster = small_cluster(num_cpus=1)
cluster.add_node(num_cpus=1)
cluster.wait_for_nodes()
try:
    for _ in range(2):  # it is a matter of who is first
        command, environment = [sys.executable, "-c", CONTROLLER], {**os.environ, "RAY_ADDRESS": cluster.address}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as controller:
            line = next(line for line in controller.stdout if line.startswith("pids"))
            pids = [int(word) for word in line.split()[1:]]
            time.sleep(0.5)
            controller.send_signal(signal.SIGKILL)
            wait_until_gone(pids, timeout_s=4.0)  # 2 s, and twice that on a machine that has other things to do
finally:
    cluster.shutdown()
