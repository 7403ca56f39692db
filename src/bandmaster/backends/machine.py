"""What the backends on this machine share: its one node, and who has which of its GPUs."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from itertools import islice

from bandmaster.plan.placement import RESERVING, Node, Request, assign_nodes, cannot_place
from bandmaster.platform.hardware import count_gpus
from bandmaster.platform.locks import check_not_held

__all__ = ["MachineBackend", "Reservation"]


@dataclass(frozen=True, eq=False)
class Reservation:
    """GPUs of this machine, by node of a request and place on it; no GPUs if none were asked for."""

    name: str
    gpus: tuple[tuple[int, ...], ...]


class MachineBackend:
    """CPUs are not counted; GPUs are, and each place has one of its own. Any number of nodes share the machine.

    Any thread may call it. Finalizers may release at any moment, also within `reserve`: so `release` takes no lock.
    """

    def __init__(self) -> None:
        self._reserving = threading.RLock()  # one reservation at a time
        self._holders: dict[int, Reservation] = {}  # by GPU
        self._released: deque[Reservation] = deque()  # whose GPUs are still among those of the holders

    def inventory(self) -> tuple[Node, ...]:
        """This machine as the one node."""
        with self._reserving:
            self._take_back()
            n_gpus, holders = count_gpus(), list(self._holders.values())
        names = tuple(sorted({f"pool {holder.name!r}" for holder in holders}))
        return (Node("this machine", None, None, n_gpus, n_gpus - len(holders), names),)

    def reserve(self, request: Request, timeout_s: float) -> Reservation:
        """Take GPUs, if any are asked for; nothing becomes free while this process waits, so nothing waits."""
        check_not_held(self._reserving, RESERVING)
        with self._reserving:
            nodes = self.inventory()
            if assign_nodes(request, nodes) is None:
                raise cannot_place(request, nodes)
            free = (gpu for gpu in range(count_gpus()) if gpu not in self._holders)
            sizes = [n * request.gpus_per_worker for n in request.workers]
            reservation = Reservation(request.name, tuple(tuple(islice(free, size)) for size in sizes))
            self._holders.update({gpu: reservation for on_node in reservation.gpus for gpu in on_node})
        return reservation

    def release(self, reservation: Reservation) -> None:
        """Give the GPUs back."""
        self._released.append(reservation)

    def _take_back(self) -> None:
        """Forget the GPUs of reservations that were released."""
        while self._released:
            released = self._released.popleft()
            self._holders = {gpu: holder for gpu, holder in self._holders.items() if holder is not released}
