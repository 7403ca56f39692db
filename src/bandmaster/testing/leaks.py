"""`no_leaks`: checks that a block of code releases the resources that it acquires.

::

    with no_leaks():
        with bm.ResourcePool([4]) as pool:
            ...
    LeakError, if there are more threads, processes, descriptors, segments or placement groups than before

The zygote, the process from which local workers are forked, does not count: it starts with the first local group and
ends with the interpreter.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Collection, Iterator, Mapping

from bandmaster.errors import UsageError
from bandmaster.testing.belongings import KINDS, HeldResources, held_resources, is_connected_to_ray

POLL_S = 0.02  # interval between two checks of the resources
GARBAGE_S = 0.1  # resources held for longer may belong to uncollected garbage
COLLECT_S = 0.5  # interval between two collections; with torch loaded, each takes a fifth of a second


class LeakError(AssertionError):
    """A block of code left resources behind.

    Attributes:
        left: Descriptions of the resources, by kind.
    """

    def __init__(self, left: Mapping[str, list[str]], timeout_s: float) -> None:
        self.left, self._timeout_s = dict(left), timeout_s
        lines = [f"  {kind}: {what}" for kind, found in self.left.items() for what in found]
        super().__init__("\n".join([f"left behind after {timeout_s:g} s:", *lines]))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.left, self._timeout_s)


@contextlib.contextmanager
def no_leaks(timeout: float = 10.0, kinds: Collection[str] | None = None) -> Iterator[None]:
    """Check that the block leaves no resources behind. If the block raises, its exception propagates unchecked.

    Args:
        timeout: Seconds to wait, after the block, for processes and threads to end and for garbage to be collected.
        kinds: Some of ``"threads"``, ``"processes"``, ``"descriptors"``, ``"segments"`` and ``"placements"``; by
            default all of them, except that descriptors are left out while this
            process is connected to a Ray cluster, because Ray opens and keeps its own.

    Raises:
        LeakError: The process holds more resources than before the block; the message lists them.
        UsageError: A kind is unknown.

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
        raise UsageError(
            f"no_leaks has no kind {', '.join(map(repr, sorted(unknown)))}; the kinds are {', '.join(KINDS)}"
        )
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
