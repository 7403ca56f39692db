"""Encodes the elements of an array that have changed: their values, and the steps from each to the next. Pure numpy.

::

    old     3 3 3 3 3 3 3 3          values   5 9
    new     3 5 3 3 3 3 9 3    ──►   steps    1 4      (stored as the distance less 1, here with 1 byte each)

A step that is too long for its bytes is cut by elements that have not changed, which are sent as they are. So steps of
1 byte pay from about one change in 500 elements on, and those of 2 bytes for fewer changes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]
STEPS = {1: np.uint8, 2: np.uint16, 4: np.uint32}  # by the bytes of a step


class Changes(NamedTuple):
    """The elements of an array that have changed, and some that have not.

    Attributes:
        values: The new elements, in order.
        steps: The distances from each to the next, less 1; the first counts from the place before the array.
    """

    values: Array
    steps: Array

    @property
    def nbytes(self) -> int:
        """Bytes of both arrays."""
        return self.values.nbytes + self.steps.nbytes


def changes(old: Array, new: Array) -> Changes | None:
    """The changes from one array to another; None if the whole new array takes no more bytes.

    Elements are compared by their bits: pass floating point numbers as a view of integers.

    Args:
        old: Integers in one dim.
        new: As many integers of the same dtype.

    Example:
        >>> old, new = np.arange(300, dtype=np.int16), np.arange(300, dtype=np.int16)
        >>> new[299] = 7
        >>> found = changes(old, new)
        >>> found.values.tolist(), found.steps.tolist(), found.steps.dtype.name
        ([7], [299], 'uint16')
    """
    places = np.flatnonzero(old != new)
    distances = np.diff(places, prepend=-1) - 1
    costs = {width: (len(places) + int((distances >> 8 * width).sum())) * (width + new.itemsize) for width in STEPS}
    width = min(costs, key=costs.__getitem__)
    if costs[width] >= new.nbytes:
        return None
    n_between = distances >> 8 * width
    most = (1 << 8 * width) - 1
    steps = np.full(len(places) + int(n_between.sum()), most, STEPS[width])
    steps[np.cumsum(n_between + 1) - 1] = distances & most
    return Changes(new[_places(steps)], steps)


def patch(array: Array, found: Changes) -> None:
    """Make an array with the old elements one with the new ones, in place.

    Raises:
        ValueError: The changes are those of a longer array.
    """
    places = _places(found.steps)
    if len(places) and places[-1] >= len(array):
        raise ValueError(f"changes of an element {places[-1]} do not fit an array of {len(array)} elements")
    array[places] = found.values


def _places(steps: Array) -> Array:
    return np.cumsum(steps.astype(np.int64) + 1) - 1
