"""Resource pools: reserved slots for workers, and how pools are merged and split.

A pool starts no process. It asks its backend to reserve the slots when the first group needs them (or on
``with pool:``), and to release them when it is closed. Merged and split pools share the slots of the pools from which
they were made::

    ResourcePool([4]) ──┐
                        ├─ merge_resource_pool ──► nodes [4, 4], the same eight slots
    ResourcePool([4]) ──┘
"""

from bandmaster.pool.resource_pool import ResourcePool, merge_resource_pool, split_resource_pool

__all__ = ["ResourcePool", "merge_resource_pool", "split_resource_pool"]
