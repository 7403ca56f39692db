"""What actors print is shown with the group's name and the rank, and a progress bar as one line when it has ended."""

import io
import os
import sys
import time

os.environ["RAY_DEDUP_LOGS"] = "0"  # read when Ray is imported; otherwise lines that differ in numbers count as equal

import ray

import bandmaster as bm
from bandmaster import Dispatch, register


class Talks(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def talk(self):
        print("a line of rank", self.rank)
        for n in range(100):
            sys.stderr.write(f"\r{n + 1}% of rank {self.rank}")
            time.sleep(0.005)  # so that Ray's log monitor reads parts of the bar
        sys.stderr.write("\n")


def of(stream, n_lines):
    """The lines of workers, once there are so many."""
    deadline = time.monotonic() + 30
    while len(found := [line for line in stream.getvalue().splitlines() if " of rank " in line]) < n_lines:
        assert time.monotonic() < deadline, stream.getvalue()
        time.sleep(0.05)  # Ray has no event for it
    return found


ray.init("local", num_cpus=2, include_dashboard=False)
sys.stdout, sys.stderr = out, err = io.StringIO(), io.StringIO()
try:
    with bm.ResourcePool([2], backend="ray") as pool:
        group = bm.WorkerGroup(pool, Talks, name="actor")
        group.talk()
        lines, bars = of(out, 2), of(err, 2)
        first = bm.WorkerGroup(pool, Talks)
        first.close()
        assert bm.WorkerGroup(pool, Talks).name == "Talks", "Ray has freed the name of the actor that was killed"
finally:
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    ray.shutdown()
for rank in (0, 1):
    assert any(f"([actor {rank}] pid=" in line and f"a line of rank {rank}" in line for line in lines), lines
    assert any(f"([actor {rank}] pid=" in line and f"100% of rank {rank}" in line for line in bars), bars
assert len(bars) == 2, bars
