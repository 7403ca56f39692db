"""Forks of this process: an object can tell whether it was made in one, and ends there what belongs to this process."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from bandmaster.errors import UsageError

_T = TypeVar("_T")
_ends: WeakKeyDictionary[Any, Callable[[Any], object]] = WeakKeyDictionary()


class _Forks:
    count = 0


def n_forks() -> int:
    """Number of forks between this process and the first that imported this module. It takes no system call."""
    return _Forks.count


def end_if_forked(n_before: int, error: BaseException | None = None) -> None:
    """End this process if it was forked since `n_forks` returned a number, as Python ends one, but by `os._exit`.

    Args:
        n_before: The number.
        error: The exception that ends the fork: its traceback is printed, or it is a `SystemExit` with an exit code.
    """
    if n_before == _Forks.count:
        return
    code: object = 1
    try:
        if error is None or isinstance(error, SystemExit):
            code = getattr(error, "code", None) or 0
        else:
            sys.__excepthook__(type(error), error, error.__traceback__)  # not that of Ray, whose threads are not here
        if not isinstance(code, int):
            print(code, file=sys.stderr)
        sys.stderr.flush()
        sys.stdout.flush()
    finally:
        os._exit(code & 0xFF if isinstance(code, int) else 1)


def in_forks(one: _T, end: Callable[[_T], object]) -> None:
    """Have ``end(one)`` called at the beginning of each fork, which must not use an object of this process.

    It closes the copies of descriptors that the fork has, so that these do not hide the end of this process. It takes
    no lock, as a thread that the fork does not have may hold any.
    """
    _ends[one] = end


def free_in_forks(lock: _T) -> _T:
    """Have each fork free a lock that another thread held, as the fork lacks that thread. Returns the lock.

    Args:
        lock: An `RLock`, or a `Condition` of one, that a module has for all its objects.
    """
    in_forks(lock, _free)
    return lock


def _free(lock: Any) -> None:
    if not lock._is_owned():  # else the thread that has forked will release it
        lock._at_fork_reinit()


def of_parent(what: str) -> UsageError:
    """The error to raise in a fork that uses an object of the process from which it was forked."""
    return UsageError(
        f"{what} belongs to the process from which this one was forked; use it there, or create a group in a freshly "
        "started process"
    )


def _note() -> None:
    _Forks.count += 1
    for one, end in list(_ends.items()):
        with contextlib.suppress(Exception):  # such as an OSError, if the user has closed a descriptor: end the others
            end(one)


os.register_at_fork(after_in_child=_note)
