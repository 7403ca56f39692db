"""Checks of the values that a pool is made with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bandmaster.errors import UsageError

__all__ = ["check_amount", "checked_resources", "checked_sizes"]


def check_amount(what: str, amount: object) -> None:
    """Raise `UsageError` unless it is a number of at least 0."""
    if isinstance(amount, bool) or not isinstance(amount, int | float) or not amount >= 0:
        raise UsageError(f"{what} must be a non-negative number, got {amount!r}")


def checked_resources(resources: Mapping[str, float] | None) -> tuple[tuple[str, float], ...]:
    """The custom resources of a slot, as name and amount."""
    if resources is None:
        return ()
    if not isinstance(resources, Mapping) or not all(isinstance(name, str) and name for name in resources):
        raise UsageError(f"resources_per_worker must be a dict such as {{'trainer': 1}}, got {resources!r}")
    for name, amount in resources.items():
        if name in ("CPU", "GPU", "memory", "object_store_memory"):
            raise UsageError(f"resources_per_worker has {name!r}: use cpus_per_worker= and use_gpu= for these")
        check_amount(f"resources_per_worker[{name!r}]", amount)
    return tuple((name, float(amount)) for name, amount in resources.items() if amount)


def checked_sizes(sizes: object, name: str, unit: str) -> tuple[int, ...]:
    """Some positive integers, at least one; the message calls them as ``name`` and ``unit`` say."""
    if not isinstance(sizes, Sequence) or isinstance(sizes, str) or not sizes:
        raise UsageError(f"{name} must be a list with one number per {unit}, such as [4, 2], got {sizes!r}")
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UsageError(
                f"every {unit} must have an integer number of slots of at least 1, got {size!r} in {list(sizes)}"
            )
    return tuple(sizes)
