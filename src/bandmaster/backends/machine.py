"""What the backends on this machine share: its one node, and who has which of its GPUs."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from dataclasses import dataclass
from itertools import islice

from bandmaster.hardware import count_gpus
from bandmaster.placement import Node, Request, assign_nodes, cannot_place

__all__ = ["MachineBackend", "Reservation"]


@dataclass(eq=False)
class Reservation:
    """GPUs of this machine, by node of a request and place on it; no GPUs if none were asked for."""

    name: str
    gpus: tuple[tuple[int, ...], ...] = ()


class MachineBackend:
    """CPUs are not counted; GPUs are, and each place has one of its own. Any number of nodes share the machine.

    Any thread may call it. A signal handler may reserve while its thread does, and a finalizer may release anywhere: so
    the lock is re-entrant, each GPU is claimed in one step, and nothing waits to release.
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
        reservation = Reservation(request.name)
        sizes = [n * request.gpus_per_worker for n in request.workers]
        with self._reserving:
            nodes = self.inventory()
            if assign_nodes(request, nodes) is None:
                raise cannot_place(request, nodes)
            claimed = self._claim(reservation, sum(sizes))
            if len(claimed) < sum(sizes):  # a signal handler was faster
                self.release(reservation)
                raise cannot_place(request, self.inventory())
        free = iter(claimed)
        reservation.gpus = tuple(tuple(islice(free, size)) for size in sizes)
        return reservation

    def release(self, reservation: Reservation) -> None:
        """Give the GPUs back."""
        self._released.append(reservation)

    def _claim(self, reservation: Reservation, n_gpus: int) -> list[int]:
        """GPUs that nobody else has from here on; fewer than asked for if there are not so many."""
        gpus = (gpu for gpu in range(count_gpus()) if self._holders.setdefault(gpu, reservation) is reservation)
        return list(islice(gpus, n_gpus))

    def _take_back(self) -> None:
        """Forget the GPUs of reservations that were released."""
        with contextlib.suppress(IndexError):  # it is empty, at the latest now
            while True:
                reservation = self._released.popleft()
                for gpu, holder in list(self._holders.items()):
                    if holder is reservation:
                        del self._holders[gpu]
