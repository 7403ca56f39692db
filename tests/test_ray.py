"""What is true of backend ``"ray"`` alone. Programs that start a Ray of their own run in a process of their own."""

import gc
import os
import subprocess
import sys
import tempfile
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
import ray
from ctrl_c import pressed, pressed_when
from ray.util.placement_group import PlacementGroup

import bandmaster as bm
from bandmaster import Dispatch, register
from bandmaster.backends.ray.backend import RayBackend, gpus_of
from bandmaster.platform.limits import start_thread
from bandmaster.testing import no_leaks

FAST = ("controller_killed", "node_lost", "session_ended")
PROGRAMS = [
    pytest.param(path, id=path.stem, marks=() if path.stem in FAST else pytest.mark.slow)
    for path in sorted((Path(__file__).parent / "ray_programs").glob("*.py"))
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs(program):
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with tempfile.TemporaryDirectory(prefix="ray") as directory:  # where Ray notes the cluster that runs: one's own
        own = {**environment, "RAY_TMPDIR": directory}
        run = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=280, env=own)
    assert run.returncode == 0, run.stdout + run.stderr


class Look(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def look(self):
        return os.environ.get("CUDA_VISIBLE_DEVICES"), self.device

    def mine(self):
        return os.environ.get("MINE")


def test_ctrl_c_as_slots_are_reserved_and_released_leaves_no_placement_group(ray_cluster):
    def reserve():
        bm.ResourcePool([1], backend="ray").reserve().close()

    n = 1
    with no_leaks(kinds=["placements"]):
        while pressed(reserve, n):
            n += 7  # as each step would take half a minute
    assert n > 200


@pytest.mark.parametrize("step", [PlacementGroup.wait, gpus_of])
def test_slots_are_free_after_ctrl_c_though_its_traceback_is_kept(ray_cluster, step):
    n = int(ray_cluster.cluster_resources()["GPU"])
    pool = bm.ResourcePool([n], backend="ray", use_gpu=True, placement_timeout=5)

    def is_now(frame, kind, _):
        return kind == "call" and frame.f_code is step.__code__

    with pytest.raises(KeyboardInterrupt) as interrupted, pressed_when(is_now):
        pool.reserve()
    with pool:
        assert interrupted.tb


def test_workers_end_after_ctrl_c_though_its_traceback_is_kept(ray_cluster):
    def is_now(frame, kind, _):
        return kind == "call" and (frame.f_code, frame.f_back.f_code) == (
            start_thread.__code__,
            RayBackend.start.__code__,
        )

    with bm.ResourcePool([2], backend="ray") as pool:
        bm.WorkerGroup(pool, Look).close()  # the process that forks the workers has started
        with no_leaks(kinds=["processes"]), pytest.raises(KeyboardInterrupt) as interrupted, pressed_when(is_now):
            bm.WorkerGroup(pool, Look)
        assert interrupted.tb


@pytest.mark.parametrize("each", [1, 2])
def test_groups_on_one_pool_share_its_devices_in_order(ray_cluster, each):
    with bm.ResourcePool([3], backend="ray", use_gpu=True, gpus_per_worker=each, max_colocate_count=2) as pool:
        one, two = bm.WorkerGroup(pool, Look), bm.WorkerGroup(pool, Look)
        devices = [int(device) for listed, _ in one.look() for device in listed.split(",")]
        assert len(devices) == 3 * each
        assert devices == sorted(set(devices))
        assert two.look() == one.look()
        assert {name for _, name in one.look()} == {"cpu"}, "Ray only pretends to have GPUs here"


def test_environment_variables_of_a_class_wrapped_by_ray_remote_reach_its_workers_as_ray_expands_them(ray_cluster):
    class Shows(bm.Worker):
        @register(Dispatch.ONE_TO_ALL)
        def variables(self):
            return dict(os.environ)

    asked = {
        "MINE": "yes",
        "PATH": "/mine:${PATH}",
        "BOTH": "$MINE, ${NOWHERE}${HOME}, $nowhere ${nowhere}, 5 $",
        "OURS": "theirs",
    }
    wrapped = ray_cluster.remote(runtime_env={"env_vars": asked})(Shows)
    with bm.ResourcePool([1], backend="ray", preload=[], env={"OURS": "${HOME}"}) as pool:
        (found,) = bm.WorkerGroup(pool, wrapped).variables()
    shows = ray_cluster.remote(num_cpus=0, runtime_env={"env_vars": asked})(lambda: dict(os.environ))
    of_ray = ray_cluster.get(shows.remote())
    assert found["PATH"] == f"/mine:{os.environ['PATH']}"
    assert [found[name] for name in ("MINE", "BOTH")] == [of_ray[name] for name in ("MINE", "BOTH")]
    assert found["OURS"] == "${HOME}", "the pool's own are literal"


def test_a_working_directory_of_a_class_is_that_of_its_workers(ray_cluster, tmp_path):
    class Reads(bm.Worker):
        @register(Dispatch.ONE_TO_ALL)
        def read(self):
            return Path("note.txt").read_text(), os.environ["MINE"], self.rank

    with zipfile.ZipFile(tmp_path / "files.zip", "w") as archive:
        archive.writestr("files/note.txt", "from the working directory")
    env = {"working_dir": f"file://{tmp_path}/files.zip", "env_vars": {"MINE": "${HOME}/mine"}}
    wrapped = ray_cluster.remote(runtime_env=env)(Reads)
    with bm.ResourcePool([2], backend="ray", preload=[]) as pool:
        group = bm.WorkerGroup(pool, wrapped)
        assert group.read() == [("from the working directory", f"{os.environ['HOME']}/mine", rank) for rank in (0, 1)]
        assert bm.WorkerGroup(pool, Look).execute_all_sync("mine") == [None, None], "they are those of the class alone"


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"num_cpus": 3}, "cpus_per_worker="),
        ({"num_gpus": 1}, "use_gpu="),
        ({"resources": {"tpu": 1}}, "resources_per_worker="),
        ({"memory": 1 << 30}, "resources_per_worker="),
        ({"concurrency_groups": {"io": 2}}, "calls in order"),
        ({"max_concurrency": 4}, "calls in order"),
        ({"fallback_strategy": [{"label_selector": {"zone": "a"}}]}, "cpus_per_worker="),
        ({"placement_group": "default"}, "cpus_per_worker="),
        ({"allow_out_of_order_execution": True}, "calls in order"),
        ({"max_restarts": -1}, "restart\\(\\)"),
        ({"name": "mine"}, "name= of WorkerGroup"),
        ({"lifetime": "detached"}, "end with their controller"),
    ],
)
def test_options_of_actors_that_have_no_meaning_are_refused_with_the_remedy(ray_cluster, options, remedy):
    with bm.ResourcePool([1], backend="ray") as pool:
        with pytest.raises(bm.UsageError, match=rf"Look asks Ray for {next(iter(options))}=.*{remedy}.*leave this out"):
            bm.WorkerGroup(pool, ray_cluster.remote(**options)(Look))
        assert len(bm.WorkerGroup(pool, ray_cluster.remote(Look)).look()) == 1


