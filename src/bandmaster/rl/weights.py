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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from secrets import randbits
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from bandmaster import (
    Broadcast,
    Concat,
    Dispatch,
    Future,
    PerRank,
    Split,
    TransferProtocol,
    UsageError,
    Worker,
    concat,
    register,
    report,
)
from bandmaster.rl.checksums import checksums
from bandmaster.rl.exchange import fill, pack
from bandmaster.rl.layout import Box, Layout
from bandmaster.rl.local_tensors import local_tensor, own_boxes, specs
from bandmaster.rl.resharding import Move, Resharding, reshard

if TYPE_CHECKING:
    from torch import Tensor

BUCKET_NBYTES = 64 << 20
N_BUCKETS = 2  # in transit at a time
Piece = tuple[str, Box]  # name of a tensor, and a rectangle of it
NO_REPLICAS: Mapping[str, int] = MappingProxyType({})


class _Staged(NamedTuple):
    """The tensors that a receiver has staged in a sync."""

    sync: int
    tensors: dict[str, Tensor]


class HoldsWeights(Worker):
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
    def weights_layout(self) -> tuple[dict[str, tuple[tuple[int, ...], str]], dict[str, Box]]:
        """Shapes and dtypes of the whole tensors, and the rectangles that this rank has."""
        weights = self.weights()
        return specs(weights), own_boxes(weights)

    @register(TransferProtocol(PerRank(), Concat("rank")))
    def weights_checksums(self, names: Sequence[str]) -> list[dict[str, int]]:
        """Return one row: the checksums of this rank's parts of some weights, by name."""
        weights = self.weights()
        return [dict(zip(names, checksums(local_tensor(weights[name]) for name in names), strict=True))]

    @register(TransferProtocol(PerRank(), Concat("rank")), arguments={"checksums": Broadcast(), "replicas": PerRank()})
    def send_weights(
        self,
        outgoing: Sequence[Sequence[Piece]],
        checksums: Sequence[Mapping[str, int]] = (),
        replicas: Mapping[str, int] = NO_REPLICAS,
    ) -> list[Tensor]:
        """Return a row for each list of pieces: their bytes, uint8 (bytes,), on the CPU.

        Args:
            outgoing: The pieces of each row.
            checksums: For each rank, the checksums of its tensors by name.
            replicas: The first rank that has the same part of a tensor, by the name of the tensor.

        Raises:
            UsageError: A tensor's checksum differs from that of the other rank.
        """
        import torch

        differ = [name for name, first in replicas.items() if checksums[self.rank][name] != checksums[first][name]]
        if differ:
            told = [f"{name!r} from that of rank {replicas[name]}{self._at(replicas[name])}" for name in differ[:5]]
            raise UsageError(
                f"{len(differ)} of {len(replicas)} weights of which this rank is a replica differ: {', '.join(told)}"
                f"{', …' if len(differ) > 5 else ''}; a sync would mix them. Give all replicas the same weights, or "
                "allow that by rl.WeightSync(..., is_compared=False)"
            )
        weights, boxes = self._weights_of(outgoing)
        rows, nothing = [], torch.empty(0, dtype=torch.uint8)
        for pieces in outgoing:
            parts = [local_tensor(weights[name])[box.slices(boxes[name])] for name, box in pieces]
            rows.append(pack(parts).cpu() if parts else nothing)
        return rows

    @register(
        TransferProtocol(Split("rank"), Concat("rank")),
        arguments={"incoming": PerRank(), "sync": Broadcast(), "is_first": Broadcast()},
    )
    def receive_weights(
        self, rows: list[Tensor], incoming: Sequence[Sequence[Piece]], sync: int, is_first: bool
    ) -> list[int]:
        """Stage the pieces that each sender has sent to this rank; the first bucket of a sync discards earlier ones.

        Args:
            rows: One row from each sender.
            incoming: The pieces of each row.
            sync: Identifies the sync.
            is_first: Whether this is its first bucket.

        Returns:
            One row, ``sync``, which shows that the bucket is staged.

        Raises:
            UsageError: This rank has not staged the earlier buckets of the sync.
        """
        import torch

        if is_first:
            self._staged = _Staged(sync, {})
        staged = self._staged_by(sync)
        weights, boxes = self._weights_of(incoming)
        for row, pieces in zip(rows, incoming, strict=True):
            data = row.split([box.size * weights[name].itemsize for name, box in pieces])
            for (name, box), piece in zip(pieces, data, strict=True):
                if name not in staged:
                    staged[name] = torch.empty_like(local_tensor(weights[name]), device="cpu")
                fill(staged[name][box.slices(boxes[name])], piece)
        return [sync]

    @register(Dispatch.ONE_TO_ALL)
    def switch_weights(self, version: Any, received: Sequence[int]) -> None:
        """Use the staged weights from now on. Ranks without staged weights stay as they are.

        Background tasks of async methods run meanwhile. If they use weights, override this method (and register the
        override), and have both hold one `threading.Lock`.

        Args:
            version: The new ``weights_version``.
            received: The rows of all calls of `receive_weights`, by reference: if one fails, this call is not sent.
                Empty if the sync has no buckets.

        Raises:
            UsageError: The staged weights belong to another sync.
        """
        if not received:
            return
        staged = self._staged_by(received[0])
        try:
            self._use(staged, version)
        except KeyboardInterrupt:  # for example, another rank has died: copy all again, so that versions do not mix
            self._use(staged, version)
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

    def _at(self, rank: int) -> str:
        """The coordinates of a rank, in brackets."""
        axes = [
            f"{axis}={place}" for axis, place in self.mesh.coordinates(rank).items() if self.mesh.axis_size(axis) > 1
        ]
        return f" ({', '.join(axes)})" if axes else ""

    def _weights_of(self, pieces: Iterable[Iterable[Piece]]) -> tuple[dict[str, Tensor], dict[str, Box]]:
        """The tensors to which some pieces belong, and the rectangles of them that this rank has."""
        weights, names = self.weights(), {name for some in pieces for name, _ in some}
        chosen = {name: weights[name] for name in names}
        return chosen, own_boxes(chosen)


