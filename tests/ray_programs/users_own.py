"""A Ray that the user started is used as it is and left running; its runtime_env reaches the workers."""

import pathlib
import sys
import tempfile

import ray

import bandmaster as bm
from bandmaster import Dispatch, register


class Reads(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def read(self):
        return pathlib.Path("note.txt").read_text()


with tempfile.TemporaryDirectory() as directory:
    pathlib.Path(directory, "note.txt").write_text("from the working directory")
    replaced = bm.ResourcePool([1], backend="ray").reserve()  # on a Ray that is started for it
    ray.shutdown()
    ray.init("local", num_cpus=2, include_dashboard=False, runtime_env={"working_dir": directory})
    with bm.ResourcePool([2], backend="ray") as pool:
        assert bm.WorkerGroup(pool, Reads).read() == ["from the working directory"] * 2
    replaced.close()
    assert ray.is_initialized(), "the user's Ray is the user's"
    ray.shutdown()
sys.exit(0)
