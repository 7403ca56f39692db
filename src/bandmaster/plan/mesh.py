"""Named axes over the ranks of a worker group. Pure: a mesh needs no processes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property
from typing import NoReturn

import numpy as np

from bandmaster.errors import MeshError
from bandmaster.plan.numbers import as_whole
from bandmaster.plan.render import html_table

RANK = "rank"  # an axis of all ranks, which every mesh has without naming it


class Mesh:
    """The ranks of a worker group, laid out over named axes, the first axis slowest.

    An immutable, hashable value. The order is that of ``torch.distributed.init_device_mesh``: in
    ``Mesh(pp=2, dp=2, tp=2)`` the ranks 0 and 1 differ in ``tp``. Besides its own axes, each mesh has the axis ``rank``
    of all its ranks, for protocols such as ``Split("rank")`` that do not depend on the others.

    Args:
        **axes: Size of each axis, at least 1, slowest first.

    Raises:
        MeshError: There is no axis, or a size is not a positive integer.

    Example:
        >>> mesh = Mesh(pp=2, dp=2, tp=2)
        >>> mesh.size, mesh.coordinates(5)
        (8, {'pp': 1, 'dp': 0, 'tp': 1})
        >>> mesh.ranks(pp=-1, tp=0)
        (4, 6)
        >>> mesh.groups("tp")
        ((0, 1), (2, 3), (4, 5), (6, 7))
        >>> mesh.positions("rank")
        (0, 1, 2, 3, 4, 5, 6, 7)

    Source: HybridFlow (arXiv 2409.19256), sections 4 and 5; ``jax.sharding.Mesh``.
    """

    def __init__(self, /, *unnamed: NoReturn, **axes: int) -> None:
        if unnamed or not axes:
            raise MeshError("a mesh needs at least one axis, each with a name, for example Mesh(dp=8)")
        for name, size in axes.items():
            if (whole := as_whole(size, 1)) is None:
                raise MeshError(f"the size of axis {name!r} must be a positive integer, got {size!r}")
            axes[name] = whole
        self._shape = dict(axes)
        self._size = math.prod(axes.values())
        self._factors = dict(axes)  # the indivisible axes and their sizes, slowest first; their product is the size
        self._axes: dict[str, tuple[str, ...]] = {name: (name,) for name in axes}  # the factors of every axis, by name
        self._is_refined = False
        self._text = f"Mesh({', '.join(f'{name}={size}' for name, size in axes.items())})"  # all that defines it

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
        """Names of all axes; the axes that `refine` adds come last."""
        return tuple(self._axes)

    @property
    def shown_axes(self) -> tuple[str, ...]:
        """Names of the axes with more than one coordinate, which tables and messages show."""
        return tuple(axis for axis in self._axes if self.axis_size(axis) > 1)

    def axis_size(self, axis: str) -> int:
        """Number of coordinates of one axis.

        Raises:
            MeshError: The mesh does not have the axis.
        """
        return math.prod(self._factors[name] for name in self._parts(axis))

    def refine(self, *, gen_pp: int | None = None, gen_tp: int | None = None) -> Mesh:
        """A mesh of the same ranks with additional axes for a generation layout with smaller model-parallel groups.

        Splits ``tp`` into ``gen_tp`` and ``micro_tp``, and ``pp`` into ``gen_pp`` and ``micro_pp``, the micro axis
        fastest; ``micro_dp`` combines both micro axes. The training axes keep their names.

        Args:
            gen_pp: Pipeline stages of a generation replica, a divisor of ``pp``; all of ``pp`` by default.
            gen_tp: Tensor-parallel ranks of a generation replica, a divisor of ``tp``; all of ``tp`` by default.

        Raises:
            MeshError: The mesh does not have the ``pp`` or ``tp`` to split, is refined already, or has an axis with
                one of the new names; or a size does not divide its axis.

        Example:
            >>> mesh = Mesh(pp=1, dp=2, tp=4).refine(gen_pp=1, gen_tp=2)
            >>> mesh.groups("gen_tp")
            ((0, 2), (1, 3), (4, 6), (5, 7))
            >>> mesh.groups("micro_dp")
            ((0, 1), (2, 3), (4, 5), (6, 7))

        Source: HybridFlow's zero-redundancy grouping, arXiv 2409.19256 section 5.
        """
        if self._is_refined:
            raise MeshError(f"{self!r} is already refined; refine {Mesh(**self._shape)!r} instead")
        wanted = {"pp": gen_pp, "tp": gen_tp}
        for axis, size in wanted.items():
            if axis not in self._axes and size not in (None, 1):
                raise MeshError(f"gen_{axis}={size} splits axis {axis!r}, which {self!r} does not have")
        for axis in ("gen_pp", "gen_tp", "micro_pp", "micro_tp", "micro_dp"):
            if axis in self._axes:
                raise MeshError(f"{self!r} already has an axis {axis!r}, which refine() would add; rename that axis")
        refined = Mesh(**self._shape)
        refined._factors = {}
        for axis, size in self._factors.items():
            if axis not in wanted:
                refined._factors[axis] = size
                continue
            generation = size if wanted[axis] is None else as_whole(wanted[axis], 1)
            if generation is None or size % generation:
                raise MeshError(f"gen_{axis}={wanted[axis]} does not divide {axis}={size}; choose a divisor of {size}")
            gen, micro = f"gen_{axis}", f"micro_{axis}"
            refined._factors |= {gen: generation, micro: size // generation}
            refined._axes |= {axis: (gen, micro), gen: (gen,), micro: (micro,)}
        made = [axis for axis in self._shape if axis in wanted]
        refined._axes["micro_dp"] = tuple(f"micro_{axis}" for axis in made)
        sizes = ", ".join(f"gen_{axis}={refined._factors[f'gen_{axis}']}" for axis in made)
        refined._is_refined, refined._text = True, f"{self}.refine({sizes})"
        return refined

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinate of ``rank`` on every axis, by axis name.

        Raises:
            MeshError: ``rank`` is not in 0 … size-1.
        """
        if rank not in range(self.size):
            raise MeshError(f"rank {rank} is not on {self!r}, whose ranks are 0 to {self.size - 1}")
        return dict(self._table[rank])

    def ranks(self, /, **at: int) -> tuple[int, ...]:
        """The ranks at the given coordinates, in rank order; with no coordinates all ranks.

        Args:
            **at: Coordinates by axis; negative coordinates count from the end of their axis.

        Raises:
            MeshError: The mesh does not have an axis, or a coordinate is outside its axis.
        """
        fixed = [(self.positions(axis), self._coordinate(axis, index)) for axis, index in at.items()]
        return tuple(rank for rank in range(self.size) if all(where[rank] == index for where, index in fixed))

    def positions(self, *axes: str) -> tuple[int, ...]:
        """The position of each rank in the product of ``axes``, the first axis slowest.

        Ranks with equal coordinates on ``axes`` have equal positions.

        Returns:
            One position per rank, from 0 to the product of the axis sizes minus 1; 0 for every rank without axes.

        Raises:
            MeshError: The mesh does not have an axis, or axes overlap, such as ``tp`` and ``gen_tp``.
        """
        sizes = tuple(self._factors.values())
        coordinates = dict(zip(self._factors, np.indices(sizes).reshape(len(sizes), self.size), strict=True))
        numbers = np.zeros(self.size, int)
        for name in self._factors_of(axes):
            numbers = numbers * self._factors[name] + coordinates[name]
        return tuple(numbers.tolist())

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """The process groups along ``axes``: the ranks of a group differ only in their coordinates on ``axes``.

        Returns:
            The groups, ordered by their first rank; the ranks of a group in the order of `positions`.

        Raises:
            MeshError: The mesh does not have an axis, or axes overlap, such as ``tp`` and ``gen_tp``.
        """
        along = self._factors_of(axes)
        groups: dict[int, list[int]] = {}
        for rank, rest in enumerate(self.positions(*(name for name in self._factors if name not in along))):
            groups.setdefault(rest, []).append(rank)
        position = self.positions(*axes)
        return tuple(tuple(sorted(group, key=position.__getitem__)) for group in groups.values())

    def select(self, /, *axes: str, **at: int) -> tuple[int, ...]:
        """One rank for each coordinate of ``axes``, in the order of `positions`.

        Args:
            *axes: The axes to iterate over, the first slowest.
            **at: Coordinates on other axes; an axis that is not named is fixed at 0.

        Raises:
            MeshError: The mesh does not have an axis, a coordinate is outside its axis, or axes overlap.

        Example:
            >>> Mesh(pp=2, dp=2, tp=2).select("dp", pp=-1)
            (4, 6)
        """
        said = self._factors_of((*axes, *at))
        silent = {name: 0 for name in self._factors if name not in said}
        return tuple(sorted(self.ranks(**at, **silent), key=self.positions(*axes).__getitem__))

    @cached_property
    def _table(self) -> tuple[dict[str, int], ...]:
        columns = [self.positions(axis) for axis in self._axes]
        return tuple(dict(zip(self._axes, row, strict=True)) for row in zip(*columns, strict=True))

    def _parts(self, axis: str) -> tuple[str, ...]:
        if axis == RANK and axis not in self._axes:
            return tuple(self._factors)
        if axis not in self._axes:
            hint = ""
            if axis in ("pp", "dp", "tp"):
                hint = f"; an axis that is not used has size 1: make the mesh with {axis}=1"
            elif axis.startswith(("gen_", "micro_")):
                hint = "; Mesh(pp=..., dp=..., tp=...).refine(gen_pp=..., gen_tp=...) makes it"
            raise MeshError(f"{self!r} has no axis {axis!r}, only {', '.join(map(repr, self._axes))}{hint}")
        return self._axes[axis]

    def _factors_of(self, axes: Iterable[str]) -> list[str]:
        """The factors of ``axes``, slowest first; MeshError if two of the axes share a factor."""
        owner: dict[str, str] = {}
        for axis in axes:
            for name in self._parts(axis):
                if name in owner:
                    raise MeshError(f"axes {owner[name]!r} and {axis!r} of {self!r} overlap; name one of them")
                owner[name] = axis
        return list(owner)

    def _coordinate(self, axis: str, index: int) -> int:
        size = self.axis_size(axis)
        if index not in range(-size, size):
            raise MeshError(f"{axis}={index} is outside axis {axis!r} of size {size} in {self!r}")
        return index % size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)  # which a string computes once

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_table"}

    def __repr__(self) -> str:
        return self._text

    def _repr_html_(self) -> str:
        rows = [[rank, *(where[axis] for axis in self.shown_axes)] for rank, where in enumerate(self._table)]
        return html_table(repr(self), ["rank", *self.shown_axes], rows)
