"""What every test shares: the ``backend`` fixture, pools that are closed, and a leak check after each test."""

import gc
import os
import signal
import sys
import time
import warnings
from types import SimpleNamespace

import cloudpickle
import psutil
import pytest
from hosts import ON_HOSTS, spread
from hypothesis import settings
from installed import has_vllm
from left_over import no_handler_left, no_processes_left

import bandmaster as bm
from bandmaster.plan import batch
from bandmaster.testing import no_leaks

settings.register_profile("default", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("default")

os.environ.setdefault("BANDMASTER_FULL_TRACEBACKS", "1")  # who works on this library wants to see its frames
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # what Ray's next version does by itself
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # a fifth of what it costs to start Ray, some 60 times

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job, and so in what tests start
    signal.signal(signal.SIGINT, signal.default_int_handler)

OBJECT_STORE_NBYTES = 200 << 20  # by default a third of the memory, of which several Rays would each want one
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

    if ON_HOSTS:
        ray.init(log_to_driver=False)
    else:
        _start_ray(ray, num_cpus=16, num_gpus=N_FAKE_GPUS, object_store_memory=OBJECT_STORE_NBYTES)
    yield ray
    ray.shutdown()


def _start_ray(ray, n_attempts=4, **resources):
    """Start Ray, again if need be: it gives up after half a minute, which other tests beside it may make too little."""
    for attempt in range(1, n_attempts + 1):
        before = psutil.Process().children(recursive=True)
        try:
            ray.init("local", **resources, include_dashboard=False, log_to_driver=False)
            break
        except Exception as error:
            if attempt == n_attempts or "timed out during startup" not in str(error):
                raise
        ray.shutdown()
        for process in set(psutil.Process().children(recursive=True)).difference(before):
            process.kill()
    if attempt > 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # of the processes that Ray has left, and forgets only now
            gc.collect()


# Run in processes of their own, and must not be imported for their doctests.
collect_ignore_glob = ["*_programs/*", "hosts.py", "on_hosts.py", "soak.py", "soaking/*", "fuzz/*", "verl/*"]
collect_ignore_glob += ["simulation/*", "mutants/*"]  # the same
collect_ignore_glob += ["test_hosts.py", "test_bench_hosts.py"]  # need root, and a Ray cluster of several hosts
collect_ignore_glob += ["deploy/test_on_hosts.py", "deploy/test_ray_job.py"]  # the same, or start Rays themselves


if not has_vllm():
    collect_ignore_glob += ["vllm/*"]

BACKENDS = ["ray"] if ON_HOSTS else ["inprocess", "local", "ray"]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Have ``pytest -n N`` keep the tests together that share groups."""
    from schedule import Schedule  # pytest-xdist need not be installed

    return Schedule(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Have no garbage looked for while modules are imported, nor among their objects afterwards: there are millions."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Have the longest tests begin first where several processes run them. Skip some where ranks are on other hosts."""
    if hasattr(config, "workerinput"):
        from schedule import start_order

        items.sort(key=lambda item: start_order(item.nodeid))
    for item in items:
        if ON_HOSTS and item.get_closest_marker("here"):
            item.add_marker(pytest.mark.skip(reason="the ranks are on other hosts"))


def pytest_collection_finish(session):
    """Send the classes of modules to Ray by value: actors that import the modules import pytest and more, each time."""
    for item in session.items:
        if _is_on_ray(item):
            cloudpickle.register_pickle_by_value(item.module)


def _is_on_ray(item):
    names = getattr(item, "fixturenames", ())
    return "ray_cluster" in names or ("backend" in names and item.callspec.params["backend"] == "ray")


def pytest_generate_tests(metafunc):
    """Run each test that asks for a backend on all of them, or on those that its marker ``backends`` names.

    What lies above the contract of a backend (plans, batches, calls, the words of errors) is the same code on each;
    `test_contract.py` tries the contract itself on Ray.
    """
    if "backend" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("backends")
        wanted = [name for name in (marker.args if marker else BACKENDS) if name in BACKENDS]
        slow = metafunc.definition.get_closest_marker("slow_on")
        marks = dict.fromkeys(slow.args, pytest.mark.slow) if slow else {}
        metafunc.parametrize(
            "backend", [pytest.param(name, marks=marks.get(name, ())) for name in wanted], indirect=True
        )
    elif "ray_cluster" in metafunc.fixturenames:
        metafunc.parametrize("only_backend", ["ray"])


@pytest.fixture(scope="module")
def backend(request):
    """Name of a backend; the test runs on every one. Of module scope, so that tests of a module can share a group."""
    if request.param != "inprocess":
        request.getfixturevalue({"ray": "ray_cluster", "local": "zygote"}[request.param])
    return request.param


@pytest.fixture(autouse=True)
def only_backend():
    """Put "ray" into the names of tests that need Ray and have no backend: `schedule` knows nothing but names."""


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
        pools.append(bm.ResourcePool(spread(process_on_nodes), backend=backend, **options))
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
    if _is_on_ray(request.node) or "Ray" in request.node.nodeid:
        with no_handler_left(), no_leaks(kinds=["placements"]):
            yield
        _wait_until_ray_is_free()
    else:  # a group that others share may keep some segments for its next calls
        with no_handler_left(), no_processes_left(), no_leaks(kinds=["threads", "descriptors"]):
            yield


@pytest.fixture(autouse=True)
def no_false_notice():
    """No call of the test was noticed to make no progress by the usual limits, 30 s or more: none of them hangs."""
    begun = time.time()
    yield
    stalls = bm.stalls() if "bandmaster.watching.watch" in sys.modules else []  # else the feature was removed
    noticed = [stall.text for stall in stalls if stall.at >= begun and stall.seconds >= 30]
    assert not noticed, "\n".join(noticed)


@pytest.fixture(autouse=True, scope="module")
def earlier_objects_are_settled():
    """Have garbage collections of a module's tests skip what earlier ones imported and kept: millions of objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def no_segment_is_left(earlier_objects_are_settled):
    """After the tests of a module, and the groups that they shared, no shared memory is left."""
    with no_leaks(kinds=["segments"]):
        yield


@pytest.fixture(autouse=True, scope="module")
def no_registered_type_is_left():
    """After the tests of a module, calls that take rows send nothing more of the batch types that they registered."""
    before = dict(batch._registered)
    yield
    for cls in set(batch._registered).difference(before):
        del batch._registered[cls]


def _wait_until_ray_is_free(timeout_s=10.0):
    start = time.monotonic()
    is_collected = False
    while taken := _taken_on_ray():
        passed = time.monotonic() - start
        assert passed < timeout_s, f"left on Ray: {taken}"
        if passed > 1 and not is_collected:  # it takes a fifth of a second, and is seldom needed
            gc.collect()
            is_collected = True
        time.sleep(0.02)  # polling for Ray to notice, not for our code


def _taken_on_ray():
    """CPUs and GPUs that are taken without belonging to a placement group that stands."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return {}
    total, free = ray.cluster_resources(), ray.available_resources()
    standing = [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
    bundles = [bundle for group in standing for bundle in group["bundles"].values()]
    reserved = {name: sum(bundle.get(name, 0) for bundle in bundles) for name in ("CPU", "GPU")}
    taken = {name: round(total.get(name, 0) - free.get(name, 0) - reserved[name], 3) for name in reserved}
    return {name: amount for name, amount in taken.items() if amount}


@pytest.fixture
def two(groups):
    """The first of a module's two `groups`: dp=2, tp=2."""
    return groups[0]


@pytest.fixture
def three(groups):
    """The other one, of three ranks."""
    return groups[1]


@pytest.fixture
def gate(tmp_path):
    """A file that methods wait for, and at the latest find when the test has ended."""
    path = tmp_path / "gate"
    yield path
    path.touch()
