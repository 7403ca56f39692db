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

__all__ = ["Zygotes", "default_modules"]

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
NEEDED = {"numpy.random", "torch"}  # another zygote is started where one lacks these, which most workers would import


class Zygotes:
    """Starts zygotes when they are needed first. Any thread may use it; `release` also finalizers, at any moment.

    Args:
        are_kept: Whether all zygotes stay until this process ends, rather than with the pools that use them, and have
            guards, as in an agent.
    """

    def __init__(self, are_kept: bool = False) -> None:
        self._zygotes: dict[Key, Zygote] = {}
        self._lock = threading.Lock()  # held while a zygote is started
        self._are_kept = are_kept

    @property
    def lasting(self) -> Zygote | None:
        """The zygote of pools that ask for nothing; None if it was not needed yet."""
        return self._zygotes.get((None, ()))

    def get(
        self,
        preload: tuple[str, ...] | None,
        variables: Mapping[str, str],
        pools: Sequence[object],
        default: Sequence[str],
    ) -> Zygote:
        """The zygote for a group; it does not end before `release` was called with all pools.

        Args:
            preload: The modules that it imports; None for the default ones.
            variables: Environment variables, besides those of this process.
            pools: The reservations that the group's slots belong to.
            default: The modules that it imports by default; see `default_modules`.

        Raises:
            UsageError: This process is a fork of the controller, or ``sys.executable`` is no program.
            ResourceError: The system allows no more processes or descriptors.
        """
        if not all(zygote.is_ours for zygote in list(self._zygotes.values())):
            raise UsageError(
                "backend 'local' cannot start workers in this process, because it was forked from a controller that "
                "has workers; create pools in that controller"
            )
        key, modules = (preload, tuple(sorted(variables.items()))), default if preload is None else preload
        with self._lock:
            self._forget_those_that_ended()
            while True:
                zygote = self._zygotes[key] = self._usable(key, modules) or self._started(key, modules)
                if all(zygote.keep_for(pool) for pool in pools):
                    return zygote

    def release(self, pool: object) -> None:
        """End the zygotes that no other pool uses."""
        for zygote in list(self._zygotes.values()):
            if zygote.is_ours:
                zygote.let_go(pool)

    def close(self) -> None:
        """End all zygotes, also those with workers."""
        for zygote in list(self._zygotes.values()):
            zygote.close()

    def _forget_those_that_ended(self) -> None:
        for key, zygote in list(self._zygotes.items()):
            if not zygote.is_alive:
                zygote.close()
                del self._zygotes[key]

    def _usable(self, key: Key, modules: Sequence[str]) -> Zygote | None:
        """The zygote that was started for this, unless it ends or lacks modules that are imported by default."""
        zygote = self._zygotes.get(key)
        if zygote is None or zygote.is_ended:
            return None
        needed = modules if "BANDMASTER_PRELOAD" in os.environ else NEEDED.intersection(modules)
        if not set(needed) <= set(zygote.preload):
            zygote.abandon()  # it has workers, which it must not neglect to import more
        return None if zygote.is_abandoned else zygote

    def _started(self, key: Key, modules: Sequence[str]) -> Zygote:
        """Start a zygote.

        Raises:
            UsageError: ``sys.executable`` is not the path of an executable file.
            ResourceError: The system allows no more processes or descriptors.
        """
        if not os.access(sys.executable or "", os.X_OK):
            raise UsageError(
                f"backend 'local' starts Python with sys.executable, but {sys.executable!r} is not an executable file; "
                "set it to the path of a Python interpreter, or use backend 'inprocess'"
            )
        before = self._zygotes.get(key)
        more = (
            () if before is None or key[0] is not None else before.preload
        )  # else groups would take turns to start it
        try:
            names, is_kept = tuple(dict.fromkeys([*more, *modules])), self._are_kept or key == (None, ())
            return Zygote(names, dict(key[1]), is_kept, has_guard=self._are_kept)
        except ResourceError:
            raise
        except (OSError, RuntimeError) as error:
            raise cannot_start("the process that workers are forked from", error) from error


def default_modules(imports: Sequence[str] = ()) -> tuple[str, ...]:
    """The modules that a zygote imports by default, given what this process has imported by now.

    Args:
        imports: Modules that the worker class imports.
    """
    named = os.environ.get("BANDMASTER_PRELOAD")
    if named is not None:
        return tuple(name.strip() for name in named.split(",") if name.strip())
    loaded = ["torch"] if "torch" in sys.modules else []
    long = [name for name, known in LONG_IMPORTS if any(one in sys.modules for one in known)]
    return tuple(dict.fromkeys(["numpy.random", *loaded, *imports, *long]))
