"""Weights from group to group, from any layout to any layout, directly from worker to worker.

::

    controller: plan = reshard(layout of the source, layout of the target); for each bucket of it:

    source                                                  target
    rank 0 ─ send_weights ─► rows ──┬──► receive_weights: rank 0 stages its pieces, a row from each sender
    rank 1 ─ send_weights ─► rows ──┴──► receive_weights: rank 1
                             (they stay where they are made; the controller passes handles)

                                         switch_weights: all ranks use the staged tensors

Ranks that get the same pieces from a sender read the same row, which is packed once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from bandmaster import Broadcast, Concat, Dispatch, PerRank, Split, TransferProtocol, UsageError, register, report
from bandmaster.host_memory import empty_like, to_host
from bandmaster.rl.engine_weights.packing import Piece
from bandmaster.rl.engine_weights.source import ARGUMENTS, FROM_RANKS, NO_REPLICAS, PacksWeights
from bandmaster.rl.exchange import fill, pack
from bandmaster.rl.layout import Box, Spec
from bandmaster.rl.lent_weights import LentWeights, wait_for_copies
from bandmaster.rl.local_tensors import chosen_weights, local_tensor, own_boxes, refuse_expanded, tensor_specs

if TYPE_CHECKING:
    from torch import Tensor


class _Staged(NamedTuple):
    """The tensors that a receiver has staged in a sync."""

    sync: int
    tensors: dict[str, Tensor]


class HoldsWeights(PacksWeights):
    """Base class of workers whose weights `WeightSync` moves.

    Attributes:
        weights_version: The version of the weights of the last sync; None before the first. If it is a whole number,
            the worker reports it, for requests with ``options(min_version=...)``; see `bandmaster.report`.
    """

    weights_version: Any = None
    _staged: _Staged | None = None

    def weights(self) -> Mapping[str, Tensor]:
        """The weights by name: plain tensors, of which this rank has all, or `DTensor`s, of which it has a part.

        By default the state dict of ``self.model``. Override it to move other tensors; a target may have fewer tensors
        than the source.
        """
        weights: Mapping[str, Tensor] = self.model.state_dict()  # type: ignore[attr-defined]
        return weights

    @register(Dispatch.ONE_TO_ALL)
    def weights_layout(self, receives: bool = False) -> tuple[dict[str, Spec], dict[str, Box]]:
        """Shapes and dtypes of the whole tensors, and the rectangles that this rank has.

        Args:
            receives: Whether the tensors are to be written to.

        Raises:
            UsageError: A tensor that is to be written to is expanded.
        """
        weights = self.weights()
        if receives:
            refuse_expanded(weights)
        return tensor_specs(weights), own_boxes(weights)

    @register(FROM_RANKS, arguments=ARGUMENTS)
    def send_weights(
        self,
        outgoing: Sequence[Sequence[Piece]],
        specs: Mapping[str, Spec],
        checksums: Sequence[Mapping[str, int]] = (),
        replicas: Mapping[str, int] = NO_REPLICAS,
    ) -> list[Tensor]:
        """Return a row for each list of pieces: their bytes, uint8 (bytes,), on the CPU.

        Args:
            outgoing: The pieces of each row.
            specs: The whole tensors of which these are pieces, by name.
            checksums: For each rank, the checksums of its tensors by name.
            replicas: The first rank that has the same part of a tensor, by the name of the tensor.

        Raises:
            UsageError: A tensor's checksum differs from that of the other rank, or its shape or dtype from its spec.
        """
        import torch

        self.check_replicas(checksums, replicas)
        weights, boxes = self._weights_of(outgoing, specs)
        rows, nothing = [], torch.empty(0, dtype=torch.uint8)
        for pieces in outgoing:
            parts = [local_tensor(weights[name])[box.slices(boxes[name])] for name, box in pieces]
            rows.append(to_host(pack(parts)) if parts else nothing)
        return rows

    @register(
        TransferProtocol(Split("rank"), Concat("rank")),
        arguments={"incoming": PerRank(), "specs": Broadcast(), "sync": Broadcast(), "is_first": Broadcast()},
    )
    def receive_weights(
        self,
        rows: list[Tensor],
        incoming: Sequence[Sequence[Piece]],
        specs: Mapping[str, Spec],
        sync: int,
        is_first: bool,
    ) -> list[int]:
        """Stage the pieces that each sender has sent to this rank; the first bucket of a sync discards earlier ones.

        Args:
            rows: One row from each sender.
            incoming: The pieces of each row.
            specs: The whole tensors of which these are pieces, by name.
            sync: Identifies the sync.
            is_first: Whether this is its first bucket.

        Returns:
            One row, ``sync``, which shows that the bucket is staged.

        Raises:
            UsageError: This rank has not staged the earlier buckets of the sync, or a tensor has another shape or dtype
                than its spec.
        """
        if is_first:
            self._staged = _Staged(sync, {})
        staged = self._staged_by(sync)
        weights, boxes = self._weights_of(incoming, specs)
        for row, pieces in zip(rows, incoming, strict=True):
            data = row.split([box.size * weights[name].itemsize for name, box in pieces])
            for (name, box), piece in zip(pieces, data, strict=True):
                if name not in staged:
                    staged[name] = empty_like(local_tensor(weights[name]))
                fill(staged[name][box.slices(boxes[name])], piece)
        return [sync]

    @register(Dispatch.ONE_TO_ALL)
    def switch_weights(self, version: Any, received: Sequence[int]) -> None:
        """Use the staged weights from now on. Ranks without staged weights stay as they are.

        Background tasks of async methods run meanwhile. If they use weights, override this method, and `copy_weights`
        for syncs with ``share=True`` (and register the overrides), and have all hold one `threading.Lock`.

        Args:
            version: The new ``weights_version``.
            received: The rows of all calls of `receive_weights`, by reference: if one fails, this call is not sent.
                Empty if the sync has no buckets.

        Raises:
            UsageError: The staged weights belong to another sync.
        """
        if received:
            self._use_whole(self._staged_by(received[0]), version)

    @register(Dispatch.ONE_TO_ALL, arguments={"lent": PerRank()})
    def copy_weights(self, lent: LentWeights | None, version: Any) -> None:
        """Copy lent weights into those of this rank. Ranks without any stay as they are.

        Args:
            lent: The weights, of which this rank may need a part.
            version: The new ``weights_version``.

        Raises:
            UsageError: A weight has another shape than the lent one.
        """
        if lent is None:
            return
        weights = self.weights()
        boxes = {name: box for name, box in own_boxes(weights).items() if box.size}
        chosen_weights(weights, boxes, lent.whole, is_cast=True)
        parts = {name: lent[name][box.slices(lent.boxes[name])] for name, box in boxes.items()}
        try:
            self._use_whole(parts, version)
        finally:
            wait_for_copies()

    def _use_whole(self, tensors: Mapping[str, Tensor], version: Any) -> None:
        """Copy tensors into the weights in use, all of them also if the call is interrupted."""
        try:
            self._use(tensors, version)
        except KeyboardInterrupt:  # for example, another rank has died: copy all again, so that versions do not mix
            self._use(tensors, version)
            raise

    def _staged_by(self, sync: int) -> dict[str, Tensor]:
        """The tensors that a sync has staged on this rank.

        Raises:
            UsageError: This rank has staged tensors of another sync, or none.
        """
        if self._staged is None or self._staged.sync != sync:
            raise UsageError(
                "this rank does not have the earlier buckets of this sync: another sync to this group has begun since, "
                "or the rank was replaced. It keeps the weights that it uses; sync again, and let one rl.WeightSync to "
                "a group end before the next one begins"
            )
        return self._staged.tensors

    def _use(self, staged: Mapping[str, Tensor], version: Any) -> None:
        """Copy staged weights into the weights in use. Repeating this is safe."""
        weights = self.weights()
        for name, tensor in staged.items():
            local_tensor(weights[name]).detach().copy_(tensor)
        if staged:
            self.weights_version = version
            if type(version) is int:
                report(self, version=version)
        self._staged = None

    def _weights_of(
        self, pieces: Iterable[Iterable[Piece]], specs: Mapping[str, Spec]
    ) -> tuple[dict[str, Tensor], dict[str, Box]]:
        """The tensors to which some pieces belong, and the rectangles of them that this rank has."""
        chosen = chosen_weights(self.weights(), {name for some in pieces for name, _ in some}, specs)
        return chosen, own_boxes(chosen)
