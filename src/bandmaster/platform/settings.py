"""The environment variables of this library that tune it, each read when it is asked for.

Variables that the library itself sets for its own processes, or that belong to others, are read where they are used.
"""

from __future__ import annotations

import os

__all__ = ["host_timeout_s", "is_link_encrypted", "tree_from"]


def host_timeout_s() -> float:
    """Seconds without a sign of life after which a host is lost: ``BANDMASTER_HOST_TIMEOUT``, 10 by default."""
    return float(os.environ.get("BANDMASTER_HOST_TIMEOUT", "10"))


def is_link_encrypted() -> bool:
    """Whether links between hosts are encrypted: ``BANDMASTER_TLS`` or Ray's own ``RAY_USE_TLS`` is 1."""
    return any(os.environ.get(name) == "1" for name in ("BANDMASTER_TLS", "RAY_USE_TLS"))


def tree_from() -> int:
    """Number of hosts of a group from which on agents form a tree: ``BANDMASTER_TREE_FROM``, 32 by default."""
    return int(os.environ.get("BANDMASTER_TREE_FROM", "32"))
