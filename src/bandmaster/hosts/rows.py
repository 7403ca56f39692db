"""Rows that stay on the host where they were made, and how agents of other hosts fetch them: straight from there."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import socket
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

from bandmaster.codec import Payload, decode, encode
from bandmaster.contract import Kept
from bandmaster.errors import RowsLost
from bandmaster.hosts.handshake import Keys
from bandmaster.hosts.link import Link, LinkStalled, awaited, flush
from bandmaster.hosts.messages import chunks_of, dumped
from bandmaster.hosts.row_links import PATIENCE_S
from bandmaster.plan.batch import join_rows, required_batch
from bandmaster.wire.channel import Closed

__all__ = ["Coming", "RowServer", "Shelf"]

Coming = Future[Payload]  # rows that are being fetched from another host


class Shelf:
    """The rows that calls have left on this host, by number. Any thread may call it."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._rows: dict[int, Kept | Coming] = {}

    def keep(self, rows: Kept) -> int:
        """Keep rows until they are released; returns their number."""
        number = next(self._numbers)
        self._rows[number] = rows
        return number

    def keep_copy(self, number: int, coming: Coming) -> None:
        """Keep a copy of rows of another host by a number that the controller has given it."""
        self._rows[number] = coming

    def release(self, numbers: Iterable[int]) -> None:
        """Let go of rows."""
        for number in numbers:
            self._rows.pop(number, None)

    def rows(self, number: int) -> Kept | Coming:
        """Rows that are kept, or will be.

        Raises:
            RowsLost: They are not.
        """
        try:
            return self._rows[number]
        except KeyError:
            raise RowsLost("rows were released on the host that had made them") from None


class RowServer:
    """Sends rows of a shelf to agents of other hosts.

    Args:
        shelf: The shelf.
    """

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    def serve(self, sock: socket.socket, keys: Keys) -> None:
        """Serve one connection, until it ends."""
        link = Link(sock, keys)
        with contextlib.suppress(Closed, LinkStalled), contextlib.closing(link):
            while True:
                self._answer(link, *pickle.loads(awaited(link, 1e6).head))

    def _answer(self, link: Link, number: int, rows: Any) -> None:
        try:
            kept = self._shelf.rows(number)
            assert not isinstance(kept, Future), "rows are fetched from where they were made"
            payload = kept.payload()
            if rows is not None:
                payload = encode(join_rows([(required_batch(decode(payload)), rows)]))
        except Exception as error:  # they are gone, or cannot be read here
            link.send(dumped((str(error),)))
        else:
            link.send(dumped((None,)), chunks_of(payload))
        flush([link], PATIENCE_S)
