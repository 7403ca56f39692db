"""What a user relies on in groups, their methods and futures, on every backend."""

import asyncio
import copy
import inspect
import pickle
import pydoc
import subprocess
import sys
import threading
from functools import partial

import numpy as np
import pytest
from ctrl_c import done_when
from ends import in_another_thread

import bandmaster as bm
from bandmaster import Broadcast, Dispatch, Execute, Gather, Mesh, Only, Reduce, Split, TransferProtocol, register
from bandmaster.backends.host_workers import HostWorkers
from bandmaster.platform.processes import is_readable
from bandmaster.wire.lane import Lane

pytestmark = pytest.mark.backends("inprocess", "local")
on_all = pytest.mark.backends("inprocess", "local", "ray")


class Adder(bm.Worker):
    """Adds to its rank."""

    def __init__(self, start=0, *more, mesh_name="none"):
        self.value = self.rank + start + sum(more)
        self.mesh_name = mesh_name

    @register(Dispatch.ONE_TO_ALL)
    def add(self, x: int, *rest: int, times: int = 1, **named: int) -> int:
        """Add x, times over."""
        self.value += (x + sum(rest) + sum(named.values())) * times
        return self.value

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def add_later(self, x):
        return self.add(x)

    @register(Dispatch.ONE_TO_ALL)
    async def add_async(self, x):
        await asyncio.sleep(0)
        return self.add(x)

    @register(Dispatch.DP_PROTO, execute_mode=Execute.RANK_ZERO)
    def whole(self, rows):
        return len(rows), self.rank

    def unregistered(self, x):
        return self.value + x

    @register(Dispatch.ONE_TO_ALL)
    def wait_for(self, event_file):
        import os
        import time

        while not os.path.exists(event_file):
            time.sleep(0.005)
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def fail(self):
        raise ValueError(f"rank {self.rank}")


@pytest.fixture
def group(make_group):
    return make_group(2, Adder)


def test_methods_carry_name_signature_and_docstring(group):
    assert group.add.__name__ == "add"
    assert group.add.__doc__ == "Add x, times over."
    assert str(inspect.signature(group.add)) == "(x: int, *rest: int, times: int = 1, **named: int) -> int"
    assert str(inspect.signature(group.add.submit)) == "(*args: 'Any', **kwargs: 'Any') -> 'Future[G]'"
    assert "Add x, times over." in pydoc.render_doc(group.add)
    assert {"add", "add_later", "whole", "world_size", "close"} <= set(dir(group))
    assert "unregistered" not in dir(group)


def traced(function):
    """A decorator without `functools.wraps`."""

    def call(*args, **kwargs):
        return function(*args, **kwargs)

    return call


class Unusual(bm.Worker):
    @traced
    def __init__(self, start, *, step=1):
        self.value = start + step

    @register(Dispatch.ONE_TO_ALL)
    @traced
    def plus(self, x, *, times=1):
        return self.value + x * times

    @register(Dispatch.DP_PROTO)
    @traced
    def double(self, rows):
        return [2 * row for row in rows]

    @register(Dispatch.ONE_TO_ALL)
    def named(self, /, **named):
        return named

    @register(Dispatch.ONE_TO_ALL)
    def about(self, method_name, args, kwargs, waits=None):
        return method_name, args, kwargs, waits

    @classmethod
    @register(Dispatch.ONE_TO_ALL)
    def named_class(cls, x):
        """Of the class."""
        return cls.__name__, x

    @register(Dispatch.ONE_TO_ALL)
    @classmethod
    def class_named(cls, x):
        return cls.__name__, x

    @staticmethod
    @register(Dispatch.DP_PROTO, arguments={"rows": Split("dp")})
    def tripled(rows):
        return [3 * row for row in rows]

    @register(Dispatch.DP_PROTO, arguments={"rows": Split("dp")})
    @staticmethod
    def squared(rows):
        return [row**2 for row in rows]


