"""The outcome of a call from the replies of its ranks: the collected value, or the error of their failures. Pure."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from bandmaster.calls.request import CallSite, Collection
from bandmaster.calls.result import Done
from bandmaster.errors import CollectError, RemoteError, ResourceError, RowsLost, WorkerDied
from bandmaster.errors.failure import Failure, FailureKind
from bandmaster.plan.collection import collect
from bandmaster.plan.rows import RealRows


def collected(how: Collection, by_rank: Mapping[int, Any], site: CallSite, real_rows: RealRows | None) -> Done:
    """Collect the values of the ranks. Returns the end with the result or the error."""
    incoming, ranks, finish = how
    values = list(map(by_rank.__getitem__, ranks))
    try:
        result = collect(incoming, ranks, values, site.method, real_rows)
        return Done(value=result if finish is None else finish(result))
    except MemoryError as error:
        no_room = ResourceError(
            f"the controller has no memory to join the values that the ranks of {site.method} returned: {error}; "
            "free memory, and try again"
        )
        no_room.__cause__ = error
        return Done(no_room)
    except CollectError as error:
        located = site.located(error)
        located.__cause__ = error.__cause__
        return Done(located)
    except Exception as error:  # the user's code
        return Done(error)


def error_of(site: CallSite, failures: Mapping[int, Failure]) -> BaseException:
    """The exception that tells of the failures of ranks; without a failure, a rank has died that the call needs."""
    for failure in failures.values():
        if failure.kind is FailureKind.RELAYED and failure.exception is not None:
            return failure.exception
    kinds = {failure.kind for failure in failures.values()}
    if FailureKind.LOST in kinds and kinds <= {FailureKind.LOST, FailureKind.CANCELLED}:
        lost = {failure.summary: None for failure in failures.values() if failure.kind is FailureKind.LOST}
        return RowsLost(f"{site.method} of group {site.group!r} takes {'; '.join(lost)}; make them again")
    if FailureKind.UNRECEIVED in kinds and kinds <= {FailureKind.UNRECEIVED, FailureKind.CANCELLED}:
        return _cannot_take(site, failures)
    if FailureKind.DIED in kinds or kinds == {FailureKind.CANCELLED}:
        kind: Callable[..., BaseException] = WorkerDied
    elif kinds <= {FailureKind.RESULT, FailureKind.CANCELLED}:
        kind = CollectError
    else:
        kind = RemoteError
    where = {rank: site.mesh.coordinates(rank) for rank in failures}
    return kind(site.method, failures, where, site.group, site.mesh.shown_axes)


def _cannot_take(site: CallSite, failures: Mapping[int, Failure]) -> ResourceError:
    ranks = sorted(rank for rank in failures if failures[rank].kind is FailureKind.UNRECEIVED)
    why = failures[ranks[0]]
    receiver = "the controller" if why.pid == os.getpid() else f"process {why.pid} on host {why.host}"
    return ResourceError(
        f"{site.method} of group {site.group!r} has run, but {receiver} cannot take the reply of "
        f"rank {', '.join(map(str, ranks))}: {why.summary}"
    )
