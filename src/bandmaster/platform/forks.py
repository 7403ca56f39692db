"""Whether this process was forked from the one that made something: what it has of it is not its own then."""

from __future__ import annotations

import os

__all__ = ["n_forks"]


class _Forks:
    count = 0


def n_forks() -> int:
    """How many forks lie between this process and the first one that loaded this. No system call, unlike a pid."""
    return _Forks.count


def _note() -> None:
    _Forks.count += 1


os.register_at_fork(after_in_child=_note)
