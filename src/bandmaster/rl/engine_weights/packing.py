"""`Packed`: the row that a rank sends: pieces of tensors, each whole or as its changes, with a checksum of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from bandmaster import UsageError
from bandmaster.host_memory import empty
from bandmaster.rl.checksums import checksums
from bandmaster.rl.engine_weights.changes import STEPS, Changes, changes, patch
from bandmaster.rl.exchange import bytes_of
from bandmaster.rl.layout import Box

if TYPE_CHECKING:
    from torch import Tensor

Piece = tuple[str, Box]  # name of a tensor, and a rectangle of it
ALIGNED = 8  # bytes; each part of the data begins at a multiple


class Part(NamedTuple):
    """The form in which a piece is sent.

    Attributes:
        checksum: Of its new bytes.
        n_changes: The number of elements that are sent as changes; None if the piece is whole.
        width: The bytes of a step from one change to the next.
    """

    checksum: int
    n_changes: int | None = None
    width: int = 0


class Packed(NamedTuple):
    """The part of a bucket that one rank sends.

    Attributes:
        parts: The form of each piece.
        data: The bytes of all pieces, uint8 (bytes,), on the CPU.
    """

    parts: tuple[Part, ...]
    data: Tensor


def pack_pieces(pieces: Iterable[tuple[Tensor, Tensor | None]]) -> Packed:
    """Pack pieces: as their changes from the tensors that the receivers have, where that takes fewer bytes.

    Args:
        pieces: Contiguous tensors on the CPU, each with the one of the same shape and dtype that the receivers have,
            or None.
    """
    import torch

    given = list(pieces)
    parts: list[Part] = []
    data: list[Tensor] = []
    for (tensor, old), checksum in zip(given, checksums(new for new, _ in given), strict=True):
        found = None if old is None else changes(_integers(old).numpy(), _integers(tensor).numpy())
        if found is None:
            parts.append(Part(checksum))
            data.append(bytes_of(tensor))
        else:
            parts.append(Part(checksum, len(found.values), found.steps.itemsize))
            data += [torch.from_numpy(array.view("uint8")) for array in found]
    padded = [part for one in data for part in (one, one.new_zeros(-len(one) % ALIGNED))]
    together = empty(sum(map(len, padded)))
    return Packed(tuple(parts), torch.cat(padded, out=together) if padded else together)


def unpack_pieces(packed: Packed, pieces: Sequence[Piece], place_of: Callable[[Piece], Tensor]) -> None:
    """Write the pieces of a row to their places, and check them.

    Args:
        packed: The row.
        pieces: The pieces in it.
        place_of: Returns the tensor for a piece; for changes, it has the old elements.

    Raises:
        UsageError: A piece differs from what was sent.
    """
    offset, written = 0, []

    def take(nbytes: int) -> Tensor:
        nonlocal offset
        found, offset = packed.data[offset : offset + nbytes], offset + nbytes + -nbytes % ALIGNED
        return found

    for piece, part in zip(pieces, packed.parts, strict=True):
        place = place_of(piece)
        if part.n_changes is None:
            place.copy_(take(place.numel() * place.itemsize).view(place.dtype).view(place.shape))
            written.append(place.contiguous())
            continue
        patched = place.contiguous()
        integers = _integers(patched).numpy()
        values = take(part.n_changes * integers.itemsize).numpy().view(integers.dtype)
        patch(integers, Changes(values, take(part.n_changes * part.width).numpy().view(STEPS[part.width])))
        if patched.data_ptr() != place.data_ptr():
            place.copy_(patched)
        written.append(patched)
    wrong = [
        piece
        for piece, part, found in zip(pieces, packed.parts, checksums(written), strict=True)
        if part.checksum != found
    ]
    if wrong:
        told = ", ".join(f"{name!r} {box}" for name, box in wrong[:5])
        raise UsageError(
            f"the checksums of {len(wrong)} of {len(pieces)} pieces differ from those of the sender: {told}; the old "
            "weights stay in use. Sync again: a new rl.WeightSync sends all weights"
        )


def _integers(tensor: Tensor) -> Tensor:
    """The elements of a contiguous tensor as integers of the same size, or as pairs of them: (elements,)."""
    import torch

    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
    return bytes_of(tensor).view(kinds[tensor.itemsize])
