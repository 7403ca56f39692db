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
from bandmaster.platform.settings import preloaded_modules

Key = tuple[tuple[str, ...] | None, tuple[tuple[str, str], ...]]  # what pools ask for: ``preload`` and ``env``

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
        self._zygotes: list[tuple[Key, Zygote]] = []  # of those for one key, groups use the last one
        self._lock = threading.Lock()  # held while a zygote is started
        self._are_kept = are_kept

    @property
    def lasting(self) -> Zygote | None:
        """The zygote of pools that ask for nothing; None if it was not needed yet."""
        return self._last((None, ()))

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
        if not all(zygote.is_ours for zygote in self._all()):
            raise UsageError(
                "backend 'local' cannot start workers in this process, because it was forked from a controller that "
                "has workers; create pools in that controller"
            )
        key, modules = (preload, tuple(sorted(variables.items()))), default if preload is None else preload
        with self._lock:
            self._close_those_that_ended()
            zygote = self._last(key)
            while zygote is None or _lacks(zygote, modules) or not all(zygote.hold(pool) for pool in pools):
                zygote = self._add(key, modules)
            return zygote

    def release(self, pool: object) -> None:
        """End the zygotes that no other pool uses."""
        for zygote in self._all():
            if zygote.is_ours:
                zygote.release(pool)

    def close(self) -> None:
        """End all zygotes, also those with workers."""
        for zygote in self._all():
            zygote.close()

    def _all(self) -> list[Zygote]:
        return [zygote for _, zygote in list(self._zygotes)]

    def _last(self, key: Key) -> Zygote | None:
        return next((zygote for known, zygote in reversed(self._zygotes) if known == key), None)

    def _close_those_that_ended(self) -> None:
        for zygote in self._all():
            if not zygote.is_alive:
                zygote.close()
        self._zygotes = [(key, zygote) for key, zygote in self._zygotes if not zygote.is_ended]

    def _add(self, key: Key, modules: Sequence[str]) -> Zygote:
        """Start a zygote, in place of one that lacks modules if there is one: that ends with the pools that use it."""
        former = self._last(key)
        known = () if former is None else former.modules  # else groups would take turns to start it
        zygote = _started(tuple(dict.fromkeys([*known, *modules])), dict(key[1]), self._are_kept)
        self._zygotes.append((key, zygote))
        if self._are_kept or key == (None, ()):
            zygote.hold(self)
        if former is not None:
            former.release(self)
        return zygote


def _lacks(zygote: Zygote, modules: Sequence[str]) -> bool:
    """Whether a zygote was started without a module that workers need."""
    needed = modules if preloaded_modules() is not None else NEEDED.intersection(modules)
    return not set(needed) <= set(zygote.modules)


def _started(modules: Sequence[str], variables: Mapping[str, str], has_guard: bool) -> Zygote:
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
    try:
        return Zygote(modules, variables, has_guard)
    except ResourceError:
        raise
    except (OSError, RuntimeError) as error:
        raise cannot_start("the process that workers are forked from", error) from error


def default_modules(imports: Sequence[str] = ()) -> tuple[str, ...]:
    """The modules that a zygote imports by default, given what this process has imported by now.

    Args:
        imports: Modules that the worker class imports.
    """
    named = preloaded_modules()
    if named is not None:
        return named
    loaded = ["torch"] if "torch" in sys.modules else []
    long = [name for name, known in LONG_IMPORTS if any(one in sys.modules for one in known)]
    return tuple(dict.fromkeys(["numpy.random", *loaded, *imports, *long]))
