"""Starts and replaces a group's workers: the backend starts processes, and `CONSTRUCT` is the first call on them."""

from __future__ import annotations

from collections.abc import Sequence

from bandmaster.calls.call import Call, Failures
from bandmaster.calls.interruption import WaitedFor, note_calls
from bandmaster.calls.open_work import OpenWork
from bandmaster.calls.options import CallOptions
from bandmaster.calls.request import CallRequest, CallSite
from bandmaster.codec import Payload, encode
from bandmaster.contract import (
    CONSTRUCT,
    NOT_STARTED,
    PRELOAD,
    START_ADVICE,
    Backend,
    Launch,
    Reply,
    Workers,
)
from bandmaster.contract import Call as Order
from bandmaster.errors import CallTimeout, ConstructorError, RemoteError
from bandmaster.output.start_progress import StartProgress, shown
from bandmaster.plan.arguments import CallPlan
from bandmaster.platform.deadline import Deadline

__all__ = ["replace_worker", "start_workers"]


def start_workers(backend: Backend, launch: Launch, constructor: Payload) -> Workers:
    """Start a process on every slot and construct all workers concurrently. If one fails, all of them are ended.

    Args:
        backend: The backend that starts the processes.
        launch: The group, its slots and options.
        constructor: The encoded ``(cls, args, kwargs)``.

    Returns:
        The running workers; the caller has to stop them.

    Raises:
        ConstructorError: A constructor raised, or a module of ``launch.preload`` could not be imported.
        WorkerDied: A process ended before its worker was constructed.
        CallTimeout: The processes did not start, or the constructors did not end, in time.
        PlacementError: A process did not start.
    """
    with shown(launch.group, len(launch.slots)) as progress:
        workers = backend.start(launch)
        try:
            _construct(workers, launch, constructor, tuple(range(len(launch.slots))), progress)
        except BaseException:
            workers.stop(NOT_STARTED)
            raise
    return workers


def replace_worker(workers: Workers, launch: Launch, constructor: Payload, rank: int) -> None:
    """End the worker of one rank, if it still runs, and start and construct a new one on its slot.

    Raises:
        ConstructorError, WorkerDied, CallTimeout, PlacementError: As in `start_workers`; the rank stays dead.
        UsageError: The backend cannot replace a worker.
    """
    workers.replace(rank)
    try:
        with shown(launch.group, 1) as progress:
            _construct(workers, launch, constructor, (rank,), progress)
    except BaseException:
        workers.interrupt({rank: None}, "ended by the controller, because it could not be constructed")
        raise


def _construct(
    workers: Workers, launch: Launch, constructor: Payload, ranks: Sequence[int], progress: StartProgress
) -> None:
    """Import modules and run the constructors on some ranks. If one fails, the others are ended without grace."""
    deadline = Deadline(launch.start_timeout_s)
    if launch.preload:
        progress.doing = f"importing {', '.join(launch.preload)}"
        _run(workers, launch, PRELOAD, encode(launch.preload), ranks, progress, deadline)
    progress.doing = ""
    _run(workers, launch, CONSTRUCT, constructor, ranks, progress, deadline)


def _run(
    workers: Workers,
    launch: Launch,
    what: str,
    argument: Payload,
    ranks: Sequence[int],
    progress: StartProgress,
    deadline: Deadline,
) -> None:
    """Run one step of the construction on some ranks, and wait for it."""
    options = CallOptions(launch.start_timeout_s, grace=0.0)
    site = CallSite(launch.constructor, launch.mesh, launch.group, options)
    call = Call(CallRequest(what, CallPlan(()), tuple(ranks)), site, None, OpenWork())
    call.is_being_sent(workers, Failures())
    parts = tuple(workers.put([argument]))
    workers.call([Order(ranks, what, parts, Reply.DROP)], call.tickets)
    try:
        has_ended = progress.follow(call, deadline.left())
    except KeyboardInterrupt as interrupt:
        note_calls(interrupt, [WaitedFor(site.method, call.missing, call.late)])
        raise
    if not has_ended:
        raise CallTimeout(site.method, call.missing, options.timeout or 0.0, call.stacks(), START_ADVICE)
    error = None if call.done is None else call.done.error
    if type(error) is RemoteError:
        axes = launch.mesh.shown_axes
        raise ConstructorError(error.method, error.failures, error.coordinates, error.group, axes) from error.__cause__
    if error is not None:
        raise error
