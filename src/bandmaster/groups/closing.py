"""`close_all`: ends all groups and pools of a controller."""

from __future__ import annotations

from bandmaster.lifecycle.open_groups import open_groups
from bandmaster.pool.lease import close_all as close_each
from bandmaster.pool.resource_pool import open_pools


def close_all() -> None:
    """Close all worker groups and resource pools of this process, also those that no variable refers to any more.

    Their workers end and their slots are released, as by `WorkerGroup.close` and `ResourcePool.close`. New pools
    and groups can be made afterwards. In a fork of the controller, it closes those that the fork has made.

    Raises:
        UsageError: A signal handler called this during an operation of a group, which stays open.

    Example:
        >>> import bandmaster as bm
        >>> pool = bm.ResourcePool([2], backend="inprocess")
        >>> group = bm.WorkerGroup(pool, bm.Worker, name="actor")
        >>> bm.close_all()
        >>> pool
        <closed ResourcePool([2], backend='inprocess')>
    """
    close_each([*open_groups.all(), *open_pools()])
