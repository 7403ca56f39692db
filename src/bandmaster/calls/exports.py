"""Exports tensors on the controller's GPUs to workers that have shown that they can open them.

Each worker is asked once for every GPU of the controller, by the copy of a few bytes. No call waits for the answer:
until it is there, and where it is no, tensors travel through host memory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from bandmaster.codec import Payload, cuda_ipc, decode, encode
from bandmaster.contract import Call, Reply, Workers
from bandmaster.platform.reference_queue import ReferenceQueue

__all__ = ["Exporter", "exports_are_on"]

MOST_OF_A_GPU = 1 / 4  # is exported at a time: calls that wait for busy workers leave the user's own work room
SAMPLE_NBYTES = 256
LEAST_NBYTES = 64 * 1024  # of a tensor that is exported


def exports_are_on() -> bool:
    """Whether the environment has ``BANDMASTER_CUDA_IPC=1``. Off by default: it has not run on a GPU yet."""
    return os.environ.get("BANDMASTER_CUDA_IPC") == "1"


class Exporter:
    """Exports copies of tensors.

    Args:
        workers: The workers of a group.
    """

    def __init__(self, workers: Workers) -> None:
        self.workers = workers
        self._trials: dict[tuple[int, int], _Trial] = {}  # by rank and GPU
        self._refused: set[int] = set()  # GPUs whose memory cannot be exported
        self._exported: ReferenceQueue[tuple[int, int]] = ReferenceQueue()  # GPU and bytes of each copy

    def export(self, ranks: Sequence[int], memory: Any) -> cuda_ipc.ExportedTensor | None:
        """Export a copy of flat bytes on a GPU; None if it is not known that all the ranks can open it."""
        device = memory.device.index
        if memory.numel() < LEAST_NBYTES or device in self._refused:
            return None
        try:
            trials = [self._trial(rank, memory.device) for rank in ranks]
            if all(trial.is_passed() for trial in trials) and self._has_room_for(memory):
                return cuda_ipc.export(self._copy(memory))
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
        exported = sum(nbytes for index, nbytes in self._exported.living() if index == device)
        total = sys.modules["torch"].cuda.get_device_properties(device).total_memory
        return bool(exported + memory.numel() <= MOST_OF_A_GPU * total)

    def _copy(self, memory: Any) -> Any:
        copy = memory.clone()
        self._exported.drain()  # only the living are counted
        self._exported.watch(copy, (memory.device.index, copy.numel()))
        return copy

    def _trial(self, rank: int, device: Any) -> _Trial:
        key = rank, device.index
        if key not in self._trials:
            self._trials[key] = _Trial(self.workers, rank, device)
        return self._trials[key]


class _Trial:
    """A worker is asked to open a few bytes on a GPU of the controller, and to read them."""

    def __init__(self, workers: Workers, rank: int, device: Any) -> None:
        torch, sample = sys.modules["torch"], os.urandom(SAMPLE_NBYTES)
        memory = torch.frombuffer(bytearray(sample), dtype=torch.uint8).to(device)
        self._exported: Any = cuda_ipc.export(memory)
        self._workers = workers
        self._is_passed = False
        tickets: dict[int, Any] = {}
        arguments = self._exported.handle, self._exported.offset, sample
        parts = workers.put([encode(tuple(enumerate(arguments)))])
        workers.call([Call((rank,), cuda_ipc.CAN_OPEN, tuple(parts), Reply.RETURN)], tickets)
        self._ticket = tickets[rank]

    def is_passed(self) -> bool:
        """Whether the worker is known to have read the right bytes."""
        if self._exported is not None and self._workers.wait([self._ticket], 0.0):
            reply = self._workers.fetch(self._ticket)
            self._is_passed = isinstance(reply, Payload) and decode(reply) is True
            self._exported = None
        return self._is_passed