@on_all
def test_methods_and_constructors_whose_self_is_among_their_arguments(make_group):
    group = make_group(2, Unusual, 10, step=2)
    assert group.plus(1) == [13, 13]
    assert group.plus.submit(1, times=3).result() == [15, 15]
    assert group.execute_all_sync("plus", [1, 2]) == [13, 14]
    assert group.double([1, 2, 3]) == [2, 4, 6]
    assert str(inspect.signature(group.plus)) == "(*args, **kwargs)"


def test_arguments_may_have_any_name(make_group):
    group = make_group(2, Unusual, 10)
    names = {"self": 1, "group": 2, "method_name": 3}
    assert group.named(**names) == group.named.submit(**names).result() == [names, names]
    names = {"method_name": 1, "args": 2, "kwargs": 3, "waits": 4}
    assert group.about(**names) == [(1, 2, 3, 4)] * 2
    assert group.execute_all_sync("about", **names) == [(1, 2, 3, 4)] * 2
    assert group.execute_rank_zero_sync("about", **names) == (1, 2, 3, 4)


def test_registered_class_and_static_methods(make_group):
    group = make_group(2, Unusual, 10)
    assert group.named_class(1) == group.class_named(x=1) == [("Unusual", 1)] * 2
    assert (group.tripled([1, 2]), group.squared([1, 2])) == ([3, 6], [1, 4])
    assert group.named_class.__doc__ == "Of the class."
    assert str(inspect.signature(group.class_named)) == str(inspect.signature(group.named_class)) == "(x)"
    with pytest.raises(bm.ArgumentError, match=r"Unusual\.tripled\(rows\)"):
        group.tripled(1, 2)


def test_arguments_of_every_kind_arrive(group):
    assert group.add(1) == [1, 2]
    assert group.add(1, 2, 3, times=2) == [13, 14]
    assert group.add(x=1, other=10) == [24, 25]


def test_constructor_arguments_of_every_kind_arrive(make_group):
    group = make_group(2, Adder, 10, 20, 30, mesh_name="m")
    assert group.add(0) == [60, 61]


def test_arguments_called_like_the_groups_own_go_through_class_with_init_args(make_group):
    class Takes(bm.Worker):
        def __init__(self, mesh, name_prefix):
            self.taken = (mesh, name_prefix)

        def what(self):
            return self.taken

    group = make_group(2, bm.ClassWithInitArgs(Takes, mesh="mine", name_prefix="too"), name_prefix="group")
    assert group.execute_all_sync("what") == [("mine", "too")] * 2
    assert group.worker_names == ["groupTakes_0:0", "groupTakes_0:1"]


def test_async_methods_are_awaited_on_the_worker(group):
    assert group.add_async(5) == [5, 6]
    assert group.execute_all_sync("add_async", 1) == [6, 7]


def test_tasks_of_an_async_method_go_on_between_calls(make_group):
    class Background(bm.Worker):
        def __init__(self):
            self.done = threading.Event()

        @register(Dispatch.ONE_TO_ALL)
        async def begin(self):
            async def work():
                await asyncio.sleep(0)
                self.done.set()

            self.task = asyncio.ensure_future(work())

        @register(Dispatch.ONE_TO_ALL)
        def is_done(self):
            return self.done.wait(timeout=10)

    group = make_group(2, Background)
    group.begin()
    assert group.is_done() == [True, True]


def test_rank_zero_gets_the_arguments_as_they_are_and_gives_a_plain_value(group):
    assert group.whole(list(range(7))) == (7, 0)


def test_execute_by_name_scatters_lists_of_world_size_and_broadcasts_the_rest(group):
    assert group.execute_all_sync("unregistered", [10, 20]) == [10, 21]
    assert group.execute_all_sync("unregistered", x=5) == [5, 6]
    with pytest.raises(bm.RemoteError, match="TypeError"):
        group.execute_all_sync("unregistered", [10, 20, 30])  # three values for two ranks go to all
    assert group.execute_rank_zero_sync("unregistered", 7) == 7


