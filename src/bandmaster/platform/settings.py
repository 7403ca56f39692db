"""The environment variables that a user sets to change what bandmaster does. Each function reads its own when called.

``BANDMASTER_FULL_TRACEBACKS`` alone is read elsewhere, in `bandmaster.errors`, which imports no other room.
"""

from __future__ import annotations

import os

__all__ = ["preloaded_modules"]


def preloaded_modules() -> tuple[str, ...] | None:
    """``BANDMASTER_PRELOAD``: the modules that the zygote imports by default, separated by commas; None if unset."""
    named = os.environ.get("BANDMASTER_PRELOAD")
    return None if named is None else tuple(name.strip() for name in named.split(",") if name.strip())
