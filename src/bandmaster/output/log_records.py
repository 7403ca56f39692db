"""Carries log records from a worker to the loggers of its controller, over a socket that preserves message boundaries.

::

    a worker's logger ── RecordSender ──► socket, JSON ──► WorkerOutput ──► pass_on ──► the controller's logger

The worker never blocks: while the controller does not read, records are dropped once the socket is full.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket

from bandmaster.contract import Written

MAX_RECORD_NBYTES = 128 * 1024  # a socket takes about 200 KiB
_PLAIN = (str, int, float, bool, type(None))
_NOT_SENT = {"args", "msg", "message", "exc_info", "exc_text", "stack_info"}  # part of the formatted text
_log = logging.getLogger(__name__)


class RecordSender(logging.Handler):
    """A handler whose records arrive in the loggers of the controller.

    Attributes of a record that are neither strings nor numbers are left out, and the strings of one that is too long
    are shortened. The next record after dropped ones carries their number.

    Args:
        connection: The worker's end.
        level: The lowest level to send.
    """

    def __init__(self, connection: socket.socket, level: int) -> None:
        super().__init__(level)
        self._connection = connection
        self._n_dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record, or drop it."""
        try:
            text = self.format(record)  # with the traceback, if there is one
            fields = {k: v for k, v in vars(record).items() if k not in _NOT_SENT and isinstance(v, _PLAIN)}
            fields |= {"msg": text, "n_dropped": self._n_dropped}
            n = MAX_RECORD_NBYTES
            while len(data := json.dumps(fields).encode()) > MAX_RECORD_NBYTES and n:
                n //= 2  # a character takes up to 12 bytes
                fields = {k: f"{v[:n]} …" if isinstance(v, str) and len(v) > n else v for k, v in fields.items()}
            self._connection.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            self._n_dropped = 0
        except OSError:  # the socket is full, or the controller has ended
            self._n_dropped += 1
        except Exception:
            self.handleError(record)


def send_records(fd: int, level: int) -> None:
    """Send the records of all loggers of this process, from a level on, over a socket."""
    root = logging.getLogger()
    root.addHandler(RecordSender(socket.socket(fileno=fd), level))
    root.setLevel(level)


def pass_on(written: Written) -> None:
    """Pass a record of a worker to the controller's logger of the same name, if that handles its level.

    The message gets the prefix ``[group rank]``, and the record the attributes ``group`` and ``rank``.
    """
    group, rank = written.group, written.rank
    try:
        fields = json.loads(written.lines[0])
        n_dropped = fields.pop("n_dropped", 0)
        fields |= {"msg": f"{written.prefix}{fields['msg']}", "args": None, "group": group, "rank": rank}
        record = logging.makeLogRecord(fields)
        logger = logging.getLogger(record.name)
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)
        if n_dropped:
            _log.warning("%s%d log records are lost, as they were not read in time", written.prefix, n_dropped)
    except Exception:  # raised by a handler or a filter of the user's
        with contextlib.suppress(Exception):  # the handler may belong to the root logger
            _log.exception("a log record of rank %d of %s cannot be handled", rank, group)
