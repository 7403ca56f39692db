"""`bandmaster.testing`: faults happen where they were asked for, leaks are found, and backends can be added."""

import inspect
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import pytest

import bandmaster as bm
from bandmaster import Dispatch, register
from bandmaster.backends import get_backend, register_backend
from bandmaster.backends.inprocess import InProcessBackend, InProcessWorkers
from bandmaster.codec import Payload
from bandmaster.contract import Reply, Ticket
from bandmaster.testing import (
    BackendContract,
    BadResult,
    Delay,
    Exit,
    FailToUnpickle,
    Fault,
    Hang,
    Kill,
    LeakError,
    Raise,
    held_resources,
    no_leaks,
    with_faults,
)
from bandmaster.wire.segments import SegmentWriter
from bandmaster.worker import registrations

pytestmark = pytest.mark.backends("inprocess", "local")


class Plain(bm.Worker):
    """The user's own."""

    @register(Dispatch.ONE_TO_ALL)
    def echo(self, value, /, *more, key=None, **others):
        """Give it back."""
        return value

    @register(Dispatch.DP_PROTO)
    async def echo_async(self, rows):
        return rows

    @register(Dispatch.ONE_TO_ALL)
    @staticmethod
    def add(a, b=2):
        return a + b

    @classmethod
    @register(Dispatch.ONE_TO_ALL)
    def name_of(cls, value):
        return cls.__name__, value

    def unregistered(self, value):
        return value


METHODS = {
    "echo": (1, [1, 1]),
    "echo_async": ([1, 2], [1, 2]),
    "add": (1, [3, 3]),
    "name_of": (1, [("Plain", 1)] * 2),
}


# --- faults ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_method_raises_on_its_rank_in_its_call_only(make_group, method):
    argument, expected = METHODS[method]
    group = make_group(2, with_faults(Plain, Raise(1, 2, error=ValueError("boom"))))
    assert getattr(group, method)(argument) == expected
    with pytest.raises(bm.RemoteError, match=rf"Plain.{method} failed on rank 1 .*ValueError: boom") as caught:
        getattr(group, method)(argument)
    assert list(caught.value.failures) == [1]
    assert isinstance(caught.value.__cause__, ValueError)
    assert getattr(group, method)(argument) == expected


def test_calls_of_one_method_are_counted_where_it_is_named(make_group):
    Faulty = with_faults(Plain, Raise(0, 2, method="add", error=KeyError), Raise(None, 5, error=ValueError("all")))
    group = make_group(2, Faulty)
    for method in ("echo", "add", "echo"):
        assert getattr(group, method)(1)
    assert group.execute_all_sync("unregistered", 1) == [1, 1], "which does not count"
    with pytest.raises(bm.RemoteError) as caught:
        group.add(1)
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(bm.RemoteError) as caught:
        group.echo(1)
    assert list(caught.value.failures) == [0, 1]
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("method", ["echo", "echo_async"])
@pytest.mark.parametrize(
    ("fault", "words"),
    [(BadResult(1, 1), "the returned lock cannot be pickled"), (FailToUnpickle(1, 1), "cannot be unpickled")],
    ids=["BadResult", "FailToUnpickle"],
)
def test_results_that_cannot_travel(make_group, method, fault, words):
    group = make_group(2, with_faults(Plain, fault))
    with pytest.raises(bm.CollectError, match=words) as caught:
        getattr(group, method)([1, 2])
    assert list(caught.value.failures) == [1]
    assert group.echo(1) == [1, 1]


@pytest.mark.backends("local")
@pytest.mark.parametrize(
    ("fault", "method"),
    [(Kill(1, 2), "echo"), (Kill(1, 2, signal=signal.SIGUSR1), "echo_async"), (Exit(1, 2), "echo_async")],
    ids=repr,
)
def test_a_process_that_ends(make_group, fault, method):
    group = make_group(2, with_faults(Plain, fault))
    assert getattr(group, method)([1, 2])
    with pytest.raises(bm.WorkerDied, match="rank 1") as caught:
        getattr(group, method)([1, 2])
    assert next(iter(caught.value.failures)) == 1
    group.restart()
    assert group.echo(1) == [1, 1], "a worker that was restarted counts from 1 again"


@pytest.mark.backends("local")
@pytest.mark.parametrize("method", ["echo", "echo_async"])
def test_a_call_that_hangs_can_be_given_up(make_group, method):
    group = make_group(2, with_faults(Plain, Hang(1, 1)))
    with pytest.raises(bm.CallTimeout) as caught:
        getattr(group, method).options(timeout=0.3)([1, 2])
    assert caught.value.missing == (1,)
    assert caught.value.future.cancel()
    assert group.echo(1) == [1, 1]