class WeightSync:
    """Moves the weights of one group to another; made once by the controller, and called for each version.

    The constructor asks both groups for their layouts, and `reshard` plans the moves between them.
    The bytes stay on the workers: senders leave them where they are made, and each receiver reads its own there. They
    come in buckets, so that little extra memory is needed: at most two buckets on each sender, and on each receiver its
    own weights once more, as it changes to the new ones in one call: a method runs with all the old weights or with all
    the new ones, also if a worker dies half-way. Receivers keep the staged tensors of a failed sync until the next one.

    Ranks of the source that have the same part of a tensor share the sending, so each sync compares checksums of these
    parts first. If replicas differ, nothing is changed, and the error names rank and tensors. That reads the replicas'
    weights once, about six times as fast as a copy.

    If another thread or controller begins a sync to the same target before one is over, the earlier one fails, and the
    receivers get all weights of the later one. Syncs that are submitted one after the other follow each other.

    If the weights come in several buckets, and another thread has a method change the weights of the source during a
    sync, the receivers may get buckets of both versions.

    Args:
        source: The group that has the weights; its workers are `HoldsWeights`.
        target: The group that gets them; its workers are `HoldsWeights`, too. It may be the source, if ranks are given.
        bucket_nbytes: Bytes that a rank sends or receives at a time.
        from_ranks: The ranks of the source that send; by default all.
        to_ranks: The ranks of the target that receive; by default all. Others keep their weights: a worker that was
            replaced gets them from its peers by ``WeightSync(group, group, from_ranks=[0, 2], to_ranks=[1])``.
        is_compared: Whether to compare replicas of the source. Without, tensors that differ on them come from any.

    Attributes:
        plan: The moves between the groups, printable.

    Raises:
        UsageError: The workers of a group are not `HoldsWeights`; or a rank would both send and receive.
        LayoutError: The target has a tensor that the source does not have, or of another shape or dtype.

    Example:
        >>> import torch, bandmaster as bm
        >>> from bandmaster import rl
        >>> class Policy(rl.HoldsWeights):
        ...     def __init__(self, value):
        ...         self.model = torch.nn.Linear(1, 1, bias=False).requires_grad_(False)
        ...         self.set(value)
        ...     @bm.register(bm.Dispatch.ONE_TO_ALL)
        ...     def set(self, value): torch.nn.init.constant_(self.model.weight, value)
        ...     @bm.register(bm.Dispatch.ONE_TO_ALL)
        ...     def value(self): return float(self.model.weight), self.weights_version
        >>> with bm.ResourcePool([2], backend="inprocess") as a, bm.ResourcePool([1], backend="inprocess") as b:
        ...     trainer, rollout = bm.WorkerGroup(a, Policy, 1.0), bm.WorkerGroup(b, Policy, 0.0)
        ...     sync = rl.WeightSync(trainer, rollout)
        ...     sync(version=7)
        ...     rollout.value()
        [(1.0, 7)]
    """

    plan: Resharding

    def __init__(
        self,
        source: Any,
        target: Any,
        bucket_nbytes: int = BUCKET_NBYTES,
        from_ranks: Iterable[int] | None = None,
        to_ranks: Iterable[int] | None = None,
        is_compared: bool = True,
    ) -> None:
        self._source, self._target = source, target
        given, wanted = _layout(source, from_ranks), _layout(target, to_ranks)
        if source is target:
            both = [r for r, boxes in enumerate(given.boxes) if boxes and wanted.boxes[r]]
            if both:
                raise UsageError(f"ranks {both} of {source.name} would send and receive; give from_ranks and to_ranks")
        self.plan = reshard(given, wanted)
        self._buckets = self.plan.buckets(bucket_nbytes)
        self._replicas = _replicas(self.plan) if is_compared else None

    def __call__(self, version: Any = None) -> None:
        """Move the weights, and wait until they are in use.

        Args:
            version: The receivers' new ``weights_version``.

        Raises:
            WorkerDied: A worker died. The other receivers have the old weights. If it died as the receivers changed to
                the new ones, they have all the new or all the old ones: ``weights_version`` says which.
            Exception: All errors of calls.
        """
        received: list[Future[Any]] = []
        for moved in self._moves():
            received.append(moved)
            if len(received) >= N_BUCKETS:
                received[-N_BUCKETS].result()
        self._switch(version, received).result()

    def submit(self, version: Any = None) -> Future[Any]:
        """Move the weights without waiting: ranks do it after the calls that were submitted before.

        All buckets may be in transit at once, so that the senders' weights are in memory twice until they are received.

        Returns:
            A future that is done when the new weights are in use. If a call fails before the receivers change to the
            new weights, the future has that error, and the receivers have the old weights.
        """
        return self._switch(version, [*self._moves()])

    def _switch(self, version: Any, received: Sequence[Future[Any]]) -> Future[Any]:
        """Submit the call that makes all ranks use the new weights once all buckets have been received."""
        switched: Future[Any] = self._target.switch_weights.submit(version, concat(received) if received else [])
        return switched

    def _moves(self) -> Iterator[Future[Any]]:
        """Begin a new sync: submit one bucket per step of the iteration."""
        sync = randbits(63)
        return (self._move(index, sync) for index in range(len(self._buckets)))

    def _move(self, index: int, sync: int) -> Future[Any]:
        """Submit the calls that send and stage a bucket; with the first one, compare replicas."""
        bucket = _Bucket.of(self.plan, self._buckets[index])
        arguments: list[Any] = [bucket.outgoing]
        if self._replicas and index == 0:
            names, firsts = self._replicas
            arguments += [self._source.weights_checksums.submit(names), firsts]
        rows = self._source.send_weights.submit(*arguments)[bucket.by_receiver]
        received: Future[Any] = self._target.receive_weights.submit(rows, bucket.incoming, sync, index == 0)
        return received


