"""The hosts: those of the tests, `tests/hosts.py`."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from harness.environments import BENCHMARKS

N_HOSTS = 3  # the first has the controller, the others have the ranks
CPUS_OF_HOST = 32  # as Ray counts them: enough for the ranks of all peers


def _module() -> Any:
    spec = importlib.util.spec_from_file_location("testbed_hosts", BENCHMARKS.parent / "tests" / "hosts.py")
    assert spec is not None and spec.loader is not None, "it is a file of Python"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_HOSTS = _module()
why_not = _HOSTS.why_not
address = _HOSTS.address


class Hosts(_HOSTS.Hosts):  # type: ignore[misc]
    """Three hosts, on which Ray's workers can import the peers."""

    def __init__(self) -> None:
        super().__init__(N_HOSTS, cpus=CPUS_OF_HOST)

    @property
    def environment(self) -> dict[str, str]:
        """For programs on the first host, and Ray on all."""
        return {**super().environment, "PYTHONPATH": python_path()}


def python_path() -> str:
    """The benchmarks, and what this process was told to import from."""
    return os.pathsep.join([str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])])
