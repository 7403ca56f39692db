"""Modules that a ``runtime_env`` brings reach workers: of the job by ``py_modules``, of a class by ``pip``."""

import os
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import ray

import bandmaster as bm
from bandmaster import Dispatch, register

NAME = "bandmaster_test_wheel-1.0"


class Imports(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def said(self, name):
        return __import__(name).WORDS, os.environ["MINE"]

    @register(Dispatch.ONE_TO_ALL)
    def task(self, name):
        return ray.get(ray.remote(num_cpus=0)(lambda: __import__(name).WORDS).remote())


def wheel(folder):
    """A wheel with one module, which pip installs without a network."""
    path = Path(folder, f"{NAME}-py3-none-any.whl")
    info = f"{NAME}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("by_pip.py", "WORDS = 'from pip'\n")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: bandmaster-test-wheel\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return str(path)


with tempfile.TemporaryDirectory() as folder:
    module = Path(folder, "by_py_modules")
    module.mkdir()
    (module / "__init__.py").write_text("WORDS = 'from py_modules'\n")
    of_job = {"py_modules": [str(module)], "env_vars": {"MINE": "job${HOME}"}}
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env=of_job)
    with bm.ResourcePool([2], backend="ray") as pool:
        group = bm.WorkerGroup(pool, Imports)
        assert group.said("by_py_modules") == [("from py_modules", f"job{os.environ['HOME']}")] * 2
        assert group.task("by_py_modules") == ["from py_modules"] * 2
        group.close()
        if find_spec("virtualenv") is not None:  # which Ray needs for this
            of_class = {"pip": [wheel(folder)], "env_vars": {"MINE": "class"}}
            group = bm.WorkerGroup(pool, ray.remote(runtime_env=of_class)(Imports))
            assert group.said("by_pip") == [("from pip", "class")] * 2
            print("pip was tried")
    ray.shutdown()
