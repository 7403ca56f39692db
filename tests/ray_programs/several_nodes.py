"""Unequal pools on several Ray nodes: placed as asked, ranks in (node, device) order, refused with the numbers."""

import os

import ray
from ray.cluster_utils import Cluster

import bandmaster as bm
from bandmaster import Dispatch, register


class Where(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def look(self):
        node = ray.get_runtime_context().get_node_id()
        return node, self.node_rank, self.local_rank, self.local_world_size, int(os.environ["CUDA_VISIBLE_DEVICES"])

    @register(Dispatch.ONE_TO_ALL)
    def environment(self):
        return [int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]


cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 2, "include_dashboard": False})
cluster.add_node(num_cpus=4, num_gpus=4)
cluster.wait_for_nodes()
ray.init(address=cluster.address, log_to_driver=False)


def main():
    for shape in ([4, 2], [2, 4]):
        with bm.ResourcePool(shape, backend="ray", use_gpu=True) as pool:
            group = bm.WorkerGroup(pool, Where)
            seen = group.look()
            places = [(node, local) for node, size in enumerate(shape) for local in range(size)]
            assert [(s[1], s[2]) for s in seen] == places
            assert [s[3] for s in seen] == [size for size in shape for _ in range(size)]
            assert len({(s[0], s[1]) for s in seen}) == 2, "each entry of the pool is on a node of its own"
            assert [s[4] for s in seen] == [local for _, local in places], "devices in order on each node"
            assert [env[0] for env in group.environment()] == list(range(6))
            assert {env[1] for env in group.environment()} == {6}
            parts = bm.split_resource_pool(pool, 3)
            assert [part.process_on_nodes for part in parts] == ([(3,), (1, 2)] if shape == [4, 2] else [(2, 1), (3,)])
            assert [s[1:] for s in bm.WorkerGroup(parts[1], Where).look()] == (
                [(0, 0, 1, 3), (1, 0, 2, 0), (1, 1, 2, 1)]
                if shape == [4, 2]
                else [(0, 0, 3, 1), (0, 1, 3, 2), (0, 2, 3, 3)]
            )

    try:
        bm.ResourcePool([3, 3], backend="ray", use_gpu=True).reserve()
    except bm.PlacementError as error:
        assert "6 GPU workers as [3, 3]" in str(error), error
        assert "has 2 GPUs" in str(error), error
        assert "has 4 GPUs" in str(error), error
        assert "ask for [4, 2]" in str(error), error
    else:
        raise AssertionError("[3, 3] was placed on nodes with 2 and 4 GPUs")

    with bm.ResourcePool([4], backend="ray", use_gpu=True, name_prefix="critic") as critic:
        assert [s[4] for s in bm.WorkerGroup(critic, Where).look()] == [0, 1, 2, 3]
        try:
            bm.ResourcePool([4], backend="ray", use_gpu=True, placement_timeout=1).reserve()
        except bm.PlacementError as error:
            assert "within 1 s" in str(error), error
            assert "held by pool 'critic' (4 slots)" in str(error), error
            assert "ask for [2]" in str(error), error
        else:
            raise AssertionError("four GPUs were taken twice")
    bm.ResourcePool(
        [4], backend="ray", use_gpu=True, placement_timeout=20
    ).reserve().close()  # given back, so free again


try:
    main()
finally:
    ray.shutdown()
    cluster.shutdown()
