"""Named axes over the ranks of a group. Pure: works with no process at all."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import product

from bandmaster.errors import MeshError
from bandmaster.plan.render import html_table

__all__ = ["Mesh"]


class Mesh:
    """World ranks laid out over named axes, the first axis slowest.

    An immutable, hashable value. The order is that of ``torch.distributed.init_device_mesh``: in
    ``Mesh(pp=2, dp=2, tp=2)`` the ranks 0 and 1 differ in ``tp``.

    Args:
        **axes: Size of each axis, at least 1, slowest first.

    Raises:
        MeshError: No axis at all, or a size that is not a positive integer.

    Example:
        >>> mesh = Mesh(pp=2, dp=2, tp=2)
        >>> mesh.size, mesh.coordinates(5)
        (8, {'pp': 1, 'dp': 0, 'tp': 1})
        >>> mesh.ranks(pp=-1, tp=0)
        (4, 6)
        >>> mesh.groups("tp")
        ((0, 1), (2, 3), (4, 5), (6, 7))

    Source: HybridFlow (arXiv 2409.19256), sections 4 and 5; ``jax.sharding.Mesh``.
    """

    def __init__(self, **axes: int) -> None:
        if not axes:
            raise MeshError("a mesh needs at least one axis, for example Mesh(dp=8)")
        for name, size in axes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise MeshError(f"axis {name!r} has size {size!r}; a size is an integer of at least 1")
        self._shape = dict(axes)
        self._size = math.prod(axes.values())
        self._set_factors(tuple(axes.items()), {name: (name,) for name in axes}, "")

    def _set_factors(
        self, factors: tuple[tuple[str, int], ...], axes: Mapping[str, tuple[str, ...]], suffix: str
    ) -> None:
        self._factors = dict(factors)  # the smallest axes, slowest first; their product is the mesh
        self._axes = dict(axes)  # every axis by name, as the factors that it is made of
        self._suffix = suffix  # what `refine` added to the repr

    @property
    def size(self) -> int:
        """Number of ranks: the product of the axes given to the constructor."""
        return self._size

    @property
    def shape(self) -> dict[str, int]:
        """The axes given to the constructor and their sizes, slowest first."""
        return dict(self._shape)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Every axis that can be asked for, those made by `refine` last."""
        return tuple(self._axes)

    def axis_size(self, axis: str) -> int:
        """Size of one axis.

        Raises:
            MeshError: The mesh has no such axis.
        """
        return math.prod(self._factors[name] for name in self._parts(axis))

    def refine(self, *, gen_pp: int | None = None, gen_tp: int | None = None) -> Mesh:
        """The same ranks, seen also in a generation layout with smaller model-parallel groups.

        ``tp`` is cut into ``gen_tp`` and ``micro_tp``, ``pp`` into ``gen_pp`` and ``micro_pp``, the micro part
        fastest; ``micro_dp`` joins both micro parts. The training axes stay usable under their own names.

        Args:
            gen_pp: Pipeline stages of a generation replica, a divisor of ``pp``; all of ``pp`` by default.
            gen_tp: Tensor-parallel ranks of a generation replica, a divisor of ``tp``; all of ``tp`` by default.

        Raises:
            MeshError: The mesh has no ``pp`` or ``tp`` to cut, was refined before, has an axis with the name of one
                to be made, or a size does not divide.

        Example:
            >>> mesh = Mesh(pp=1, dp=2, tp=4).refine(gen_pp=1, gen_tp=2)
            >>> mesh.groups("gen_tp")
            ((0, 2), (1, 3), (4, 6), (5, 7))
            >>> mesh.groups("micro_dp")
            ((0, 1), (2, 3), (4, 5), (6, 7))

        Source: HybridFlow's zero-redundancy grouping, arXiv 2409.19256 section 5.
        """
        if self._suffix:
            raise MeshError(f"{self!r} is refined already; refine {Mesh(**self._shape)!r} instead")
        wanted = {"pp": gen_pp, "tp": gen_tp}
        for axis, size in wanted.items():
            if axis not in self._axes and size not in (None, 1):
                raise MeshError(f"gen_{axis}={size} cuts axis {axis!r}, which {self!r} does not have")
        for axis in ("gen_pp", "gen_tp", "micro_pp", "micro_tp", "micro_dp"):
            if axis in self._axes:
                raise MeshError(f"{self!r} has an axis {axis!r} already, which refining would make; rename it")
        factors: list[tuple[str, int]] = []
        axes = dict(self._axes)
        for axis, size in self._factors.items():
            if axis not in wanted:
                factors.append((axis, size))
                continue
            generation = size if wanted[axis] is None else wanted[axis]
            if not isinstance(generation, int) or generation < 1 or size % generation:
                raise MeshError(f"gen_{axis}={generation} does not divide {axis}={size}; choose a divisor of {size}")
            factors += [(f"gen_{axis}", generation), (f"micro_{axis}", size // generation)]
            axes[axis] = (f"gen_{axis}", f"micro_{axis}")
        made = [name for name, _ in factors if name not in axes]
        axes.update({name: (name,) for name in made})
        axes["micro_dp"] = tuple(name for name in made if name.startswith("micro_"))
        refined = Mesh(**self._shape)
        sizes = ", ".join(f"gen_{a}={dict(factors)[f'gen_{a}']}" for a in wanted if a in self._shape)
        refined._set_factors(tuple(factors), axes, f".refine({sizes})")
        return refined

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where ``rank`` lies on every axis.

        Raises:
            MeshError: ``rank`` is not in 0 … size-1.
        """
        if rank not in range(self.size):
            raise MeshError(f"rank {rank} is not on {self!r}, whose ranks are 0 to {self.size - 1}")
        return dict(self._table[rank])

    def ranks(self, **at: int) -> tuple[int, ...]:
        """The ranks at the given coordinates, in rank order; negative ones count from the end of their axis.

        Raises:
            MeshError: An axis that the mesh does not have, or a coordinate outside it.
        """
        fixed = {axis: self._coordinate(axis, index) for axis, index in at.items()}
        return tuple(
            rank for rank, where in enumerate(self._table) if all(where[axis] == i for axis, i in fixed.items())
        )

    def positions(self, *axes: str) -> tuple[int, ...]:
        """For each rank, its number among the coordinates of ``axes`` taken together, the first axis slowest.

        Ranks with equal coordinates on ``axes`` share a number; the numbers run from 0 to the product of
        the sizes minus 1. With no axes every rank has number 0.

        Raises:
            MeshError: An axis that the mesh does not have, or axes that overlap, such as ``tp`` and ``gen_tp``.
        """
        self._factors_of(axes)
        sizes = [(axis, self.axis_size(axis)) for axis in axes]
        numbers = []
        for where in self._table:
            number = 0
            for axis, size in sizes:
                number = number * size + where[axis]
            numbers.append(number)
        return tuple(numbers)

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """The process groups along ``axes``: ranks that differ in nothing else, groups by their first rank.

        Raises:
            MeshError: An axis that the mesh does not have, or axes that overlap, such as ``tp`` and ``gen_tp``.
        """
        along = self._factors_of(axes)
        position = dict(enumerate(self.positions(*axes)))
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, where in enumerate(self._table):
            rest = tuple(where[name] for name in self._factors if name not in along)
            groups.setdefault(rest, []).append(rank)
        return tuple(tuple(sorted(group, key=position.__getitem__)) for group in groups.values())

    def select(self, *axes: str, **at: int) -> tuple[int, ...]:
        """One rank for each coordinate of ``axes``, in their order; other axes are fixed by ``at``, else at 0.

        Raises:
            MeshError: An axis that the mesh does not have, a coordinate outside it, or axes that overlap.

        Example:
            >>> Mesh(pp=2, dp=2, tp=2).select("dp", pp=-1)
            (4, 6)
        """
        said = self._factors_of((*axes, *at))
        silent = {name: 0 for name in self._factors if name not in said}
        return tuple(sorted(self.ranks(**at, **silent), key=self.positions(*axes).__getitem__))

    @cached_property
    def _table(self) -> tuple[dict[str, int], ...]:
        rows = []
        for point in product(*(range(size) for size in self._factors.values())):
            factor = dict(zip(self._factors, point, strict=True))
            row = {}
            for axis, parts in self._axes.items():
                index = 0
                for name in parts:
                    index = index * self._factors[name] + factor[name]
                row[axis] = index
            rows.append(row)
        return tuple(rows)

    def _parts(self, axis: str) -> tuple[str, ...]:
        if axis not in self._axes:
            hint = ""
            if axis in ("pp", "dp", "tp"):
                hint = f"; an axis that is not used has size 1: make the mesh with {axis}=1"
            elif axis.startswith(("gen_", "micro_")):
                hint = "; Mesh(pp=..., dp=..., tp=...).refine(gen_pp=..., gen_tp=...) makes it"
            raise MeshError(f"{self!r} has no axis {axis!r}, only {', '.join(map(repr, self._axes))}{hint}")
        return self._axes[axis]

    def _factors_of(self, axes: Iterable[str]) -> set[str]:
        """The factors of ``axes``, which must have none in common."""
        owner: dict[str, str] = {}
        for axis in axes:
            for name in self._parts(axis):
                if name in owner:
                    raise MeshError(f"axes {owner[name]!r} and {axis!r} of {self!r} overlap; name one of them")
                owner[name] = axis
        return set(owner)

    def _coordinate(self, axis: str, index: int) -> int:
        size = self.axis_size(axis)
        if index not in range(-size, size):
            raise MeshError(f"{axis}={index} is outside axis {axis!r} of size {size} in {self!r}")
        return index % size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and self._key() == other._key()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self._key())

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name not in ("_table", "_hash")}

    def _key(self) -> tuple[object, ...]:
        return tuple(self._factors.items()), tuple(self._axes.items())

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{name}={size}' for name, size in self._shape.items())}){self._suffix}"

    def _repr_html_(self) -> str:
        return html_table(repr(self), ["rank", *self._axes], _rank_rows(self._table))


def _rank_rows(table: Iterable[Mapping[str, int]]) -> list[list[object]]:
    return [[rank, *where.values()] for rank, where in enumerate(table)]
