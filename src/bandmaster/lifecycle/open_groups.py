"""The open groups of this controller, and their names.

A name that the user gives belongs to one open group at most: a new group of that name closes the former one, so that a
cell of a notebook can be run again. By default, a group is named by its class, with a number if that name is taken.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from typing import Any

_log = logging.getLogger(__name__)
_groups: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()  # in this order
_lock = threading.RLock()  # re-entrant, as a finalizer may construct a group at any point


def add_group(group: Any, name: str, is_default: bool) -> None:
    """Add a group that is being constructed, and set its name.

    Args:
        group: The group; only a weak reference to it is kept.
        name: Its name.
        is_default: Whether a number is added to the name if an open group has it.
    """
    with _lock:
        taken, n, base = {other._name for other in open_groups()}, 1, name
        while is_default and name in taken:
            n += 1
            name = f"{base}-{n}"
        group._name = group._ownership.name = name
        _groups[group] = None


def open_groups() -> list[Any]:
    """The groups that are open."""
    with _lock:
        return [group for group in list(_groups) if group._ownership.is_open]


def close_former(group: Any) -> list[Any]:
    """Close the open groups that got the name of a new one before it. Returns them."""
    former = itertools.takewhile(lambda other: other is not group, open_groups())
    closed = [other for other in former if other._name == group._name]
    for other in closed:
        _log.info("group %r is closed, because a new group of that name replaces it", group._name)
        other._ownership.why_closed = ", because a new group of that name replaced it; use that one"
        other.close()
    return closed