def test_futures_speak_the_words_of_concurrent_futures(group, tmp_path):
    (tmp_path / "go").touch()
    future = group.wait_for.submit(str(tmp_path / "go"))
    assert future.result(timeout=30) == [0, 1]
    assert future.result() == [0, 1], "it can be asked again"
    assert future.exception() is None
    assert (future.done(), future.running(), future.cancel(), future.cancelled()) == (True, False, False, False)


@pytest.mark.backends("local", "ray")
def test_a_future_says_which_ranks_have_not_answered_and_can_be_waited_for_again(group, tmp_path):
    future = group.wait_for.submit(str(tmp_path / "go"))
    assert not future.done()
    assert future.running()
    with pytest.raises(bm.CallTimeout, match=r"rank 0, 1 within 0.05 s"):
        future.result(timeout=0.05)
    with pytest.raises(TimeoutError):
        future.exception(timeout=0)
    (tmp_path / "go").touch()
    assert future.result(timeout=30) == [0, 1]


def test_a_failed_future_has_the_exception(group):
    future = group.fail.submit()
    error = future.exception(timeout=30)
    assert isinstance(error, bm.RemoteError)
    assert isinstance(error.__cause__, ValueError)
    assert sorted(error.failures) == [0, 1]
    with pytest.raises(bm.RemoteError, match="rank 0"):
        future.result()


def test_a_method_registered_as_not_blocking_returns_its_future(group):
    assert group.add_later(4).result(timeout=30) == [4, 5]


def test_callbacks_run_once_the_future_is_done(group):
    seen, called = [], threading.Event()

    def note(future):
        seen.append(future.result())
        called.set()

    future = group.add.submit(1)
    future.add_done_callback(note)
    assert called.wait(timeout=30)
    future.add_done_callback(note)
    assert seen == [[1, 2], [1, 2]]


def test_futures_can_be_awaited_together(group):
    async def main():
        return await asyncio.gather(*(group.add.submit(1) for _ in range(3)))

    assert asyncio.run(main()) == [[1, 2], [2, 3], [3, 4]]


def test_a_future_can_be_asked_from_many_threads(group):
    future = group.add.submit(1)
    results = []
    threads = [threading.Thread(target=lambda: results.append(future.result(timeout=30))) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[1, 2]] * 5


@on_all
def test_execute_all_async_gives_one_future_per_rank(group):
    assert [future.result(timeout=30) for future in group.execute_all_async("unregistered", [1, 2])] == [1, 3]
    assert group.execute_rank_zero_async("unregistered", 1).result(timeout=30) == 1


@on_all
def test_a_group_lives_as_long_as_somebody_uses_it(make_pool):
    pool = make_pool([2])
    assert bm.WorkerGroup(pool, Adder).add(1) == [1, 2]
    future = bm.WorkerGroup(pool, Adder).add.submit(1)
    assert future.result(timeout=30) == [1, 2]


def test_reduce_and_only(make_group):
    class Metrics(bm.Worker):
        @register(TransferProtocol(Split("dp"), Reduce("sum", "dp")))
        def total(self, rows):
            return {"sum": rows.sum(), "n": len(rows)}

        @register(TransferProtocol(Split("dp"), Only(dp=-1)))
        def last(self, rows):
            return rows

        @register(TransferProtocol(Split("dp"), Reduce("mean", "dp", weights="rows")))
        def loss(self, rows=None):
            return {"loss": rows.mean()}

    group = make_group(Mesh(dp=2), Metrics)
    assert group.total(np.arange(5)) == {"sum": 10, "n": 5}
    assert group.last(np.arange(5)).tolist() == [3, 4]
    assert group.loss(np.arange(5)) == {"loss": 2.0}
    with pytest.raises(bm.BatchError, match=r"Metrics\.loss collects with Reduce.* no rows to weight by; pass a batch"):
        group.loss()


