"""Adds notes to a KeyboardInterrupt about the interrupted calls: names, ranks without a reply, and their stacks."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bandmaster.errors import CallTimeout, ResourceError
from bandmaster.errors.failure import stacks_by_equality
from bandmaster.platform.limits import start_thread

_log = logging.getLogger(__name__)
STACKS_WITHIN_S = 0.5
MOST_CALLS = 4  # described in notes


class WaitedFor(NamedTuple):
    """A call for which the interrupted thread waited.

    Attributes:
        method: ``"Class.method"``.
        missing: The ranks without a reply.
        late: Returns the error for a wait of so many seconds, with the stacks of the ranks.
    """

    method: str
    missing: tuple[int, ...]
    late: Callable[[float], CallTimeout]


def note_calls(error: KeyboardInterrupt, calls: Sequence[WaitedFor]) -> None:
    """Add notes to a KeyboardInterrupt that name the interrupted calls and show the stacks of their ranks.

    Returns within half a second, even if a rank does not show its stack. Another Ctrl-C ends it at once. Does nothing
    on Python 3.10, whose exceptions have no notes.

    Args:
        error: The KeyboardInterrupt.
        calls: The calls that the interrupted thread waited for.
    """
    calls = [call for call in calls if call.missing]
    if not calls or not hasattr(error, "add_note") or getattr(error, "__notes__", None):  # noted by an inner wait
        return
    notes: list[str] = []
    is_done = threading.Event()
    with contextlib.suppress(ResourceError):  # there is no thread left
        start_thread("bandmaster-interrupted-call", _describe, calls[:MOST_CALLS], notes, is_done)
        is_done.wait(STACKS_WITHIN_S)
    described = list(notes)
    described += [f"{_summary(call)}; its stacks could not be read" for call in calls[len(described) : MOST_CALLS]]
    if len(calls) > MOST_CALLS:
        described.append(f"and {len(calls) - MOST_CALLS} more calls")
    for note in described:
        error.add_note(note)


def _describe(calls: Sequence[WaitedFor], notes: list[str], is_done: threading.Event) -> None:
    """Append a note for each call. Runs in a thread of its own."""
    try:
        for call in calls:
            timeout = call.late(0.0)
            notes.append("\n".join(filter(None, (_summary(call, timeout), stacks_by_equality(timeout.stacks)))))
    except Exception:
        _log.debug("cannot read the stacks of a call that Ctrl-C has interrupted", exc_info=True)
    finally:
        is_done.set()


def _summary(call: WaitedFor, timeout: CallTimeout | None = None) -> str:
    if timeout is None or not timeout.missing:  # the stacks are unknown, or the ranks have replied since
        method, missing = call.method, call.missing
    else:
        method, missing = timeout.method, timeout.missing
    what = method if method == call.method else f"{call.method}, which waited for {method},"
    return f"{what} was interrupted before rank {', '.join(map(str, missing))} had replied"
