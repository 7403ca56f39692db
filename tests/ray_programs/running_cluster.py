"""A cluster that runs on this machine is joined, as ray.init() would, and left with the last pool."""

import ray
from ray.cluster_utils import Cluster

import bandmaster as bm
from bandmaster import Dispatch, register


class Where(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def node(self):
        return ray.get_runtime_context().get_node_id()


cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
try:
    with bm.ResourcePool([2], backend="ray") as pool:
        assert bm.WorkerGroup(pool, Where).node() == [cluster.head_node.node_id] * 2
    assert not ray.is_initialized()
finally:
    ray.shutdown()
    cluster.shutdown()
