"""Sends the log records of a worker to its controller, over a socket that keeps their borders; it never blocks."""

from __future__ import annotations

import json
import logging
import socket

__all__ = ["MAX_RECORD_NBYTES", "RecordSender", "send_records"]

MAX_RECORD_NBYTES = 128 * 1024  # a socket takes about 200 KiB
_PLAIN = (str, int, float, bool, type(None))
_NOT_SENT = {"args", "msg", "message", "exc_info", "exc_text", "stack_info"}  # they become text


class RecordSender(logging.Handler):
    """A handler whose records arrive in the loggers of the controller.

    What is not a string or a number in a record's attributes stays behind. While the controller does not read, records
    are dropped once the socket is full; the next one that is sent says how many.

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
            data = json.dumps(fields).encode()
            if len(data) > MAX_RECORD_NBYTES:
                fields["msg"] = text[: MAX_RECORD_NBYTES // 8] + " …"
                data = json.dumps(fields).encode()
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