def test_a_method_that_returns_a_tuple_has_a_collect_for_each_item(make_group):
    class Trainer(bm.Worker):
        @register(TransferProtocol(Split("dp"), (bm.Concat("dp"), Reduce("mean", "dp", weights="rows"), Only(tp=1))))
        def step(self, rows):
            return rows * 2, {"mean": rows.mean()}, self.rank

        @register(TransferProtocol(Split("dp", pad=True), (bm.Concat("dp"), Reduce("sum", "dp"))))
        def padded(self, rows):
            return rows, len(rows)

        @register(TransferProtocol(Broadcast(), (Gather(), Gather("dp"))))
        def wrong(self):
            return (self.rank,) * (2 + self.rank // 3)

    group = make_group(Mesh(dp=2, tp=2), Trainer)
    rows, metrics, rank = group.step(np.arange(5.0))
    assert (rows.tolist(), metrics, rank) == ([0, 2, 4, 6, 8], {"mean": 2.0}, 1)
    rows, n_rows = group.padded.submit(np.arange(5)).result()
    assert (rows.tolist(), n_rows) == ([0, 1, 2, 3, 4], 6), "the other items are made of the padding, too"
    with pytest.raises(
        bm.CollectError, match=r"rank 3 \(dp=1, tp=1\): returned a tuple of 3, expected a tuple of 2"
    ) as caught:
        group.wrong()
    assert caught.value.method == "Trainer.wrong"


def test_padding_makes_equal_parts_and_never_comes_back(make_group):
    class Padded(bm.Worker):
        @register(TransferProtocol(Split("dp", pad=True), bm.Concat("dp")))
        def sizes(self, rows):
            return [(len(rows), row) for row in rows]

    group = make_group(Mesh(dp=2), Padded)
    rows = [10, 11, 12, 13, 14]
    assert group.sizes(rows) == [(3, row) for row in rows]
    assert group.sizes(rows) == [(3, row) for row in rows], "the caller's batch was not changed"
    assert group.sizes([]) == []
    assert group.sizes([7]) == [(1, 7)]


def test_registered_batch_types_are_split_and_joined(make_group):
    class Prompts:
        def __init__(self, texts):
            self.texts = texts

    bm.register_batch_type(
        Prompts,
        rows=lambda prompts: len(prompts.texts),
        split=lambda prompts, start, stop: Prompts(prompts.texts[start:stop]),
        concat=lambda parts: Prompts([text for part in parts for text in part.texts]),
    )

    class Upper(bm.Worker):
        @register(Dispatch.DP_PROTO)
        def upper(self, prompts):
            prompts.texts = [f"{text.upper()}{self.rank}" for text in prompts.texts]
            return prompts

    group = make_group(2, Upper)
    assert group.upper(Prompts(["a", "b", "c"])).texts == ["A0", "B0", "C1"]


def test_tensors_that_require_grad_arrive_as_leaves_and_come_back_without(make_group):
    import torch  # here, so that the workers of the other tests, which import this module, start sooner

    class Learner(bm.Worker):
        @register(TransferProtocol(Split("dp", pad=True), (bm.Concat("dp"), Gather(), Reduce("mean"))))
        def learn(self, weights):
            return 2 * weights, (weights.requires_grad, weights.is_leaf), weights.sum()

    learned, arrived, mean = make_group(2, Learner).learn(3 * torch.ones(3, requires_grad=True))
    assert arrived == [(True, True)] * 2
    assert [(tensor.requires_grad, tensor.grad_fn) for tensor in (learned, mean)] == [(False, None)] * 2
    assert (learned.tolist(), mean.item()) == ([6, 6, 6], 6)


class Fragile(bm.Worker):
    def __init__(self, refusal):
        if refusal.exists():
            raise ValueError("not now")

    @register(Dispatch.ONE_TO_ALL)
    def echo(self, value):
        return value

    def on_replace(self, rank, state):
        pass


@on_all
def test_a_rank_that_could_not_be_replaced_is_dead_until_it_is(make_group, tmp_path):
    group = make_group(2, Fragile, tmp_path / "refusal")
    (tmp_path / "refusal").touch()
    with pytest.raises(bm.ConstructorError, match=r"rank 1 .*not now"):
        group.replace(1)
    assert not group.healthy
    with pytest.raises(bm.WorkerDied, match=r"rank 1 .*could not be constructed"):
        group.echo(1)
    (tmp_path / "refusal").unlink()
    group.replace(1)
    assert group.healthy
    assert group.echo(1) == [1, 1]


@pytest.mark.backends("inprocess")
def test_a_death_that_another_thread_notes_as_a_rank_is_to_be_replaced_is_named(make_group, tmp_path):
    class Rank(int):
        def __ne__(self, other):
            deaths[2] = None  # as another thread may at any time
            return int(self) != other

        __hash__ = int.__hash__

    group = make_group(3, Fragile, tmp_path / "refusal")
    deaths = group._ownership.workers().deaths
    deaths[Rank(1)] = None
    try:
        with pytest.raises(bm.UsageError, match=r"cannot replace rank 0: rank 1.* is dead too"):
            group.replace(0)
    finally:
        deaths.clear()


@pytest.mark.backends("local")
def test_other_threads_see_all_workers_while_one_is_replaced(make_group, tmp_path):
    group, seen = make_group(3, Fragile, tmp_path / "refusal"), []
    with bm.trace() as trace:
        group.echo(1)

    def look():
        seen.append([worker.rank for worker in group.workers])
        seen.append(sorted(trace.calls[0].stacks()))

    def is_replaced(frame, kind, what):
        return kind == "call" and frame.f_code is Lane.close.__code__

    with done_when(is_replaced, partial(in_another_thread, look)):
        group.replace(1)
    assert seen == [[0, 1, 2], [0, 2]]


@pytest.mark.backends("local")
def test_a_rank_that_is_replaced_as_another_thread_ends_it_is_not_ended_again(make_group, tmp_path):
    group = make_group(2, Fragile, tmp_path / "refusal")

    def is_noted(frame, kind, what):
        is_left = kind == "return" and frame.f_code.co_name == "__exit__"
        return is_left and frame.f_back.f_code is HostWorkers._kill.__code__

    with done_when(is_noted, partial(in_another_thread, group.replace, 0)):
        group._ownership.workers().interrupt({0: None}, "stuck")
    assert group.echo(1) == [1, 1] and group.healthy


@pytest.mark.backends("local")
def test_a_rank_is_not_ended_whose_reply_nobody_has_read(make_group, tmp_path):
    group = make_group(1, Fragile, tmp_path / "refusal")
    future = group.echo.submit(1)
    workers = group._ownership.workers()
    assert is_readable(workers.arrivals, 60)
    workers.interrupt(dict(future._call.tickets), "stuck")
    assert (future.result(), group.echo(2)) == ([1], [2]) and group.healthy


def test_a_group_that_could_not_be_restarted_is_dead_until_it_is(make_group, tmp_path):
    group = make_group(2, Fragile, tmp_path / "refusal")
    (tmp_path / "refusal").touch()
    with pytest.raises(bm.ConstructorError, match="not now"):
        group.restart()
    assert not group.healthy
    with pytest.raises(bm.WorkerDied, match=r"if restart\(\) raised, its error says why none run"):
        group.echo(1)
    (tmp_path / "refusal").unlink()
    group.restart()
    assert group.healthy
    assert group.echo(1) == [1, 1]


def test_groups_meshes_and_pools_can_be_read(make_group, backend):
    group = make_group(Mesh(pp=1, dp=2), Adder, name_prefix="my")
    assert repr(group) == f"<WorkerGroup myAdder of 2 on ResourcePool([2], backend={backend!r}), Mesh(pp=1, dp=2)>"
    assert "<table>" in group._repr_html_()
    assert "myAdder_0:1" in group._repr_html_()
    group.close()
    assert repr(group).endswith(", closed>")


@on_all
def test_group_and_pool_close_in_any_order_and_twice(make_pool):
    pool = make_pool([2])
    with pool, bm.WorkerGroup(pool, Adder) as group:
        assert group.add(1) == [1, 2]
    group.close()
    pool.close()
    pool.close()
    with pytest.raises(bm.ClosedError, match="was closed; make a new"):
        group.add(1)
    with pytest.raises(bm.ClosedError, match="was closed; make a new pool"):
        bm.WorkerGroup(pool, Adder)


def test_closing_a_pool_closes_groups_on_pools_made_of_it(make_pool):
    first, second = make_pool([1]), make_pool([1])
    group = bm.WorkerGroup(bm.merge_resource_pool(first, second), Adder)
    assert group.add(1) == [1, 2]
    first.close()
    with pytest.raises(bm.ClosedError):
        group.add(1)


def test_a_module_that_makes_workers_when_it_is_imported_is_told_so_by_its_first_worker(tmp_path):
    (tmp_path / "unguarded.py").write_text(
        "import bandmaster as bm\n"
        "class Mine(bm.Worker): pass\n"
        "pool = bm.ResourcePool([1])\n"
        "bm.WorkerGroup(pool, Mine)\n"
    )
    command = [sys.executable, "-c", "import unguarded"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert "move the code that creates them into a function" in run.stderr


def test_importing_bandmaster_loads_nothing_slow():
    program = "import sys, bandmaster; print([m for m in ('ray', 'torch', 'multiprocessing') if m in sys.modules])"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


class OwnAttributes(bm.Worker):
    roles = ("policy", "reference")

    @register(Dispatch.ONE_TO_ALL)
    def look(self):
        return self.roles, copy.deepcopy(self).rank, pickle.loads(pickle.dumps(vars(self)))["rank"], self.meshes


def test_a_worker_can_be_copied_and_has_its_own_attributes(make_group):
    group = make_group(2, OwnAttributes, meshes={"flat": Mesh(dp=2)})
    assert group.look() == [(("policy", "reference"), rank, rank, {"flat": Mesh(dp=2)}) for rank in (0, 1)]


class TwoLayouts(bm.Worker):
    @register("3D_PROTO", mesh="train")
    def step(self, rows):
        return [(row, self.rank) for row in rows]

    @register(Dispatch.DP_PROTO, mesh="rollout")
    def generate(self, rows):
        return [(row, self.rank) for row in rows]

    @register("ONE_TO_ALL", mesh="train")
    def fail(self):
        raise ValueError("now")

    @register(Dispatch.ONE_TO_ALL)
    def where(self):
        return {name: mesh.coordinates(self.rank) for name, mesh in self.meshes.items()}, self.coordinates


def test_a_group_has_several_meshes_of_which_a_method_names_one(make_group):
    meshes = {"train": Mesh(pp=2, dp=1, tp=2), "rollout": Mesh(dp=2, tp=2)}
    group = make_group(4, TwoLayouts, meshes=meshes)
    assert group.step([1, 2]) == [(1, 2), (2, 2)], "from the last stage of the only replica"
    assert group.generate([1, 2, 3]) == [(1, 0), (2, 0), (3, 2)]
    assert group.where()[3] == ({"train": {"pp": 1, "dp": 0, "tp": 1}, "rollout": {"dp": 1, "tp": 1}}, {"dp": 3})
    assert (group.meshes, group.mesh) == (meshes, Mesh(dp=4))
    with pytest.raises(bm.RemoteError, match=r"TwoLayouts\.fail failed on rank 0 \(pp=0, tp=0, "):
        group.fail()


@pytest.mark.parametrize(
    ("meshes", "words"),
    [
        (
            None,
            r"TwoLayouts\.\w+ is registered for mesh '\w+', but the group has no named meshes; pass meshes=",
        ),
        (
            {"train": Mesh(dp=2)},
            r"for mesh 'rollout', but the group has only the meshes 'train'; pass meshes={'rollout'",
        ),
        ({"rollout": Mesh(dp=2), "train": Mesh(dp=3)}, r"mesh 'train': Mesh\(dp=3\) has 3 ranks, but .* has 2 slots"),
        ({"rollout": None, "train": Mesh(dp=2)}, "mesh 'rollout': got None, expected a Mesh"),
        ([Mesh(dp=2)], "meshes must be a dict of meshes by name"),
    ],
)
def test_meshes_that_do_not_fit_are_refused(make_pool, meshes, words):
    with pytest.raises(bm.MeshError, match=words):
        bm.WorkerGroup(make_pool([2]), TwoLayouts, meshes=meshes)
