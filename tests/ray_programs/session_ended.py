"""Pools and groups whose Ray was left with `ray.shutdown` say so at once, start no other, and do it no harm."""

import asyncio
import contextlib
import logging
import sys
import time
from pathlib import Path

import ray

import bandmaster as bm
from bandmaster import Dispatch, register

sys.path.append(str(Path(__file__).parents[1]))
from clock import idle_time
from ctrl_c import done_when

from bandmaster.single_controller.base import decorator as verl
from bandmaster.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from bandmaster.single_controller.ray.actor_workers import ActorWorkers


class Naps(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def nap(self, seconds):
        time.sleep(seconds)
        return self.rank

    @verl.register(verl.Dispatch.DP_PROTO, blocking=False)
    def doze(self, rows):
        return rows

    def on_replace(self, rank, state):
        pass


class Waits(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    async def wait(self, seconds):
        await asyncio.sleep(seconds)


def connect():
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)


@contextlib.contextmanager
def fails(error, words, within_s=5.0):
    start = idle_time()
    try:
        yield
    except error as raised:
        assert words in str(raised) and "call restart()" not in str(raised), raised
    else:
        raise AssertionError(f"there was no {error}")
    assert idle_time() - start < within_s
    assert not ray.is_initialized(), "no Ray was started"


connect()
pool = bm.ResourcePool([1], backend="ray", cpus_per_worker=0, name_prefix="old")
busy, idle = bm.WorkerGroup(pool, Naps), bm.WorkerGroup(pool, Naps)
assert busy.nap(0) == idle.nap(0) == [0]
of_actors = RayWorkerGroup(RayResourcePool([1], use_gpu=False, cpus_per_worker=0), RayClassWithInitArgs(Naps))
pending, of_actor = busy.nap.submit(300), of_actors.nap.submit(300)
attached = RayWorkerGroup.from_detached(worker_handles=of_actors.workers, ray_cls_with_init=Naps)
of_attached = attached.doze([1])  # behind the nap, and so is what the actors tell of themselves


def is_disconnecting(frame, kind, what):
    return kind == "call" and frame.f_code.co_name == "reset_cache"


health = []
with done_when(is_disconnecting, lambda: health.append(of_actors.healthy)):  # as another thread may ask
    ray.shutdown()
assert health == [False]

ended = "has ended (ray.shutdown()); create the pool and its groups again"
with fails(bm.WorkerDied, f"the Ray session of group {busy.name!r} {ended}"):
    pending.result(timeout=20)
with fails(bm.WorkerDied, f"the Ray session of group {of_actors.name!r} {ended}"):
    of_actor.result(timeout=20)
with fails(bm.WorkerDied, f"the Ray session of group {attached.name!r} {ended}"):
    of_attached.result(timeout=20)
with fails(bm.ClosedError, ended):
    of_actors.replace(0)
assert not ray.is_initialized()
while idle.healthy:  # those on the controller's host end a little later
    time.sleep(0.01)
for group in (idle, busy):
    with fails((bm.ClosedError, bm.WorkerDied), f"the Ray session of group {group.name!r} {ended}"):
        group.nap(0)
    with fails((bm.ClosedError, bm.WorkerDied), f"the Ray session of group {group.name!r} {ended}"):
        group.execute_rank_zero_async("nap", 0).result()
    with fails(bm.ClosedError, f"the Ray session of group {group.name!r} {ended}"):
        group.replace(0)
    with fails(bm.ClosedError, f"the Ray session of pool 'old' {ended}"):
        group.restart()
old = RayWorkerGroup, of_actors.resource_pool, RayClassWithInitArgs(Naps)
with fails(bm.ClosedError, f"the Ray session of pool 'old' {ended}"):
    bm.WorkerGroup(pool, Naps)
with fails(bm.ClosedError, ended):
    old[0](*old[1:])

connect()  # to a Ray that gives this process the same id
for make, *args in ((bm.WorkerGroup, pool, Naps), old):
    try:
        make(*args)
    except bm.ClosedError as error:
        assert ended in str(error), error
    else:
        raise AssertionError("a group was made on slots of a Ray that has ended")
with bm.ResourcePool([1], backend="ray") as new_pool:
    new = bm.WorkerGroup(new_pool, Naps)
    busy.close()
    pool.close()
    assert new.nap(0) == [0]
    assert new.execute_rank_zero_async("nap", 0).result() == 0


def is_cancelling(frame, kind, what):
    return kind == "call" and frame.f_code is ActorWorkers.interrupt.__code__


overlap = RayClassWithInitArgs(ray.remote(max_concurrency=2)(Waits))
waiting = RayWorkerGroup(RayResourcePool([1], use_gpu=False, cpus_per_worker=0), overlap).wait.submit(300)
with done_when(is_cancelling, ray.shutdown):  # as another thread may do
    assert waiting.cancel()
assert not ray.is_initialized()
