"""How long calls may take: as the call says, else its group, else the library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypedDict

from bandmaster.errors import UsageError

__all__ = [
    "CallOptions",
    "FlowOptions",
    "Limits",
    "MethodOptions",
    "check_seconds",
    "default_options",
    "set_default_options",
]


def check_seconds(name: str, value: Any) -> None:
    """Raise if a value is not a duration.

    Args:
        name: Name of the parameter, for the message.
        value: Seconds, or None for no limit.

    Raises:
        UsageError: The value is neither None nor a number of 0 or more.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and value >= 0):  # nan is not
        raise UsageError(f"{name} must be a non-negative number of seconds or None, got {value!r}")


class Limits(TypedDict, total=False):
    """The keywords of `CallOptions`, for type checkers."""

    timeout: float | None
    grace: float | None


class MethodOptions(Limits, total=False):
    """The keywords of `GroupMethod.options`, for type checkers."""

    maxsize: int


@dataclass(frozen=True)
class FlowOptions:
    """How the results of a single call flow; `GroupMethod.options` takes them as keywords.

    Attributes:
        maxsize: How many items of each rank a stream has made before they are taken.
    """

    maxsize: int = 2

    def but(self, changes: Mapping[str, Any]) -> FlowOptions:
        """A copy with some options changed.

        Raises:
            UsageError: A value is invalid.
        """
        for name in ("maxsize",):
            value = changes.get(name, 1)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"{name} must be a whole number of 1 or more, got {value!r}")
        return replace(self, **changes) if changes else self


@dataclass(frozen=True)
class CallOptions:
    """The limits of a call. `GroupMethod.options` and `set_default_options` take them as keywords.

    Attributes:
        timeout: Seconds that a wait for the result may take before `CallTimeout`; None sets no limit.
        grace: Seconds from the interruption of a call, after a cancel or the failure of a rank, until ranks that still
            run it, for example in C code, are ended; None never ends one.
    """

    timeout: float | None = None
    grace: float | None = 5.0

    def but(self, changes: Mapping[str, Any]) -> CallOptions:
        """A copy with some options changed.

        Raises:
            UsageError: An option is unknown, or its value is not a non-negative number or None.
        """
        if not changes:
            return self
        for name, value in changes.items():
            if name not in ("timeout", "grace"):
                flow = [field.name for field in fields(FlowOptions)]
                where = f"; {name} is for group.method.options(...)" if name in flow else ""
                raise UsageError(
                    f"a call has no option {name!r}; its options are timeout and grace, both in seconds{where}"
                )
            check_seconds(name, value)
        known = {"timeout": self.timeout, "grace": self.grace}
        return CallOptions(**{**known, **changes})


class _Library:
    options = CallOptions()


def set_default_options(**options: float | None) -> None:
    """Set the default options of the calls of all groups. The options of a group or of a call take precedence.

    Args:
        **options: ``timeout`` (at first None) and ``grace`` (at first 5), both in seconds; see `CallOptions`.

    Raises:
        UsageError: An option is unknown, or its value is not a non-negative number or None.

    Example:
        >>> set_default_options(timeout=600)
        >>> set_default_options(timeout=None)
    """
    _Library.options = _Library.options.but(options)


def default_options() -> CallOptions:
    """The options of calls about which neither the call nor its group says anything."""
    return _Library.options
