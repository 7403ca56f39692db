"""Large payloads in shared memory that has no name: memfd segments, written once, handed over as descriptors.

::

    writer                                                   readers, each in a process of its own
    SegmentWriter.write(chunks)                              SegmentReader.chunks(id)
      a free segment, or a new one                             maps it privately: a reader may write, and pays for
      one copy into it, however many will read                 a copy of the pages that it writes only
      is leased to every reader ── id (descriptor once) ────►  arrays lie in the mapping
      free again when all have ◄── ids ─────────────────────   the last array over it is gone
      given it back

A lease belongs to the message that names the segment: the reader claims it with the message, and the lease ends with
the message unless something is made of it. A segment is reused only when no lease on it is left. A segment that was
mapped by a reader when that process forked is closed instead: the fork may read it for as long as it lives. Segments
that have not been used for long are closed too, and readers are told to forget them.

Readers of a *kept* segment do not map it when it comes. They hold its descriptor, pass it on to other processes, and
map it anew each time that somebody may write to what they read, so that it never shows again.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from bandmaster.platform.mapped_file import MappedFile
from bandmaster.platform.reference_queue import ReferenceQueue

__all__ = ["OWNER", "KeptFile", "Lease", "Segment", "SegmentReader", "SegmentWriter", "chunks_in", "fill", "start_of"]

ALIGNMENT = 64  # of every chunk, so that arrays are aligned for any instruction
MAX_FREE_NBYTES = 512 << 20  # of segments that are kept for reuse
MAX_FREE = 64  # segments that are kept for reuse: each may have a descriptor
MAX_FREE_KEPT = 8  # of them, kept segments, whose descriptors their readers hold
MAX_FREE_AGE = 256  # a free segment that was passed over by so many writes is closed
WRITES_PER_LOOK = 16  # for such segments

SPARE_BITS = 4  # a segment is up to an eighth larger than what it is made for: the next batch may be

OWNER = -1  # the writer itself, as a reader of its segments

_LENGTH = 8  # of each number in a segment's header
FEW_PAGES = 32  # which are dropped sooner than looked at
# Highest bytes of a page's entry in the pagemap that say: not there (neither present nor swapped), or of a file.
_IS_THE_SEGMENTS = bytes(flags for flags in range(256) if not flags & 0xC0 or flags & 0x20)


@dataclass(eq=False)
class Segment:
    """One memfd, on its writer's side.

    Attributes:
        id: Its number, never used again.
        fd: Its descriptor; -1 once it was given away.
        memory: The writer's own mapping.
        nbytes: Its capacity.
        readers: Who may still have arrays in it, and how many leases each has: one for each message that named it.
        last_used: Count of writes when it was last taken.
        is_spoiled: Whether it is to be closed, rather than reused, when nobody reads it any more.
        is_kept: Whether its readers hold its descriptor, rather than map it when it comes.
        lease: Of a segment that another process has written: this one's claim on it.
    """

    id: int
    fd: int
    memory: MappedFile | None
    nbytes: int
    readers: dict[int, int] = field(default_factory=dict)
    last_used: int = 0
    is_spoiled: bool = False
    is_kept: bool = False
    lease: Lease | None = None

    def close_descriptor(self) -> None:
        """Close the descriptor, unless it belongs to a lease; no further reader can map the segment then."""
        fd, self.fd = self.fd, -1
        if fd >= 0 and self.lease is None:
            os.close(fd)


_nbytes, _last_used = attrgetter("nbytes"), attrgetter("last_used")


class SegmentWriter:
    """Writes payloads into segments, and reuses segments without leases. Not thread-safe: callers hold a lock.

    Attributes:
        on_close: Called with the number of every segment that is closed; readers have to forget it.

    Args:
        kept_name: What /proc calls kept segments.
    """

    def __init__(self, kept_name: str = "bandmaster") -> None:
        self._kept_name = kept_name
        self.on_close: list[Callable[[int], None]] = []
        self._segments: dict[int, Segment] = {}
        self._free: dict[int, Segment] = {}
        self._n_writes = 0
        self._ids = itertools.count()

    def write(self, chunks: Sequence[Any], is_kept: bool = False) -> Segment:
        """Copy chunks into a segment, which is leased to `OWNER` until `end_leases` says otherwise.

        Raises:
            OSError: There is no memory or no descriptor for it.
        """
        segment = self.reserve([memoryview(chunk).nbytes for chunk in chunks], is_kept)
        fill(segment, chunks)
        return segment

    def reserve(self, sizes: Sequence[int], is_kept: bool = False) -> Segment:
        """Take a segment for chunks of these sizes, leased to `OWNER` until `end_leases` says otherwise.

        Raises:
            OSError: There is no memory or no descriptor for it.
        """
        segment = self._take(_layout(sizes)[1], is_kept)
        self.lease(segment, OWNER)
        return segment

    def adopt(self, lease: Lease) -> Segment:
        """A segment that another process has written, as one of this writer's that is never reused; for `OWNER`."""
        segment = Segment(next(self._ids), lease.file.fd, None, lease.file.nbytes, {OWNER: 1}, lease=lease)
        segment.is_spoiled = segment.is_kept = True
        self._segments[segment.id] = segment
        return segment

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
                elif not segment.readers and (segment.is_spoiled or (segment.is_kept and self._has_enough_kept())):
                    self._close(segment)
                elif not segment.readers:
                    self._free[number] = segment
        if len(self._free) > MAX_FREE:
            self._trim()

    def forget_reader(self, reader: int) -> None:
        """End all leases of a reader, whose process has ended."""
        held = {number: s.readers.get(reader, 0) for number, s in self._segments.items()}
        self.end_leases([number for number, n in held.items() for _ in range(n)], reader)

    def close(self) -> None:
        """Close all segments; readers keep what they have mapped."""
        self._free.clear()
        for segment in list(self._segments.values()):
            self._close(segment)

    def _has_enough_kept(self) -> bool:
        return sum(segment.is_kept for segment in self._free.values()) >= MAX_FREE_KEPT

    def _take(self, nbytes: int, is_kept: bool) -> Segment:
        self._n_writes += 1
        fitting = [s for s in self._free.values() if nbytes <= s.nbytes <= 4 * nbytes and s.is_kept is is_kept]
        segment = self._free.pop(min(fitting, key=_nbytes).id) if fitting else self._create(nbytes, is_kept)
        segment.last_used = self._n_writes
        self._trim()
        return segment

    def _trim(self) -> None:
        """Close free segments that are too many or, every now and then, too old."""
        excess = sum(map(_nbytes, self._free.values())) - MAX_FREE_NBYTES
        if excess <= 0 and len(self._free) <= MAX_FREE and self._n_writes % WRITES_PER_LOOK:
            return
        for segment in sorted(self._free.values(), key=_last_used):
            is_young = self._n_writes - segment.last_used <= MAX_FREE_AGE
            if excess <= 0 and len(self._free) <= MAX_FREE and is_young:
                break
            excess -= segment.nbytes
            del self._free[segment.id]
            self._close(segment)

    def _create(self, nbytes: int, is_kept: bool) -> Segment:
        step = max(mmap.PAGESIZE, 1 << nbytes.bit_length() >> SPARE_BITS)  # pages that are not written to cost nothing
        capacity = -(-nbytes // step) * step
        fd = os.memfd_create(self._kept_name if is_kept else "bandmaster", os.MFD_CLOEXEC)
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
        segment.memory = segment.lease = None  # whoever still knows the segment does not keep it mapped
        for tell in self.on_close:
            tell(segment.id)


def fill(segment: Segment, chunks: Sequence[Any]) -> None:
    """Copy chunks into a segment that was reserved for them."""
    views = [memoryview(chunk).cast("B") for chunk in chunks]
    for view, place in zip(views, places_in(segment, [view.nbytes for view in views]), strict=True):
        place[:] = view


def places_in(segment: Segment, sizes: Sequence[int]) -> list[memoryview]:
    """The memory of each chunk of a segment that was reserved for chunks of these sizes, to be written."""
    assert segment.memory is not None, "it is this process that writes it"
    memory = memoryview(segment.memory.array())
    struct.pack_into(f"<{1 + len(sizes)}Q", memory, 0, len(sizes), *sizes)
    return [memory[offset : offset + size] for offset, size in zip(_layout(sizes)[0], sizes, strict=True)]


class KeptFile:
    """The descriptor of a kept segment, on a reader's side, until nobody refers to this any more.

    Attributes:
        fd: The descriptor.
        nbytes: Size of the segment.
        view: What the reader makes of the segment to look at it again and again.
    """

    __slots__ = ("fd", "nbytes", "view")

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd, self.nbytes = fd, nbytes
        self.view: Any = None

    def memory(self) -> Any:
        """The segment as an array, in private memory that keeps no lease.

        Raises:
            OSError: There is no memory or no mapping left.
        """
        return MappedFile(self.fd, self.nbytes, is_private=True).array()

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # module globals may be cleared before
        close(self.fd)


class Lease:
    """A reader's claim on a kept segment. The segment is not reused while this, or an array over it, is there.

    Attributes:
        file: The segment.
    """

    __slots__ = ("__weakref__", "file")

    def __init__(self, file: KeptFile) -> None:
        self.file = file

    def chunks(self) -> list[memoryview]:
        """The chunks in the segment, in writable private memory of their own, which keeps this lease.

        Raises:
            OSError: There is no memory or no mapping left.
        """
        return chunks_in(_Mapping(self).array())


class _Mapping(MappedFile):
    """A mapping of a kept segment, which keeps a lease on it."""

    __slots__ = ("_lease",)

    def __init__(self, lease: Lease) -> None:
        super().__init__(lease.file.fd, lease.file.nbytes, is_private=True)
        self._lease = lease


class SegmentReader:
    """Maps the segments of one writer, on a reader's side.

    Attributes:
        leases: Yields the numbers of segments in which no array lies any more. The writer has to be told of them.
    """

    def __init__(self) -> None:
        self.leases: ReferenceQueue[int] = ReferenceQueue()
        self._maps: dict[int, MappedFile] = {}
        self._kept: dict[int, KeptFile] = {}
        self._were_forked: set[int] = set()  # segments that a fork of this process may read
        self._were_read: set[int] = set()
        _readers.add(self)

    def attach(self, number: int, fd: int, nbytes: int, is_kept: bool) -> None:
        """Map a segment that this reader has not mapped yet; ``fd`` is closed. A kept one is held by its descriptor."""
        if is_kept:
            self._kept[number] = KeptFile(fd, nbytes)
            return
        try:
            self._maps[number] = MappedFile(fd, nbytes, is_private=True)
        finally:
            os.close(fd)

    def knows(self, number: int) -> bool:
        """Whether a segment could be attached."""
        return number in self._maps or number in self._kept

    def lease(self, number: int) -> Any:
        """The claim of a message on a segment that it names: the memory, or the `Lease` on a kept one.

        It ends when this, and the last view of the memory, is collected.
        """
        claim = Lease(self._kept[number]) if number in self._kept else self._maps[number].array()
        self.leases.watch(claim, number)
        return claim

    def chunks(self, number: int, claim: Any) -> list[memoryview]:
        """The chunks in a segment that is not kept, in writable private memory that keeps the claim on it."""
        memory = self._maps[number]
        if number in self._were_read and _may_differ(memory):
            memory.forget_writes()  # what this reader wrote into it the last time must not show
        self._were_read.add(number)
        return chunks_in(claim)

    def note_fork(self) -> None:
        """Note the segments under lease, which the fork that is about to happen may read for as long as it lives."""
        self._were_forked.update(self.leases.living())

    def was_forked(self, number: int) -> bool:
        """Whether a fork of this process may read a segment, so that its writer must not reuse it."""
        return number in self._were_forked

    def forget(self, ids: Iterable[int]) -> None:
        """Unmap segments that their writer has closed or is to close, once no array lies in them."""
        for number in ids:
            self._maps.pop(number, None)
            self._kept.pop(number, None)
            self._were_read.discard(number)
            self._were_forked.discard(number)

    def close(self) -> None:
        """Unmap all segments; arrays that lie in a segment keep its mapping, and leases its descriptor."""
        self.forget([*self._maps, *self._kept])


def chunks_in(whole: Any) -> list[memoryview]:
    """The chunks in the memory of a segment."""
    view = memoryview(whole)
    (n_chunks,) = struct.unpack_from("<Q", view)
    sizes = struct.unpack_from(f"<{n_chunks}Q", view, _LENGTH)
    offsets, _ = _layout(sizes)
    return [view[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]


def start_of(whole: Any) -> memoryview:
    """The memory of a segment up to the end of its first chunk: with the sizes of all chunks."""
    view = memoryview(whole)
    n_chunks, size = struct.unpack_from("<2Q", view)
    return view[: -(-_LENGTH * (1 + n_chunks) // ALIGNMENT) * ALIGNMENT + size]


def _may_differ(memory: MappedFile) -> bool:
    """Whether a page of a private mapping was written to, and so is no longer that of the segment.

    Dropping pages would make the reader fault all of them in again, which takes a third as long as to copy them.

    Source: Documentation/admin-guide/mm/pagemap.rst of Linux, bits 61 to 63.
    """
    n_pages = memory.nbytes // mmap.PAGESIZE
    if n_pages <= FEW_PAGES:
        return True
    try:
        pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        try:
            entries = os.pread(pagemap, 8 * n_pages, memory.address // mmap.PAGESIZE * 8)
        finally:
            os.close(pagemap)
    except OSError:
        return True
    flags = entries[7::8]  # the highest byte of each little-endian number
    return len(flags) != n_pages or bool(flags.translate(None, delete=_IS_THE_SEGMENTS))


_readers: weakref.WeakSet[SegmentReader] = weakref.WeakSet()


def _note_fork() -> None:
    for reader in list(_readers):
        reader.note_fork()


os.register_at_fork(before=_note_fork)


def _layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """The offset of each chunk, behind a header of their count and sizes; and the offset behind the last chunk."""
    end = _LENGTH * (1 + len(sizes))
    offsets = []
    for size in sizes:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        offsets.append(start)
        end = start + size
    return offsets, end