@pytest.mark.parametrize("is_connected", [True, False], ids=["connected", "by RAY_ADDRESS"])
def test_ray_client_is_refused(monkeypatch, is_connected):
    from ray.util.client import ray as client

    from bandmaster.backends.local import LocalBackend
    from bandmaster.backends.ray.backend import RayBackend

    backend = RayBackend(LocalBackend())
    monkeypatch.setattr(client, "is_connected", lambda: is_connected)
    monkeypatch.setattr(ray, "is_initialized", lambda: is_connected)
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(bm.UsageError, match=r"Ray Client .*run the script on a node of the cluster"):
        backend.inventory()


@pytest.mark.parametrize("holds_s", [0, 0.5])
def test_gpus_of_a_pool_that_was_dropped_are_free(ray_cluster, holds_s):
    n = int(ray_cluster.cluster_resources()["GPU"])
    gc.disable()
    try:
        pool = bm.ResourcePool([n], backend="ray", use_gpu=True).reserve()
        cycle = [pool]
        cycle.append(cycle)
        held = [cycle] if holds_s else []
        del pool, cycle
        drops = threading.Timer(holds_s, held.clear)  # perhaps while the next pool waits for the GPUs
        drops.start()
        with bm.ResourcePool([n], backend="ray", use_gpu=True, placement_timeout=5) as pool:
            pool.reserve()
        drops.join()
    finally:
        gc.enable()


