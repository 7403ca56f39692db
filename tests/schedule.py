"""How ``pytest -n N`` deals the tests to N processes: those of one file and backend to the same one, long ones first.

::

    collection, in each process ──► by `start_order` ──► units, by `unit_of` ──► the process that is free next;
                                                         units on Ray only to the first `MOST_RAYS` processes

Tests of a file share groups, which are fixtures of its module, so a file is cut only between backends. `SEPARATE` names
tests that share nothing. A process that runs a test on Ray starts a Ray of its own, which takes seconds of processor
time and half a gigabyte, so few processes do.
"""

from __future__ import annotations

import re

from xdist.scheduler import LoadScopeScheduling

__all__ = ["Schedule", "start_order", "unit_of"]

MOST_RAYS = 2
ON_RAY = " ray"  # ends the name of a unit
SEPARATE = (
    "tests/test_ray.py::test_programs",
    "tests/test_tutorials.py",
    "tests/test_docs.py",
    "tests/test_soak.py",
    "tests/test_benchmarks.py::test_a_benchmark_alone",
    "tests/test_benchmarks.py::test_ways",
    "tests/test_benchmarks.py::test_peers",
)
LONGEST_FIRST = (
    "tests/test_table.py",
    "tests/test_benchmarks.py",
    "tests/test_rlhf.py",
    "tests/test_tutorials.py",
    "tests/test_soak.py",
    "tests/test_docs.py::test_the_code_of_a_page_runs[torch]",
    "tests/test_ray.py::test_programs",
    "tests/test_agents.py",
    "tests/faults",
    "tests/test_debugging.py",
    "tests/test_replay.py",
    "tests/test_features.py",
    "tests/test_handles.py",
    "tests/test_contract.py",
    "tests/test_cli.py",
    "tests/test_top.py",
)
_backend = re.compile(r"\[(?:.*-)?(inprocess|local|ray)(?:-.*)?\]$")


class Schedule(LoadScopeScheduling):
    """Deals units in the order in which the tests were collected, those on Ray to the first processes alone."""

    def __init__(self, config, log=None):
        super().__init__(config, log)
        config.option.loadscopereorder = False  # which would be by the number of tests

    def _split_scope(self, nodeid):
        return unit_of(nodeid)

    def _assign_work_unit(self, node):
        may_have_ray = self.nodes.index(node) < MOST_RAYS
        units = [unit for unit in self.workqueue if may_have_ray or not unit.endswith(ON_RAY)]
        if not units:
            node.shutdown()
            return
        first = next((unit for unit in units if may_have_ray and unit.endswith(ON_RAY)), units[0])
        self.workqueue.move_to_end(first, last=False)
        super()._assign_work_unit(node)


def unit_of(nodeid):
    """What a test is run with in one process: its file and backend, or the test itself if it shares nothing.

    Example:
        >>> unit_of("tests/test_group.py::test_calls[local-2]"), unit_of("tests/test_mesh.py::test_axes[2]")
        ('tests/test_group.py local', 'tests/test_mesh.py')
    """
    if nodeid.startswith(SEPARATE):
        return nodeid
    file, *names = nodeid.split("::")
    found = _backend.search(nodeid)
    shared = f"{file}::{names[0]}" if file == "tests/test_contract.py" else file
    return f"{shared} {found[1]}" if found else shared


def start_order(nodeid):
    """Sort key: units that take longest come first, so that no process is left with one at the end."""
    return next((n for n, name in enumerate(LONGEST_FIRST) if nodeid.startswith(name)), len(LONGEST_FIRST))
