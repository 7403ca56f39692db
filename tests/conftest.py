"""What every test shares: the ``backend`` fixture, pools that are closed, and a leak check after each test."""

import gc
import os
import sys
import threading
import time
from collections import Counter
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import settings

import bandmaster as bm

settings.register_profile("default", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("default")

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # what Ray's next version does by itself

N_FAKE_GPUS = 8  # what Ray is told it has, so that GPU placement can be tried anywhere


@pytest.fixture(scope="session")
def zygote():
    """The process that local workers are forked from: it stays from the first group to the end of the session."""

    class Nothing(bm.Worker):
        pass

    with bm.ResourcePool([1], backend="local") as pool:
        bm.WorkerGroup(pool, Nothing)


@pytest.fixture(scope="session")
def ray_cluster():
    """A real Ray for the session, with devices that stand in for GPUs."""
    import ray

    ray.init("local", num_cpus=16, num_gpus=N_FAKE_GPUS, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


BACKENDS = ["inprocess", "local", "ray"]


def pytest_generate_tests(metafunc):
    """Run each test that asks for it on every backend, or on those whose workers have processes of their own."""
    if "backend" in metafunc.fixturenames:
        only_processes = metafunc.definition.get_closest_marker("own_processes")
        names = [name for name in BACKENDS if not (only_processes and name == "inprocess")]
        metafunc.parametrize("backend", names, indirect=True)


@pytest.fixture(scope="module")
def backend(request):
    """Name of a backend; the test runs on every one. Of module scope, so that tests of a module can share a group."""
    if request.param != "inprocess":
        request.getfixturevalue({"ray": "ray_cluster", "local": "zygote"}[request.param])
    return request.param


@pytest.fixture
def effort(backend):
    """How much a property test may ask of the backend: examples, and ranks of a group."""
    return (
        SimpleNamespace(n_examples=100, n_ranks=12)
        if backend == "inprocess"
        else SimpleNamespace(n_examples=8, n_ranks=4)
    )


@pytest.fixture
def make_pool(backend):
    """``make_pool([2, 1], **options)``: a pool on the backend, closed after the test."""
    pools = []

    def make(process_on_nodes, **options):
        pools.append(bm.ResourcePool(process_on_nodes, backend=backend, **options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture
def make_group(make_pool):
    """``make_group(n or mesh or pool, Class, *args, **kwargs)``: a group that is closed after the test."""

    def make(where, cls, *args, **kwargs):
        if isinstance(where, bm.Mesh):
            kwargs["mesh"], where = where, where.size
        pool = make_pool([where]) if isinstance(where, int) else where
        return bm.WorkerGroup(pool, cls, *args, **kwargs)

    return make


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    """After the test there are no more threads, processes, descriptors or Ray placements than before."""
    uses_ray = "ray_cluster" in request.fixturenames or "ray" in request.node.nodeid
    before, taken = _standing(), _taken_on_ray()
    yield
    if uses_ray:
        _wait_until(lambda: not _taken_on_ray() - taken, lambda: f"left on Ray: {_taken_on_ray() - taken}")
        return
    _wait_until(lambda: not _grown(before), lambda: f"left behind: {_grown(before)}")


def _standing():
    process = psutil.Process()
    return {
        "threads": {thread.name for thread in threading.enumerate()},
        "children": {child.pid for child in process.children(recursive=True)},
        "descriptors": process.num_fds(),
    }


def _grown(before):
    gc.collect()
    now = _standing()
    grown = {key: now[key] - before[key] for key in ("threads", "children") if now[key] - before[key]}
    if now["descriptors"] > before["descriptors"]:
        grown["descriptors"] = now["descriptors"] - before["descriptors"]
    return grown


def _taken_on_ray():
    """Placement groups that stand, and the number of GPUs that are taken."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return Counter()
    gc.collect()
    table = ray.util.placement_group_table().values()
    taken = Counter(group["name"] + group["placement_group_id"] for group in table if group["state"] != "REMOVED")
    n_gpus = ray.cluster_resources().get("GPU", 0) - ray.available_resources().get("GPU", 0)
    return taken + Counter({"GPUs": round(n_gpus, 4)})


def _wait_until(condition, complaint, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(complaint() if callable(complaint) else complaint)
        time.sleep(0.02)  # polling for the operating system and Ray to notice, not for our code
