"""The zygotes of a controller: which one the workers of a group are forked from.

::

    pools that ask for nothing ──────────────► one zygote, which stays until the controller ends
    pools with preload=["torch"] ────────────► another one, which ends with the last of these pools
    pools with env={"NCCL_DEBUG": "INFO"} ───► another one, as modules read variables when they are imported
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping, Sequence

from bandmaster.backends.zygote import Zygote
from bandmaster.errors import ResourceError, UsageError
from bandmaster.platform.limits import cannot_start

__all__ = ["Zygotes"]

Key = tuple[tuple[str, ...] | None, tuple[tuple[str, str], ...]]

# Modules that take long to import, and start no threads: a zygote imports those that the controller
# has loaded. A script that has loaded a module of the second column has workers that train, as a rule, and each of
# them would import the first one, with its 800 modules, when it makes an optimizer.
LONG_IMPORTS = (
    ("torch._dynamo", ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp")),
    ("torch.distributed.tensor", ("torch.distributed.tensor",)),
    ("torch.distributed.fsdp", ("torch.distributed.fsdp",)),
    ("transformers.modeling_utils", ("transformers.modeling_utils",)),
    ("tensordict", ("tensordict",)),
)


class Zygotes:
    """Starts zygotes when they are needed first. Any thread may use it; `release` also finalizers, at any moment."""

    def __init__(self) -> None:
        self._zygotes: dict[Key, Zygote] = {}
        self._lock = threading.Lock()  # held while a zygote is started

    @property
    def lasting(self) -> Zygote | None:
        """The zygote of pools that ask for nothing; None if it was not needed yet."""
        return self._zygotes.get((None, ()))

    def get(self, preload: tuple[str, ...] | None, variables: Mapping[str, str], pools: Sequence[object]) -> Zygote:
        """The zygote for a group; it does not end before `release` was called with all pools.

        Args:
            preload: The modules that it imports; None for those of `default_preload`.
            variables: Environment variables, besides those of this process.
            pools: The reservations that the group's slots belong to.

        Raises:
            UsageError: This process is a fork of the controller, or ``sys.executable`` is no program.
            ResourceError: The system allows no more processes or descriptors.
        """
        if not all(zygote.is_ours for zygote in list(self._zygotes.values())):
            raise UsageError(
                "backend 'local' cannot start workers in this process, because it was forked from a controller that "
                "has workers; create pools in that controller"
            )
        key = preload, tuple(sorted(variables.items()))
        with self._lock:
            self._forget_those_that_ended()
            while True:
                zygote = self._zygotes[key] = self._usable(key) or _started(key)
                if all(zygote.keep_for(pool) for pool in pools):
                    return zygote

    def release(self, pool: object) -> None:
        """End the zygotes that no other pool uses."""
        for zygote in list(self._zygotes.values()):
            if zygote.is_ours:
                zygote.let_go(pool)

    def _forget_those_that_ended(self) -> None:
        for key, zygote in list(self._zygotes.items()):
            if not zygote.is_alive:
                zygote.close()
                del self._zygotes[key]

    def _usable(self, key: Key) -> Zygote | None:
        """The zygote that was started for this, unless it ends or lacks modules that are imported by default."""
        zygote = self._zygotes.get(key)
        if zygote is None or zygote.is_ended:
            return None
        if not set(_needed(key[0])) <= set(zygote.preload):
            zygote.abandon()  # it has workers, which it must not neglect to import more
        return None if zygote.is_abandoned else zygote


def _needed(preload: tuple[str, ...] | None) -> tuple[str, ...]:
    """The modules that a zygote must have been told to import; another one is started where it was not."""
    if preload is not None:
        return preload
    named = os.environ.get("BANDMASTER_PRELOAD")
    if named is not None:
        return tuple(name.strip() for name in named.split(",") if name.strip())
    return ("numpy.random", "torch") if "torch" in sys.modules else ("numpy.random",)


def _long_imports() -> tuple[str, ...]:
    return tuple(name for name, loaded in LONG_IMPORTS if any(known in sys.modules for known in loaded))


def _started(key: Key) -> Zygote:
    """Start a zygote.

    Raises:
        UsageError: ``sys.executable`` is not the path of an executable file.
        ResourceError: The system allows no more processes or descriptors.
    """
    if not os.access(sys.executable or "", os.X_OK):
        raise UsageError(
            f"backend 'local' starts Python with sys.executable, but {sys.executable!r} is not an executable file; set "
            "it to the path of a Python interpreter, or use backend 'inprocess'"
        )
    preload, variables = key
    is_chosen = preload is None and "BANDMASTER_PRELOAD" not in os.environ
    modules = _needed(preload) + (_long_imports() if is_chosen else ())
    try:
        return Zygote(modules, dict(variables), is_kept=key == (None, ()))
    except ResourceError:
        raise
    except (OSError, RuntimeError) as error:
        raise cannot_start("the process that workers are forked from", error) from error
