"""Hosts that are taken away, as spot hosts are: the models move to spare hosts, and go on from the last checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engines import EngineOptions
from options import option

import bandmaster as bm

__all__ = ["SpareOptions", "surviving"]


@dataclass
class SpareOptions(EngineOptions):
    """The options of programs that go on when a host is lost."""

    spares: int = option(
        0, "further hosts, reserved for the ranks of lost ones; needs --out and --backend ray", least=0
    )

    def pool(self, n_slots: int) -> bm.ResourcePool:
        """A pool of so many slots, and spare hosts each of which takes the slots of one host."""
        if self.spares and not (self.out and self.backend == "ray"):
            raise SystemExit("--spares needs --backend ray and --out: it goes on from a checkpoint, on another host")
        return bm.ResourcePool(
            self.slots(n_slots),
            backend=self.backend,
            use_gpu=self.gpus,
            spares=[max(self.slots(n_slots))] * self.spares,
        )


def surviving(options: SpareOptions, groups: Sequence[Any], train: Callable[[], None]) -> None:
    """Train; when a host is lost and there are spare hosts, start all models again and resume.

    Args:
        options: The options, whose ``resume`` is set when a host was lost.
        groups: All groups of the program; those with ranks on the lost host move to a spare one as they restart.
        train: Trains from the beginning, or from the last checkpoint if the options say so.

    Raises:
        WorkerDied, RowsLost: More hosts were lost than there were spare ones.
    """
    for n_left in reversed(range(options.spares + 1)):
        try:
            train()
            return
        except (bm.WorkerDied, bm.RowsLost) as loss:  # RowsLost: the host had rows, and no rank of a pending call
            if not n_left:
                raise
            print(f"{str(loss).splitlines()[0]}\ngoing on from the last checkpoint, on a spare host", flush=True)
        for group in groups:
            group.restart()
        options.resume = True
