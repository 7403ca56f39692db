"""Pools and groups that threads and finalizers make and close at once: nothing is given twice."""

import gc
import itertools
import logging
import os
import signal
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from inspect import CO_GENERATOR

import pytest
from ctrl_c import done_when, pressed, pressed_when
from ends import runs, until

import bandmaster as bm
from bandmaster import Dispatch, register
from bandmaster.backends import inprocess, local, machine, register_backend
from bandmaster.lifecycle.ownership import add_group
from bandmaster.pool.lease import Lease

N_GPUS, N_THREADS, N_ROUNDS = 4, 8, 20
TIMEOUT_S = 20


class Holder(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def where(self):
        return self.device

    @register(Dispatch.ONE_TO_ALL)
    def wait_for(self, gate):
        while not gate.exists():
            time.sleep(0.01)


class Slow(bm.Worker):
    """Its constructor leaves a file with the name of its process, and waits for the gate."""

    def __init__(self, gate, folder):
        (folder / str(os.getpid())).touch()
        while not gate.exists():
            time.sleep(0.01)  # polling for a file of the test


@pytest.fixture
def gpus(monkeypatch):
    """A machine of four GPUs; nothing here uses them."""
    monkeypatch.setattr(machine, "count_gpus", lambda: N_GPUS)


def test_gpus_of_a_pool_that_was_dropped_are_free(gpus):
    gc.disable()
    try:
        cycle = [bm.ResourcePool([N_GPUS], backend="local", use_gpu=True).reserve()]
        cycle.append(cycle)
        del cycle
        with bm.ResourcePool([N_GPUS], backend="local", use_gpu=True) as pool:
            pool.reserve()
    finally:
        gc.enable()


def test_gpus_are_free_of_a_group_that_was_dropped_while_stalled_calls_are_told_of(gpus, zygote, monkeypatch, tmp_path):
    is_telling, may_end = threading.Event(), threading.Event()

    class Slow(logging.Handler):
        def emit(self, record):
            is_telling.set()
            may_end.wait(TIMEOUT_S)

    monkeypatch.setattr(local, "visible_devices", lambda: [str(n) for n in range(N_GPUS)])
    handler = Slow()
    logging.getLogger("bandmaster.watching").addHandler(handler)
    try:
        with bm.ResourcePool([1], backend="local") as pool:
            group = bm.WorkerGroup(pool, Holder)
            other = bm.WorkerGroup(bm.ResourcePool([N_GPUS], backend="local", use_gpu=True), Holder)
            late = group.wait_for.options(stall_after=0.1).submit(tmp_path / "gate")
            assert is_telling.wait(TIMEOUT_S)
            del other
            with bm.ResourcePool([N_GPUS], backend="local", use_gpu=True) as next_pool:
                next_pool.reserve()
            (tmp_path / "gate").touch()
            may_end.set()
            late.result(TIMEOUT_S)
    finally:
        may_end.set()
        logging.getLogger("bandmaster.watching").removeHandler(handler)


@pytest.fixture
def threads_alternate():
    """After a few steps each."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(*functions):
    """What each function returns or raises that begins, in a thread of its own, when all others do."""
    barrier = threading.Barrier(len(functions))

    def run(function):
        barrier.wait(TIMEOUT_S)
        try:
            return function()
        except bm.BandmasterError as error:
            return error

    with ThreadPoolExecutor(len(functions)) as executor:
        return list(executor.map(run, functions))


def of_type(kind, outcomes):
    return [outcome for outcome in outcomes if isinstance(outcome, kind)]


@pytest.mark.usefixtures("gpus", "threads_alternate")
def test_no_gpu_is_given_to_two_pools():
    for _ in range(N_ROUNDS):
        pools = [bm.ResourcePool([1], backend="inprocess", use_gpu=True) for _ in range(N_THREADS)]
        outcomes = at_once(*(lambda pool=pool: bm.WorkerGroup(pool, Holder) for pool in pools))
        groups = of_type(bm.WorkerGroup, outcomes)
        assert sorted(group.where()[0] for group in groups) == [f"cuda:{n}" for n in range(N_GPUS)]
        assert len(of_type(bm.PlacementError, outcomes)) == N_THREADS - N_GPUS
        at_once(*(pool.close for pool in pools))
    with bm.ResourcePool([N_GPUS], backend="inprocess", use_gpu=True):
        pass  # all were given back


@pytest.mark.usefixtures("threads_alternate")
def test_a_place_never_holds_more_groups_than_it_may():
    with bm.ResourcePool([2], backend="inprocess", max_colocate_count=3) as pool:
        for _ in range(N_ROUNDS):
            outcomes = at_once(*[lambda: bm.WorkerGroup(pool, Holder)] * N_THREADS)
            groups = of_type(bm.WorkerGroup, outcomes)
            errors = of_type(bm.PlacementError, outcomes)
            assert (len(groups), len(errors)) == (3, N_THREADS - 3)
            assert all("3 groups of at most 3" in str(error) for error in errors)
            at_once(*(group.close for group in groups))


@pytest.mark.usefixtures("threads_alternate")
def test_a_pool_reserves_its_places_once_whoever_asks(gpus):
    for _ in range(N_ROUNDS):
        with bm.ResourcePool([N_GPUS], backend="inprocess", use_gpu=True) as pool:
            outcomes = at_once(*[lambda pool=pool: bm.WorkerGroup(pool, Holder)] * 3)
            assert [group.where() for group in outcomes] == [[f"cuda:{n}" for n in range(N_GPUS)]] * 3


@pytest.mark.usefixtures("threads_alternate")
def test_a_pool_that_is_closed_while_groups_are_made_on_it_keeps_none(gpus):
    for _ in range(N_ROUNDS):
        pool = bm.ResourcePool([N_GPUS], backend="inprocess", use_gpu=True)
        made, _ = at_once(lambda pool=pool: bm.WorkerGroup(pool, Holder), pool.close)
        if isinstance(made, bm.WorkerGroup):
            with pytest.raises(bm.ClosedError):
                made.where()
        else:
            assert isinstance(made, bm.ClosedError)
        with bm.ResourcePool([N_GPUS], backend="inprocess", use_gpu=True):
            pass  # all were given back


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("close_all", [False, True])
def test_workers_that_another_thread_constructs_end_with_their_pool(zygote, gate, tmp_path, is_restarted, close_all):
    folder, pool = tmp_path / "started", bm.ResourcePool([2], backend="local")
    folder.mkdir()

    def make():
        return bm.WorkerGroup(pool, Slow, gate, folder)

    with ThreadPoolExecutor(1) as threads:
        n_before = 0
        if is_restarted:
            gate.touch()
            make = make().restart
            gate.unlink()
            n_before = 2
        making = threads.submit(make)
        try:
            until(lambda: len(list(folder.iterdir())) == n_before + 2)
            (bm.close_all if close_all else pool.close)()
            assert not [path.name for path in folder.iterdir() if runs(int(path.name))]
            with pytest.raises(bm.ClosedError, match="group 'Slow' was closed; make a new WorkerGroup"):
                making.result(TIMEOUT_S)
        finally:
            gate.touch()


@pytest.mark.parametrize("step", [add_group, bm.ResourcePool.reserve])
def test_a_group_that_is_replaced_by_name_as_it_is_constructed_keeps_no_slot(step):
    def is_now(frame, kind, what):
        return kind == "return" and frame.f_code is step.__code__

    def replace():
        with ThreadPoolExecutor(1) as threads:
            threads.submit(bm.WorkerGroup, other, Holder, name="same").result(TIMEOUT_S).close()

    with bm.ResourcePool([1], backend="inprocess", max_colocate_count=1) as pool:
        other = bm.ResourcePool([1], backend="inprocess")
        with pytest.raises(bm.ClosedError, match="a new group of that name replaced it"), done_when(is_now, replace):
            bm.WorkerGroup(pool, Holder, name="same")
        assert bm.WorkerGroup(pool, Holder).where() == ["cpu"]


def test_groups_of_one_name_give_back_a_place_each():
    with bm.ResourcePool([1], backend="inprocess", max_colocate_count=2) as pool:
        first, second = (bm.WorkerGroup(pool, Holder, name_prefix="same") for _ in range(2))
        with pytest.raises(bm.PlacementError, match="2 groups of at most 2 "):
            bm.WorkerGroup(pool, Holder, name_prefix="same")
        first.close()
        third = bm.WorkerGroup(pool, Holder, name_prefix="same")
        assert second.where() == third.where() == ["cpu"]


@pytest.mark.parametrize("in_thread", [False, True], ids=["in the same thread", "in another thread"])
def test_a_pool_may_be_collected_as_garbage_while_another_is_placed(monkeypatch, in_thread):
    """Finalizers run at any moment in any thread: also while GPUs are counted."""
    forgotten = []

    def count():
        collect = threading.Thread(target=lambda: (forgotten.clear(), gc.collect()))
        if forgotten and in_thread:
            collect.start()
            collect.join(TIMEOUT_S)
            assert not collect.is_alive(), "the finalizer waits for who waits for it"
        elif forgotten:
            collect.run()
        return N_GPUS

    monkeypatch.setattr(machine, "count_gpus", count)
    pool = bm.ResourcePool([2], backend="inprocess", use_gpu=True).reserve()
    pool.itself = pool
    forgotten.append(pool)
    del pool
    with bm.ResourcePool([2], backend="inprocess", use_gpu=True) as other:
        assert bm.WorkerGroup(other, Holder).where() in (["cuda:0", "cuda:1"], ["cuda:2", "cuda:3"])
    with bm.ResourcePool([N_GPUS], backend="inprocess", use_gpu=True):
        pass


@pytest.mark.parametrize("which", ["the same pool", "another pool"])
def test_a_signal_handler_that_asks_for_places_while_places_are_reserved_is_refused(monkeypatch, which):
    pool, other = (bm.ResourcePool([2], backend="inprocess", use_gpu=True) for _ in range(2))
    asked, before = pool if which == "the same pool" else other, signal.getsignal(signal.SIGUSR1)
    refused = []

    def ask(*_):
        with pytest.raises(bm.UsageError, match="set a flag in the handler"):
            bm.WorkerGroup(asked, Holder)
        refused.append(True)

    def count():
        if not refused:
            signal.raise_signal(signal.SIGUSR1)
        return N_GPUS

    monkeypatch.setattr(machine, "count_gpus", count)
    signal.signal(signal.SIGUSR1, ask)
    try:
        with pool, other:
            groups = [bm.WorkerGroup(pool, Holder), bm.WorkerGroup(other, Holder)]
            assert sorted(device for group in groups for device in group.where()) == [f"cuda:{n}" for n in range(4)]
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert refused


# --- other things that are one for the whole process ------------------------------------------------------------


class Meeting:
    is_loading, may_go_on = threading.Event(), threading.Event()


def load_slowly():
    Meeting.is_loading.set()
    assert Meeting.may_go_on.wait(TIMEOUT_S)


class LoadsSlowly:
    def __reduce__(self):
        return load_slowly, ()


class Takes(bm.Worker):
    def __init__(self, argument):
        self.argument = argument


def test_a_thread_may_make_a_pool_while_another_loads_a_workers_class():
    def make_slowly():
        with bm.ResourcePool([1], backend="inprocess") as pool:
            return bool(bm.WorkerGroup(pool, Takes, LoadsSlowly()))

    def make():
        try:
            assert Meeting.is_loading.wait(TIMEOUT_S)
            with bm.ResourcePool([1], backend="inprocess") as pool:
                return bm.WorkerGroup(pool, Holder).where()
        finally:
            Meeting.may_go_on.set()

    assert at_once(make_slowly, make) == [True, ["cpu"]]


@pytest.mark.usefixtures("threads_alternate")
def test_a_backend_is_made_once_whoever_asks_first():
    made = []

    def factory():
        made.append(inprocess.InProcessBackend())
        for _ in range(1000):  # so that other threads come here, too, if they can
            made[-1].inventory()
        return made[-1]

    name = f"slow-{uuid.uuid4().hex}"
    register_backend(name, factory)
    at_once(*[lambda: bm.ResourcePool([1], backend=name)] * 4)
    assert len(made) == 1


@pytest.mark.usefixtures("gpus")
def test_ctrl_c_as_slots_are_reserved_and_released_leaves_their_gpus_free():
    def reserve():
        bm.ResourcePool([N_GPUS], use_gpu=True).reserve().close()

    n = 1
    while pressed(reserve, n):
        gc.collect()  # a pool whose close has not begun
        reserve()
        n += 1
    assert n > 20


def test_a_pool_whose_reservation_ctrl_c_has_interrupted_reserves_its_slots_once(gpus):
    n, is_interrupted = 1, True
    while is_interrupted:
        steps = itertools.count(1)

        def is_now(frame, kind, _, steps=steps, n=n):
            is_step = kind in ("call", "return") and frame.f_back.f_code is Lease.open.__code__
            return is_step and not frame.f_code.co_flags & CO_GENERATOR and next(steps) == n

        with bm.ResourcePool([N_GPUS], backend="inprocess", use_gpu=True) as pool:
            pool._give_back(bm.ResourcePool([1]))
            is_interrupted = False
            try:
                with pressed_when(is_now):
                    pool.reserve()
            except KeyboardInterrupt:
                is_interrupted = True
            pool.reserve()
        n += 1
    assert n > 10


def test_a_pool_that_ctrl_c_has_kept_from_giving_back_its_slots_has_slots_for_the_next_group(gpus):
    n, is_interrupted = 1, True
    while is_interrupted:
        with bm.ResourcePool([N_GPUS], backend="inprocess", use_gpu=True) as pool:
            is_interrupted = pressed(partial(pool._give_back, bm.ResourcePool([1])), n)
            bm.WorkerGroup(pool, Holder)
            with pytest.raises(bm.PlacementError, match="0 of 4 GPUs free"):
                bm.ResourcePool([1], backend="inprocess", use_gpu=True).reserve()
        n += 1
    assert n > 10


def test_ctrl_c_as_a_pool_closes_leaves_neither_slots_nor_groups_to_close_all(gpus):
    def reserve():
        return bm.ResourcePool([N_GPUS], backend="inprocess", use_gpu=True).reserve()

    n, is_interrupted = 1, True
    while is_interrupted:
        pool = reserve()
        groups = [bm.WorkerGroup(part, Holder) for part in (pool, *bm.split_resource_pool(pool, [1, 3]))]
        is_interrupted = pressed(pool.close, n)
        try:
            reserve().close()  # slots are free only once no group is on them
        except bm.PlacementError:
            bm.close_all()
            reserve().close()
        for group in groups:
            with pytest.raises(bm.ClosedError):
                group.where()
        n += 1
    assert n > 40


def test_ctrl_c_as_a_group_ends_ends_the_other_groups_of_the_pool_that_closes(gpus, monkeypatch):
    def stop(workers, *_):
        monkeypatch.undo()
        raise KeyboardInterrupt

    with bm.ResourcePool([2], backend="inprocess") as pool:
        group, other = (bm.WorkerGroup(part, Holder) for part in (pool, bm.split_resource_pool(pool, 1)[1]))
        monkeypatch.setattr(type(group._ownership.workers()), "stop", stop)
        with pytest.raises(KeyboardInterrupt):
            pool.close()
        with pytest.raises(bm.ClosedError):
            other.where()
