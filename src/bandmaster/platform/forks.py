"""Detects forks, so that an object can tell whether it was made in this process or in one that forked it."""

from __future__ import annotations

import os
import sys


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


def _note() -> None:
    _Forks.count += 1


os.register_at_fork(after_in_child=_note)
