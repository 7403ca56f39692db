"""The open groups of this controller, and their names.

A name that the user gives belongs to one open group at most: a new group of that name closes the former one, so that a
cell of a notebook can be run again. By default, a group is named by its class, with a number if that name is taken.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from typing import Any, Protocol

from bandmaster.lifecycle.ownership import Ownership

_log = logging.getLogger(__name__)


class OpenGroup(Protocol):
    """The members of a group that this module uses."""

    _name: str
    _ownership: Ownership
    _pool: Any

    def close(self) -> None:
        """Release its workers and slots."""


class OpenGroups:
    """The groups that are open or being constructed; only weak references to them are kept."""

    def __init__(self) -> None:
        self._groups: weakref.WeakKeyDictionary[OpenGroup, None] = weakref.WeakKeyDictionary()  # in the order of `add`
        self._lock = threading.RLock()  # re-entrant, as a finalizer may construct a group at any point

    def add(self, group: OpenGroup, name: str, is_default: bool) -> str:
        """Add a group that is being constructed.

        Args:
            group: The group.
            name: Its name.
            is_default: Whether a number is added to the name if an open group has it.

        Returns:
            Its name.
        """
        with self._lock:
            taken, n, base = {other._name for other in self.all()}, 1, name
            while is_default and name in taken:
                n += 1
                name = f"{base}-{n}"
            group._name = group._ownership.name = name
            self._groups[group] = None
        return name

    def all(self) -> list[OpenGroup]:
        """The groups that are open."""
        with self._lock:
            return [group for group in list(self._groups) if group._ownership.is_open]

    def close_former(self, group: OpenGroup) -> list[OpenGroup]:
        """Close the open groups that got the name of a new one before it. Returns them."""
        former = itertools.takewhile(lambda other: other is not group, self.all())
        closed = [other for other in former if other._name == group._name]
        for other in closed:
            _log.info("group %r is closed, because a new group of that name replaces it", group._name)
            other._ownership.why_closed = ", because a new group of that name replaced it; use that one"
            other.close()
        return closed


open_groups = OpenGroups()  # of this process
