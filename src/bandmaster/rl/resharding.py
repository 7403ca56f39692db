"""Plans moves from one layout of tensors to another: the sender and receiver of each rectangle. Pure.

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
from itertools import groupby
from typing import NamedTuple, TypeVar

from bandmaster import LayoutError, UsageError
from bandmaster.plan.render import text_table
from bandmaster.rl.layout import Box, Layout

K = TypeVar("K")
_Choices = Sequence[tuple[Box, tuple[int, ...]]]  # rectangles, and the ranks that can send each
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
    """The moves by which ranks that hold one layout fill another; made by `reshard`. Prints as a table.

    Attributes:
        source: The layout of the tensors that exist.
        target: The layout to fill.
        moves: The moves, sorted by tensor in the order of the target layout, then by rectangle, sender and receiver.
            Each element that a rank wants is in one of them.
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
        """Bytes that any plan has to send from worker to worker: the wanted bytes that a worker does not hold, once."""
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
            nbytes: Most bytes that any rank sends, or receives, in a bucket. A row of a tensor with more bytes makes a
                bucket of its own. A rectangle that one rank sends to several is in one bucket, if it fits.

        Raises:
            UsageError: ``nbytes`` is not positive.
        """
        if nbytes < 1:
            raise UsageError(f"a bucket must have at least 1 byte, got {nbytes}")
        buckets: list[list[Move]] = [[]]
        load: dict[tuple[str, int], int] = {}
        for moves in (part for same in _same(self.moves) for part in _cut(same, nbytes)):
            ends = _sums((end, move.nbytes) for move in moves for end in _ends(move))
            for some in [moves] if max(ends.values(), default=0) <= nbytes else [[move] for move in moves]:
                ends = _sums((end, move.nbytes) for move in some for end in _ends(move))
                if buckets[-1] and any(load.get(end, 0) + more > nbytes for end, more in ends.items()):
                    buckets.append([])
                    load = {}
                buckets[-1] += some
                for end, more in ends.items():
                    load[end] = load.get(end, 0) + more
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
    sending, so that all send about equally many bytes. Different workers that want the same rectangle get it from the
    same rank, which then has to read and pack it once.

    Args:
        source: The layout of the tensors that exist.
        target: The layout to fill, of tensors that the source has.
        within: None if source and target are different workers. Else rank r of both is the same worker, and these are
            groups of ranks: a rank takes as much as it can from itself, then from the ranks of its own group, and the
            rest from any rank. HybridFlow's switch from training to generation has ``mesh.groups("micro_dp")``;
            ``[range(n)]`` makes no difference between ranks.

    Returns:
        The plan.

    Raises:
        LayoutError: A tensor has another shape or dtype in the source, or no rank holds a part of it; or there are
            groups, and the layouts differ in their number of ranks.

    Example:
        >>> import bandmaster as bm
        >>> from bandmaster import rl
        >>> tensors = {"w": ((12, 4), "float32")}
        >>> train = rl.Layout.split(bm.Mesh(dp=2, tp=2), tensors, {"w": {0: "tp"}})
        >>> print(rl.reshard(train, rl.Layout.split(bm.Mesh(tp=3), tensors, {"w": {0: "tp"}})))
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
    load, n_senders = [0] * source.n_ranks, source.n_ranks
    moves: list[Move] = []
    for piece in sorted(planner.pieces(), key=lambda piece: (len(piece.senders), -piece.nbytes * len(piece.receivers))):
        # Equally loaded senders take turns, so that not all receivers begin with the same one.
        first, least = piece.receivers[0], min([load[rank] for rank in piece.senders])
        sender = min((rank - first) % n_senders for rank in piece.senders if load[rank] == least)
        sender = (sender + first) % n_senders
        for receiver in piece.receivers:
            is_local = within is not None and sender == receiver
            load[sender] += 0 if is_local else piece.nbytes
            moves.append(Move(piece.name, piece.box, sender, receiver, piece.nbytes, is_local))
    order = {name: index for index, name in enumerate(target.tensors)}
    moves.sort(key=lambda move: (order[move.name], move.box.start, move.box.shape, move.sender, move.receiver))
    return Resharding(source, target, tuple(moves))


class _Piece(NamedTuple):
    """A rectangle that some ranks get from the same sender, and the ranks that can send it."""

    name: str
    box: Box
    nbytes: int
    senders: tuple[int, ...]
    receivers: tuple[int, ...]


class _Planner:
    """Finds for every rectangle of the target the rectangles of the source that make it up."""

    def __init__(self, source: Layout, target: Layout, within: Sequence[Sequence[int]] | None) -> None:
        self._source, self._target = source, target
        self._group = None if within is None else {rank: tuple(group) for group in within for rank in group}
        self._covers: dict[object, list[tuple[Box, int]]] = {}

    def pieces(self) -> Iterator[_Piece]:
        """Yield the pieces that make up the target layout."""
        for name in self._target.tensors:
            self._check(name)
            everywhere = [(box, tuple(ranks)) for box, ranks in self._source.holders(name).items()]
            itemsize, near = self._target.itemsize(name), self._near(everywhere)
            for wanted, receivers in self._target.holders(name).items():
                for some in [receivers] if self._group is None else [[receiver] for receiver in receivers]:
                    choices = self._choices(name, some[0], everywhere, near)
                    for box, index in self._cover(name, wanted, choices):
                        yield _Piece(name, box, box.size * itemsize, choices[index][1], tuple(some))

    def _near(self, everywhere: _Choices) -> dict[tuple[int, ...], _Choices]:
        """The rectangles that the ranks of each group hold, with their holders in the group."""
        found: dict[tuple[int, ...], _Choices] = {}
        for group in set(self._group.values()) if self._group else ():
            in_group = [(box, tuple(rank for rank in ranks if rank in group)) for box, ranks in everywhere]
            found[group] = [(box, ranks) for box, ranks in in_group if ranks]
        return found

    def _choices(
        self, name: str, receiver: int, everywhere: _Choices, near: Mapping[tuple[int, ...], _Choices]
    ) -> _Choices:
        """The rectangles that a rank can receive, each with the ranks that can send it; the best choice first."""
        if self._group is None:
            return everywhere
        held = self._source.boxes[receiver]
        own = [(held[name], (receiver,))] if name in held else []
        return [*own, *near.get(self._group.get(receiver, ()), ()), *everywhere]

    def _cover(self, name: str, wanted: Box, choices: _Choices) -> list[tuple[Box, int]]:
        """Rectangles that make up ``wanted`` and do not overlap, each with the number of the choice that has it."""
        itemsize = self._target.itemsize(name)
        key = wanted, itemsize, tuple((box, len(senders)) for box, senders in choices)
        if key in self._covers:  # by other ranks, or of a tensor that is cut in the same way
            return self._covers[key]
        cover: list[tuple[Box, int]] = []
        missing = [wanted]
        for index, (box, senders) in enumerate(choices):
            left = []
            for part in missing:
                common = part & box
                if common is None:
                    left.append(part)
                    continue
                left += part.without(common)
                n_parts = min(len(senders), -(-common.size * itemsize // PIECE_NBYTES))
                cover += [(piece, index) for piece in common.cut(n_parts)]
            missing = left
            if not missing:
                self._covers[key] = cover
                return cover
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


def _same(moves: Iterable[Move]) -> Iterator[list[Move]]:
    """Group the moves of the same rectangle from the same sender."""
    for _, same in groupby(moves, key=lambda move: (move.name, move.box, move.sender)):
        yield list(same)


def _ends(move: Move) -> tuple[tuple[str, int], ...]:
    return () if move.is_local else (("from", move.sender), ("to", move.receiver))


def _cut(moves: list[Move], nbytes: int) -> list[list[Move]]:
    """Cut moves of the same rectangle into parts of at most ``nbytes``, if its rows are small enough."""
    first = moves[0]
    if first.nbytes <= nbytes:
        return [moves]
    itemsize = first.nbytes // first.box.size
    n_rows = next((size for size in first.box.shape if size > 1), 1)
    rows_per_part = max(1, nbytes * n_rows // first.nbytes)
    parts = first.box.cut(-(-n_rows // rows_per_part))
    return [[move._replace(box=part, nbytes=part.size * itemsize) for move in moves] for part in parts]
