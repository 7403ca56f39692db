"""A node that is lost takes its workers and rows with it: calls and readers are told in time, and the rest goes on."""

import os
import re
import sys
import time
from pathlib import Path

import numpy as np
import ray

import bandmaster as bm
from bandmaster import Dispatch, register

sys.path.append(str(Path(__file__).parents[1]))
from clock import idle_time
from small_ray import small_cluster

from bandmaster.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup


class Rows(bm.Worker):
    @register(Dispatch.DP_PROTO)
    def make(self, ids):
        return {"id": ids, "wide": np.ones((len(ids), 100_000))}

    @register(Dispatch.DP_PROTO)
    def add(self, rows):
        return {"id": rows["id"], "wide": rows["wide"] + 1}

    @register(bm.TransferProtocol(bm.Split("dp"), bm.Gather("dp")))
    def total(self, rows):
        return int(rows["id"].sum())

    @register(Dispatch.ONE_TO_ALL)
    def raylet(self):
        return int(os.environ["RAY_RAYLET_PID"])

    @register(Dispatch.ONE_TO_ALL)
    def hang(self):
        time.sleep(300)

    def on_replace(self, rank, state):
        pass


cluster = small_cluster(num_cpus=5)
node = cluster.add_node(num_cpus=3)
cluster.wait_for_nodes()
ray.init(address=cluster.address, log_to_driver=False)


def check_fails(read, kind, message):
    try:
        read()
    except kind as error:
        assert re.match(message, str(error)), error
    else:
        raise AssertionError("as if nothing was")


def main():
    with (
        bm.ResourcePool([1, 1], backend="ray") as apart,
        bm.ResourcePool([1, 1], backend="ray") as busy,
        bm.ResourcePool([2], backend="ray") as together,
        RayResourcePool([1, 1], use_gpu=False) as of_actors,
    ):
        makers, hangs, readers = (bm.WorkerGroup(pool, Rows) for pool in (apart, busy, together))
        actors = RayWorkerGroup(of_actors, RayClassWithInitArgs(Rows))
        rows = makers.make.submit(np.arange(10))
        assert len(rows) == 10
        raylet = node.all_processes["raylet"][0].process.pid
        lost, lost_actor = (group.raylet().index(raylet) for group in (makers, actors))
        pending = hangs.hang.submit()
        cluster.remove_node(node, allow_graceful=False)

        begun = idle_time()
        error = pending.exception(timeout=60)
        assert isinstance(error, bm.WorkerDied), error
        assert idle_time() - begun < 5, "the agent ends with its node, and hangs up"
        assert not hangs.healthy
        check_fails(hangs.raylet, bm.WorkerDied, "")

        while makers.healthy:
            time.sleep(0.01)
        start, host = 5 * lost, rows.where[lost].host
        gone = f".*rows {start} to {start + 4} of Rows.make, which rank {lost} has left on host {host}, are gone"
        for submit in [
            lambda: readers.total.submit(rows),
            lambda: readers.total.submit(rows.shuffle(0)),
            lambda: readers.add.submit(rows[2:8]),
        ]:
            check_fails(lambda submit=submit: submit().result(timeout=60), bm.RowsLost, gone)
        for future in [rows, rows[start + 1 : start + 3]]:
            check_fails(future.result, bm.RowsLost, gone)
        assert idle_time() - begun < 60
        assert sum(readers.total(rows[5 - start : 10 - start])) == 35 - 5 * start, "those of the other node are there"

        replaced = idle_time()
        for _ in range(2):  # Ray may find out only during the first
            check_fails(lambda: actors.replace(lost_actor), bm.PlacementError, ".*its host is lost; restart")
        assert idle_time() - replaced < 60


try:
    main()
finally:
    ray.shutdown()
    cluster.shutdown()
