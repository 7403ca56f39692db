"""`StagedWeights`: whole tensors in a file that is in memory alone, which other processes of the host can map."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from bandmaster.rl.layout import NBYTES, Spec

if TYPE_CHECKING:
    from torch import Tensor

ALIGNED = 64  # bytes


class StagedWeights(Mapping[str, "Tensor"]):
    """The tensors of one version of an engine's weights by name, in the order in which a checkpoint has them.

    They lie in a memfd, so that nothing is left on the host when the process ends. A tensor is made when it is asked
    for, and must not be written to by engines.

    Attributes:
        sync: Identifies the sync that has brought them.
        path: The file, for processes of the same host and user.
        specs: Shape and dtype of each tensor, by name.
    """

    def __init__(self, sync: int, specs: Mapping[str, Spec], path: str = "") -> None:
        """Make a new file with room for tensors; or map one that another process has made.

        Args:
            sync: Identifies the sync.
            specs: The tensors.
            path: The file of another process; by default, a new one.
        """
        import torch

        self.sync, self.specs = sync, dict(specs)
        self._offsets: dict[str, int] = {}
        end = 0
        for name, (shape, dtype) in specs.items():
            self._offsets[name] = end
            end += -(-prod(shape) * NBYTES[dtype] // ALIGNED) * ALIGNED
        self.nbytes = max(end, ALIGNED)
        if path:
            self.path = path
            self._data = torch.from_file(path, shared=False, size=self.nbytes, dtype=torch.uint8)
            return
        descriptor = os.memfd_create("bandmaster-weights")
        weakref.finalize(self, os.close, descriptor)
        os.ftruncate(descriptor, self.nbytes)
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
        self._data = torch.from_file(self.path, shared=True, size=self.nbytes, dtype=torch.uint8)

    def copy(self, sync: int) -> StagedWeights:
        """Copy the tensors to a new file, for another sync."""
        copied = StagedWeights(sync, self.specs)
        copied._data.copy_(self._data)
        return copied

    def __getitem__(self, name: str) -> Tensor:
        import torch

        shape, dtype = self.specs[name]
        offset, nbytes = self._offsets[name], prod(shape) * NBYTES[dtype]
        return self._data[offset : offset + nbytes].view(getattr(torch, dtype)).view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    @property
    def address(self) -> str:
        """The file and its contents as a text, from which `opened` maps it in another process of the host."""
        return json.dumps([self.sync, self.path, list(self.specs.items())])

    @classmethod
    def opened(cls, address: str) -> StagedWeights:
        """Map the tensors of another process, read-only in effect: what is written stays private."""
        sync, path, specs = json.loads(address)
        return cls(sync, {name: (tuple(shape), dtype) for name, (shape, dtype) in specs}, path)


class Place(NamedTuple):
    """The process that stages the weights of a replica, and its host.

    Attributes:
        host: Names the host, and on it the namespace of processes.
        pid: The process.
    """

    host: str
    pid: int

    @classmethod
    def here(cls) -> Place:
        """This process."""
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return cls(f"{boot}/{os.readlink('/proc/self/ns/pid')}", os.getpid())