@pytest.mark.backends("local")
def test_one_rank_that_fails_frees_one_that_hangs(make_group):
    group = make_group(2, with_faults(Plain, Hang(0, 1), Raise(1, 1, error=ValueError("the first cause"))))
    with pytest.raises(bm.RemoteError, match="the first cause") as caught:
        group.echo(1)
    assert list(caught.value.failures) == [1, 0]
    assert group.echo(1) == [1, 1]


@pytest.mark.parametrize("method", ["echo", "echo_async"])
def test_a_call_that_is_late(make_group, method):
    group = make_group(2, with_faults(Plain, Delay(1, 1, seconds=0.3)))
    start = time.monotonic()
    assert getattr(group, method)([1, 2])
    assert time.monotonic() - start >= 0.3


def test_what_would_take_the_controller_along_is_refused():
    with bm.ResourcePool([2], backend="inprocess") as pool:
        for fault in (Kill(1, 1), Exit(1, 1), Hang(1, 1)):
            with bm.WorkerGroup(pool, with_faults(Plain, fault)) as group:
                with pytest.raises(
                    bm.RemoteError, match="would end or block the process that created the class"
                ) as caught:
                    group.echo(1)
                assert isinstance(caught.value.__cause__, bm.UsageError)


def test_a_rank_that_the_group_does_not_have_is_no_silent_success(make_group):
    group = make_group(2, with_faults(Plain, Raise(2, 1, error=ValueError)))
    with pytest.raises(bm.RemoteError, match="the group has ranks 0 to 1") as caught:
        group.echo(1)
    assert isinstance(caught.value.__cause__, bm.UsageError)


def test_faults_can_be_given_twice_and_of_ones_own_kind(make_group):
    Faulty = with_faults(with_faults(Plain, Raise(0, 2, error=KeyError("inner"))), Negated(1, 1))
    group = make_group(2, Faulty)
    assert group.echo(5) == [5, -5]
    with pytest.raises(bm.RemoteError, match="inner"):
        group.echo(5)


class Counting(bm.Worker):
    n_open = 0

    @register(Dispatch.DP_PROTO)
    def items(self, rows):
        self.n_open += 1
        try:
            yield from rows
        finally:
            self.n_open -= 1

    @register(Dispatch.DP_PROTO)
    async def items_async(self, rows):
        self.n_open += 1
        try:
            for row in rows:
                yield row
        finally:
            self.n_open -= 1

    @register(Dispatch.ONE_TO_ALL)
    def count_open(self):
        return self.n_open


@pytest.mark.parametrize("method", ["items", "items_async"])
def test_generator_methods_are_streamed_and_fail_as_others_do(make_group, method):
    group = make_group(2, with_faults(Counting, Raise(rank=1, call=2, method=method, error=ValueError("planned"))))
    stream = getattr(group, method).stream
    assert sorted(item.result() for item in stream([1, 2, 3, 4])) == [1, 2, 3, 4]
    with pytest.raises(bm.RemoteError, match="planned") as caught:
        list(stream([1, 2, 3, 4]))
    assert caught.value.rank == 1
    with stream([1, 2, 3, 4]) as items:
        assert next(items).result() in (1, 3)
    assert group.count_open() == [0, 0]


class Negated(Fault):
    def spoil(self, value):
        return -value


