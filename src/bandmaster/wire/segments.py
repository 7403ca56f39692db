"""Large payloads in shared memory that has no name: memfd segments, written once, handed over as descriptors.

::

    writer                                                   readers, each in a process of its own
    SegmentWriter.write(chunks)                              SegmentReader.chunks(id)
      a free segment, or a new one                             maps it privately: a reader may write, and pays for
      one copy into it, however many will read                 a copy of the pages that it writes only
      is lent to every reader ──── id (descriptor once) ────►  arrays lie in the mapping
      free again when all have ◄── ids ─────────────────────   the last array over it is gone
      given it back

A segment is reused only when no reader has anything left that lies in it. Segments that nobody asks for any more are
closed, and readers are told to forget them.
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

import numpy as np

from bandmaster.wire.traces import Trace, Traces

__all__ = ["OWNER", "Segment", "SegmentReader", "SegmentWriter", "fill"]

ALIGNMENT = 64  # of every chunk, so that arrays are aligned for any instruction
MAX_FREE_NBYTES = 512 << 20  # of segments that are kept for reuse
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
    """One memfd, as its writer sees it.

    Attributes:
        id: Its number, never used again.
        fd: Its descriptor.
        memory: The writer's own mapping.
        nbytes: Its capacity.
        readers: Who may still have arrays in it.
        last_used: Count of writes when it was last taken.
    """

    id: int
    fd: int
    memory: mmap.mmap
    nbytes: int
    readers: set[int] = field(default_factory=set)
    last_used: int = 0


_nbytes, _last_used = attrgetter("nbytes"), attrgetter("last_used")


class SegmentWriter:
    """The segments of one writing side. Not thread-safe: its owner holds a lock.

    A signal's handler may make calls in the middle of anything, though: so segments are claimed by popping them.

    Attributes:
        on_close: Called with the number of every segment that is closed; readers have to forget it.
    """

    def __init__(self) -> None:
        self.on_close: list[Callable[[int], None]] = []
        self._segments: dict[int, Segment] = {}
        self._free: dict[int, Segment] = {}
        self._n_writes = 0
        self._ids = itertools.count()

    def write(self, chunks: Sequence[Any]) -> Segment:
        """Copy chunks into a segment, which is lent to `OWNER` until `give_back` says otherwise.

        Raises:
            OSError: There is no memory or no descriptor for it.
        """
        segment = self.reserve([memoryview(chunk).nbytes for chunk in chunks])
        fill(segment, chunks)
        return segment

    def reserve(self, sizes: Sequence[int]) -> Segment:
        """A segment for chunks of these sizes, lent to `OWNER` until `give_back` says otherwise.

        Raises:
            OSError: There is no memory or no descriptor for it.
        """
        segment = self._take(_layout(sizes)[1])
        segment.readers.add(OWNER)
        return segment

    def lend(self, segment: Segment, reader: int) -> None:
        """Note that a reader is about to be told of the segment."""
        segment.readers.add(reader)

    def give_back(self, ids: Iterable[int], reader: int) -> None:
        """A reader has nothing left in these segments."""
        for number in ids:
            segment = self._segments.get(number)
            if segment is not None:
                segment.readers.discard(reader)
                if not segment.readers:
                    self._free[number] = segment

    def forget_reader(self, reader: int) -> None:
        """A reader is gone: it has nothing left anywhere."""
        self.give_back([number for number, s in list(self._segments.items()) if reader in s.readers], reader)

    def close(self) -> None:
        """Close all segments; readers keep what they have mapped."""
        self._free.clear()
        for segment in list(self._segments.values()):
            self._close(segment)

    def _take(self, nbytes: int) -> Segment:
        self._n_writes += 1
        fitting = [s for s in list(self._free.values()) if nbytes <= s.nbytes <= 4 * nbytes]
        fitting.sort(key=_nbytes)
        for segment in fitting:
            if self._free.pop(segment.id, None) is not None:
                break
        else:
            segment = self._create(nbytes)
        segment.last_used = self._n_writes
        self._trim()
        return segment

    def _trim(self) -> None:
        """Close free segments that are too many or, every now and then, too old."""
        excess = sum(map(_nbytes, list(self._free.values()))) - MAX_FREE_NBYTES
        if excess <= 0 and self._n_writes % WRITES_PER_LOOK:
            return
        for segment in sorted(self._free.values(), key=_last_used):
            if excess <= 0 and self._n_writes - segment.last_used <= MAX_FREE_AGE:
                break
            excess -= segment.nbytes
            if self._free.pop(segment.id, None) is not None:
                self._close(segment)

    def _create(self, nbytes: int) -> Segment:
        step = max(mmap.PAGESIZE, 1 << nbytes.bit_length() >> SPARE_BITS)  # pages that are not written to cost nothing
        capacity = -(-nbytes // step) * step
        fd = os.memfd_create("bandmaster", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, capacity)
            memory = mmap.mmap(fd, capacity)
        except BaseException:
            os.close(fd)
            raise
        segment = Segment(next(self._ids), fd, memory, capacity)
        self._segments[segment.id] = segment
        return segment

    def _close(self, segment: Segment) -> None:
        del self._segments[segment.id]
        os.close(segment.fd)
        segment.memory.close()
        for tell in self.on_close:
            tell(segment.id)


def fill(segment: Segment, chunks: Sequence[Any]) -> None:
    """Copy chunks into a segment that was reserved for them."""
    views = [memoryview(chunk).cast("B") for chunk in chunks]
    sizes = [view.nbytes for view in views]
    with memoryview(segment.memory) as memory:
        struct.pack_into(f"<{1 + len(sizes)}Q", memory, 0, len(sizes), *sizes)
        for view, offset in zip(views, _layout(sizes)[0], strict=True):
            memory[offset : offset + view.nbytes] = view


class SegmentReader:
    """The mappings of one reading side, of the segments of one writer.

    Attributes:
        loans: Of segments, by their numbers: they end when nothing lies in a segment any more, as its writer has to be
            told.
    """

    def __init__(self) -> None:
        self.loans: Traces[int] = Traces()
        self._maps: dict[int, tuple[mmap.mmap, int]] = {}  # and the address of each
        self._kept: set[int] = set()  # segments that are never given back
        self._were_read: set[int] = set()
        _readers.add(self)

    def attach(self, number: int, fd: int, nbytes: int) -> None:
        """Map a segment that is new here; ``fd`` is closed."""
        try:
            memory = mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            self._maps[number] = memory, np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
        finally:
            os.close(fd)

    def chunks(self, number: int) -> list[memoryview]:
        """What was written, in memory that may be written to; given back when the last view of it is gone."""
        memory, address = self._maps[number]
        if number in self._were_read and _may_differ(memory, address):
            memory.madvise(mmap.MADV_DONTNEED)  # what this reader wrote into it the last time must not show
        self._were_read.add(number)
        (n_chunks,) = struct.unpack_from("<Q", memory)
        sizes = struct.unpack_from(f"<{n_chunks}Q", memory, _LENGTH)
        offsets, nbytes = _layout(sizes)
        whole = np.frombuffer(memory, np.uint8, nbytes)  # lives as long as any view of it
        self.loans.follow(whole, number)
        view = memoryview(whole.data)
        return [view[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]

    def keep(self) -> None:
        """Never give back what is lent now: a process that is about to be forked will have it too."""
        self._kept.update(self.loans.living())

    def take_ended(self) -> list[Trace[int]]:
        """The loans that have ended, but for those of segments that are kept."""
        return [loan for loan in self.loans.take_ended() if loan.of not in self._kept]

    def forget(self, ids: Iterable[int]) -> None:
        """Unmap segments that their writer has closed."""
        for number in ids:
            self._maps.pop(number, None)
            self._were_read.discard(number)

    def close(self) -> None:
        """Unmap all segments; arrays that lie in one keep it."""
        self.forget(list(self._maps))


def _may_differ(memory: mmap.mmap, address: int) -> bool:
    """Whether a page of a private mapping was written to, and so is no longer that of the segment.

    Dropping pages would make the reader fault all of them in again, which takes a third as long as to copy them.

    Source: Documentation/admin-guide/mm/pagemap.rst of Linux, bits 61 to 63.
    """
    n_pages = len(memory) // mmap.PAGESIZE
    if n_pages <= FEW_PAGES:
        return True
    try:
        pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        try:
            entries = os.pread(pagemap, 8 * n_pages, address // mmap.PAGESIZE * 8)
        finally:
            os.close(pagemap)
    except OSError:
        return True
    flags = entries[7::8]  # the highest byte of each little-endian number
    return len(flags) != n_pages or bool(flags.translate(None, delete=_IS_THE_SEGMENTS))


_readers: weakref.WeakSet[SegmentReader] = weakref.WeakSet()


def _keep_all() -> None:
    for reader in list(_readers):
        reader.keep()


os.register_at_fork(before=_keep_all)


def _layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where chunks of these sizes lie, after a header of their count and sizes; and the end of the last."""
    end = _LENGTH * (1 + len(sizes))
    offsets = []
    for size in sizes:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        offsets.append(start)
        end = start + size
    return offsets, end
