"""Which workers can copy from the controller's GPUs: each is asked once for every GPU, by the copy of a few bytes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from bandmaster.wire import gpu
from bandmaster.wire.lane import INLINE_NBYTES
from bandmaster.wire.traces import Traces

__all__ = ["Lender"]

MOST_OF_A_GPU = 1 / 4  # is lent at a time: calls that wait for busy workers leave the user's own work room
SAMPLE_NBYTES = 256


class Lender:
    """Lends copies of tensors on the controller's GPUs to workers that have shown that they can read them.

    Nobody waits for the answer: until it is there, and where it is no, tensors travel through host memory. So do all of
    them unless the environment says ``BANDMASTER_CUDA_IPC=1``: this has not been tried on a GPU yet.

    Args:
        ask: Sends a worker a trial: ``(rank, loan, what it is to read)``. What it returns says, whenever it is called,
            whether the worker is known to have read that.
    """

    def __init__(self, ask: Callable[[int, gpu.Loan, bytes], Callable[[], bool]]) -> None:
        self._ask = ask
        self._trials: dict[tuple[int, int], Callable[[], bool]] = {}  # by rank and GPU
        self._refused: set[int] = set()  # GPUs whose memory cannot be lent
        self._lent: Traces[tuple[int, int]] = Traces()  # GPU and bytes of each copy
        self._is_on = os.environ.get("BANDMASTER_CUDA_IPC") == "1"

    def lend(self, ranks: Sequence[int], memory: Any) -> gpu.Loan | None:
        """A loan of a copy of flat bytes on a GPU; None if it is not known that all the ranks can read it."""
        if not self._is_on:
            return None
        device = memory.device.index
        if memory.numel() < INLINE_NBYTES or device in self._refused:
            return None
        try:
            trials = [self._trial(rank, memory.device) for rank in ranks]
            if all(can_read() for can_read in trials) and self._has_room_for(memory):
                return gpu.lend(self._copy(memory))
        except OSError:
            self._refused.add(device)
        except sys.modules["torch"].cuda.OutOfMemoryError:
            pass
        return None

    def forget(self, rank: int) -> None:
        """There is a new worker for a rank."""
        self._trials = {key: trial for key, trial in self._trials.items() if key[0] != rank}

    def _has_room_for(self, memory: Any) -> bool:
        device = memory.device.index
        lent = sum(nbytes for index, nbytes in self._lent.living() if index == device)
        total = sys.modules["torch"].cuda.get_device_properties(device).total_memory
        return bool(lent + memory.numel() <= MOST_OF_A_GPU * total)

    def _copy(self, memory: Any) -> Any:
        copy = memory.clone()
        self._lent.take_ended()  # of which nothing is to be known any more
        self._lent.follow(copy, (memory.device.index, copy.numel()))
        return copy

    def _trial(self, rank: int, device: Any) -> Callable[[], bool]:
        key = rank, device.index
        if key not in self._trials:
            torch, sample = sys.modules["torch"], os.urandom(SAMPLE_NBYTES)
            memory = torch.frombuffer(bytearray(sample), dtype=torch.uint8).to(device)
            self._trials[key] = self._ask(rank, gpu.lend(memory), sample)
        return self._trials[key]
