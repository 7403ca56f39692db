"""Runs on the first host: rows on other hosts that outlive their pool."""

import json
import sys

import numpy as np
import ray

import bandmaster as bm
from bandmaster import Dispatch, register


class Rows(bm.Worker):
    @register(Dispatch.DP_PROTO)
    def doubled(self, rows):
        return rows * 2


ray.init(logging_level="warning")  # else the connection ends with the pool
with bm.ResourcePool([1, 1], backend="ray") as pool:
    rows = bm.WorkerGroup(pool, Rows).doubled.submit(np.arange(1_000_000))
    assert len(rows) == 1_000_000
assert (rows.result() == np.arange(0, 2_000_000, 2)).all()
print(json.dumps({"kept": True}), flush=True)
sys.stdin.readline()
del rows
print(json.dumps({"released": True}), flush=True)
sys.stdin.readline()
