"""Time limits and flow options of calls. The limits of a call precede those of its group and of the library."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypedDict

from bandmaster.errors import UsageError
from bandmaster.plan.numbers import as_amount, as_whole


def checked_seconds(name: str, value: Any) -> float | None:
    """Return a duration as an int or float, or None for no limit.

    Args:
        name: Name of the parameter, for the message.
        value: Seconds, or None for no limit.

    Raises:
        UsageError: The value is neither None nor a number of 0 or more.
    """
    seconds = as_amount(value)
    if value is not None and seconds is None:
        raise UsageError(f"{name} must be a non-negative number of seconds or None, got {value!r}")
    return seconds


def check_count(options: object, name: str) -> None:
    """Make an option an int. Raise UsageError if it is neither None nor a whole number of 1 or more."""
    value = getattr(options, name)
    count = as_whole(value, 1)
    if value is not None and count is None:
        raise UsageError(f"{name} must be a whole number of 1 or more, got {value!r}")
    object.__setattr__(options, name, count)  # options are frozen


USUAL = "usual"
WARN, RAISE, RESTART, REPLACE = POLICIES = "warn", "raise", "restart", "replace"
FUNCTION = "a function"  # stands for any, where policies are listed


def check_policy(value: Any) -> None:
    """Raise UsageError for an ``on_stall`` that is no policy."""
    if not (callable(value) or value in POLICIES):
        known = ", ".join(map(repr, POLICIES))
        raise UsageError(f"on_stall must be one of {known}, or a function that takes the Stall, got {value!r}")


class SharedLimits(TypedDict, total=False):
    """The keywords of `CallOptions` that requests have as well, for type checkers."""

    timeout: float | None
    stall_after: float | Literal["usual"] | None
    on_stall: Literal["warn", "raise", "restart", "replace"] | Callable[[Any], object]


class MethodOptions(SharedLimits, total=False):
    """The keywords of `GroupMethod.options`, for type checkers."""

    grace: float | None
    maxsize: int
    on_error: Literal["raise", "return"]


class RequestOptions(SharedLimits, total=False):
    """The keywords of `RequestMethod.options`, for type checkers; see `bandmaster.requests.target`."""

    key: Hashable
    replica: int | None
    spill: int
    maxsize: int
    retries: int
    min_version: int | None


@dataclass(frozen=True)
class FlowOptions:
    """The options of the streams of single calls; `GroupMethod.options` takes them as keywords.

    Attributes:
        maxsize: Most items of each rank, or requests of a map, that a stream has made before they are taken.
        on_error: ``"return"`` returns the errors of failed parts; ``"raise"`` ends the stream with the first.

    Raises:
        UsageError: A value is invalid.
    """

    maxsize: int | None = None
    on_error: str = "raise"

    def __post_init__(self) -> None:
        check_count(self, "maxsize")
        if self.on_error not in ("raise", "return"):
            raise UsageError(f"on_error must be 'raise' or 'return', got {self.on_error!r}")

    def but(self, changes: Mapping[str, Any], is_generator: bool) -> FlowOptions:
        """A copy with some options changed, of a method that may be a generator.

        Raises:
            UsageError: A value is invalid.
        """
        made = replace(self, **changes)
        if made.on_error != "raise" and not is_generator:
            raise UsageError(
                "on_error is about the items of a generator; or register the method with Dispatch.REQUEST, and call "
                f"method.map(rows, on_error={made.on_error!r})"
            )
        return made


FLOW_NAMES = tuple(field.name for field in fields(FlowOptions))


@dataclass(frozen=True)
class CallOptions:
    """The limits of a call. `GroupMethod.options` and `set_default_options` take them as keywords.

    Attributes:
        timeout: Seconds that a wait for the result may take before `CallTimeout`; None sets no limit.
        grace: Seconds from the interruption of a call, after a cancel or the failure of a rank, until the controller
            ends ranks that still run it, for example in C code; None never ends one.
        stall_after: Seconds without progress after which a call is reported as stalled; None never reports it.
            ``"usual"`` is ten times as long as the method was seen to take, at least 30 s and at most 5 min, and 60 s
            before it was seen. See `bandmaster.watching`.
        on_stall: What follows then, beside the notice: ``"warn"``, nothing; ``"raise"``: the call is cancelled, and
            fails with `Stalled`; ``"restart"`` and ``"replace"``: and the group is restarted, or the guilty rank
            replaced; or a function, which gets the `Stall` in a thread of its own.
    """

    timeout: float | None = None
    grace: float | None = 5.0
    stall_after: float | str | None = USUAL
    on_stall: str | Callable[[Any], object] = WARN

    def but(self, changes: Mapping[str, Any]) -> CallOptions:
        """A copy with some options changed.

        Raises:
            UsageError: An option is unknown, or its value is invalid.
        """
        made = dict(changes)
        for name, value in changes.items():
            if name in ("pull", "group_by"):
                raise UsageError(
                    f"{name}= was removed: register the method with Dispatch.REQUEST and call method.map(rows, chunk=n)"
                )
            if name not in CALL_NAMES:
                where = f"; {name} is for group.method.options(...)" if name in FLOW_NAMES else ""
                if not where and name in RequestOptions.__annotations__:
                    where = f"; {name} is for methods that are registered with Dispatch.REQUEST"
                known = " and ".join([", ".join(CALL_NAMES[:-1]), CALL_NAMES[-1]])
                raise UsageError(f"a call has no option {name!r}; its options are {known}{where}")
            if name == "on_stall":
                check_policy(value)
            elif (name, value) != ("stall_after", USUAL):
                made[name] = checked_seconds(name, value)
        return replace(self, **made)


CALL_NAMES = tuple(field.name for field in fields(CallOptions))


class _Library:
    """The options of calls for which neither the call nor its group sets any."""

    options = CallOptions()


library = _Library()


def set_default_options(**options: Any) -> None:
    """Set the default options of the calls of all groups. The options of a group or of a call take precedence.

    Args:
        **options: ``timeout`` (at first None), ``grace`` (at first 5) and ``stall_after`` (at first ``"usual"``), in
            seconds, and ``on_stall`` (at first ``"warn"``); see `CallOptions`.

    Raises:
        UsageError: An option is unknown, or its value is invalid.

    Example:
        >>> set_default_options(timeout=600)
        >>> set_default_options(timeout=None)
    """
    library.options = library.options.but(options)
