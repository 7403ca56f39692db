"""`PacksWeights`: the methods of the workers whose weights go to engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from bandmaster import Broadcast, Concat, Dispatch, PerRank, TransferProtocol, UsageError, Worker, register
from bandmaster.host_memory import to_host
from bandmaster.rl.checksums import checksums
from bandmaster.rl.engine_weights.packing import Packed, Piece, pack_pieces
from bandmaster.rl.layout import Spec
from bandmaster.rl.lent_weights import LentWeights, Memory
from bandmaster.rl.local_tensors import chosen_weights, local_tensor, own_boxes

if TYPE_CHECKING:
    from torch import Tensor

NO_REPLICAS: Mapping[str, int] = MappingProxyType({})
FROM_RANKS = TransferProtocol(PerRank(), Concat("rank"))
ARGUMENTS: Mapping[str, Broadcast | PerRank] = {
    "specs": Broadcast(),
    "checksums": Broadcast(),
    "replicas": PerRank(),
}
SYNCS: Mapping[str, Broadcast] = {"sync": Broadcast(), "base": Broadcast()}


class PacksWeights(Worker):
    """Methods that `WeightSync` calls to send weights to engines, in the engines' dtypes."""

    _snapshots: Mapping[int, dict[Piece, Tensor]] = MappingProxyType({})  # cast pieces on the CPU, by the sync

    _loans: Mapping[int, LentWeights] = MappingProxyType({})  # by the sync

    def weights(self) -> Mapping[str, Tensor]:
        """The weights by name; see `HoldsWeights.weights`."""
        raise NotImplementedError

    @register(FROM_RANKS)
    def weights_checksums(self, names: Sequence[str]) -> list[dict[str, int]]:
        """Return one row: the checksums of this rank's parts of some weights, by name."""
        weights = self.weights()
        return [dict(zip(names, checksums(local_tensor(weights[name]) for name in names), strict=True))]

    @register(FROM_RANKS, arguments={**ARGUMENTS, **SYNCS})
    def snapshot_weights(
        self,
        outgoing: Sequence[Piece],
        specs: Mapping[str, Spec],
        sync: int,
        base: int | None,
        checksums: Sequence[Mapping[str, int]] = (),
        replicas: Mapping[str, int] = NO_REPLICAS,
    ) -> list[int]:
        """Keep the pieces that this rank sends as they are now, until the next snapshot, and again as a base.

        Args:
            outgoing: All pieces that this rank sends.
            specs: The whole tensors in the dtypes in which to send them, by name.
            sync: Identifies the sync.
            base: The earlier sync whose snapshot is kept as well; others are dropped.
            checksums: For each rank, the checksums of its tensors by name.
            replicas: The first rank that has the same part of a tensor, by the name of the tensor.

        Returns:
            One row, ``sync``.

        Raises:
            UsageError: A tensor's checksum differs from that of the other rank, or its shape from its spec.
        """
        self.check_replicas(checksums, replicas)
        self._snapshots = {number: kept for number, kept in self._snapshots.items() if number == base}
        kept, weights = self._cast(outgoing, specs), self.weights()
        own = {local_tensor(weights[name]).untyped_storage().data_ptr() for name, _ in outgoing}
        snapshot = {
            piece: one.clone() if one.untyped_storage().data_ptr() in own else one for piece, one in kept.items()
        }
        self._snapshots = {**self._snapshots, sync: snapshot}
        return [sync]

    @register(FROM_RANKS, arguments=ARGUMENTS)
    def pack_weights(
        self,
        outgoing: Sequence[Piece],
        specs: Mapping[str, Spec],
        checksums: Sequence[Mapping[str, int]] = (),
        replicas: Mapping[str, int] = NO_REPLICAS,
    ) -> list[Packed]:
        """Return one row: pieces as they are now.

        Args:
            outgoing: The pieces.
            specs: The whole tensors in the dtypes in which to send them, by name.
            checksums: For each rank, the checksums of its tensors by name.
            replicas: The first rank that has the same part of a tensor, by the name of the tensor.

        Raises:
            UsageError: A tensor's checksum differs from that of the other rank, or its shape from its spec.
        """
        self.check_replicas(checksums, replicas)
        return [pack_pieces((tensor, None) for tensor in self._cast(outgoing, specs).values())]

    @register(FROM_RANKS, arguments=SYNCS)
    def pack_snapshot(self, outgoing: Sequence[Piece], sync: int, base: int | None) -> list[Packed]:
        """Return one row: pieces as they were at the snapshot of a sync.

        Args:
            outgoing: The pieces.
            sync: Identifies the sync.
            base: The sync whose pieces the receivers have, so that changes are enough; None sends pieces whole.

        Raises:
            UsageError: This rank does not have the snapshot any more.
        """
        if sync not in self._snapshots:
            raise UsageError(
                f"rank {self.rank} has lost its copy of the weights of this sync, as it was replaced or restarted "
                "since; sync again, which brings the weights as they are now"
            )
        kept, old = self._snapshots[sync], {} if base is None else self._snapshots.get(base, {})
        return [pack_pieces((kept[piece], old.get(piece)) for piece in outgoing)]

    @register(Dispatch.ONE_TO_ALL)
    def weights_memory(self) -> Memory:
        """The memory in which the weights are."""
        return Memory.of(self)

    @register(FROM_RANKS, arguments={**ARGUMENTS, "sync": Broadcast()})
    def lend_weights(
        self,
        names: Sequence[str],
        is_apart: bool,
        specs: Mapping[str, Spec],
        sync: int,
        checksums: Sequence[Mapping[str, int]] = (),
        replicas: Mapping[str, int] = NO_REPLICAS,
    ) -> list[LentWeights]:
        """Return one row: this rank's parts of some weights where they lie, until the end of the loan.

        Args:
            names: The weights.
            is_apart: Whether other processes read them.
            specs: The whole tensors in the dtypes in which to lend them; one of another dtype is lent as a copy.
            sync: Identifies the sync.
            checksums: For each rank, the checksums of its tensors by name.
            replicas: The first rank that has the same part of a tensor, by the name of the tensor.

        Raises:
            UsageError: A tensor's checksum differs from that of the other rank, or its shape from its spec; or another
                process is to read one that is not on a GPU.
        """
        import torch

        self.check_replicas(checksums, replicas)
        weights = chosen_weights(self.weights(), names, specs, is_cast=True)
        parts = {name: local_tensor(one).detach().to(getattr(torch, specs[name][1])) for name, one in weights.items()}
        lent = LentWeights(sync, parts, weights, is_apart)
        self._loans = {**self._loans, sync: lent}
        return [lent]

    @register(Dispatch.ONE_TO_ALL)
    def end_loan(self, sync: int) -> None:
        """Forget what was lent for a sync, which all readers have read."""
        self._loans = {other: lent for other, lent in self._loans.items() if other != sync}

    def check_replicas(self, checksums: Sequence[Mapping[str, int]], replicas: Mapping[str, int]) -> None:
        """Compare the checksums of this rank's weights with those of the ranks that have the same parts.

        Raises:
            UsageError: Some differ.
        """
        differ = [name for name, first in replicas.items() if checksums[self.rank][name] != checksums[first][name]]
        if differ:
            told = [f"{name!r} from that of rank {replicas[name]}{self._at(replicas[name])}" for name in differ[:5]]
            raise UsageError(
                f"{len(differ)} of {len(replicas)} weights of which this rank is a replica differ: {', '.join(told)}"
                f"{', …' if len(differ) > 5 else ''}; a sync would mix them. Give all replicas the same weights, or "
                "allow that by rl.WeightSync(..., is_compared=False)"
            )

    def _at(self, rank: int) -> str:
        """The coordinates of a rank, in brackets."""
        axes = [
            f"{axis}={place}" for axis, place in self.mesh.coordinates(rank).items() if self.mesh.axis_size(axis) > 1
        ]
        return f" ({', '.join(axes)})" if axes else ""

    def _cast(self, outgoing: Sequence[Piece], specs: Mapping[str, Spec]) -> dict[Piece, Tensor]:
        """Pieces of the weights in other dtypes, contiguous, on the CPU; they may share memory with the weights."""
        import torch

        weights = chosen_weights(self.weights(), {name for name, _ in outgoing}, specs, is_cast=True)
        boxes = own_boxes(weights)
        return {
            (name, box): to_host(
                local_tensor(weights[name])
                .detach()[box.slices(boxes[name])]
                .to(getattr(torch, specs[name][1]))
                .contiguous()
            )
            for name, box in outgoing
        }
