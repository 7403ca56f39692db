"""Carries out the moves of a plan in one process group, with one message per bucket and pair of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from bandmaster.host_memory import empty
from bandmaster.rl.layout import Box
from bandmaster.rl.resharding import Move

if TYPE_CHECKING:
    from torch import Tensor


class Pieces(NamedTuple):
    """Local tensors of a rank, and the rectangle of the whole tensor that each of them is, by name."""

    tensors: Mapping[str, Tensor]
    boxes: Mapping[str, Box]

    def piece(self, move: Move) -> Tensor:
        """The part of a local tensor that a move transfers, as a view detached from autograd."""
        return self.tensors[move.name].detach()[move.box.slices(self.boxes[move.name])]


def exchange(moves: Sequence[Move], rank: int, source: Pieces, target: Pieces) -> None:
    """Move pieces between the ranks of the default process group. Collective: all ranks pass the same moves.

    Args:
        moves: The moves, in the same order on all ranks.
        rank: The rank of this process.
        source: The pieces that this rank has.
        target: The pieces that this rank fills.
    """
    import torch.distributed as dist

    outgoing: dict[int, list[Move]] = {}
    incoming: dict[int, list[Move]] = {}
    for move in moves:
        if move.is_local:
            if move.receiver == rank:
                target.piece(move).copy_(source.piece(move))
        elif move.sender == rank:
            outgoing.setdefault(move.receiver, []).append(move)
        elif move.receiver == rank:
            incoming.setdefault(move.sender, []).append(move)
    sent = {peer: pack([source.piece(move) for move in parts]) for peer, parts in outgoing.items()}
    received = {peer: _empty(target, parts) for peer, parts in incoming.items()}
    operations = [dist.P2POp(dist.isend, data, peer) for peer, data in sent.items()]
    operations += [dist.P2POp(dist.irecv, data, peer) for peer, data in received.items()]
    for request in dist.batch_isend_irecv(operations) if operations else ():
        request.wait()
    for peer, parts in incoming.items():
        data = received[peer].split([move.nbytes for move in parts])
        for move, piece in zip(parts, data, strict=True):
            fill(target.piece(move), piece)


def pack(pieces: Sequence[Tensor]) -> Tensor:
    """Concatenate the bytes of tensors of any dtypes: uint8 (bytes,), on the device of the first tensor."""
    import torch

    nbytes, device = [piece.numel() * piece.itemsize for piece in pieces], pieces[0].device
    is_here = device.type == "cpu"
    packed = empty(sum(nbytes)) if is_here else torch.empty(sum(nbytes), dtype=torch.uint8, device=device)
    for place, piece in zip(packed.split(nbytes), pieces, strict=True):
        if place.storage_offset() % piece.itemsize:  # after a piece of another dtype
            place.copy_(bytes_of(piece))
        else:
            place.view(piece.dtype).view(piece.shape).copy_(piece.detach())
    return packed


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's elements, uint8 (bytes,): shared with a contiguous tensor, unless it is a lazy view."""
    import torch

    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def fill(place: Tensor, data: Tensor) -> None:
    """Copy bytes of a piece that `pack` has packed into a tensor of the same dtype and shape."""
    if data.storage_offset() % place.itemsize:  # after a piece of another dtype
        data = data.clone()
    place.copy_(data.view(place.dtype).view(place.shape))


def _empty(target: Pieces, parts: Sequence[Move]) -> Tensor:
    import torch

    device = target.tensors[parts[0].name].device
    return torch.empty(sum(move.nbytes for move in parts), dtype=torch.uint8, device=device)
