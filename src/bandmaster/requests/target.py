"""`Target`: the options of requests, but for their time limit: where one goes, how often, and how far ahead."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from bandmaster.calls.options import SharedLimits
from bandmaster.errors import UsageError

LIMITS = tuple(SharedLimits.__annotations__)  # the options that requests share with other calls; see `CallOptions`


@dataclass(frozen=True)
class Target:
    """The choice of the replica of a request, and the limits of what it makes there.

    Attributes:
        key: Requests with equal keys go to one replica, as long as it is not much busier than others; None for no key.
        replica: The number of the replica; None for the one with the fewest open requests.
        spill: How many open requests more than the least busy one the replica of a key may have.
        maxsize: Most items of a stream that are made before they are taken.
        retries: How often it is sent again because its replica has died.
        min_version: The version of its weights that the replica must have reported at least; None for any, or none.
        is_all: Whether all replicas get it, whether or not they have a place for it.
    """

    key: Hashable = None
    replica: int | None = None
    spill: int = 16
    maxsize: int = 16
    retries: int = 0
    min_version: int | None = None
    is_all: bool = False

    def but(self, changes: Mapping[str, Any], n_replicas: int) -> Target:
        """A copy with some options changed.

        Raises:
            UsageError: An option is unknown, or its value is invalid.
        """
        names = [*LIMITS, *(field.name for field in fields(self) if field.name != "is_all")]
        unknown = [name for name in changes if name not in names]
        if unknown:
            listed = f"{', '.join(names[:-1])} and {names[-1]}"
            raise UsageError(f"a request has no option {unknown[0]!r}; its options are {listed}")
        made = replace(self, **changes)
        if made.replica is not None:
            up_to = f"from 0 to {n_replicas - 1}, as there are {n_replicas} replicas"
            _check("replica", made.replica, 0, up_to, n_replicas - 1)
        for name, least in (("spill", 0), ("maxsize", 1), ("retries", 0)):
            _check(name, getattr(made, name), least, f"of {least} or more")
        if made.min_version is not None:
            _check("min_version", made.min_version, -float("inf"), "or None")
        if made.retries and made.replica is not None:
            raise UsageError(
                f"retries={made.retries} sends a request to another replica, but replica={made.replica} allows one; "
                "leave one of the two out"
            )
        try:
            hash(made.key)
        except TypeError:
            kind = type(made.key).__name__
            raise UsageError(f"key must be hashable, got {kind}; pass a string or a number") from None
        return made


def _check(name: str, value: Any, least: float, which: str, most: float = float("inf")) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise UsageError(f"{name} must be a whole number {which}, got {value!r}")


ANY = Target()
