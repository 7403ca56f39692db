"""Rows are lost with the node that holds them: who reads them is told whose rows, at once."""

import os
import re
import sys
import time
from pathlib import Path

import numpy as np
import ray
from ray.cluster_utils import Cluster

import bandmaster as bm
from bandmaster import Dispatch, register

sys.path.append(str(Path(__file__).parents[1]))
from clock import idle_time


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


cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
node = cluster.add_node(num_cpus=1)
cluster.wait_for_nodes()
ray.init(address=cluster.address, log_to_driver=False)


def check_lost(read, message):
    try:
        read()
    except bm.RowsLost as error:
        assert re.match(message, str(error)), error
    else:
        raise AssertionError("read as if nothing was")


def main():
    with bm.ResourcePool([1, 1], backend="ray") as apart, bm.ResourcePool([2], backend="ray") as together:
        makers, readers = bm.WorkerGroup(apart, Rows), bm.WorkerGroup(together, Rows)
        rows = makers.make.submit(np.arange(10))
        assert len(rows) == 10
        lost = makers.raylet().index(node.all_processes["raylet"][0].process.pid)
        cluster.remove_node(node, allow_graceful=False)
        begun = idle_time()
        while makers.healthy:
            time.sleep(0.01)
        start, host = 5 * lost, rows.where[lost].host
        of = f"rows {start} to {start + 4} of Rows.make, which rank {lost} has left on host {host}, are gone"
        for submit in [
            lambda: readers.total.submit(rows),
            lambda: readers.total.submit(rows.shuffle(0)),
            lambda: readers.add.submit(rows[2:8]),
        ]:
            check_lost(lambda submit=submit: submit().result(timeout=60), f".*{of}")
        assert idle_time() - begun < 60, "its agent hangs up"
        for future in [rows, rows[start + 1 : start + 3]]:
            check_lost(future.result, f".*{of}")
        assert sum(readers.total(rows[5 - start : 10 - start])) == 35 - 5 * start, "those of the other node are there"


try:
    main()
finally:
    ray.shutdown()
    cluster.shutdown()
