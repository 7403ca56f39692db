"""Runs workers as processes on this machine, forked from a zygote and reached over lanes, which use no port or name.

::

    LocalBackend.start ──► Zygotes.get ──► HostWorkers ──► worker processes

The Ray backend starts the workers on the controller's own host here as well, and an agent those of its host.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from bandmaster.backends.host_workers import HostWorkers, Place
from bandmaster.backends.machine import MachineBackend, Reservation
from bandmaster.backends.zygote import Zygote
from bandmaster.backends.zygotes import Zygotes, default_modules
from bandmaster.contract import Launch, ShowOutput
from bandmaster.platform.hardware import visible_devices


class LocalBackend(MachineBackend):
    """Backend whose workers are processes on this machine.

    Args:
        are_zygotes_kept: Whether all zygotes stay until this process ends, and have guards, as in an agent.
    """

    def __init__(self, are_zygotes_kept: bool = False) -> None:
        super().__init__()
        self._zygotes = Zygotes(are_zygotes_kept)
        self._released_pools: weakref.WeakSet[object] = weakref.WeakSet()

    @property
    def lasting_zygote(self) -> Zygote | None:
        """The zygote that stays until the controller ends; None if it was not needed yet."""
        return self._zygotes.lasting

    def start(self, launch: Launch) -> HostWorkers:
        """Fork a worker process for every slot."""
        devices = visible_devices()
        gpus = {
            rank: [devices[gpu] for gpu in slot.reservation.gpus[slot.node][slot.index]]
            for rank, slot in enumerate(launch.slots)
        }
        place = Place(range(len(launch.slots)), gpus=gpus, modules=default_modules(launch.imports))
        return self.start_ranks(launch, place, [slot.reservation for slot in launch.slots])

    def prepare(self, modules: Sequence[str]) -> None:
        """Start the zygote of pools that ask for nothing, which imports some modules, without waiting for it."""
        self._zygotes.get(None, {}, (), modules)

    def start_ranks(
        self, launch: Launch, place: Place, pools: Sequence[object], shows: ShowOutput | None = None
    ) -> HostWorkers:
        """Fork a worker process for each rank of a place.

        Args:
            launch: The group.
            place: What this host gives to the ranks.
            pools: The reservations of their slots: `release_zygotes` is called with each of them later.
            shows: Shows the output of the workers; by default this process does.
        """
        pools = list(dict.fromkeys(pools))
        zygote = self._zygotes.get(launch.preload, launch.env, pools, place.modules)
        try:
            return HostWorkers(launch, zygote, place, shows)
        finally:
            for pool in self._released_pools.intersection(pools):  # another thread has closed it meanwhile
                self._zygotes.release(pool)

    def release(self, reservation: Reservation) -> None:
        """Release the GPUs of a reservation, and end the zygotes that only its pool has used."""
        super().release(reservation)
        self.release_zygotes(reservation)

    def close(self) -> None:
        """End all zygotes, and with them the workers that they have forked."""
        self._zygotes.close()

    def release_zygotes(self, pool: object) -> None:
        """End the zygotes that only a pool has used, which is given by its reservation."""
        self._released_pools.add(pool)
        self._zygotes.release(pool)
