"""`Target`: the options of requests, but for their time limit: where one goes, how often, and how far ahead."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from bandmaster.calls.options import RequestOptions, SharedLimits
from bandmaster.errors import UsageError
from bandmaster.plan.numbers import as_whole

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
        names = list(RequestOptions.__annotations__)
        unknown = [name for name in changes if name not in names]
        if unknown:
            listed = f"{', '.join(names[:-1])} and {names[-1]}"
            raise UsageError(f"a request has no option {unknown[0]!r}; its options are {listed}")
        up_to = f"from 0 to {n_replicas - 1}, as there are {n_replicas} replicas"
        allowed = {
            "replica": (0, n_replicas - 1, up_to),
            "spill": (0, inf, "of 0 or more"),
            "maxsize": (1, inf, "of 1 or more"),
            "retries": (0, inf, "of 0 or more"),
            "min_version": (-inf, inf, "or None"),
        }
        numbers = {name: as_whole(changes[name], *allowed[name][:2]) for name in allowed if name in changes}
        for name, number in numbers.items():
            if number is None and (changes[name] is not None or getattr(ANY, name) is not None):
                raise UsageError(f"{name} must be a whole number {allowed[name][2]}, got {changes[name]!r}")
        made = replace(self, **{**changes, **numbers})
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


ANY = Target()
