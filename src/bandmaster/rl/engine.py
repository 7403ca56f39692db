"""The hybrid engine: one set of weights, in the layout that trains and in the one that generates, on the same ranks.

::

    rank              training: p-d-t              generation: p_g-t_g
    (dp=0, tp=0)      w[0:4]  ──┬─ gathered in ──►  w[0:8]
    (dp=0, tp=1)      w[4:8]  ──┘  a micro-DP  ──►  w[0:8]
                                   group
    (dp=1, tp=0)      w[0:4]  ──┬─────────────────►  w[0:8]
    (dp=1, tp=1)      w[4:8]  ──┘                ──►  w[0:8]

While the generation layout is in use, the training shards lie in it: no byte is held twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bandmaster import Box, Move, Resharding, UsageError, Worker, reshard
from bandmaster.rl.exchange import Pieces, allocate, exchange
from bandmaster.rl.local_tensors import layout_of_ranks, local_tensor, tensors_of
from bandmaster.rl.meshes import start_torch_distributed

if TYPE_CHECKING:
    from torch.nn import Module

__all__ = ["HybridEngine"]

BUCKET_NBYTES = 64 << 20


class HybridEngine:
    """A model in its training layout and in its generation layout, on the same ranks.

    Within ``with engine:`` the generation model has the weights of the training model. They are gathered from the ranks
    that have the rectangles, within the micro-DP group wherever that is enough; by gloo on the CPU, by NCCL on GPUs.
    Tensors that a rank holds alike in both layouts are shared. The memory of the other training shards is freed
    meanwhile, and filled again at the end with the same bits, so that a rank never has an element twice. Parameters,
    optimizer states and gradients stay the same objects.

    Collective: all ranks of the group make it, enter it and leave it.

    Args:
        worker: The worker, that is ``self``.
        training: The model that is trained: of `DTensor` parameters (tensor parallelism, FSDP2), of plain ones, which
            all ranks have alike, or a pipeline stage, which has some of the parameters. Its weights stay in memory.
        generation: The model that generates, with parameters of the same names and shapes in another layout. It
            gives up its memory until it is used.
        bucket_nbytes: Bytes that a rank sends and receives at a time; it takes about so much more memory for both.

    Attributes:
        plan: What is moved from where to where, printable; see `bandmaster.reshard`.

    Raises:
        MeshError: The models differ in names, shapes or dtypes.
        UsageError: Several ranks share this process, as on backend ``"inprocess"``.

    Source: HybridFlow (arXiv 2409.19256), section 5.
    """

    plan: Resharding

    def __init__(
        self, worker: Worker, training: Module, generation: Module, bucket_nbytes: int = BUCKET_NBYTES
    ) -> None:
        if worker.world_size > 1:
            start_torch_distributed(worker)
        self._rank, self._is_in_use = worker.rank, False
        whole = {"training": tensors_of(training), "generation": tensors_of(generation)}
        source, target = (layout_of_ranks(tensors, worker.world_size) for tensors in whole.values())
        self.plan = reshard(source, target, within=_near(worker))
        self._buckets = self.plan.buckets(bucket_nbytes)
        self._boxes, self._wanted = source.boxes[worker.rank], target.boxes[worker.rank]
        self._training, self._generation = (
            {name: local_tensor(tensor) for name, tensor in tensors.items()} for tensors in whole.values()
        )
        self._modules = list(training.modules())
        self._shared = {name for name, box in self._wanted.items() if self._boxes.get(name) == box}
        self._lent = {name for name, box in self._wanted.items() if self._can_be_lent(name, box)} - self._shared
        for name in self._generation:
            self._give_up(name)
        training.register_forward_pre_hook(self._check_not_in_use)
        generation.register_forward_pre_hook(self._check_in_use)

    @property
    def received_nbytes(self) -> int:
        """Bytes that this rank receives from others each time that the generation layout is entered."""
        return self.plan.received(self._rank)

    def __enter__(self) -> HybridEngine:
        if self._is_in_use:
            raise UsageError("the generation layout is in use; leave its `with` block before entering another")
        self._is_in_use = True
        for module in self._modules:
            if hasattr(module, "reshard"):  # FSDP2 keeps the last parameters that it has gathered
                module.reshard()
        try:
            self._gather()
        except BaseException:  # a rank has failed, or the call was interrupted
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        import torch

        with torch.no_grad():
            for name in self._generation:
                if name in self._lent and not self._training[name].untyped_storage().nbytes():
                    place = self._boxes[name].slices(self._wanted[name])
                    allocate(self._training[name]).copy_(self._generation[name][place])
                self._give_up(name)
        self._is_in_use = False

    def _gather(self) -> None:
        """Fill the generation layout, and free what lies in it, bucket by bucket."""
        import torch

        last = {move.name: index for index, moves in enumerate(self._buckets) for move in moves}
        with torch.no_grad():
            for index, moves in enumerate(self._buckets):
                self._fill(moves)
                for name in {move.name for move in moves} & self._lent:
                    if last[name] == index:
                        self._training[name].untyped_storage().resize_(0)

    def _fill(self, moves: Sequence[Move]) -> None:
        """Move a bucket into the generation layout."""
        pieces = Pieces(self._training, self._boxes), Pieces(self._generation, self._wanted)
        for move in moves:
            if move.receiver == self._rank and move.name not in self._shared:
                allocate(self._generation[move.name])
        needed = [move for move in moves if not (move.is_local and move.name in self._shared)]
        exchange(needed, self._rank, *pieces)

    def _can_be_lent(self, name: str, wanted: Box) -> bool:
        """Whether the memory for training can be freed meanwhile: the other one has it all, and no tensor shares it."""
        if name not in self._boxes or self._boxes[name] & wanted != self._boxes[name]:
            return False
        addresses = [tensor.untyped_storage().data_ptr() for tensor in self._training.values()]
        return addresses.count(self._training[name].untyped_storage().data_ptr()) == 1

    def _give_up(self, name: str) -> None:
        """Free the memory for generation of a tensor, or have it share that for training."""
        if name in self._shared:
            self._generation[name].data = self._training[name].data
        else:
            self._generation[name].untyped_storage().resize_(0)

    def _check_not_in_use(self, *_: object) -> None:
        if self._is_in_use:
            raise UsageError("the weights are in the generation layout; leave the `with` block of the engine to train")

    def _check_in_use(self, *_: object) -> None:
        if not self._is_in_use:
            raise UsageError("the generation model has no weights outside of `with engine:`; enter it first")


def _near(worker: Worker) -> Sequence[Sequence[int]]:
    """The groups of ranks that exchange weights among themselves as far as they can."""
    is_refined = "micro_dp" in worker.mesh.axis_names
    return worker.mesh.groups("micro_dp") if is_refined else [range(worker.world_size)]
