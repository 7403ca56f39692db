"""`LentWeights`: the tensors of a worker where they lie, for readers on the same GPU or in the same process.

::

    lender                                    a reader in the same process
    LentWeights ── pickled, by the ──┬──────► takes the tensors themselves
    (has the       controller        │
     tensors)                        │        a reader in another process on the same GPU
                                     └──────► maps their memory, by torch.multiprocessing

Nothing is copied, so the lender must not change the tensors until all readers have read them.
"""

from __future__ import annotations

import base64
import math
import os
import pickle
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from secrets import randbits
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

from bandmaster import UsageError, Worker
from bandmaster.rl.engine_weights.staged import Place
from bandmaster.rl.layout import Box, Layout, Spec
from bandmaster.rl.local_tensors import own_boxes, tensor_specs

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = "lent:"  # of addresses

_lent_here: WeakValueDictionary[int, LentWeights] = WeakValueDictionary()  # those of this process, by their keys
_exported: dict[tuple[Any, ...], _Export] = {}  # by tensor
_exporting = threading.Lock()


class _Export(NamedTuple):
    """A tensor that other processes can map.

    Attributes:
        storage: Its storage, weakly.
        place: The address and bytes of the memory, which a storage may exchange for others.
        handle: A pickle of what maps it.
    """

    storage: Any
    place: tuple[int, int]
    handle: bytes


class Memory(NamedTuple):
    """The memory that a worker has, or that it reads.

    Attributes:
        place: The host and the process.
        gpus: The GPUs that it sees, as ``CUDA_VISIBLE_DEVICES`` names them; "" without one.
    """

    place: Place
    gpus: str

    @classmethod
    def of(cls, worker: Worker) -> Memory:
        """The memory of this process."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or worker.device
        return cls(Place.here(), "" if worker.device == "cpu" else visible)

    def is_near(self, other: Memory) -> bool:
        """Whether a process with the one memory can read the other without a copy."""
        return self.place == other.place or (self.place.host == other.place.host and self.gpus == other.gpus != "")


class LentWeights(Mapping[str, "Tensor"]):
    """The parts of tensors that one rank has, by the names of the whole tensors.

    It can be pickled. Another process maps a tensor when it is asked for, and unmaps it when the last reference is
    gone; it must not write to it.

    Args:
        sync: Identifies the sync for which they are lent.
        tensors: The parts, where they lie.
        weights: The weights of which they are this rank's parts.
        is_apart: Whether processes read them that are not this one, so that they have to be on a GPU.

    Raises:
        UsageError: Another process reads them, and one is not on a GPU.

    Attributes:
        specs: Shape and dtype of each part, by name.
        whole: Those of the weights.
        boxes: The rectangles that the parts are.
    """

    def __init__(
        self, sync: int, tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor], is_apart: bool = False
    ) -> None:
        self.sync, self._tensors = sync, dict(tensors)
        self.whole, self.boxes = tensor_specs(weights), own_boxes(weights)
        self.specs: dict[str, Spec] = tensor_specs(tensors)
        self._handles = _handles_of(self._tensors) if is_apart else {}
        self._key = randbits(63)
        _lent_here[self._key] = self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tensors": {}}

    def __getitem__(self, name: str) -> Tensor:
        lender = _lent_here.get(self._key)
        if lender is not None:
            return lender._tensors[name]
        shape, dtype = self.specs[name]
        if not math.prod(shape):
            import torch

            return torch.empty(shape, dtype=getattr(torch, dtype))
        rebuild, arguments = pickle.loads(self._handles[name])
        tensor: Tensor = rebuild(*arguments)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    @property
    def address(self) -> str:
        """A text from which `opened` makes the same in another process."""
        return PREFIX + base64.b64encode(pickle.dumps(self)).decode()

    @classmethod
    def opened(cls, address: str) -> LentWeights:
        """Make lent weights from their address."""
        found: LentWeights = pickle.loads(base64.b64decode(address.removeprefix(PREFIX)))
        return found


def lenders(
    given: Layout,
    lend: Sequence[Memory],
    wanted: Sequence[Mapping[str, Box]],
    read: Sequence[Memory],
    names: tuple[str, str],
) -> list[int | None]:
    """The rank that lends to each reader; None for readers that need nothing.

    Args:
        given: The rectangles that each rank has.
        lend: The memory of each rank.
        wanted: The rectangles that each reader needs.
        read: The memory that each reader reads.
        names: The lenders' group, and that of the readers.

    Raises:
        UsageError: A reader is near no rank that has what it needs.
    """
    return [
        _lender(given, lend, boxes, memory, (names[0], f"{reader} of {names[1]}"))
        for reader, (boxes, memory) in enumerate(zip(wanted, read, strict=True))
    ]


def _lender(
    given: Layout, lend: Sequence[Memory], wanted: Mapping[str, Box], memory: Memory, names: tuple[str, str]
) -> int | None:
    needed = {name: box for name, box in wanted.items() if box.size}
    if not needed:
        return None
    near = [rank for rank, other in enumerate(lend) if given.boxes[rank] and memory.is_near(other)]
    lacking = [_lacking(given.boxes[rank], needed) for rank in near]
    for rank, lacks in zip(near, lacking, strict=True):
        if lacks is None:
            return rank
    source, reader = names
    told = f"no rank of {source} is on the GPU or in the process of replica or rank {reader}"
    if near:
        told = f"rank {near[0]} of {source} has {lacking[0]}, all of which replica or rank {reader} needs"
    raise UsageError(
        f"share=True lets a group read weights where they lie, but {told}; have both groups on one pool and weights "
        "cut alike, or leave out share=True, so that weights are copied"
    )


def _lacking(given: Mapping[str, Box], needed: Mapping[str, Box]) -> str | None:
    """The first rectangle that is not whole, as a text; None if all are."""
    for name, box in needed.items():
        own = given.get(name)
        if own is None or own & box != box:
            return f"{own or 'nothing'} of {name!r}, but not {box}"
    return None


def wait_for_copies() -> None:
    """Wait until this process's GPU has done what it was asked to, such as to read what is lent."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _handles_of(tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    """Export tensors, once they are computed. Returns a handle by name."""
    import torch

    shared = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
    for name, tensor in shared.items():
        if not tensor.is_cuda:
            raise UsageError(
                f"{name!r} lies in the memory of this process, and on no GPU, where others could read it; move the "
                "model to the GPU before the sync, or make the rl.WeightSync without share=True"
            )
    for device in {tensor.device for tensor in shared.values()}:
        torch.cuda.synchronize(device)
    with _exporting:
        for key, export in [*_exported.items()]:
            if export.storage.expired():
                del _exported[key]
        return {name: _handle(tensor) for name, tensor in shared.items()}


def _handle(tensor: Tensor) -> bytes:
    """Export a tensor: once, as torch keeps something of each time. Returns a pickle of what maps it elsewhere."""
    from torch.multiprocessing.reductions import StorageWeakRef, reduce_tensor

    storage = tensor.untyped_storage()
    key = (storage._cdata, tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
    place = storage.data_ptr(), storage.nbytes()
    if key not in _exported or _exported[key].place != place:
        _exported[key] = _Export(StorageWeakRef(storage), place, pickle.dumps(reduce_tensor(tensor)))
    return _exported[key].handle
