"""The hybrid engine: one set of weights, in the training layout and in the generation layout, on the same ranks.

::

    rank              training: p-d-t              generation: p_g-t_g
    (dp=0, tp=0)      w[0:4]  ──┬─ gathered in ──►  w[0:8]
    (dp=0, tp=1)      w[4:8]  ──┘  a micro-DP  ──►  w[0:8]
                                   group
    (dp=1, tp=0)      w[0:4]  ──┬─────────────────►  w[0:8]
    (dp=1, tp=1)      w[4:8]  ──┘                ──►  w[0:8]

While the generation layout is in use, the training shards lie in it: no byte is held twice. The generation layout gets
new memory each time; a training shard gives its memory up only if it is all of a storage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from bandmaster import UsageError, Worker
from bandmaster.rl.exchange import Pieces, exchange
from bandmaster.rl.interrupts import uninterrupted
from bandmaster.rl.layout import Box
from bandmaster.rl.local_tensors import layout_of_ranks, local_tensor, spec_text, tensor_specs, tensors_of
from bandmaster.rl.meshes import start_torch_distributed
from bandmaster.rl.resharding import Resharding, reshard

if TYPE_CHECKING:
    from torch.nn import Module

BUCKET_NBYTES = 64 << 20


class _Exit:
    """A descriptor that gives each ``with`` block its own ``__exit__`` object, which the block drops however it ends.

    An interrupt may come after the last step of a block and before the first step of ``__exit__``, which then never
    runs. The object leaves the generation layout when it is collected.
    """

    def __get__(self, engine: HybridEngine | None, owner: type[HybridEngine]) -> Callable[..., None]:
        if engine is None:
            return owner._leave
        return engine._leave if engine._is_in_use else _Leave(engine._leave)


class _Leave(partial[None]):
    """Leaves the generation layout when it is called, or else when it is collected."""

    def __del__(self) -> None:
        self()


class HybridEngine:
    """A model in its training layout and in its generation layout, on the same ranks.

    Within ``with engine:`` the generation model has the weights of the training model. They are gathered from the ranks
    that have the rectangles, within the micro-DP group wherever that is enough; by gloo on the CPU, by NCCL on GPUs.
    Tensors that a rank holds alike in both layouts are shared. The memory of the other training shards is freed
    meanwhile, and filled again at the end with the same bits, so that a rank never has an element twice. Only a shard
    that is part of a larger storage keeps its memory: a view of another tensor, or a shard that FSDP2 has padded.
    Parameters, optimizer states and gradients stay the same objects.

    The block takes the tensors that the models have when it is entered: ``parameter.data = ...`` and ``model.to(...)``
    before it are respected. Outside of a block, the parameters of the generation model are empty. An interrupt that
    comes as the block is entered or left is raised when that is done, and the training model has its weights again.

    Collective: all ranks of the group make it, enter it and leave it.

    Args:
        worker: The worker, that is ``self``.
        training: The model to train: with `DTensor` parameters (tensor parallelism, FSDP2), with plain parameters,
            which are equal on all ranks, or a pipeline stage, which has some of the parameters. Its weights stay in
            memory.
        generation: The model that generates, with parameters of the same names and shapes in another layout. It
            gives up its memory until it is used.
        bucket_nbytes: Bytes that a rank sends and receives at a time; it takes about so much more memory for both.

    Attributes:
        plan: The moves between the layouts, printable; see `reshard`.

    Raises:
        MeshError: The models differ in names, shapes or dtypes.
        UsageError: Several ranks share this process, as on backend ``"inprocess"``; or, on entry, a parameter has
            another dtype or shape on this rank than when the engine was made.

    Source: HybridFlow (arXiv 2409.19256), section 5.
    """

    plan: Resharding
    __exit__ = _Exit()

    def __init__(
        self, worker: Worker, training: Module, generation: Module, bucket_nbytes: int = BUCKET_NBYTES
    ) -> None:
        if worker.world_size > 1:
            start_torch_distributed(worker)
        self._rank, self._is_in_use = worker.rank, False
        self._models = training, generation
        source, target = (layout_of_ranks(tensors_of(model), worker.world_size) for model in (training, generation))
        self.plan = reshard(source, target, within=_near(worker))
        self._buckets = self.plan.buckets(bucket_nbytes)
        self._boxes, self._wanted = source.boxes[worker.rank], target.boxes[worker.rank]
        self._shared = {name for name, box in self._wanted.items() if self._boxes.get(name) == box}
        self._freed: set[str] = set()  # names of the tensors whose training memory is freed until `_restore`
        self._bind()
        self._restore()
        training.register_forward_pre_hook(self._check_not_in_use)
        training.register_state_dict_pre_hook(self._check_not_in_use)  # to read freed memory would end the process
        training.register_load_state_dict_pre_hook(self._check_not_in_use)
        generation.register_forward_pre_hook(self._check_in_use)

    @property
    def received_nbytes(self) -> int:
        """Bytes that this rank receives from others each time that the generation layout is entered."""
        return self.plan.received(self._rank)

    def __enter__(self) -> HybridEngine:
        if self._is_in_use:
            raise UsageError("the generation layout is in use; leave its `with` block before entering another")
        try:
            self._bind()
            self._is_in_use = True
            uninterrupted(self._gather)
        except BaseException:  # a rank has failed, or the call was interrupted
            self._leave()
            raise
        return self

    def _leave(self, *_: object) -> None:
        """Return to the training layout if the generation layout is in use. An interrupt is raised after that."""
        interrupt = None
        while self._is_in_use:
            try:
                self._restore()
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _bind(self) -> None:
        """Take the tensors that the models have now."""
        for module in self._models[0].modules():
            if hasattr(module, "reshard"):  # FSDP2 keeps the last parameters that it has gathered
                module.reshard()
        self._training, self._generation = (
            {name: local_tensor(tensor) for name, tensor in tensors_of(model).items()} for model in self._models
        )
        for kind, tensors, layout in (
            ("training", self._training, self.plan.source),
            ("generation", self._generation, self.plan.target),
        ):
            now = tensor_specs(tensors)
            for name, box in layout.boxes[self._rank].items():
                before = box.shape, layout.tensors[name][1]
                if name not in now or (kind == "training" and now[name] != before):
                    raise UsageError(
                        f"tensor {name!r} of the {kind} model is {spec_text(now.get(name))} on this rank, and was "
                        f"{spec_text(before)} when the engine was made; make a new HybridEngine"
                    )
        uses = Counter(tensor.untyped_storage().data_ptr() for tensor in self._training.values())
        self._lent = {name for name, box in self._wanted.items() if self._can_be_lent(name, box, uses)} - self._shared

    def _gather(self) -> None:
        """Fill the generation layout, and free training shards in it, bucket by bucket. Ranks wait for each other."""
        import torch

        for name in self._shared:
            self._generation[name].data = self._training[name].data
        missing = self._wanted.keys() - self._shared
        last = {move.name: index for index, moves in enumerate(self._buckets) for move in moves}
        pieces = Pieces(self._training, self._boxes), Pieces(self._generation, self._wanted)
        for index, moves in enumerate(self._buckets):
            names = {move.name for move in moves}
            for name in names & missing:
                tensor, dtype = self._generation[name], self.plan.target.tensors[name][1]
                tensor.data = tensor.new_empty(self._wanted[name].shape, dtype=getattr(torch, dtype))
            missing -= names
            needed = [move for move in moves if not (move.is_local and move.name in self._shared)]
            exchange(needed, self._rank, *pieces)
            for name in names & self._lent:
                if last[name] == index:
                    self._freed.add(name)
                    self._training[name].untyped_storage().resize_(0)

    def _restore(self) -> None:
        """Give the weights back to the training model. After an interrupt, a second call continues."""
        for name in self._wanted:
            tensor = self._generation[name]
            if name in self._freed:
                shard = self._training[name].detach()
                shard.untyped_storage().resize_(shard.numel() * shard.itemsize)
                shard.copy_(tensor[self._boxes[name].slices(self._wanted[name])])
                self._freed.remove(name)
            tensor.data = tensor.new_empty(0)
        self._is_in_use = False

    def _can_be_lent(self, name: str, wanted: Box, uses: Mapping[int, int]) -> bool:
        """Whether a training shard can be freed: the generation tensor contains it, and no tensor shares its memory."""
        if name not in self._boxes or self._boxes[name] & wanted != self._boxes[name]:
            return False
        tensor = self._training[name]
        storage = tensor.untyped_storage()
        is_all = storage.nbytes() == tensor.numel() * tensor.itemsize
        return is_all and storage.resizable() and uses[storage.data_ptr()] == 1

    def _check_not_in_use(self, *_: object) -> None:
        if self._is_in_use:
            raise UsageError(
                "the weights are in the generation layout; leave the `with` block of the engine to train, save or load"
            )

    def _check_in_use(self, *_: object) -> None:
        if not self._is_in_use:
            raise UsageError("the generation model has no weights outside of `with engine:`; enter it first")


def _near(worker: Worker) -> Sequence[Sequence[int]]:
    """The groups of ranks that prefer to exchange weights among themselves."""
    is_refined = "micro_dp" in worker.mesh.axis_names
    return worker.mesh.groups("micro_dp") if is_refined else [range(worker.world_size)]
