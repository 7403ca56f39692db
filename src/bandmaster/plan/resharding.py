"""From one layout of tensors to another: which rank sends which rectangle to which. Pure.

::

    source (tp=2)            moves                      target (3 ranks)
    rank 0: w[0:6]   ──┬── w[0:4]  ────────────────►  rank 0: w[0:4]
                       └── w[4:6]  ──┬─────────────►  rank 1: w[4:8]
    rank 1: w[6:12]  ──┬── w[6:8]  ──┘
                       └── w[8:12] ────────────────►  rank 2: w[8:12]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

from bandmaster.errors import LayoutError, UsageError
from bandmaster.plan.layout import Box, Layout
from bandmaster.plan.render import text_table

__all__ = ["Move", "Resharding", "reshard"]

K = TypeVar("K")
PIECE_NBYTES = 1 << 20  # larger rectangles are cut, if several ranks can send them


class Move(NamedTuple):
    """A rectangle of a tensor that one rank takes from another.

    Attributes:
        name: Name of the tensor.
        box: The rectangle, in the indices of the whole tensor.
        sender: Rank in the source layout.
        receiver: Rank in the target layout.
        nbytes: Its size.
        is_local: Whether sender and receiver are the same worker, so that nothing is sent.
    """

    name: str
    box: Box
    sender: int
    receiver: int
    nbytes: int
    is_local: bool


@dataclass(frozen=True)
class Resharding:
    """What has to move so that ranks that hold one layout fill another; made by `reshard`. Prints as a table.

    Attributes:
        source: What is there.
        target: What is wanted.
        moves: By name of the tensor in the order of the target layout, then rectangle and receiver. Each element that a
            rank wants is in one of them.
    """

    source: Layout
    target: Layout
    moves: tuple[Move, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that are sent from worker to worker."""
        return sum(self._received.values())

    @cached_property
    def minimum_nbytes(self) -> int:
        """Bytes that have to be sent from worker to worker: what each wants and does not hold, once."""
        wanted = sum(self.target.nbytes(rank) for rank in range(self.target.n_ranks))
        return wanted - sum(move.nbytes for move in self.moves if move.is_local)

    def sent(self, rank: int) -> int:
        """Bytes that a rank of the source sends to other workers."""
        return self._sent.get(rank, 0)

    def received(self, rank: int) -> int:
        """Bytes that a rank of the target receives from other workers."""
        return self._received.get(rank, 0)

    @cached_property
    def _sent(self) -> Mapping[int, int]:
        return _sums((move.sender, move.nbytes) for move in self.moves if not move.is_local)

    @cached_property
    def _received(self) -> Mapping[int, int]:
        return _sums((move.receiver, move.nbytes) for move in self.moves if not move.is_local)

    def buckets(self, nbytes: int) -> list[list[Move]]:
        """The moves in order, cut into buckets so that extra memory stays small.

        Args:
            nbytes: What any rank sends, or receives, of a bucket at most; if a row of a tensor has more bytes, that
                makes a bucket of its own.

        Raises:
            UsageError: ``nbytes`` is not positive.
        """
        if nbytes < 1:
            raise UsageError(f"a bucket must have at least 1 byte, got {nbytes}")
        buckets: list[list[Move]] = [[]]
        load: dict[tuple[str, int], int] = {}
        for move in (part for whole in self.moves for part in _cut(whole, nbytes)):
            ends = () if move.is_local else (("from", move.sender), ("to", move.receiver))
            if buckets[-1] and any(load.get(end, 0) + move.nbytes > nbytes for end in ends):
                buckets.append([])
                load = {}
            buckets[-1].append(move)
            for end in ends:
                load[end] = load.get(end, 0) + move.nbytes
        return [bucket for bucket in buckets if bucket]

    def __str__(self) -> str:
        pairs = _sums(((move.sender, move.receiver), move.nbytes) for move in self.moves if not move.is_local)
        receivers = range(self.target.n_ranks)
        rows: list[list[object]] = [
            [f"from {sender}", *(_bytes(pairs.get((sender, to), 0)) for to in receivers), _bytes(self.sent(sender))]
            for sender in range(self.source.n_ranks)
        ]
        rows.append(["received", *(_bytes(self.received(to)) for to in receivers), _bytes(self.nbytes)])
        title = f"{len(self.moves)} moves of {len(self.target.tensors)} tensors, in bytes"
        return text_table(title, ["", *(f"to {to}" for to in receivers), "sent"], rows)


def _bytes(number: int) -> str:
    return f"{number:,}" if number else "-"


def _sums(pairs: Iterable[tuple[K, int]]) -> dict[K, int]:
    sums: dict[K, int] = {}
    for key, number in pairs:
        sums[key] = sums.get(key, 0) + number
    return sums


