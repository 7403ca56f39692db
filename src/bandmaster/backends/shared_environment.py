"""The environment variables that in-process groups ask for: their ranks share those of the controller's process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from functools import partial

from bandmaster.errors import UsageError


class SharedEnvironment:
    """Sets variables while there are groups that ask for them, and puts back what was there before.

    Any thread may call it. Finalizers may release variables at any moment, so that this waits for no lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held while variables are set, and while a group is added
        self._asked: dict[object, tuple[str, Mapping[str, str]]] = {}  # group and variables, by what holds them
        self._before: dict[str, str | None] = {}  # values of the variables before; None where there was none

    def hold(self, group: str, variables: Mapping[str, str]) -> Callable[[], object]:
        """Set variables for a group. Returns a function that releases them; calling that again does nothing.

        Raises:
            UsageError: Another group has one of them with another value.
        """
        holder = object()
        with self._lock:
            for other, theirs in list(self._asked.values()):
                for name in variables.keys() & theirs.keys():
                    if variables[name] != theirs[name]:
                        raise UsageError(
                            f"groups {other!r} and {group!r} ask for {name}={theirs[name]!r} and {variables[name]!r}, "
                            "but the ranks of backend 'inprocess' share the variables of this one process; close the "
                            "first group, or use backend 'local'"
                        )
            self._asked[holder] = group, dict(variables)
        self._update()
        return partial(self._release, holder)

    def has(self, name: str) -> bool:
        """Whether a variable is set for a group."""
        return name in self._variables()

    def _variables(self) -> dict[str, str]:
        return {name: value for _, variables in list(self._asked.values()) for name, value in variables.items()}

    def _release(self, holder: object) -> None:
        self._asked.pop(holder, None)
        self._update()

    def _update(self) -> None:
        """Have the process's variables be as asked; if another thread holds the lock, that thread does it."""
        is_done = False
        while not is_done and self._lock.acquire(blocking=False):
            try:
                asked = self._variables()
                for name, value in asked.items():
                    self._before.setdefault(name, os.environ.get(name))
                    os.environ[name] = value
                for name in self._before.keys() - asked.keys():
                    before = self._before.pop(name)
                    if before is None:
                        os.environ.pop(name, None)
                    else:
                        os.environ[name] = before
            finally:
                self._lock.release()
            is_done = asked == self._variables()  # else a group was released meanwhile
