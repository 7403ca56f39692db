"""Hands the log records of workers to the loggers of the controller."""

from __future__ import annotations

import contextlib
import json
import logging

__all__ = ["pass_on"]

_log = logging.getLogger(__name__)


def pass_on(data: bytes, group: str, rank: int) -> None:
    """Have the controller's logger of the same name handle a record, if it handles its level.

    The message gets the prefix ``[group rank]``, and the record the attributes ``group`` and ``rank``.

    Args:
        data: The record, as `RecordSender` has sent it; nothing where the worker has ended.
        group: The group's name.
        rank: The worker's rank.
    """
    if not data:
        return
    try:
        fields = json.loads(data)
        n_dropped = fields.pop("n_dropped", 0)
        fields |= {"msg": f"[{group} {rank}] {fields['msg']}", "args": None, "group": group, "rank": rank}
        record = logging.makeLogRecord(fields)
        logger = logging.getLogger(record.name)
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)
        if n_dropped:
            _log.warning("[%s %d] %d log records are lost, as they were not read in time", group, rank, n_dropped)
    except Exception:  # a handler or a filter of the user's
        with contextlib.suppress(Exception):  # it may be the root logger's
            _log.exception("a log record of rank %d of %s cannot be handled", rank, group)
