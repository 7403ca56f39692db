"""Runs workers as processes on this machine, forked from a zygote and reached over lanes, which use no port or name.

::

    LocalBackend.start ──► zygote ── fork ──► worker processes ◄── lanes ── HostWorkers

    pools that ask for nothing ──────────────► one zygote, which stays until the controller ends
    pools with preload=["torch"] ────────────► another one, which ends with the last of these pools
    pools with env={"NCCL_DEBUG": "INFO"} ───► another one, as modules read variables when they are imported

The Ray backend starts the workers on the controller's own host here as well, and an agent those of its host.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence

from bandmaster.backends.host_workers import HostShare, HostWorkers
from bandmaster.backends.machine import MachineBackend, MachineReservation
from bandmaster.backends.zygote import Zygote
from bandmaster.contract import Launch, ShowOutput
from bandmaster.errors import ResourceError, UsageError
from bandmaster.platform.hardware import visible_devices
from bandmaster.platform.limits import cannot_start
from bandmaster.platform.locks import SigintSafeLock
from bandmaster.platform.settings import preloaded_modules

Key = tuple[tuple[str, ...] | None, tuple[tuple[str, str], ...]]  # what pools ask for: ``preload`` and ``env``
_NOTHING: Key = None, ()

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


class LocalBackend(MachineBackend):
    """Backend whose workers are processes on this machine. Any thread may use it, and finalizers may release pools.

    Args:
        are_zygotes_kept: Whether all zygotes stay until this process ends, and have guards, as in an agent.
    """

    def __init__(self, are_zygotes_kept: bool = False) -> None:
        super().__init__()
        self._zygotes: list[tuple[Key, Zygote]] = []  # of those for one key, groups use the last one
        self._starting = threading.Lock()  # held while a zygote is started
        self._are_kept = are_zygotes_kept
        self._released_pools: weakref.WeakSet[object] = weakref.WeakSet()

    @property
    def lasting_zygote(self) -> Zygote | None:
        """The zygote of pools that ask for nothing, which stays; None if it was not needed yet."""
        return self._last(_NOTHING)

    def start(self, launch: Launch) -> HostWorkers:
        """Fork a worker process for every slot."""
        devices = visible_devices()
        gpus = {
            rank: [devices[gpu] for gpu in slot.reservation.gpus[slot.node][slot.index]]
            for rank, slot in enumerate(launch.slots)
        }
        place = HostShare(range(len(launch.slots)), gpus=gpus, modules=default_modules(launch.imports))
        return self.start_ranks(launch, place, [slot.reservation for slot in launch.slots])

    def prepare(self, modules: Sequence[str]) -> None:
        """Start the zygote of pools that ask for nothing, which imports some modules, without waiting for it."""
        self._zygote(_NOTHING, modules, ())

    def start_ranks(
        self, launch: Launch, place: HostShare, pools: Sequence[object], shows: ShowOutput | None = None
    ) -> HostWorkers:
        """Fork a worker process for each rank of a place.

        Args:
            launch: The group.
            place: What this host gives to the ranks.
            pools: The reservations of their slots: `release_zygotes` is called with each of them later.
            shows: Shows the output of the workers; by default this process does.

        Raises:
            UsageError: This process is a fork of the controller, or ``sys.executable`` is no program.
            ResourceError: The system allows no more processes or descriptors.
        """
        pools = list(dict.fromkeys(pools))
        modules = place.modules if launch.preload is None else launch.preload
        zygote = self._zygote((launch.preload, tuple(sorted(launch.env.items()))), modules, pools)
        try:
            return HostWorkers(launch, zygote, place, shows)
        finally:
            for pool in self._released_pools.intersection(pools):  # another thread has closed it meanwhile
                self.release_zygotes(pool)

    def release(self, reservation: MachineReservation) -> None:
        """Release the GPUs of a reservation, and end the zygotes that only its pool has used."""
        super().release(reservation)
        self.release_zygotes(reservation)

    def release_zygotes(self, pool: object) -> None:
        """End the zygotes that only a pool has used, which is given by its reservation."""
        self._released_pools.add(pool)
        for zygote in self._all():
            if zygote.is_ours:
                zygote.release(pool)

    def close(self) -> None:
        """End all zygotes, and with them the workers that they have forked."""
        for zygote in self._all():
            zygote.close()

    def _all(self) -> Iterator[Zygote]:
        return (zygote for _, zygote in list(self._zygotes))

    def _last(self, key: Key) -> Zygote | None:
        return next((zygote for known, zygote in reversed(self._zygotes) if known == key), None)

    def _zygote(self, key: Key, modules: Sequence[str], pools: Sequence[object]) -> Zygote:
        """The zygote that pools with a key use, which imports some modules, and ends with the last of the pools."""
        if not all(zygote.is_ours for zygote in self._all()):
            raise UsageError(
                "backend 'local' cannot start workers in this process, because it was forked from a controller that "
                "has workers; create pools in that controller"
            )
        with SigintSafeLock(), self._starting:  # so that Ctrl-C leaves no zygote that no pool holds
            for zygote in self._all():
                if not zygote.is_alive:
                    zygote.close()
            self._zygotes = [(known, zygote) for known, zygote in self._zygotes if not zygote.is_ended]
            found = self._last(key)
            while found is None or _lacks(found, modules) or not all(found.hold(pool) for pool in pools):
                found = self._add(key, modules)
            return found

    def _add(self, key: Key, modules: Sequence[str]) -> Zygote:
        """Start a zygote, in place of one that lacks modules if there is one: that ends with the pools that use it."""
        former = self._last(key)
        known = () if former is None else former.modules  # else groups would take turns to start it
        zygote = _started(tuple(dict.fromkeys([*known, *modules])), key, self._are_kept)
        self._zygotes.append((key, zygote))
        if self._are_kept or key == _NOTHING:
            zygote.hold(self)
        if former is not None:
            former.release(self)
        return zygote


def _lacks(zygote: Zygote, modules: Sequence[str]) -> bool:
    """Whether a zygote was started without a module that workers need."""
    needed = modules if preloaded_modules() is not None else NEEDED.intersection(modules)
    return not set(needed) <= set(zygote.modules)


def _started(modules: Sequence[str], key: Key, has_guard: bool) -> Zygote:
    if not os.access(sys.executable or "", os.X_OK):
        raise UsageError(
            f"backend 'local' starts Python with sys.executable, but {sys.executable!r} is not an executable file; "
            "set it to the path of a Python interpreter, or use backend 'inprocess'"
        )
    try:
        return Zygote(modules, dict(key[1]), has_guard)
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
