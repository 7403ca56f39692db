"""Shared by the backends that run on this machine: its only node, and the reservations of its GPUs."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import dataclass
from itertools import islice

from bandmaster.plan.placement import RESERVING, Node, Request, assign_nodes, cannot_place
from bandmaster.platform.hardware import count_gpus
from bandmaster.platform.locks import check_not_held


@dataclass(frozen=True, eq=False)
class MachineReservation:
    """The GPUs of this machine that a pool has reserved.

    Attributes:
        name: Name of the pool.
        gpus: Indices of the GPUs of each slot, by node of the request and slot on that node.
    """

    name: str
    gpus: tuple[tuple[tuple[int, ...], ...], ...]


class MachineBackend:
    """Reserves GPUs of this machine. CPUs are not counted, and all nodes of a request are this machine.

    Any thread may call its methods. Finalizers may call `release` at any moment, even during `reserve`, so `release`
    takes no lock.
    """

    def __init__(self) -> None:
        self._reserving = threading.RLock()  # one reservation at a time
        self._reserved: set[weakref.ref[MachineReservation]] = set()  # Ctrl-C may leave one with nobody

    def inventory(self) -> tuple[Node, ...]:
        """This machine as the only node."""
        n_gpus, holders = count_gpus(), self._holders()
        names = tuple(sorted({f"pool {holder.name!r}" for holder in holders.values()}))
        return (Node("this machine", {"GPU": n_gpus}, {"GPU": n_gpus - len(holders)}, names, is_many=True),)

    def reserve(self, request: Request, timeout_s: float) -> MachineReservation:
        """Reserve GPUs, if the request needs any. It does not wait, because only this process could release GPUs.

        Raises:
            PlacementError: Too few GPUs are free.
            UsageError: A signal handler asks for slots while this thread is reserving.
        """
        check_not_held(self._reserving, RESERVING)
        with self._reserving:
            if assign_nodes(request, self.inventory()) is None:
                gc.collect()  # dropped pools hold their slots as long as they are in cycles
            nodes = self.inventory()
            if assign_nodes(request, nodes) is None:
                raise cannot_place(request, nodes)
            holders = self._holders()
            free = (gpu for gpu in range(count_gpus()) if gpu not in holders)
            each = request.gpus_per_worker
            gpus = tuple(tuple(tuple(islice(free, each)) for _ in range(size)) for size in request.workers)
            reservation = MachineReservation(request.name, gpus)
            self._reserved.add(weakref.ref(reservation))
        return reservation

    def nodes(self, reservation: MachineReservation) -> list[Node | None]:
        """This machine, as often as the request has entries."""
        return [self.inventory()[0]] * len(reservation.gpus)

    def release(self, reservation: MachineReservation) -> None:
        """Release the GPUs of a reservation."""
        self._reserved.discard(weakref.ref(reservation))

    def _holders(self) -> dict[int, MachineReservation]:
        """The reservation of each GPU in use, by index of the GPU."""
        holders = [holder for known in list(self._reserved) if (holder := known()) is not None]
        return {gpu: holder for holder in holders for node in holder.gpus for slot in node for gpu in slot}
