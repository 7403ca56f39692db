"""Detects forks, so that an object can tell whether it was made in this process or in one that forked it."""

from __future__ import annotations

import os


class _Forks:
    count = 0


def n_forks() -> int:
    """Number of forks between this process and the first that imported this module. It takes no system call."""
    return _Forks.count


def _note() -> None:
    _Forks.count += 1


os.register_at_fork(after_in_child=_note)
