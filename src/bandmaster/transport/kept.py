"""Rows that a call has left on this host, in a segment that the worker has written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from bandmaster.codec import Payload
from bandmaster.contract import RowFacts
from bandmaster.transport.segments import Lease

__all__ = ["NO_ROWS", "KeptSegment", "RowReaders", "payload_in"]

RowReaders = Mapping[int, Callable[[], Payload]]  # what reads the kept rows of a call, by the labels of its arguments
NO_ROWS: RowReaders = MappingProxyType({})


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
