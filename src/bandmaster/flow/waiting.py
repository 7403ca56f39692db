"""Waits for several futures, with the names of `concurrent.futures`."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, FIRST_EXCEPTION
from functools import partial
from typing import Any, NamedTuple

from bandmaster.calls.future import Future
from bandmaster.calls.options import checked_seconds
from bandmaster.calls.progress import progress
from bandmaster.calls.result import note_calls
from bandmaster.errors import UsageError
from bandmaster.platform.deadline import Deadline


class DoneAndNotDone(NamedTuple):
    """The result of `wait`: two sets of futures.

    Attributes:
        done: The futures that are done.
        not_done: The futures that are not done.
    """

    done: set[Future[Any]]
    not_done: set[Future[Any]]


def wait(
    futures: Iterable[Future[Any]], timeout: float | None = None, return_when: str = ALL_COMPLETED
) -> DoneAndNotDone:
    """Wait until futures are done; they may belong to different groups.

    Args:
        futures: The futures.
        timeout: Seconds to wait; None sets no limit.
        return_when: ``"ALL_COMPLETED"``, ``"FIRST_COMPLETED"``, or ``"FIRST_EXCEPTION"``: until one has raised or was
            cancelled, or all are done.

    Returns:
        The futures that are done and those that are not.

    Raises:
        UsageError: An item is not a bandmaster `Future`, ``timeout`` is not a non-negative number or None, or
            ``return_when`` is unknown; or a callback would wait, see `Future.add_done_callback`.

    Source: `concurrent.futures.wait`.
    """
    known = (ALL_COMPLETED, FIRST_COMPLETED, FIRST_EXCEPTION)
    if return_when not in known:
        raise UsageError(f"return_when of wait must be one of {', '.join(map(repr, known))}, got {return_when!r}")
    given = _checked(futures, timeout, "wait")
    done: set[Future[Any]] = set()
    with contextlib.closing(_as_they_come(given, Deadline(timeout))) as coming:  # its finalizer would lose Ctrl-C
        for future in coming:
            done.add(future)
            is_enough = return_when == FIRST_COMPLETED or (
                return_when == FIRST_EXCEPTION and future.exception() is not None
            )
            if is_enough:
                break
    done.update(future for future in given if future not in done and future.done())
    return DoneAndNotDone(done, set(given) - done)


def as_completed(futures: Iterable[Future[Any]], timeout: float | None = None) -> Iterator[Future[Any]]:
    """Iterate over futures in the order in which they are done; they may belong to different groups.

    Args:
        futures: The futures; each is yielded once.
        timeout: Seconds from this call on, after which the iterator raises `TimeoutError`; None sets no limit.

    Raises:
        UsageError: An item is not a bandmaster `Future`, or ``timeout`` is not a non-negative number or None; or, in
            the iteration, a callback would wait, see `Future.add_done_callback`.
        TimeoutError: Not all futures were done in time.

    Source: `concurrent.futures.as_completed`.
    """
    waiting = _checked(futures, timeout, "as_completed")
    return _all_of(waiting, Deadline(timeout))


def _all_of(waiting: list[Future[Any]], deadline: Deadline) -> Iterator[Future[Any]]:
    n_left = len(waiting)
    for future in _as_they_come(waiting, deadline):
        n_left -= 1
        yield future
    if n_left:
        raise TimeoutError(f"{n_left} of {len(waiting)} futures were not done in {deadline.timeout_s:g} s")


def _as_they_come(futures: list[Future[Any]], deadline: Deadline) -> Generator[Future[Any], None, None]:
    """Yield futures as they become done, until the deadline."""
    done: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()
    watches = [(future._call, partial(done.put, future)) for future in futures]
    try:
        for call, when_done in watches:
            call.watch(when_done)
        for _ in futures:
            if done.empty() and deadline.left() != 0.0:
                progress.check_may_wait()
            yield done.get(timeout=deadline.left())
    except queue.Empty:
        return
    except KeyboardInterrupt as error:
        note_calls(error, [future._call for future in futures if not future.done()])
        raise
    finally:  # else calls that go on would hold the queue, and with it the futures that are done
        for call, when_done in watches:
            call.unwatch(when_done)


def _checked(futures: Iterable[Future[Any]], timeout: float | None, function: str) -> list[Future[Any]]:
    """The futures, each once, in the order in which they were given."""
    checked_seconds(f"timeout of {function}", timeout)
    found = list(dict.fromkeys(futures))
    for future in found:
        if not isinstance(future, Future):
            raise UsageError(f"{function} takes futures returned by submit(), got {type(future).__name__}")
    return found
