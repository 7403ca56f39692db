"""Tools for tests of your own workers and backends; `docs/testing.md` introduces them.

`with_faults` makes workers fail on purpose, `trials` draws the faults from a seed, `no_leaks` finds resources that a
test leaves behind, `record` stores calls to run them again, `finite` finds the call that made a NaN, and
`BackendContract` tests a backend. Only `BackendContract` needs pytest.

::

    your test ── with_faults(Class, Fault, ...) ──► WorkerGroup ──► workers that fail on purpose
        └─────── no_leaks() ── held_resources() before and after ──► LeakError
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bandmaster.errors import UsageError
from bandmaster.testing.belongings import HeldResources, held_resources
from bandmaster.testing.faults import BadResult, Delay, Exit, FailToUnpickle, Fault, Hang, Kill, Raise
from bandmaster.testing.faulty import with_faults
from bandmaster.testing.finite import finite
from bandmaster.testing.leaks import LeakError, no_leaks
from bandmaster.testing.recording import record
from bandmaster.testing.trials import InjectedError, Trial, trials, unchanged

if TYPE_CHECKING:
    from bandmaster.testing.contract import BackendContract

__all__ = [
    "BackendContract",
    "BadResult",
    "Delay",
    "Exit",
    "FailToUnpickle",
    "Fault",
    "Hang",
    "HeldResources",
    "InjectedError",
    "Kill",
    "LeakError",
    "Raise",
    "Trial",
    "finite",
    "held_resources",
    "no_leaks",
    "record",
    "trials",
    "unchanged",
    "with_faults",
]


def __getattr__(name: str) -> Any:
    if name != "BackendContract":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import pytest
    except ImportError as error:
        raise UsageError(f"BackendContract needs pytest ({error}): pip install pytest") from error
    import sys

    module = "bandmaster.testing.contract"
    if module not in sys.modules:
        pytest.register_assert_rewrite(module)  # so that failing assertions show their values
    from bandmaster.testing.contract import BackendContract

    return BackendContract
