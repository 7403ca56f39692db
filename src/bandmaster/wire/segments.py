"""Large payloads in shared memory that has no name: memfd segments, written once, handed over as descriptors.

::

    writer                                                   readers, each in a process of its own
    SegmentWriter.put(payload)                               SegmentReader.chunks(id)
      a free segment, or a new one                             maps it privately: a reader may write, and pays for
      one copy into it, however many will read                 a copy of the pages that it writes only
      is leased to every reader ── id (descriptor once) ────►  arrays lie in the mapping
      free again when all have ◄── ids ─────────────────────   the last array over it is gone
      given it back

A lease belongs to the message that names the segment: the reader claims it with the message, and the lease ends with
the message unless something is made of it. A segment is reused only when no lease on it is left. A segment that was
mapped by a reader when that process forked is closed instead: the fork may read it for as long as it lives. Segments
that have not been used for long are closed too, and readers are told to forget them.

Readers of a *kept* segment do not map it when it comes; see `bandmaster.wire.segment_reader`.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from bandmaster.codec import Payload
from bandmaster.platform.mapped_file import MappedFile
from bandmaster.platform.reference_queue import ReferenceQueue
from bandmaster.wire.segment_reader import SegmentLease, layout

MAX_FREE_NBYTES = 512 << 20  # of segments that are kept for reuse
MAX_FREE = 64  # segments that are kept for reuse: each may have a descriptor
MAX_FREE_KEPT = 8  # of them, kept segments, whose descriptors their readers hold
MAX_FREE_AGE = 256  # a free segment that was passed over by so many writes is closed
SPARE_BITS = 4  # a segment is up to an eighth larger than what it is made for: the next batch may be

_OWNER = -1  # the writer itself, as a reader of its segments


@dataclass(eq=False)
class Segment:
    """One memfd, on its writer's side.

    Attributes:
        id: Its number, never used again.
        fd: Its descriptor; -1 once it was given away.
        memory: The writer's own mapping.
        nbytes: Its capacity.
        readers: Who may still have arrays in it, and how many leases each has: one for each message that named it.
        free_since: Count of writes when it became free.
        is_spoiled: Whether it is to be closed, rather than reused, when nobody reads it any more.
        is_kept: Whether its readers hold its descriptor, rather than map it when it comes.
        lease: Of a segment that another process has written: this one's claim on it.
    """

    id: int
    fd: int
    memory: MappedFile | None
    nbytes: int
    readers: dict[int, int] = field(default_factory=dict)
    free_since: int = 0
    is_spoiled: bool = False
    is_kept: bool = False
    lease: SegmentLease | None = None

    def close_descriptor(self) -> None:
        """Close the descriptor, unless it belongs to a lease; no further reader can map the segment then."""
        fd, self.fd = self.fd, -1
        if fd >= 0 and self.lease is None:
            os.close(fd)

    def places(self, sizes: Sequence[int]) -> list[memoryview]:
        """The memory of each chunk, to be written. The segment was reserved for chunks of these sizes."""
        assert self.memory is not None, "it is this process that writes it"
        memory = memoryview(self.memory.array())
        struct.pack_into(f"<{1 + len(sizes)}Q", memory, 0, len(sizes), *sizes)
        return [memory[offset : offset + size] for offset, size in zip(layout(sizes)[0], sizes, strict=True)]


class SharedPayload:
    """A payload that has a segment, which is not reused as long as this exists.

    The first message that names the payload copies it there, so that one worker runs while the next one's rows are
    copied.
    """

    __slots__ = ("__weakref__", "_payload", "_segment")

    def __init__(self, segment: Segment, payload: Payload | None) -> None:
        self._segment, self._payload = segment, payload

    @property
    def segment(self) -> Segment:
        """The segment, with the payload in it."""
        if self._payload is not None:
            views = _views(self._payload)
            for view, place in zip(views, self._segment.places([view.nbytes for view in views]), strict=True):
                place[:] = view
            self._payload = None
        return self._segment


class SegmentPayload(Payload):
    """A payload that lies in a segment already.

    Attributes:
        placed: The payload as messages name it.
        owner: The writer of the segment.
    """

    __slots__ = ("owner", "placed")

    def __init__(self, places: Sequence[Any], shared: SharedPayload, owner: SegmentWriter) -> None:
        super().__init__(places[0], tuple(places[1:]))
        self.placed, self.owner = shared, owner


_nbytes = attrgetter("nbytes")


class SegmentWriter:
    """Writes payloads into segments, and reuses segments without leases. Not thread-safe: callers hold a lock.

    The segment of a `SharedPayload` that was collected becomes free when the next payload comes, or with `release`.

    Attributes:
        on_close: Called with the number of every segment that is closed; readers have to forget it.
        collected: True, as a collection that is not empty, when `release` has something to do.
        kept_name: The name of kept segments in /proc.

    Args:
        kept_name: The name of kept segments in /proc.
        most_free_nbytes: Bytes of the segments that are kept for reuse.
    """

    def __init__(self, kept_name: str = "bandmaster", most_free_nbytes: int = MAX_FREE_NBYTES) -> None:
        self.kept_name, self._most_free_nbytes = kept_name, most_free_nbytes
        self.on_close: set[Callable[[int], None]] = set()
        self._segments: dict[int, Segment] = {}
        self._free: dict[int, Segment] = {}  # in the order in which they became free
        self._n_writes = 0
        self._ids = itertools.count()
        self._written: ReferenceQueue[Segment] = ReferenceQueue()
        self.collected = self._written.has_records

    def put(self, payload: Payload, is_kept: bool = False) -> SharedPayload:
        """Reserve a segment for a payload, whose memory is read when `SharedPayload.segment` is first asked for.

        Args:
            payload: The payload.
            is_kept: Whether readers may read it several times, as rows that are kept.

        Raises:
            OSError: There is no memory or no descriptor for it.
        """
        return self._shared(self._reserved([view.nbytes for view in _views(payload)], is_kept), payload)

    def reserve(self, sizes: Sequence[int], is_kept: bool = False) -> SegmentPayload:
        """A payload in a segment of its own, whose head and buffers of these sizes are still to be written.

        Raises:
            OSError: There is no memory or no descriptor for it.
        """
        segment = self._reserved(sizes, is_kept)
        return SegmentPayload(segment.places(sizes), self._shared(segment, None), self)

    def adopt(self, lease: SegmentLease) -> SharedPayload:
        """The segment of kept rows that another process has written, as one of this writer's that is never reused."""
        segment = Segment(next(self._ids), lease.file.fd, None, lease.file.nbytes, {_OWNER: 1}, lease=lease)
        segment.is_spoiled = segment.is_kept = True
        self._segments[segment.id] = segment
        return self._shared(segment, None)

    def release(self) -> None:
        """End the leases of payloads that were collected."""
        if self.collected:
            self.end_leases([segment.id for segment in self._written.drain()], _OWNER)

    @property
    def has_leases(self) -> bool:
        """Whether a segment is not free."""
        return len(self._segments) > len(self._free)

    def lease(self, segment: Segment, reader: int) -> None:
        """Note the lease of a reader that is about to be sent a message that names the segment."""
        segment.readers[reader] = segment.readers.get(reader, 0) + 1

    def end_leases(self, ids: Iterable[int], reader: int, is_spoiled: bool = False) -> None:
        """End leases of a reader, one for each number: nothing that it got by one message lies there any more.

        Args:
            ids: The numbers of segments.
            reader: The reader.
            is_spoiled: Whether the segments must not be reused.
        """
        for number in ids:
            segment = self._segments.get(number)
            if segment is not None:
                segment.is_spoiled |= is_spoiled
                left = segment.readers.pop(reader, 1) - 1
                if left:
                    segment.readers[reader] = left
                elif not segment.readers:
                    n_kept = sum(free.is_kept for free in self._free.values())
                    if segment.is_spoiled or (segment.is_kept and n_kept >= MAX_FREE_KEPT):
                        self._close(segment)
                    else:
                        self._free[number], segment.free_since = segment, self._n_writes
        if len(self._free) > MAX_FREE:
            self._trim()

    def forget_reader(self, reader: int) -> None:
        """End all leases of a reader that tells of no more ends. As it may read on, they are not reused."""
        held = {number: s.readers.get(reader, 0) for number, s in self._segments.items()}
        self.end_leases([number for number, n in held.items() for _ in range(n)], reader, is_spoiled=True)

    def close(self) -> None:
        """Close all segments; readers keep what they have mapped."""
        self._free.clear()
        for segment in list(self._segments.values()):
            self._close(segment)

    def _shared(self, segment: Segment, payload: Payload | None) -> SharedPayload:
        shared = SharedPayload(segment, payload)
        self._written.watch(shared, segment)
        return shared

    def _reserved(self, sizes: Sequence[int], is_kept: bool) -> Segment:
        """A free or new segment for chunks of these sizes, leased to its writer."""
        self.release()
        nbytes = layout(sizes)[1]
        self._n_writes += 1
        fitting = [s for s in self._free.values() if nbytes <= s.nbytes <= 4 * nbytes and s.is_kept is is_kept]
        segment = self._free.pop(min(fitting, key=_nbytes).id) if fitting else self._create(nbytes, is_kept)
        self._trim()
        self.lease(segment, _OWNER)
        return segment

    def _trim(self) -> None:
        """Close the segments that have been free for longest, while those that are free are too many or too old."""
        excess = sum(map(_nbytes, self._free.values())) - self._most_free_nbytes
        for segment in list(self._free.values()):
            is_young = self._n_writes - segment.free_since <= MAX_FREE_AGE
            if excess <= 0 and len(self._free) <= MAX_FREE and is_young:
                break
            excess -= segment.nbytes
            del self._free[segment.id]
            self._close(segment)

    def _create(self, nbytes: int, is_kept: bool) -> Segment:
        step = max(mmap.PAGESIZE, 1 << nbytes.bit_length() >> SPARE_BITS)  # pages that are not written to cost nothing
        capacity = -(-nbytes // step) * step
        fd = os.memfd_create(self.kept_name if is_kept else "bandmaster", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, capacity)
            memory = MappedFile(fd, capacity, is_private=False)
        except BaseException:
            os.close(fd)
            raise
        segment = Segment(next(self._ids), fd, memory, capacity, is_kept=is_kept)
        self._segments[segment.id] = segment
        return segment

    def _close(self, segment: Segment) -> None:
        del self._segments[segment.id]
        segment.close_descriptor()
        segment.memory = segment.lease = None  # the mapping ends although the segment is still known somewhere
        for tell in self.on_close:
            tell(segment.id)


def _views(payload: Payload) -> list[memoryview]:
    return [memoryview(chunk).cast("B") for chunk in (payload.head, *payload.buffers)]
