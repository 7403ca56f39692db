"""A check that a block of code leaves nothing behind.

::

    with no_leaks():
        with bm.ResourcePool([4]) as pool:
            ...
    LeakError, if there are more threads, processes, descriptors, segments or placement groups than before

The process that local workers are forked from does not count: it starts with the first local group, and stays until
the interpreter ends.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Collection, Iterator, Mapping

from bandmaster.errors import UsageError
from bandmaster.testing.belongings import KINDS, HeldResources, held_resources, is_connected_to_ray

__all__ = ["LeakError", "no_leaks"]

POLL_S = 0.02  # how often the operating system and Ray are asked whether they have noticed
GARBAGE_S = 0.1  # what is left for longer may be garbage
COLLECT_S = 0.5  # where torch is loaded, a collection takes a fifth of a second


class LeakError(AssertionError):
    """Something was left behind.

    Attributes:
        left: What, in words, by kind.
    """

    def __init__(self, left: Mapping[str, list[str]], timeout_s: float) -> None:
        self.left, self._timeout_s = dict(left), timeout_s
        lines = [f"  {kind}: {what}" for kind, found in self.left.items() for what in found]
        super().__init__("\n".join([f"left behind after {timeout_s:g} s:", *lines]))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.left, self._timeout_s)


@contextlib.contextmanager
def no_leaks(timeout: float = 10.0, kinds: Collection[str] | None = None) -> Iterator[None]:
    """Check that the block leaves nothing behind. If the block raises, that goes on, and nothing is checked.

    Args:
        timeout: Seconds to wait, at the end, for what ends by itself: processes, threads, garbage.
        kinds: Of `KINDS`, those to look at; all by default. While this process is connected to a Ray, that is
            without descriptors, of which Ray opens and keeps what it likes.

    Raises:
        LeakError: There is more than before, and it says what.
        UsageError: There is no such kind.

    Example:
        >>> import subprocess
        >>> with no_leaks(timeout=0.1, kinds=["processes"]):
        ...     child = subprocess.Popen(["sleep", "60"])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        bandmaster.testing.leaks.LeakError: left behind after 0.1 s:
          processes: pid ...: sleep 60
        >>> child.kill()
        >>> child.wait()
        -9
    """
    unknown = set(kinds or ()) - set(KINDS)
    if unknown:
        raise UsageError(f"nothing is known of {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    before = held_resources(KINDS if kinds is None else kinds)
    yield
    deadline = time.monotonic() + timeout
    collect_at = time.monotonic() + GARBAGE_S
    while left := _held_beyond(before, kinds):
        now = time.monotonic()
        if now >= deadline:
            raise LeakError(left, timeout)
        if now >= collect_at:
            gc.collect()
            collect_at = now + COLLECT_S
        else:
            time.sleep(POLL_S)


def _held_beyond(before: HeldResources, kinds: Collection[str] | None) -> dict[str, list[str]]:
    looked_at = _usual_kinds() if kinds is None else kinds
    return held_resources(looked_at).beyond(before, looked_at)


def _usual_kinds() -> Collection[str]:
    return [kind for kind in KINDS if kind != "descriptors" or not is_connected_to_ray()]
