"""Checks of numbers that users pass, which may be NumPy's."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any


def as_whole(value: Any, least: float = -math.inf, most: float = math.inf) -> int | None:
    """Return a whole number as an int; None if it is below ``least``, above ``most``, a bool or no whole number."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        return None
    whole = int(value)
    return whole if least <= whole <= most else None


def as_amount(value: Any) -> float | None:
    """Return a number of 0 or more as an int or float; None if it is negative, nan, a bool or no number."""
    if not isinstance(value, Real) or isinstance(value, bool) or not float(value) >= 0:
        return None
    return value if isinstance(value, int | float) else float(value)