def test_the_class_looks_as_it_did():
    Faulty = with_faults(Plain, Raise(1, 1, error=ValueError))
    assert issubclass(Faulty, Plain)
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(Faulty, name) == getattr(Plain, name)
    assert registrations(Faulty) == registrations(Plain)
    with bm.ResourcePool([1], backend="inprocess") as pool:
        plain, faulty = bm.WorkerGroup(pool, Plain), bm.WorkerGroup(pool, Faulty)
        for name in METHODS:
            assert inspect.signature(getattr(faulty, name)) == inspect.signature(getattr(plain, name))
            assert getattr(faulty, name).__doc__ == getattr(plain, name).__doc__
            assert getattr(Faulty, name).__name__ == name
        assert inspect.iscoroutinefunction(Faulty.echo_async)
        with pytest.raises(bm.ArgumentError, match="echo"):
            faulty.echo()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Kill(-1, 1), "rank must be a non-negative integer"),
        (Kill("1", 1), "rank must be a non-negative integer"),
        (Kill(True, 1), "rank must be a non-negative integer"),
        (Kill(1.0, 1), "rank must be a non-negative integer"),
        (Kill(1, 0), "call must be a positive integer"),
        (Kill(1, None), "call must be a positive integer"),
        (Kill(1, 1, signal=1000), "signal must be the number of a signal, got 1000"),
        (Kill(1, 1, method="ecko"), r"has no registered method 'ecko'; it registers add, echo, echo_async"),
        (Kill(1, 1, method="unregistered"), "has no registered method 'unregistered'"),
        (Exit(1, 1, code=256), "0 to 255"),
        (Raise(1, 1, error="boom"), "error must be an exception"),
        (Raise(1, 1, error=int), "error must be an exception"),
        (Delay(1, 1, seconds=-1), "seconds must be a number from 0"),
        (Delay(1, 1, seconds=float("nan")), "seconds must be a number from 0"),
        (Delay(1, 1, seconds=float("inf")), "use Hang"),
        ("kill rank 1", "such as Kill"),
        (Kill, "such as Kill"),
    ],
    ids=repr,
)
def test_a_fault_that_makes_no_sense_is_refused_with_the_class(fault, words):
    with pytest.raises(bm.UsageError, match=words):
        with_faults(Plain, fault)


@pytest.mark.parametrize("what", [Plain(), int, None])
def test_only_worker_classes_can_be_given_faults(what):
    with pytest.raises(bm.UsageError, match=r"takes a subclass of bandmaster\.Worker"):
        with_faults(what, Kill(1, 1))


# --- leaks -------------------------------------------------------------------------------------------------------


def left_by(make, kinds=("threads", "processes", "descriptors", "segments")):
    """What is said to be left by a block that makes something; the thing itself."""
    with pytest.raises(LeakError) as caught, no_leaks(timeout=0.2, kinds=kinds):
        thing = make()
    return caught.value.left, thing


def test_a_thread_is_found():
    end = threading.Event()

    def start():
        thread = threading.Thread(target=end.wait, name="forgotten")
        thread.start()
        return thread

    left, thread = left_by(start)
    end.set()
    thread.join()
    assert left == {"threads": ["forgotten"]}


def test_a_second_thread_of_a_name_is_found():
    end = threading.Event()
    threads = [threading.Thread(target=end.wait, name="twin") for _ in range(2)]
    threads[0].start()
    left, _ = left_by(threads[1].start)
    end.set()
    for thread in threads:
        thread.join()
    assert left == {"threads": ["twin"]}


def test_processes_are_found_with_their_children_and_those_that_nobody_waited_for():
    left, shell = left_by(lambda: subprocess.Popen(["sh", "-c", "sleep 300; true"]))
    with shell:
        lines = left["processes"]
        assert any("sh -c sleep 300; true" in line and f"pid {shell.pid}:" in line for line in lines)
        assert any(line.endswith(": sleep 300") for line in lines)
        for line in lines:
            os.kill(int(line.split(":")[0].removeprefix("pid ")), signal.SIGKILL)
    pids = []

    def leave_a_zombie():
        pids.append(os.posix_spawn("/bin/true", ["true"], {}))
        os.waitid(os.P_PID, pids[0], os.WEXITED | os.WNOWAIT)

    left, _ = left_by(leave_a_zombie)
    os.waitpid(pids[0], 0)
    assert left == {"processes": [f"pid {pids[0]}: [true] (a zombie: it has ended, but nothing has waited for it)"]}


def test_descriptors_and_segments_are_found():
    left, pipe = left_by(os.pipe)
    assert [line.split(" -> ")[0] for line in left["descriptors"]] == list(map(str, sorted(pipe)))
    assert all("pipe:" in line for line in left["descriptors"])
    for fd in pipe:
        os.close(fd)

    writer = SegmentWriter()
    left, shared = left_by(lambda: writer.put(Payload(bytes(100))))
    segment = shared.segment
    assert list(left) == ["segments"]
    for where in (segment.fd, segment.memory.address):
        assert f"{where} -> /memfd:bandmaster (deleted)" in left["segments"]
    writer.close()


def test_a_group_that_was_not_closed_is_found(zygote):
    pool = bm.ResourcePool([2], backend="local")
    left, group = left_by(lambda: bm.WorkerGroup(pool, Plain))
    pids = [worker.pid for worker in group.workers]
    pool.close()
    assert left.keys() == {"threads", "processes", "descriptors"}
    assert [int(line.split(":")[0].removeprefix("pid ")) for line in left["processes"]] == sorted(pids)
    assert sorted(left["threads"]) == ["bandmaster-output-Plain", "bandmaster-watch"]


