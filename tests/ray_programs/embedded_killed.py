"""Workers on a Ray of our own, and what they have started, end at once with a controller that is killed."""

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import psutil

sys.path.append(str(Path(__file__).parents[1]))
from ends import wait_until_gone

CONTROLLER = """
import os, subprocess, time
import bandmaster as bm
from bandmaster import Dispatch, register

class Busy(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def start(self):
        return os.getpid(), subprocess.Popen(["sleep", "300"], start_new_session=True).pid

    @register(Dispatch.ONE_TO_ALL)
    def spin(self):
        while self.rank == 0:
            pass

group = bm.WorkerGroup(bm.ResourcePool([2], backend="ray"), Busy)
print("pids", *sum(group.start(), ()), flush=True)
group.spin.submit()
time.sleep(300)
"""

with subprocess.Popen([sys.executable, "-c", CONTROLLER], stdout=subprocess.PIPE, text=True) as controller:
    line = next(line for line in controller.stdout if line.startswith("pids"))
    pids = [int(word) for word in line.split()[1:]]
    assert len(pids) == 4
    others = psutil.Process(controller.pid).children(recursive=True)
    controller.send_signal(signal.SIGKILL)
    try:
        wait_until_gone(pids, timeout_s=1.0)
    finally:
        for process in others:  # agents of Ray's own take a minute to see that their Ray is gone
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
