"""Runs on the first host: pools that ask for certain ones of the other hosts."""

import json
import os

import ray

import bandmaster as bm
from bandmaster import Dispatch, register


class Place(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def host(self):
        return os.uname().nodename


def hosts_of(sizes, **options):
    with bm.ResourcePool(sizes, backend="ray", **options) as pool:
        return bm.WorkerGroup(pool, Place).host()


def refused(sizes, **options):
    try:
        bm.ResourcePool(sizes, backend="ray", placement_timeout=0, **options).reserve()
    except bm.PlacementError as error:
        return str(error)
    return ""


ray.init(logging_level="warning")  # once for all pools
planned = bm.ResourcePool([2, 1], backend="ray", nodes=[{"number": "2"}, {"number": "1"}], spares=[1])
before = str(planned.plan())
with planned:
    after = str(planned.plan())
    group = bm.WorkerGroup(planned, Place)
    facts = {"planned": [before, after], "labels": group.host()}
facts["name"] = hosts_of([1], nodes="host3")
facts["resource"] = hosts_of([1, 1], resources_per_worker={"odd": 1}, strategy="strict_spread")
facts["pack"] = hosts_of([1, 1], strategy="pack")
facts["no label"] = refused([1], nodes={"number": "9"})
facts["no name"] = refused([1], nodes="host9")
facts["too few"] = refused([1] * 7, strategy="strict_spread")
facts["no resource"] = refused([1], resources_per_worker={"odd": 9})
print(json.dumps(facts), flush=True)
