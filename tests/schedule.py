"""How ``pytest -n N`` deals the tests to N processes: those of one file and backend to the same one, long ones first.

::

    collection, in each process ──► by `start_order` ──► units, by `unit_of` ──► the process that is free next

Tests of a file share groups, which are fixtures of its module, so that a file is not cut where that would start a
group twice. `SEPARATE` names the tests that share nothing, each of which is a unit.
"""

from __future__ import annotations

import re

from xdist.scheduler import LoadScopeScheduling

__all__ = ["Schedule", "start_order", "unit_of"]

LONGEST_FIRST = ()
SEPARATE = ()
_backend = re.compile(r"\[(?:.*-)?(inprocess|local|ray)(?:-.*)?\]$")


class Schedule(LoadScopeScheduling):
    """Deals units, in the order in which the tests were collected."""

    def __init__(self, config, log=None):
        super().__init__(config, log)
        config.option.loadscopereorder = False  # which would be by their number of tests

    def _split_scope(self, nodeid):
        return unit_of(nodeid)


def unit_of(nodeid):
    """What a test is run with in one process: its file and backend, or the test itself if it shares nothing.

    Example:
        >>> unit_of("tests/test_group.py::test_calls[local-2]"), unit_of("tests/test_mesh.py::test_axes[2]")
        ('tests/test_group.py local', 'tests/test_mesh.py')
    """
    if nodeid.startswith(SEPARATE):
        return nodeid
    found = _backend.search(nodeid)
    return " ".join([nodeid.partition("::")[0], *(found.groups() if found else [])])


def start_order(nodeid):
    """Sort key: units that take longest come first, so that no process is left with one at the end."""
    unit = unit_of(nodeid)
    return next((n for n, name in enumerate(LONGEST_FIRST) if unit.startswith(name)), len(LONGEST_FIRST))