def _layout(group: Any, ranks: Iterable[int] | None) -> Layout:
    """The layout of a group's weights, empty for ranks that do not take part."""
    if not callable(getattr(group, "weights_layout", None)):
        raise UsageError(
            f"the workers of {getattr(group, 'name', group)!r} hold no weights; derive them from rl.HoldsWeights"
        )
    said, chosen = group.weights_layout(), None if ranks is None else {*ranks}
    tensors = {name: spec for specs, _ in said for name, spec in specs.items()}
    return Layout(tensors, [boxes if chosen is None or rank in chosen else {} for rank, (_, boxes) in enumerate(said)])


def _replicas(plan: Resharding) -> tuple[list[list[str]], list[dict[str, int]]] | None:
    """The replicas in the source that a sync compares; None if there are none.

    Returns:
        For each rank the names of the tensors of which it and other ranks have the same part; and for each rank the
        first rank that has the same part, by name of the tensor, if that is another rank.
    """
    ranks = range(plan.source.n_ranks)
    names: list[list[str]] = [[] for _ in ranks]
    firsts: list[dict[str, int]] = [{} for _ in ranks]
    for name in dict.fromkeys(move.name for move in plan.moves):
        for first, *others in plan.source.holders(name).values():
            for rank in others:
                firsts[rank][name] = first
            for rank in [first, *others] if others else ():
                names[rank].append(name)
    return (names, firsts) if any(names) else None


class _Bucket(NamedTuple):
    """The pieces and rows of one bucket.

    Attributes:
        outgoing: By sender, the pieces of each row that it makes.
        incoming: By receiver and sender, the pieces that the receiver gets, which make up a row.
        by_receiver: The numbers of the rows of all senders that the receivers get, one from each sender.
    """

    outgoing: list[list[tuple[Piece, ...]]]
    incoming: list[list[tuple[Piece, ...]]]
    by_receiver: list[int]

    @classmethod
    def of(cls, plan: Resharding, moves: Sequence[Move]) -> _Bucket:
        """Make the bucket of some moves of a plan."""
        senders, receivers = range(plan.source.n_ranks), range(plan.target.n_ranks)
        pieces: dict[tuple[int, int], list[Piece]] = {}
        for move in moves:
            pieces.setdefault((move.receiver, move.sender), []).append((move.name, move.box))
        incoming = [[tuple(pieces.get((r, s), ())) for s in senders] for r in receivers]
        outgoing = [list(dict.fromkeys(of_receiver[s] for of_receiver in incoming)) for s in senders]
        first = list(accumulate(map(len, outgoing), initial=0))
        numbers = [{row: first[s] + i for i, row in enumerate(outgoing[s])} for s in senders]
        return cls(outgoing, incoming, [numbers[s][incoming[r][s]] for r in receivers for s in senders])
