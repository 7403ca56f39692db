"""Rows that a call has left on this host, in a segment that the worker has written."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from bandmaster.codec import Payload
from bandmaster.contract import RowFacts
from bandmaster.wire.segments import KeptFile, Lease

__all__ = ["NO_ROWS", "KeptSegment", "RowReader", "RowReaders", "held_nbytes", "kept_name"]


class RowReader(NamedTuple):
    """Reads kept rows that arguments of a call refer to.

    Attributes:
        payload: Returns them, encoded, in memory of the caller's own.
        file: The kept segment that they lie in; None if they lie in none.
        shared: Returns them in memory that others read as well; None if ``file`` tells where they lie, or they lie in
            nobody else's memory.
        there: The numbers of the rows, in ascending order, where these are not all that the rank has kept.
    """

    payload: Callable[[], Payload]
    file: KeptFile | None = None
    shared: Callable[[], Payload] | None = None
    there: Any = None

    @classmethod
    def of(cls, lease: Lease, there: Any = None) -> RowReader:
        """The reader of a kept segment."""
        return cls(partial(_payload_in, lease), lease.file, there=there)


RowReaders = Mapping[int, RowReader]  # by the labels that the arguments of a call use
NO_ROWS: RowReaders = MappingProxyType({})


_HELD = re.compile(r"/memfd:bandmaster-rows ([0-9]+) \(deleted\)")


def kept_name(pid: int) -> str:
    """What /proc calls the kept segments that a worker has written."""
    return f"bandmaster-rows {pid}"


def held_nbytes(pid: int) -> dict[int, int]:
    """Bytes of the kept segments to which a process has descriptors, by the pid of the worker that wrote them."""
    held: dict[int, int] = {}
    with suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found = _HELD.fullmatch(os.readlink(path))
                if found is not None:
                    worker = int(found[1])
                    held[worker] = held.get(worker, 0) + path.stat().st_size
    return held


class KeptSegment:
    """Rows in a kept segment; see `bandmaster.contract.Kept`.

    Attributes:
        facts: What is known of the rows.
        lease: The claim on the segment.
        place: ``"shared memory"``.
        origin: What messages call them.
    """

    place = "shared memory"
    origin: object = "rows"

    def __init__(self, lease: Lease, facts: RowFacts) -> None:
        self.lease, self.facts = lease, facts

    def payload(self, timeout_s: float | None = None) -> Payload:
        """The encoded rows, in private memory that is mapped anew."""
        return _payload_in(self.lease)


def _payload_in(lease: Lease) -> Payload:
    """The payload in a kept segment, in private memory that is mapped anew."""
    head, *buffers = lease.chunks()
    return Payload(head, tuple(buffers))
