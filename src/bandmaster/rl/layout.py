"""Layouts: the rectangles of tensors that each rank holds. Pure; a layout needs neither processes nor torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType

from bandmaster import LayoutError, Mesh
from bandmaster.plan.render import text_table

Spec = tuple[tuple[int, ...], str]  # shape and dtype of a whole tensor

NBYTES = {
    **dict.fromkeys(("bool", "int8", "uint8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}
NOWHERE: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, order=True)
class Box:
    """A rectangle of a tensor.

    Attributes:
        start: Its first index in each dim.
        shape: Its size in each dim; ``()`` for a scalar.

    Example:
        >>> Box((0, 2), (4, 4)) & Box((3, 0), (4, 4))
        Box(start=(3, 2), shape=(1, 2))
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @cached_property
    def stop(self) -> tuple[int, ...]:
        """The first index after the rectangle in each dim."""
        return tuple(start + size for start, size in zip(self.start, self.shape, strict=True))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def __and__(self, other: Box) -> Box | None:
        """The intersection of both rectangles; None if it is empty."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        shape = tuple(b - a for a, b in zip(start, stop, strict=True))
        return Box(start, shape) if all(size > 0 for size in shape) else None

    def without(self, inner: Box) -> list[Box]:
        """Remove a rectangle that lies inside this one. Returns the rest as rectangles that do not overlap."""
        rest, low, high = [], list(self.start), list(self.stop)
        for dim, (start, stop) in enumerate(zip(inner.start, inner.stop, strict=True)):
            for a, b in ((low[dim], start), (stop, high[dim])):
                if a < b:
                    rest.append(_between([*low[:dim], a, *low[dim + 1 :]], [*high[:dim], b, *high[dim + 1 :]]))
            low[dim], high[dim] = start, stop
        return rest

    def slices(self, outer: Box) -> tuple[slice, ...]:
        """The index that selects this rectangle in an array that holds the rectangle ``outer``."""
        starts = [start - origin for start, origin in zip(self.start, outer.start, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.shape, strict=True))

    def cut(self, n_parts: int) -> list[Box]:
        """Cut it into about ``n_parts`` rectangles along its first dim that is longer than 1."""
        dim = next((dim for dim, size in enumerate(self.shape) if size > 1), None)
        if dim is None or n_parts < 2:
            return [self]
        first, step = self.start[dim], -(-self.shape[dim] // n_parts)
        bounds = [*range(first, self.stop[dim], step), self.stop[dim]]
        low, high = list(self.start), list(self.stop)
        return [
            _between([*low[:dim], a, *low[dim + 1 :]], [*high[:dim], b, *high[dim + 1 :]]) for a, b in pairwise(bounds)
        ]

    def __str__(self) -> str:
        return f"[{', '.join(f'{a}:{b}' for a, b in zip(self.start, self.stop, strict=True))}]"


def in_buckets(specs: Mapping[str, Spec], nbytes: int) -> Iterator[list[str]]:
    """Yield the names of tensors, in groups of about so many bytes."""
    names: list[str] = []
    n = 0
    for name, (shape, dtype) in specs.items():
        names.append(name)
        n += math.prod(shape) * NBYTES[dtype]
        if n >= nbytes:
            yield names
            names, n = [], 0
    if names:
        yield names


def _between(start: Sequence[int], stop: Sequence[int]) -> Box:
    return Box(tuple(start), tuple(b - a for a, b in zip(start, stop, strict=True)))


@dataclass(frozen=True)
class Layout:
    """The rectangles of tensors that each rank holds.

    A frozen value. It compares by its contents, and prints as a table.

    Args:
        tensors: Shape and dtype of each whole tensor, by name; dtypes by torch's names, such as ``"bfloat16"``.
        boxes: For each rank, the rectangles that it holds, by name. A rank without a tensor leaves it out, or has an
            empty rectangle.

    Raises:
        LayoutError: A dtype is unknown, or a rectangle is not one of a tensor of that name and shape.

    Example:
        >>> import bandmaster as bm
        >>> from bandmaster import rl
        >>> layout = rl.Layout.split(bm.Mesh(dp=2, tp=2), {"w": ((8, 4), "float32")}, {"w": {0: "tp"}})
        >>> layout.boxes[1]["w"], layout.nbytes(1)
        (Box(start=(4, 0), shape=(4, 4)), 64)
        >>> print(layout)
        1 tensors on 4 ranks, 128 bytes
        tensor  shape   dtype    rectangles by ranks
        w       (8, 4)  float32  [0:4, 0:4] on 0, 2; [4:8, 0:4] on 1, 3

    Source: rectangles as in torch's distributed checkpoint (``torch.distributed.checkpoint.metadata``).
    """

    tensors: Mapping[str, Spec]
    boxes: Sequence[Mapping[str, Box]] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        boxes = tuple({name: box for name, box in held.items() if box.size} for held in self.boxes)
        object.__setattr__(self, "tensors", dict(self.tensors))
        object.__setattr__(self, "boxes", boxes)
        for name, (_, dtype) in self.tensors.items():
            if dtype not in NBYTES:
                raise LayoutError(f"tensor {name!r} has dtype {dtype!r}, which is none of {', '.join(NBYTES)}")
        checked: set[tuple[str, Box]] = set()
        for rank, held in enumerate(boxes):
            for item in held.items():
                if item not in checked:
                    self._check(rank, *item)
                    checked.add(item)

    def _check(self, rank: int, name: str, box: Box) -> None:
        if name not in self.tensors:
            raise LayoutError(
                f"rank {rank} holds a rectangle of {name!r}, but the layout has only {list(self.tensors)}"
            )
        shape = self.tensors[name][0]
        fits = len(box.start) == len(box.shape) == len(shape)
        if not fits or any(a < 0 or b > size for a, b, size in zip(box.start, box.stop, shape, strict=True)):
            raise LayoutError(f"rank {rank} holds {box} of tensor {name!r}, which is outside of its shape {shape}")

    @classmethod
    def split(
        cls,
        mesh: Mesh,
        tensors: Mapping[str, Spec],
        dims: Mapping[str, Mapping[int, str | Sequence[str]]],
        at: Mapping[str, Mapping[str, int]] = MappingProxyType({}),
    ) -> Layout:
        """The layout of tensors that are cut along the axes of a mesh, as by ``torch.chunk``.

        Args:
            mesh: The axes over the ranks.
            tensors: Shape and dtype of each whole tensor, by name.
            dims: By name of a tensor and dim: the axis, or the axes with the slowest first, over which that dim is cut.
                Along other axes ranks hold the same.
            at: By name of a tensor: the coordinates of the ranks that hold it, such as ``{"pp": 1}``; else all do.

        Raises:
            LayoutError: ``dims`` or ``at`` names a tensor or a dim that does not exist, or a dtype is unknown.
            MeshError: The mesh does not have an axis, or axes of a tensor overlap.
        """
        for name in {*dims, *at} - {*tensors}:
            raise LayoutError(f"there is no tensor {name!r}, only {', '.join(map(repr, tensors))}")
        held: list[dict[str, Box]] = [{} for _ in range(mesh.size)]
        for name, (shape, _) in tensors.items():
            boxes = _boxes(mesh, name, shape, dims.get(name, {}))
            for rank in mesh.ranks(**at.get(name, NOWHERE)):
                held[rank][name] = boxes[rank]
        return cls(tensors, held)

    @property
    def n_ranks(self) -> int:
        """Number of ranks."""
        return len(self.boxes)

    def nbytes(self, rank: int) -> int:
        """Bytes that a rank holds."""
        return sum(box.size * self.itemsize(name) for name, box in self.boxes[rank].items())

    def holders(self, name: str) -> dict[Box, list[int]]:
        """The ranks that hold each rectangle of a tensor, ascending, by rectangle."""
        holders: dict[Box, list[int]] = {}
        for rank, held in enumerate(self.boxes):
            if name in held:
                holders.setdefault(held[name], []).append(rank)
        return holders

    def itemsize(self, name: str) -> int:
        """Bytes of an element of a tensor."""
        return NBYTES[self.tensors[name][1]]

    def __str__(self) -> str:
        total = sum(math.prod(shape) * NBYTES[dtype] for shape, dtype in self.tensors.values())
        rows = [[name, shape, dtype, self._placed(name)] for name, (shape, dtype) in self.tensors.items()]
        title = f"{len(self.tensors)} tensors on {self.n_ranks} ranks, {total:,} bytes"
        return text_table(title, ["tensor", "shape", "dtype", "rectangles by ranks"], rows)

    def _placed(self, name: str) -> str:
        found = self.holders(name).items()
        return "; ".join(f"{box} on {', '.join(map(str, ranks))}" for box, ranks in found) or "nowhere"


def _boxes(mesh: Mesh, name: str, shape: Sequence[int], dims: Mapping[int, str | Sequence[str]]) -> list[Box]:
    """The rectangle of each rank of a tensor that is cut over axes."""
    axes = {dim: (over,) if isinstance(over, str) else tuple(over) for dim, over in dims.items()}
    for dim in axes:
        if dim not in range(len(shape)):
            raise LayoutError(f"tensor {name!r} of shape {tuple(shape)} has no dim {dim}; its dims are counted from 0")
    mesh.positions(*(axis for over in axes.values() for axis in over))  # raises if axes overlap
    spans = []
    for dim, size in enumerate(shape):
        over = axes.get(dim, ())
        step = -(-size // math.prod(mesh.axis_size(axis) for axis in over))
        spans.append([(min(place * step, size), min((place + 1) * step, size)) for place in mesh.positions(*over)])
    made: dict[object, Box] = {}  # ranks that hold the same share the value
    rows = list(zip(*spans, strict=True)) if spans else [()] * mesh.size
    for edges in rows:
        if edges not in made:
            made[edges] = _between([edge[0] for edge in edges], [edge[1] for edge in edges])
    return [made[edges] for edges in rows]