def test_a_placement_group_is_found(ray_cluster):
    pool = bm.ResourcePool([2], backend="ray", name_prefix="forgotten")
    left, _ = left_by(pool.reserve, kinds=["placements"])
    pool.close()
    assert list(left) == ["placements"]
    assert "forgotten" in left["placements"][0]
    assert "2 slots" in left["placements"][0]


@pytest.mark.parametrize("backend_name", ["inprocess", "local"])
def test_a_group_that_was_closed_leaves_nothing_though_it_was_the_first(backend_name):
    program = f"""
import bandmaster as bm
from bandmaster.testing import no_leaks, held_resources

class Nothing(bm.Worker): pass

with no_leaks():
    with bm.ResourcePool([2], backend={backend_name!r}) as pool:
        bm.WorkerGroup(pool, Nothing)
"""
    environment = {**os.environ, "BANDMASTER_PRELOAD": "numpy"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr


def test_what_ends_by_itself_is_waited_for():
    with no_leaks():
        threading.Timer(0.3, lambda: None).start()
        cycle = [DescriptorOfGarbage()]
        cycle.append(cycle)
        del cycle


class DescriptorOfGarbage:
    def __init__(self):
        self.fd = os.open(os.devnull, os.O_RDONLY)

    def __del__(self):
        os.close(self.fd)


def test_an_error_in_the_block_goes_on():
    with pytest.raises(KeyError), no_leaks(timeout=0.1):
        file = open(os.devnull)  # noqa: SIM115
        raise KeyError
    file.close()


def test_a_kind_that_is_not_known():
    with (
        pytest.raises(bm.UsageError, match="no_leaks has no kind 'sockets'; the kinds are threads, "),
        no_leaks(kinds=["sockets"]),
    ):
        pass


def test_what_was_left_survives_a_pickle():
    left, fd = left_by(lambda: os.open(os.devnull, os.O_RDONLY))
    os.close(fd)
    error = LeakError(left, 0.2)
    again = pickle.loads(pickle.dumps(error))
    assert (again.left, str(again)) == (left, str(error))
    assert os.devnull in str(error)
    assert isinstance(error, AssertionError)


def test_descriptors_may_be_others_than_before_but_not_more():
    file = open(os.devnull)  # noqa: SIM115
    before = held_resources()
    with open(os.devnull, "rb"):
        file.close()
        assert "descriptors" not in held_resources().beyond(before)


# --- backends of one's own ---------------------------------------------------------------------------------------


class Tiny(InProcessBackend):
    n_made = 0

    def __init__(self):
        super().__init__()
        Tiny.n_made += 1


register_backend("tiny", Tiny)


def test_a_backend_is_known_by_its_name():
    with bm.ResourcePool([2], backend="tiny") as pool:
        assert bm.WorkerGroup(pool, Plain).echo(1) == [1, 1]
        assert pool.backend == "tiny"
    assert isinstance(get_backend("tiny"), Tiny)
    assert Tiny.n_made == 1
    with pytest.raises(bm.UsageError, match=r"'mine'; expected 'local', 'inprocess', .*'tiny'"):
        get_backend("mine")


@pytest.mark.parametrize("name", ["tiny", "local", "ray"])
def test_a_name_that_is_taken_is_refused(name):
    with pytest.raises(bm.UsageError, match=f"a backend called '{name}' already"):
        register_backend(name, Tiny)


@pytest.mark.parametrize(("name", "factory"), [("", Tiny), (None, Tiny), ("mine", "Tiny"), ("mine", None)])
def test_what_is_no_name_or_no_factory_is_refused(name, factory):
    with pytest.raises(bm.UsageError):
        register_backend(name, factory)
    with pytest.raises(bm.UsageError):
        get_backend(name)


class TestTiny(BackendContract):
    backend = "tiny"
    has_processes = False


class Sharing(Tiny):
    """Does not copy what it sends."""

    def start(self, launch):
        workers = super().start(launch)
        workers.__class__ = SharingWorkers
        return workers


class SharingWorkers(InProcessWorkers):
    def _run(self, rank, call):
        outcome = self._executors[rank].call(call.method, Reply.RETURN, call.parts)
        return Ticket(outcome, is_done=True)


register_backend("sharing", Sharing)


def test_the_contract_finds_a_backend_that_breaks_a_law():
    class Contract(BackendContract):
        backend = "sharing"

    with pytest.raises(AssertionError):
        Contract().test_what_a_worker_receives_is_its_own()
    with pytest.raises(bm.CollectError):
        Contract().test_a_rank_that_is_not_collected_does_not_encode_its_value()