class UsesRay(bm.Worker):
    """Uses Ray as a worker of any kind may: it is connected when it does so first."""

    @register(Dispatch.ONE_TO_ALL)
    def task(self, x):
        import ray

        @ray.remote(num_cpus=0)
        def add(y):
            return x + y

        return ray.get(add.remote(self.rank))

    @register(Dispatch.ONE_TO_ALL)
    def call(self, name):
        import ray

        return ray.get(ray.get_actor(name).value.remote())

    @register(Dispatch.ONE_TO_ALL)
    def call_handle(self, handle):
        import ray

        return ray.get(handle.value.remote())

    @register(Dispatch.ONE_TO_ALL)
    def read(self, references):
        import ray

        return [np.asarray(value).sum().item() for value in ray.get(references)]

    @register(Dispatch.ONE_TO_ALL)
    def give(self):
        import ray

        return ray.put(np.full(200_000, self.rank))

    @register(Dispatch.ONE_TO_ALL)
    def pass_on(self, queue):
        queue.put(self.rank)

    @register(Dispatch.ONE_TO_ALL)
    def data(self):
        import ray.data

        return sorted(row["id"] for row in ray.data.range(10).take_all())

    @register(Dispatch.ONE_TO_ALL)
    def reduce(self):
        from ray.util import collective

        collective.init_collective_group(self.world_size, self.rank, backend="gloo", group_name="ours")
        tensor = np.full(3, self.rank + 1.0, np.float32)
        collective.allreduce(tensor, group_name="ours")
        collective.destroy_collective_group("ours")
        return tensor.tolist()


@pytest.fixture(scope="module")
def users(ray_cluster):
    with bm.ResourcePool([2], backend="ray") as pool:
        yield bm.WorkerGroup(pool, UsesRay)


@pytest.fixture
def named(ray_cluster):
    @ray_cluster.remote(num_cpus=0)
    class Named:
        def value(self):
            return 7

    actor = Named.options(name="named").remote()
    yield actor
    ray_cluster.kill(actor)


def test_workers_run_tasks(users):
    assert users.task(10) == [10, 11]


def test_workers_find_named_actors_of_the_controller(users, named):
    assert users.call("named") == [7, 7]


def test_workers_call_actors_by_handles(users, named):
    assert users.call_handle(named) == [7, 7]


def test_workers_read_object_refs(users, ray_cluster):
    @ray_cluster.remote(num_cpus=0)
    def made():
        return np.arange(4)

    references = [ray_cluster.put(np.ones(300_000)), ray_cluster.put([1, 2]), made.remote()]
    assert users.read(references) == [[300_000.0, 3, 6]] * 2


def test_object_refs_of_workers_are_read_by_the_controller(users, ray_cluster):
    assert [ray_cluster.get(reference).sum() for reference in users.give()] == [0, 200_000]


def test_workers_put_into_queues(users, ray_cluster):
    from ray.util.queue import Queue

    queue = Queue(actor_options={"num_cpus": 0})
    users.pass_on(queue)
    assert sorted(queue.get_nowait_batch(2)) == [0, 1]
    queue.shutdown()


@pytest.mark.slow
def test_workers_use_ray_data(users):
    assert users.data() == [list(range(10))] * 2


def test_workers_are_ranks_of_rays_collectives(users):
    assert users.reduce() == [[3.0] * 3] * 2
