"""The environment variables that in-process groups ask for: their ranks share those of the controller's process."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

from bandmaster.errors import UsageError

__all__ = ["SharedEnvironment"]


class SharedEnvironment:
    """Sets variables while there are groups that ask for them, and puts back what was there before.

    Any thread may call it. Finalizers may release variables at any moment, so that this waits for no lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: list[tuple[str, Mapping[str, str]]] = []  # groups, and the variables that they ask for
        self._before: dict[str, str | None] = {}  # values of the variables before; None where there was none
        self._released: deque[tuple[str, Mapping[str, str]]] = deque()

    def hold(self, group: str, variables: Mapping[str, str]) -> Callable[[], object]:
        """Set variables for a group. Returns what releases them; calling that again does nothing.

        Raises:
            UsageError: Another group has one of them with another value.
        """
        if not variables:
            return _nothing
        held = group, dict(variables)
        self._put_back()
        try:
            with self._lock:
                self._check(group, variables)
                self._held.append(held)
                for name, value in variables.items():
                    self._before.setdefault(name, os.environ.get(name))
                    os.environ[name] = value
        finally:
            self._put_back()
        return partial(self._release, held)

    def has(self, name: str) -> bool:
        """Whether a variable is set for a group."""
        return any(name in theirs for _, theirs in list(self._held))  # finalizers ask, too: without the lock

    def _check(self, group: str, variables: Mapping[str, str]) -> None:
        for other, theirs in self._held:
            for name in variables.keys() & theirs.keys():
                if variables[name] != theirs[name]:
                    raise UsageError(
                        f"groups {other!r} and {group!r} ask for {name}={theirs[name]!r} and {variables[name]!r}, but "
                        "the ranks of backend 'inprocess' share the variables of this one process; close the first "
                        "group, or use backend 'local'"
                    )

    def _release(self, held: tuple[str, Mapping[str, str]]) -> None:
        self._released.append(held)
        self._put_back()

    def _put_back(self) -> None:
        while self._released and self._lock.acquire(blocking=False):  # else the thread that has it does this next
            try:
                held = self._released.popleft()
                mine = [other is held for other in self._held]
                if any(mine):
                    del self._held[mine.index(True)]
                    self._restore(held[1])
            finally:
                self._lock.release()

    def _restore(self, variables: Mapping[str, str]) -> None:
        for name in variables:
            if not any(name in theirs for _, theirs in self._held):
                before = self._before.pop(name)
                if before is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = before


def _nothing() -> None:
    """What there is to release of no variables."""
