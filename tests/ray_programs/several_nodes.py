"""Unequal pools on several Ray nodes: placed as asked, ranks in (node, device) order, refused with the numbers."""

import os
import sys
from pathlib import Path

import ray

import bandmaster as bm
from bandmaster import Dispatch, register

sys.path.append(str(Path(__file__).parents[1]))
from small_ray import small_cluster


class Where(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def look(self):
        starter = os.getppid()  # each node has a process that starts its workers
        return starter, self.node_rank, self.local_rank, self.local_world_size, int(os.environ["CUDA_VISIBLE_DEVICES"])

    @register(Dispatch.ONE_TO_ALL)
    def mine(self):
        return os.environ["MINE"]

    @register(Dispatch.ONE_TO_ALL)
    def environment(self):
        return [int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]


cluster = small_cluster(num_cpus=1, num_gpus=1)
cluster.add_node(num_cpus=2, num_gpus=2)
cluster.wait_for_nodes()
ray.init(address=cluster.address, log_to_driver=False)


def main():
    for shape in ([2, 1], [1, 2]):
        with bm.ResourcePool(shape, backend="ray", use_gpu=True) as pool:
            group = bm.WorkerGroup(pool, Where)
            seen = group.look()
            places = [(node, local) for node, size in enumerate(shape) for local in range(size)]
            assert [(s[1], s[2]) for s in seen] == places
            assert [s[3] for s in seen] == [size for size in shape for _ in range(size)]
            nodes = {(s[0], s[1]) for s in seen}
            assert len({starter for starter, _ in nodes}) == len(nodes) == 2, "each entry has a node of its own"
            assert [s[4] for s in seen] == [local for _, local in places], "devices in order on each node"
            assert [env[0] for env in group.environment()] == list(range(3))
            assert {env[1] for env in group.environment()} == {3}
            parts = bm.split_resource_pool(pool, [1, 2])
            assert [part.process_on_nodes for part in parts] == ([(1,), (1, 1)] if shape == [2, 1] else [(1,), (2,)])
            wrapped = ray.remote(runtime_env={"env_vars": {"MINE": "${HOME}/mine"}})(Where)
            group = bm.WorkerGroup(parts[1], wrapped)
            assert group.mine() == [f"{os.environ['HOME']}/mine"] * 2
            assert [s[1:] for s in group.look()] == (
                [(0, 0, 1, 1), (1, 0, 1, 0)] if shape == [2, 1] else [(0, 0, 2, 0), (0, 1, 2, 1)]
            )

    try:
        bm.ResourcePool([2, 2], backend="ray", use_gpu=True).reserve()
    except bm.PlacementError as error:
        assert "4 GPU workers as [2, 2]" in str(error), error
        assert "has 1 GPUs" in str(error), error
        assert "has 2 GPUs" in str(error), error
        assert "ask for [2, 1]" in str(error), error
    else:
        raise AssertionError("[2, 2] was placed on nodes with 1 and 2 GPUs")

    with bm.ResourcePool([2], backend="ray", use_gpu=True, name_prefix="critic") as critic:
        assert [s[4] for s in bm.WorkerGroup(critic, Where).look()] == [0, 1]
        try:
            bm.ResourcePool([2], backend="ray", use_gpu=True, placement_timeout=1).reserve()
        except bm.PlacementError as error:
            assert "within 1 s" in str(error), error
            assert "held by pool 'critic' (2 slots)" in str(error), error
            assert "ask for [1]" in str(error), error
        else:
            raise AssertionError("two GPUs were taken twice")
    bm.ResourcePool(
        [2], backend="ray", use_gpu=True, placement_timeout=20
    ).reserve().close()  # given back, so free again


try:
    main()
finally:
    ray.shutdown()
    cluster.shutdown()
