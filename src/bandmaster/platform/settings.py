"""The environment variables that bandmaster reads. Each function reads its own when it is called.

``BANDMASTER_FULL_TRACEBACKS`` alone is read elsewhere, in `bandmaster.errors`, which imports no other room.
"""

from __future__ import annotations

import os

__all__ = ["CONTROLLERS_RAY", "controllers_ray", "preloaded_modules"]

CONTROLLERS_RAY = "BANDMASTER_RAY"


def preloaded_modules() -> tuple[str, ...] | None:
    """``BANDMASTER_PRELOAD``: the modules that the zygote imports by default, separated by commas; None if unset."""
    named = os.environ.get("BANDMASTER_PRELOAD")
    return None if named is None else tuple(name.strip() for name in named.split(",") if name.strip())


def controllers_ray() -> str | None:
    """``BANDMASTER_RAY``: how workers connect to the Ray of their controller, as JSON; None if they do not.

    Backend ``"ray"`` sets it for its workers; no user does.
    """
    return os.environ.get(CONTROLLERS_RAY)
