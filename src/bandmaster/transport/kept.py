"""Rows that a call has left on this host, in a segment that the worker has written."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from bandmaster.codec import Payload
from bandmaster.contract import RowFacts
from bandmaster.transport.segments import Lease

__all__ = ["NO_ROWS", "KeptSegment", "RowReaders", "held_nbytes", "kept_name", "payload_in"]

RowReaders = Mapping[int, Callable[[], Payload]]  # what reads the kept rows of a call, by the labels of its arguments
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
    """

    place = "shared memory"

    def __init__(self, lease: Lease, facts: RowFacts) -> None:
        self.lease, self.facts = lease, facts

    def payload(self) -> Payload:
        """The encoded rows, in private memory that is mapped anew."""
        return payload_in(self.lease)


def payload_in(lease: Lease) -> Payload:
    """The payload in a kept segment, in private memory that is mapped anew."""
    head, *buffers = lease.chunks()
    return Payload(head, tuple(buffers))