def reshard(source: Layout, target: Layout, within: Sequence[Sequence[int]] | None = None) -> Resharding:
    """Plan how ranks that hold tensors in one layout fill another layout.

    Every element is sent to each rank that wants it once. If several ranks hold the same rectangle, they share the
    sending, so that all send about equally many bytes.

    Args:
        source: What is there.
        target: What is wanted, of tensors that the source has.
        within: None if source and target are different workers. Else rank r of both is the same worker, and these are
            groups of ranks: a rank takes what it can from itself, then from the ranks of its own group, and the rest
            from any. ``mesh.groups("micro_dp")`` are those of HybridFlow's switch from training to generation;
            ``[range(n)]`` knows no difference.

    Returns:
        The plan.

    Raises:
        LayoutError: A tensor has another shape or dtype in the source, or nobody holds a part of it; or there are
            groups, and the layouts differ in their number of ranks.

    Example:
        >>> import bandmaster as bm
        >>> tensors = {"w": ((12, 4), "float32")}
        >>> train = bm.Layout.split(bm.Mesh(dp=2, tp=2), tensors, {"w": {0: "tp"}})
        >>> print(bm.reshard(train, bm.Layout.split(bm.Mesh(tp=3), tensors, {"w": {0: "tp"}})))
        4 moves of 1 tensors, in bytes
                  to 0  to 1  to 2  sent
        from 0    64    -     -     64
        from 1    -     32    -     32
        from 2    -     32    -     32
        from 3    -     -     64    64
        received  64    64    64    192

    Source: HybridFlow (arXiv 2409.19256), section 5, for ``within``.
    """
    if within is not None and source.n_ranks != target.n_ranks:
        raise LayoutError(
            f"within= says that both layouts are of the same workers, but the source has {source.n_ranks} ranks and "
            f"the target {target.n_ranks}; omit it for different workers"
        )
    planner = _Planner(source, target, within)
    pieces = [piece for name in target.tensors for piece in planner.pieces_of(name)]
    load = [0] * source.n_ranks
    moves: list[tuple[tuple[int, Box, int], Move]] = []
    for piece in sorted(pieces, key=lambda piece: (len(piece.senders), -piece.nbytes)):
        # Equally loaded senders take turns, so that not all receivers begin with the same one.
        sender = min(piece.senders, key=lambda rank: (load[rank], (rank - piece.receiver) % source.n_ranks))
        is_local = within is not None and sender == piece.receiver
        load[sender] += 0 if is_local else piece.nbytes
        move = Move(piece.name, piece.box, sender, piece.receiver, piece.nbytes, is_local)
        moves.append(((planner.order[piece.name], piece.box, piece.receiver), move))
    return Resharding(source, target, tuple(move for _, move in sorted(moves)))


class _Piece(NamedTuple):
    """A rectangle that a rank wants, and who can send it."""

    name: str
    box: Box
    receiver: int
    nbytes: int
    senders: tuple[int, ...]


class _Planner:
    """Finds for every rectangle of the target the rectangles of the source that make it up."""

    def __init__(self, source: Layout, target: Layout, within: Sequence[Sequence[int]] | None) -> None:
        self._source, self._target = source, target
        self._group = None if within is None else {rank: tuple(group) for group in within for rank in group}
        self.order = {name: index for index, name in enumerate(target.tensors)}

    def pieces_of(self, name: str) -> Iterator[_Piece]:
        """The pieces that the ranks want of a tensor."""
        self._check(name)
        holders: dict[Box, list[int]] = {}
        for rank, held in enumerate(self._source.boxes):
            if name in held:
                holders.setdefault(held[name], []).append(rank)
        itemsize, known = self._target.itemsize(name), {}
        for receiver, wanted in enumerate(self._target.boxes):
            if name not in wanted:
                continue
            choices = self._choices(name, receiver, holders)
            key = wanted[name], choices
            if key not in known:
                known[key] = list(self._cover(name, wanted[name], choices))
            for box, senders in known[key]:
                yield _Piece(name, box, receiver, box.size * itemsize, senders)

    def _choices(
        self, name: str, receiver: int, holders: Mapping[Box, Sequence[int]]
    ) -> tuple[tuple[Box, tuple[int, ...]], ...]:
        """What can be taken and from whom, the best first."""
        everywhere = [(box, tuple(ranks)) for box, ranks in holders.items()]
        if self._group is None:
            return tuple(everywhere)
        near = self._group.get(receiver, (receiver,))
        own = [(box, (receiver,)) for box, ranks in everywhere if receiver in ranks]
        from_near = [(box, tuple(rank for rank in ranks if rank in near)) for box, ranks in everywhere]
        return (*own, *((box, ranks) for box, ranks in from_near if ranks), *everywhere)

    def _cover(
        self, name: str, wanted: Box, choices: Iterable[tuple[Box, tuple[int, ...]]]
    ) -> Iterator[tuple[Box, tuple[int, ...]]]:
        """Rectangles that make up ``wanted`` and do not overlap, each with the ranks that can send it."""
        itemsize, missing = self._target.itemsize(name), [wanted]
        for box, senders in choices:
            left = []
            for part in missing:
                common = part & box
                if common is None:
                    left.append(part)
                    continue
                left += part.without(common)
                n_parts = min(len(senders), -(-common.size * itemsize // PIECE_NBYTES))
                yield from ((piece, senders) for piece in common.cut(n_parts))
            missing = left
            if not missing:
                return
        raise LayoutError(f"no rank of the source holds {missing[0]} of tensor {name!r}")

    def _check(self, name: str) -> None:
        spec, known = self._target.tensors[name], self._source.tensors
        if name not in known:
            raise LayoutError(
                f"the target has a tensor {name!r}, which the source does not have; it has "
                f"{', '.join(map(repr, list(known)[:10]))}{' …' if len(known) > 10 else ''}"
            )
        if known[name] != spec:
            raise LayoutError(
                f"tensor {name!r} is {known[name][1]} of shape {known[name][0]} in the source, and {spec[1]} of shape "
                f"{spec[0]} in the target"
            )


def _cut(move: Move, nbytes: int) -> list[Move]:
    """A move in parts of at most ``nbytes``, as far as its first dim allows."""
    if move.nbytes <= nbytes:
        return [move]
    itemsize = move.nbytes // move.box.size
    parts = move.box.cut(-(-move.nbytes // nbytes))
    return [move._replace(box=part, nbytes=part.size * itemsize) for part in parts]
