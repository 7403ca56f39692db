"""Pools that are collected as garbage during a call give back their slots, and end the agents of their nodes."""

import signal
import sys
import time
from pathlib import Path

import ray

import bandmaster as bm
from bandmaster import Dispatch, register

sys.path.append(str(Path(__file__).parents[1]))
from small_ray import small_cluster


class Echo(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def echo(self, value, after_s=0.0):
        time.sleep(after_s)
        return value


cluster = small_cluster(num_cpus=0)
cluster.add_node(num_cpus=2)
cluster.add_node(num_cpus=1)
cluster.wait_for_nodes()
ray.init(address=cluster.address, log_to_driver=False)


def main():
    ignored = []
    sys.unraisablehook = ignored.append
    with bm.ResourcePool([2], backend="ray") as pool:
        group = bm.WorkerGroup(pool, Echo)
        assert group.echo(1) == [1, 1]
        dropped = [bm.ResourcePool([1], backend="ray", placement_timeout=30)]  # on the other node
        bm.WorkerGroup(dropped[0], Echo).close()  # its agent stays for the pool
        signal.signal(signal.SIGALRM, lambda *_: dropped.clear())  # a collection may come at the same moments
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        assert group.echo(2, after_s=1.0) == [2, 2]
        assert not dropped
        assert group.echo(3) == [3, 3]
    deadline = time.monotonic() + 30
    while ray.available_resources().get("CPU", 0) != 3 and time.monotonic() < deadline:
        time.sleep(0.05)  # polling for Ray to notice
    assert ray.available_resources()["CPU"] == 3
    assert not ignored, [error.exc_value for error in ignored]


try:
    main()
finally:
    ray.shutdown()
    cluster.shutdown()
