"""Functions that merge and split pools."""

from __future__ import annotations

from collections.abc import Sequence

from bandmaster.errors import UsageError
from bandmaster.pool.checks import checked_sizes
from bandmaster.pool.lease import Part, joined
from bandmaster.pool.resource_pool import ResourcePool


def merge_resource_pool(*pools: ResourcePool) -> ResourcePool:
    """Return one pool over the slots of several pools, in the given order. The slots are shared, not moved.

    The pools may themselves be merged or split. Adjacent parts of one node, in the order of its devices, become one
    node again.

    Args:
        *pools: Two pools or more, with the same ``backend``, ``use_gpu``, ``cpus_per_worker``,
            ``resources_per_worker``, ``preload`` and ``env``.

    Raises:
        UsageError: Fewer than two pools, an argument that is not a pool, pools that differ in the parameters above,
            or pools that share a slot.
        ClosedError: One of the pools was closed.
    """
    if len(pools) < 2:
        raise UsageError(f"merge_resource_pool takes two pools or more, got {len(pools)}")
    for pool in pools:
        _check_pool(pool, "merge_resource_pool")
        for what in ("backend", "use_gpu", "cpus_per_worker", "resources_per_worker", "preload", "env"):
            ours, theirs = getattr(pools[0], what), getattr(pool, what)
            if ours != theirs:
                raise UsageError(
                    f"cannot merge {pools[0]!r} and {pool!r}: {what} must be equal, got {ours!r} and {theirs!r}"
                )
    places = [place for pool in pools for place in pool._places]
    if len(set(places)) < len(places):
        raise UsageError(f"cannot merge pools that share slots: {', '.join(map(repr, pools))}; merge disjoint pools")
    parts = [part for pool in pools for part in pool._parts]
    return ResourcePool._of(joined(parts), "".join(pool.name_prefix for pool in pools))


def split_resource_pool(pool: ResourcePool, split_size: int | Sequence[int]) -> list[ResourcePool]:
    """Return pools over consecutive slots of a pool, in rank order. The slots are shared, not moved.

    Args:
        pool: The pool to split; it may itself be merged or split.
        split_size: Slots of every part, or a list with the size of each part.

    Raises:
        UsageError: The first argument is not a pool, or the sizes do not add up to the pool's.
        ClosedError: The pool was closed.

    Example:
        >>> [part.process_on_nodes for part in split_resource_pool(ResourcePool([2, 4]), 3)]
        [(2, 1), (3,)]
    """
    _check_pool(pool, "split_resource_pool")
    size = pool.world_size
    if isinstance(split_size, int):
        if split_size < 1 or size % split_size:
            raise UsageError(f"cannot split {size} slots into parts of {split_size}; give a divisor or a list of sizes")
        split_size = [split_size] * (size // split_size)
    sizes = checked_sizes(split_size, "split_size", "part")
    if sum(sizes) != size:
        raise UsageError(
            f"cannot split {size} slots into {list(sizes)}, which are {sum(sizes)}; give sizes that add up to {size}"
        )
    places = iter(pool._places)
    pools = []
    for n in sizes:
        parts = [Part(lease, node, (index,)) for lease, node, index in (next(places) for _ in range(n))]
        pools.append(ResourcePool._of(joined(parts), pool.name_prefix))
    return pools


def _check_pool(pool: object, function: str) -> None:
    if not isinstance(pool, ResourcePool):
        raise UsageError(f"{function} takes ResourcePools, got {type(pool).__name__} ({pool!r})")
    pool._check_open()
