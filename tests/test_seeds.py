"""The seeds' program, with one word of its imports replaced, gives the seeds' numbers on a real Ray.

Its pools have two workers each, as each takes five seconds of a processor to start. With as many as in the seeds, the
program is docs/tutorials/02-worker-groups.ipynb, see test_tutorials.py.
"""

import pytest
import ray
import torch

from bandmaster.single_controller.base import Worker
from bandmaster.single_controller.base.decorator import Dispatch, Execute, collect_all_to_all, register
from bandmaster.single_controller.ray.base import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    merge_resource_pool,
)

pytestmark = pytest.mark.slow


@ray.remote
class GPUAccumulator(Worker):
    def __init__(self) -> None:
        super().__init__()
        self.value = torch.zeros(size=(1,), device=self.device) + self.rank

    def add(self, x):
        self.value += x
        return self.value.cpu()


@ray.remote
class GPUAccumulatorDecorator(Worker):
    def __init__(self) -> None:
        super().__init__()
        self.value = torch.zeros(size=(1,), device=self.device) + self.rank

    @register(Dispatch.ONE_TO_ALL)
    def add(self, x):
        self.value = self.value + x
        return self.value.cpu()


def two_to_all_dispatch_fn(worker_group, *args, **kwargs):
    for values in (*args, *kwargs.values()):
        assert len(values) == 2
        for i in range(worker_group.world_size - 2):
            values.append(values[i % 2])
    return args, kwargs


@ray.remote
class TwoToAll(Worker):
    def __init__(self, x) -> None:
        super().__init__()
        self._x = x

    def foo(self, y):
        return self._x + y

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def foo_rank_zero(self, x, y):
        return self._x + y + x

    @register(dispatch_mode={"dispatch_fn": two_to_all_dispatch_fn, "collect_fn": collect_all_to_all})
    def foo_custom(self, x, y):
        return self._x + y + x


@pytest.fixture(scope="module")
def pools(ray_cluster):
    first = RayResourcePool([2], use_gpu=True).reserve()
    second = RayResourcePool([2], use_gpu=True, name_prefix="a").reserve()
    yield first, second
    first.close()
    second.close()


@pytest.fixture(scope="module")
def accumulators(pools):
    with RayWorkerGroup(pools[0], RayClassWithInitArgs(cls=GPUAccumulator)) as group:
        yield group


@pytest.fixture(scope="module")
def summers(pools):
    pool = merge_resource_pool(*pools)
    with RayWorkerGroup(pool, RayClassWithInitArgs(cls=TwoToAll, x=2), name_prefix="TB0KhK") as group:
        yield group


def values(tensors):
    return [int(tensor) for tensor in tensors]


def test_accumulators_on_two_pools(pools, accumulators):
    first, second = pools
    assert values(accumulators.execute_all_sync("add", x=[1, 1])) == [1, 2]
    assert (first.local_rank_list(), first.local_world_size_list()) == ([0, 1], [2, 2])
    on_second = RayWorkerGroup(second, RayClassWithInitArgs(cls=GPUAccumulator))
    assert values(on_second.execute_all_sync("add", x=[2, 2])) == [2, 3]


def test_accumulators_on_both_pools_merged(pools, accumulators):
    merged = merge_resource_pool(*pools)
    assert merged.local_rank_list() == [0, 1, 0, 1]
    on_both = RayWorkerGroup(merged, RayClassWithInitArgs(cls=GPUAccumulator))
    assert values(on_both.execute_all_sync("add", x=[3] * 4)) == [3, 4, 5, 6]

    references = accumulators.execute_all_async("add", x=[1, 1])
    assert all(isinstance(reference, ray.ObjectRef) for reference in references)
    assert values(ray.get(references)) == [2, 3]


def test_one_to_all(pools):
    group = RayWorkerGroup(pools[1], RayClassWithInitArgs(cls=GPUAccumulatorDecorator))
    assert values(group.add(x=10)) == [10, 11]


def test_custom_dispatch_and_rank_zero(summers):
    x, y = [1, 2], [5, 6]
    assert summers.foo_custom(x=x, y=y) == [8, 10, 8, 10]
    assert (x, y) == ([1, 2], [5, 6]), "the dispatch function extended copies, not the caller's lists"
    assert summers.foo_rank_zero(x=1, y=2) == 5


def test_workers_are_actors_named_by_node_and_local_rank(summers):
    assert summers.worker_names == [f"TB0KhKTwoToAll_{node}:{rank}" for node in range(2) for rank in range(2)]
    assert ray.get(ray.get_actor("TB0KhKTwoToAll_1:1").foo.remote(1)) == 3
    assert [ray.get(worker.foo.remote(rank)) for rank, worker in enumerate(summers.workers)] == [2, 3, 4, 5]
