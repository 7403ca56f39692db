"""Without a running Ray, pools start one that is large enough for them, and the last one stops it."""

import os
import signal
import threading
import time

import psutil
import ray

import bandmaster as bm
from bandmaster import Dispatch, register

os.environ.pop("RAY_ADDRESS", None)


class Where(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def pid(self):
        return os.getpid()


with bm.ResourcePool([1], backend="ray") as planned:
    assert "nothing that is counted" in str(planned.plan())
assert not ray.is_initialized(), "a Ray that was started for a plan has ended"

first = bm.ResourcePool([3], backend="ray", cpus_per_worker=os.cpu_count())  # more than this machine has
assert not ray.is_initialized(), "nothing is started before it is needed"
with first:
    assert ray.is_initialized()
    pids = bm.WorkerGroup(first, Where).pid()
    assert len(set(pids)) == 3
    with bm.ResourcePool([2], backend="ray", cpus_per_worker=64) as second:  # CPUs are not counted here
        assert len(bm.WorkerGroup(second, Where).pid()) == 2
    assert ray.is_initialized(), "the first pool still needs it"
assert not ray.is_initialized(), "the last pool stopped it"

try:
    bm.ResourcePool([1], backend="ray", use_gpu=True).reserve()
except bm.PlacementError as error:
    assert "has 0 GPUs" in str(error), error
else:
    raise AssertionError("a GPU pool was placed on a machine without GPUs")
assert not ray.is_initialized()


def press_ctrl_c_as_ray_starts():
    while not any(child.name() == "gcs_server" for child in psutil.Process().children()):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)


before = psutil.Process().children()
threading.Thread(target=press_ctrl_c_as_ray_starts).start()
try:
    bm.ResourcePool([1], backend="ray").reserve()
except KeyboardInterrupt:
    assert not ray.is_initialized()
    psutil.wait_procs(left := set(psutil.Process().children()).difference(before), timeout=20)
    assert not any(child.is_running() for child in left), f"Ray has left {left}"
else:
    raise AssertionError("Ctrl-C was lost")
