"""`GroupSync`: moves weights from group to group, from any layout to any layout; see `bandmaster.rl.weights`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from secrets import randbits
from typing import Any, NamedTuple

from bandmaster import Future, UsageError, concat
from bandmaster.rl.engine_weights.packing import Piece
from bandmaster.rl.layout import Layout, Spec
from bandmaster.rl.resharding import Move, Resharding, reshard

N_BUCKETS = 2  # in transit at a time


class GroupSync:
    """Moves the weights of one group to another; see `WeightSync`."""

    plan: Resharding

    def __init__(
        self,
        source: Any,
        target: Any,
        bucket_nbytes: int,
        from_ranks: Iterable[int] | None,
        to_ranks: Iterable[int] | None,
        is_compared: bool,
    ) -> None:
        self._source, self._target = source, target
        given, wanted = layout_of(source, from_ranks), layout_of(target, to_ranks, receives=True)
        if source is target:
            refuse_overlap(given, wanted, source.name)
        self.plan = reshard(given, wanted)
        self._buckets = self.plan.buckets(bucket_nbytes)
        self._replicas = replicas_in(self.plan) if is_compared else None

    def run(self, version: Any, in_flight: str | None = None) -> None:
        """Move the weights, and wait until they are in use; see `WeightSync`."""
        refuse_in_flight(in_flight)
        received: list[Future[Any]] = []
        for moved in self._moves():
            received.append(moved)
            if len(received) >= N_BUCKETS:
                received[-N_BUCKETS].result()
        self._switch(version, received).result()

    def submit(self, version: Any, in_flight: str | None = None) -> Future[Any]:
        """Move the weights without waiting; see `WeightSync`."""
        refuse_in_flight(in_flight)
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
        arguments: list[Any] = [bucket.outgoing, bucket.specs]
        if index == 0:
            arguments += compared(self._source, self._replicas)
        rows = self._source.send_weights.submit(*arguments)[bucket.by_receiver]
        received: Future[Any] = self._target.receive_weights.submit(
            rows, bucket.incoming, bucket.specs, sync, index == 0
        )
        return received


def refuse_overlap(given: Layout, wanted: Layout, name: str) -> None:
    """Raise UsageError if a rank of a group would send to its own group, and receive."""
    if both := [rank for rank, boxes in enumerate(given.boxes) if boxes and wanted.boxes[rank]]:
        raise UsageError(f"ranks {both} of {name} would send and receive; give from_ranks and to_ranks")


def refuse_in_flight(in_flight: str | None) -> None:
    """Raise UsageError if it is said what is to become of requests, which models do not have."""
    if in_flight is not None:
        raise UsageError(
            f"in_flight={in_flight!r} is for engines, which run requests; the target is a group of models, whose "
            "ranks change between two calls"
        )


def layout_of(group: Any, ranks: Iterable[int] | None, *, receives: bool = False) -> Layout:
    """The layout of the weights of a group that sends or receives, empty for ranks that do not take part."""
    if not callable(getattr(group, "weights_layout", None)):
        hint = "" if receives else "; WeightSync takes the trainer first"
        raise UsageError(
            f"the workers of {getattr(group, 'name', group)!r} hold no weights; derive them from rl.HoldsWeights{hint}"
        )
    chosen = range(group.world_size) if ranks is None else list(ranks)
    if wrong := [rank for rank in chosen if rank not in range(group.world_size)]:
        raise UsageError(
            f"{group.name} has ranks 0 to {group.world_size - 1}, not {wrong}; from_ranks are those of the source, "
            "to_ranks those of the target"
        )
    if not chosen:
        raise UsageError(
            f"no rank of {group.name} is chosen; name one or more in from_ranks and to_ranks, or leave out"
        )
    said = group.weights_layout(receives=True) if receives else group.weights_layout()
    tensors = {name: spec for specs, _ in said for name, spec in specs.items()}
    return Layout(tensors, [boxes if rank in chosen else {} for rank, (_, boxes) in enumerate(said)])


def replicas_in(plan: Resharding) -> tuple[list[list[str]], list[dict[str, int]]] | None:
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


def compared(source: Any, replicas: tuple[list[list[str]], list[dict[str, int]]] | None) -> list[Any]:
    """The arguments by which the ranks of a source compare the replicas that `replicas_in` has found."""
    if replicas is None:
        return []
    names, firsts = replicas
    return [source.weights_checksums.submit(names), firsts]


class _Bucket(NamedTuple):
    """The pieces and rows of one bucket.

    Attributes:
        outgoing: By sender, the pieces of each row that it makes.
        incoming: By receiver and sender, the pieces that the receiver gets, which make up a row.
        by_receiver: The numbers of the rows of all senders that the receivers get, one from each sender.
        specs: The whole tensors of which these are pieces, by name.
    """

    outgoing: list[list[tuple[Piece, ...]]]
    incoming: list[list[tuple[Piece, ...]]]
    by_receiver: list[int]
    specs: dict[str, Spec]

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
        by_receiver = [numbers[s][incoming[r][s]] for r in receivers for s in senders]
        return cls(outgoing, incoming, by_receiver, {move.name: plan.target.tensors[move.name] for move in moves})
