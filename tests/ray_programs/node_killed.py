"""A Ray node that is gone takes its workers with it: the next call says so in time, and the rest can be closed."""

import sys
import time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

import bandmaster as bm
from bandmaster import Dispatch, register

sys.path.append(str(Path(__file__).parents[1]))
from clock import idle_time


class Echo(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def echo(self, value):
        return value

    @register(Dispatch.ONE_TO_ALL)
    def hang(self):
        time.sleep(300)


cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
node = cluster.add_node(num_cpus=2)
cluster.wait_for_nodes()
ray.init(address=cluster.address, log_to_driver=False)


def main():
    with bm.ResourcePool([1, 1], backend="ray") as pool:
        group = bm.WorkerGroup(pool, Echo)
        assert group.echo(1) == [1, 1]
        pending = group.hang.submit()
        cluster.remove_node(node, allow_graceful=False)
        start = idle_time()
        error = pending.exception(timeout=60)
        assert isinstance(error, bm.WorkerDied), error
        assert idle_time() - start < 5, "the agent ends with its node, and hangs up"
        assert not group.healthy
        try:
            group.echo(1)
        except bm.WorkerDied:
            pass
        else:
            raise AssertionError("called as if nothing was")
    with bm.ResourcePool([2], backend="ray") as pool:
        assert bm.WorkerGroup(pool, Echo).echo(2) == [2, 2], "the rest of the cluster goes on"


try:
    main()
finally:
    ray.shutdown()
    cluster.shutdown()
