"""Calls as they come by a lane, and their replies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bandmaster.codec import Payload, decode, encode
from bandmaster.contract import Report, Rows
from bandmaster.errors.failure import Failure
from bandmaster.wire.lane import Lane
from bandmaster.wire.messages import CallContent, ReplyKind, reply_message
from bandmaster.wire.segment_reader import NO_ROWS, RowReader, RowReaders
from bandmaster.wire.segments import SharedPayload
from bandmaster.worker_process.executor import Executor


def claimed(lane: Lane, content: CallContent, leases: dict[int, Any]) -> tuple[str, int, list[Payload], RowReaders]:
    """Read a call: method, reply, the parts in memory of this process, and what reads the kept rows.

    Args:
        lane: The lane that the call has come by.
        content: The call.
        leases: Those on kept segments that calls of the same message have read before, to which its own are added.

    Raises:
        OSError: A segment cannot be opened here.
    """
    method, reply, parts, rows, present = content
    known = {} if present is None else decode(lane.unpack(present))
    readers: dict[int, RowReader] = {}
    for label, part in rows:
        if type(part) is tuple:
            readers[label] = RowReader(Payload(*part).private, present=known.get(label))
            continue
        if part not in leases:
            leases[part] = lane.claim(part)
        readers[label] = RowReader.of(leases[part], known.get(label))
    return method, reply, list(map(lane.unpack, parts)), readers or NO_ROWS


def new_reports(executor: Executor, lane: Lane) -> Mapping[str, Report] | None:
    """The reports of the worker; None if the other end of a lane has them already."""
    reports = executor.reports
    if reports == lane.reported:
        return None
    lane.reported = reports
    return reports


def reply(lane: Lane, number: int, outcomes: list[Payload | Rows | Failure | None], times: bytes | None = None) -> None:
    """Remove the only outcome from the list and send it.

    If a signal handler raises just after the reply was sent, the call is replied to again. The controller uses the
    first reply.
    """
    kind, content, shared = _packed(lane, outcomes.pop())
    segments = [] if shared is None else [shared.segment]
    lane.lease(segments)
    try:
        lane.send(reply_message(number, kind, content, times), segments)
    except OSError as error:  # for example, too many descriptors are in flight
        lane.end_leases(segments)
        kind, content, _ = _packed(lane, Failure.of(error))
        lane.send(reply_message(number, kind, content))
    del shared
    lane.writer.release()


def _packed(lane: Lane, outcome: Payload | Rows | Failure | None) -> tuple[int, Any, SharedPayload | None]:
    """Kind and content of the reply with an outcome, and the owner of the segment that it names.

    The caller keeps no reference to the arguments or the outcome, so that leases on their segments end with the reply.
    """
    if outcome is None:
        return ReplyKind.NOTHING, None, None
    if isinstance(outcome, Payload | Rows):
        try:
            if isinstance(outcome, Rows):
                part, shared = lane.pack(outcome.payload, is_kept=True)
                return ReplyKind.ROWS, (part, tuple(outcome.facts)), shared
            return ReplyKind.PART, *lane.pack(outcome)
        except OSError as error:
            outcome = Failure.of(error)
    return ReplyKind.FAILURE, *lane.pack(encode(outcome))
