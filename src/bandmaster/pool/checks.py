"""Checks of the values that a pool is made with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bandmaster.errors import UsageError
from bandmaster.plan.numbers import as_amount, as_whole

_SET_FOR_EACH_RANK = "bandmaster sets it in each worker, so that torch.distributed finds the other ranks"
_REFUSED = {  # environment variables, and why a pool does not set them
    **dict.fromkeys(
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), _SET_FOR_EACH_RANK
    ),
    "BANDMASTER_PRELOAD": "it is read by the controller; use preload= for the modules that workers import first",
    "PYTHONPATH": "workers have the sys.path of the controller; add folders to that, or set the variable for both",
}
_GPUS = "a pool with use_gpu=True gives each worker a GPU of its own by this variable"


def checked_amount(what: str, amount: object) -> float:
    """A number of at least 0, as an int or float."""
    if (found := as_amount(amount)) is None:
        raise UsageError(f"{what} must be a non-negative number, got {amount!r}")
    return found


def check_count(what: str, count: object, meaning: str = "") -> None:
    """Raise `UsageError` unless it is an integer of at least 1."""
    if as_whole(count, 1) is None:
        raise UsageError(f"{what} must be an integer of at least 1{meaning}, got {count!r}")


def checked_resources(resources: Mapping[str, float] | None) -> tuple[tuple[str, float], ...]:
    """The custom resources of a slot, as name and amount."""
    if resources is None:
        return ()
    if not isinstance(resources, Mapping) or not all(isinstance(name, str) and name for name in resources):
        raise UsageError(f"resources_per_worker must be a dict such as {{'trainer': 1}}, got {resources!r}")
    for name, amount in resources.items():
        if name in ("CPU", "GPU", "memory", "object_store_memory"):
            raise UsageError(f"resources_per_worker has {name!r}: use cpus_per_worker= and use_gpu= for these")
        checked_amount(f"resources_per_worker[{name!r}]", amount)
    return tuple((name, float(amount)) for name, amount in resources.items() if amount)


def checked_sizes(sizes: object, name: str, unit: str) -> tuple[int, ...]:
    """Some positive integers, at least one; the message calls them as ``name`` and ``unit`` say."""
    if not isinstance(sizes, Sequence) or isinstance(sizes, str) or not sizes:
        raise UsageError(f"{name} must be a list with one number per {unit}, such as [4, 2], got {sizes!r}")
    for size in sizes:
        if as_whole(size, 1) is None:
            raise UsageError(
                f"every {unit} must have an integer number of slots of at least 1, got {size!r} in {list(sizes)}"
            )
    return tuple(map(int, sizes))


def checked_modules(names: Sequence[str] | None) -> tuple[str, ...] | None:
    """The names of modules that are to be imported; None stays None."""
    if names is None:
        return None
    is_list = isinstance(names, Sequence) and not isinstance(names, str)
    if not is_list or not all(isinstance(name, str) for name in names):
        raise UsageError(f"preload must be a list of names of modules, such as ['torch'], or None, got {names!r}")
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise UsageError(f"preload must name modules, such as 'torch.optim', got {name!r}")
    return tuple(dict.fromkeys(names))


def checked_env(env: Mapping[str, str] | None, use_gpu: bool) -> tuple[tuple[str, str], ...]:
    """Environment variables of workers, as name and value."""
    if env is None:
        return ()
    if not isinstance(env, Mapping):
        raise UsageError(f"env must be a dict of strings, such as {{'NCCL_DEBUG': 'INFO'}}, got {env!r}")
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise UsageError(f"env must be a dict of strings, got {name!r}: {value!r}; write {str(name)!r}: '{value}'")
        if not name or "=" in name or "\0" in name + value:
            raise UsageError(f"env has {name!r}: {value!r}, which cannot be an environment variable")
        why = _REFUSED.get(name) or (_GPUS if use_gpu and name == "CUDA_VISIBLE_DEVICES" else None)
        if why is not None:
            raise UsageError(f"env must not set {name}: {why}")
    return tuple(sorted(env.items()))
