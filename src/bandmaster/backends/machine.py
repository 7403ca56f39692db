"""What the backends on this machine share: its one node, and who has which of its GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from bandmaster.hardware import count_gpus
from bandmaster.placement import Node, Request, assign_nodes, cannot_place

__all__ = ["MachineBackend", "Reservation"]


@dataclass(frozen=True, eq=False)
class Reservation:
    """GPUs of this machine, by node of a request and place on it; no GPUs if none were asked for."""

    name: str
    gpus: tuple[tuple[int, ...], ...]


class MachineBackend:
    """CPUs are not counted; GPUs are, and each place has one of its own. Any number of nodes share the machine."""

    def __init__(self) -> None:
        self._holders: dict[int, Reservation] = {}  # by GPU

    def inventory(self) -> tuple[Node, ...]:
        """This machine as the one node."""
        n_gpus = count_gpus()
        holders = tuple(sorted({f"pool {holder.name!r}" for holder in self._holders.values()}))
        return (Node("this machine", None, None, n_gpus, n_gpus - len(self._holders), holders),)

    def reserve(self, request: Request, timeout_s: float) -> Reservation:
        """Take GPUs, if any are asked for; nothing becomes free while this process waits, so nothing waits."""
        nodes = self.inventory()
        if assign_nodes(request, nodes) is None:
            raise cannot_place(request, nodes)
        free = (gpu for gpu in range(count_gpus()) if gpu not in self._holders)
        gpus = tuple(tuple(next(free) for _ in range(n * request.gpus_per_worker)) for n in request.workers)
        reservation = Reservation(request.name, gpus)
        self._holders.update({gpu: reservation for on_node in gpus for gpu in on_node})
        return reservation

    def release(self, reservation: Reservation) -> None:
        """Give the GPUs back."""
        self._holders = {gpu: holder for gpu, holder in self._holders.items() if holder is not reservation}
