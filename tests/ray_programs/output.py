"""What workers on other nodes print is shown as that of local ones; of a progress bar, the line with which it ends."""

import io
import logging
import sys
import time
from pathlib import Path

import ray

import bandmaster as bm
from bandmaster import Dispatch, register

sys.path.append(str(Path(__file__).parents[1]))
from small_ray import small_cluster


class Talks(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def talk(self):
        print("a line of rank", self.rank)
        for n in range(100):
            sys.stderr.write(f"\r{n + 1}% of rank {self.rank}")
        sys.stderr.write("\n")
        logging.getLogger("talks").info("a record of rank %d", self.rank)


def of(stream, n_lines):
    """The lines of workers, once there are so many."""
    deadline = time.monotonic() + 30
    while len(found := [line for line in stream.getvalue().splitlines() if " of rank " in line]) < n_lines:
        assert time.monotonic() < deadline, stream.getvalue()
        time.sleep(0.05)  # agents send it behind the reply
    return sorted(found)


records = io.StringIO()
logging.getLogger("talks").addHandler(logging.StreamHandler(records))
logging.getLogger("talks").setLevel("INFO")
cluster = small_cluster(num_cpus=1)
cluster.add_node(num_cpus=1)
cluster.wait_for_nodes()
ray.init(address=cluster.address, log_to_driver=False)
sys.stdout, sys.stderr = out, err = io.StringIO(), io.StringIO()
try:
    with bm.ResourcePool([1, 1], backend="ray") as pool:
        bm.WorkerGroup(pool, Talks, name="actor", logging="INFO").talk()
        lines, bars, logged = of(out, 2), of(err, 2), of(records, 2)
finally:
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    ray.shutdown()
    cluster.shutdown()
assert lines == [f"[actor {rank}] a line of rank {rank}" for rank in (0, 1)], lines
assert bars == [f"[actor {rank}] 100% of rank {rank}" for rank in (0, 1)], bars
assert logged == [f"[actor {rank}] a record of rank {rank}" for rank in (0, 1)], logged
