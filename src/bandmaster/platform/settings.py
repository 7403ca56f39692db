"""The environment variables that tune bandmaster. Each function reads its own when it is called.

``BANDMASTER_FULL_TRACEBACKS`` alone is read elsewhere, in `bandmaster.errors`, which imports no other room. Variables
that belong to others are read where they are used.
"""

from __future__ import annotations

import os

CONTROLLERS_RAY = "BANDMASTER_RAY"
AGENTS_DOOR = "BANDMASTER_DOOR"


def preloaded_modules() -> tuple[str, ...] | None:
    """``BANDMASTER_PRELOAD``: the modules that the zygote imports by default, separated by commas; None if unset."""
    named = os.environ.get("BANDMASTER_PRELOAD")
    return None if named is None else tuple(name.strip() for name in named.split(",") if name.strip())


def controllers_ray() -> str | None:
    """``BANDMASTER_RAY``: how workers connect to the Ray of their controller, as JSON; None if they do not.

    Backend ``"ray"`` sets it for its workers; no user does.
    """
    return os.environ.get(CONTROLLERS_RAY)


def agents_door() -> str | None:
    """``BANDMASTER_DOOR``: the door of the agent that has started this worker; None if none has. Agents set it."""
    return os.environ.get(AGENTS_DOOR)


def host_timeout_s() -> float:
    """Seconds without a sign of life after which a host is lost: ``BANDMASTER_HOST_TIMEOUT``, 10 by default."""
    return float(os.environ.get("BANDMASTER_HOST_TIMEOUT", "10"))


def is_link_encrypted() -> bool:
    """Whether links between hosts are encrypted: ``BANDMASTER_TLS`` or Ray's own ``RAY_USE_TLS`` is 1."""
    return any(os.environ.get(name) == "1" for name in ("BANDMASTER_TLS", "RAY_USE_TLS"))


def tree_from() -> int:
    """Number of hosts of a group from which on agents form a tree: ``BANDMASTER_TREE_FROM``, 32 by default."""
    return int(os.environ.get("BANDMASTER_TREE_FROM", "32"))
