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
import os
import pickle
import threading
from collections.abc import Iterator, Mapping, Sequence
from secrets import randbits
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

from bandmaster import UsageError, Worker
from bandmaster.rl.engine_weights.staged import Place
from bandmaster.rl.layout import Box, Layout, Spec

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = "lent:"  # of addresses

_lent_here: WeakValueDictionary[int, LentWeights] = WeakValueDictionary()  # those of this process, by their keys
_exported: dict[tuple[Any, ...], tuple[Any, bytes]] = {}  # by tensor: its storage, weakly, and how to map it
_exporting = threading.Lock()


class Memory(NamedTuple):
    """The memory that a worker has, or that it reads.

    Attributes:
        place: The host and the process.
        gpu: The entry of ``CUDA_VISIBLE_DEVICES`` for its GPU; "" without one.
    """

    place: Place
    gpu: str

    @classmethod
    def of(cls, worker: Worker) -> Memory:
        """The memory of this process."""
        kind, _, index = worker.device.partition(":")
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        number = int(index or 0)
        return cls(Place.here(), "" if kind == "cpu" else visible[number] if visible[number:] else str(number))

    def is_near(self, other: Memory) -> bool:
        """Whether a process with the one memory can read the other without a copy."""
        return self.place == other.place or (self.place.host == other.place.host and self.gpu == other.gpu != "")


class LentWeights(Mapping[str, "Tensor"]):
    """The parts of tensors that one rank has, by the names of the whole tensors.

    It can be pickled. Another process maps a tensor when it is asked for, and unmaps it when the last reference is
    gone; it must not write to it.

    Args:
        sync: Identifies the sync for which they are lent.
        tensors: The parts, where they lie.
        boxes: The rectangles that they are.

    Attributes:
        specs: Shape and dtype of each part, by name.
    """

    def __init__(self, sync: int, tensors: Mapping[str, Tensor], boxes: Mapping[str, Box]) -> None:
        self.sync, self.boxes, self._tensors = sync, dict(boxes), dict(tensors)
        self.specs: dict[str, Spec] = {
            name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors.items()
        }
        self._handles = _handles_of(self._tensors)
        self._key = randbits(63)
        _lent_here[self._key] = self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tensors": {}}

    def __getitem__(self, name: str) -> Tensor:
        lender = _lent_here.get(self._key)
        if lender is not None:
            return lender._tensors[name]
        if name not in self._handles:
            raise UsageError(
                f"{name!r} lies in the memory of another process, and on no GPU; move the model to the GPU before the "
                "sync, or make the rl.WeightSync without share=True"
            )
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


def _handles_of(tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    """Export the tensors that are on a GPU, once they are computed. Returns a handle by name."""
    on_gpu = {name: tensor for name, tensor in tensors.items() if tensor.is_cuda and tensor.numel()}
    if not on_gpu:
        return {}
    import torch

    torch.cuda.synchronize()
    with _exporting:
        for key, (storage, _) in [*_exported.items()]:
            if storage.expired():
                del _exported[key]
        return {name: _handle(tensor) for name, tensor in on_gpu.items()}


def _handle(tensor: Tensor) -> bytes:
    """Export a tensor: once, as torch keeps something of each time. Returns a pickle of what maps it elsewhere."""
    from torch.multiprocessing.reductions import StorageWeakRef, reduce_tensor

    storage = tensor.untyped_storage()
    key = (storage._cdata, tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
    if key not in _exported:
        _exported[key] = StorageWeakRef(storage), pickle.dumps(reduce_tensor(tensor))
    return _exported[key][1]
