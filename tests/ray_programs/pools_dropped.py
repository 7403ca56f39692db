"""Pools that are collected during a call, or closed as Ctrl-C comes, give back slots, and end agents of their nodes."""

import signal
import sys
import time
from pathlib import Path

import ray

import bandmaster as bm
from bandmaster import Dispatch, register

sys.path.append(str(Path(__file__).parents[1]))
from ctrl_c import interrupted_when
from small_ray import small_cluster

from bandmaster.hosts.links import AgentLinks


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


def agents():
    return [actor for actor in ray._private.state.actors().values() if actor["State"] != "DEAD"]


def waits_for_the_agent(frame, kind, what):
    return kind == "call" and frame.f_code is AgentLinks.answers.__code__


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
        closed = bm.ResourcePool([1], backend="ray", placement_timeout=30)
        bm.WorkerGroup(closed, Echo).close()
        assert len(agents()) == 2
        with interrupted_when(waits_for_the_agent):
            closed.close()
        deadline = time.monotonic() + 30
        while len(agents()) != 1:
            assert time.monotonic() < deadline, agents()
            time.sleep(0.05)  # polling for Ray to notice
        assert group.echo(4) == [4, 4]
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
