"""Segments on a reader's side: mapped privately, or held by their descriptors as the rows that a call has kept.

A segment that others may read as well is never handed out as memory: its content is copied out, or mapped privately.
The reader of a message maps the segments that it names. Readers of a *kept* segment hold its descriptor, pass it on to
other processes, and map it anew each time that somebody may write to what they read, so that it never shows again.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NamedTuple

from bandmaster.codec import Payload
from bandmaster.platform.mapped_file import MappedFile
from bandmaster.platform.proc import descriptors
from bandmaster.platform.reference_queue import ReferenceQueue
from bandmaster.platform.weak import living
from bandmaster.wire.messages import KeptElsewhere

ALIGNMENT = 64  # of every chunk, so that arrays are aligned for any instruction
LENGTH_NBYTES = 8  # of each number in a segment's header
FEW_PAGES = 32  # which are dropped sooner than looked at
# Highest bytes of a page's entry in the pagemap that say: not there (neither present nor swapped), or of a file.
_IS_THE_SEGMENTS = bytes(flags for flags in range(256) if not flags & 0xC0 or flags & 0x20)
_ROWS = "bandmaster-rows"
_HELD = re.compile(rf"/memfd:{_ROWS} ([0-9]+) \(deleted\)")


class KeptFile:
    """The descriptor of a kept segment, on a reader's side, until nobody refers to this any more.

    Attributes:
        fd: The descriptor.
        nbytes: Size of the segment.
        view: A value that the reader has made of the segment, to look at it again and again.
    """

    __slots__ = ("fd", "nbytes", "view")

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd, self.nbytes = fd, nbytes
        self.view: Any = None

    def memory(self, keeps: SegmentLease | None = None) -> Any:
        """The segment as an array, in private memory that is mapped anew and keeps a lease, if one is given.

        Raises:
            OSError: There is no memory or no mapping left.
        """
        return MappedFile(self.fd, self.nbytes, is_private=True, keeps=keeps).array()

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # module globals may be cleared before
        close(self.fd)


class SegmentLease:
    """A reader's claim on a kept segment. The segment is not reused while this, or an array over it, is there.

    Attributes:
        file: The segment.
    """

    __slots__ = ("__weakref__", "file")

    def __init__(self, file: KeptFile) -> None:
        self.file = file

    def payload(self) -> Payload:
        """The payload in the segment, in private memory that is mapped anew and keeps this lease.

        Raises:
            OSError: There is no memory or no mapping left.
        """
        return payload_in(self.file.memory(keeps=self))


class KeptSegment(KeptElsewhere):
    """Rows that a call has left on this host, in a kept segment; see `bandmaster.contract.Kept`.

    Attributes:
        lease: The claim on the segment.
        place: ``"shared memory"``.
    """

    place = "shared memory"

    def __init__(self, lease: SegmentLease, described: Payload) -> None:
        super().__init__(described)
        self.lease = lease

    def payload(self, timeout_s: float | None = None) -> Payload:
        """The encoded rows, in private memory that is mapped anew."""
        return self.lease.payload()


class RowReader(NamedTuple):
    """Reads kept rows that arguments of a call refer to.

    Attributes:
        payload: Returns them, encoded, in memory of the caller's own.
        file: The kept segment that they lie in; None if they lie in none.
        present: The numbers of the rows, in ascending order, where these are not all that the rank has kept.
    """

    payload: Callable[[], Payload]
    file: KeptFile | None = None
    present: Any = None


RowReaders = Mapping[int, RowReader]  # by the labels that the arguments of a call use
NO_ROWS: RowReaders = MappingProxyType({})


def kept_name(pid: int) -> str:
    """The name in /proc of the kept segments that a worker has written."""
    return f"{_ROWS} {pid}"


def held_nbytes(pid: int) -> dict[int, int]:
    """Bytes of the kept segments to which a process has descriptors, by the pid of the worker that wrote them."""
    held: dict[int, int] = {}
    for path, name in descriptors(pid):
        found = _HELD.fullmatch(name)
        if found is not None:
            with suppress(OSError):
                held[int(found[1])] = held.get(int(found[1]), 0) + os.stat(path).st_size
    return held


class SegmentReader:
    """Maps the segments of one writer, on a reader's side.

    Attributes:
        leases: Yields the numbers of segments in which no array lies any more. The writer has to be told of them.
    """

    def __init__(self) -> None:
        self.leases: ReferenceQueue[int] = ReferenceQueue()
        self._files: dict[int, MappedFile | KeptFile] = {}
        self._were_forked: set[int] = set()  # segments that a fork of this process may read
        self._were_read: set[int] = set()
        _readers[self] = None

    def attach(self, number: int, fd: int, nbytes: int, is_kept: bool) -> None:
        """Map a segment that this reader has not mapped yet; ``fd`` is closed. A kept one is held by its descriptor."""
        if is_kept:
            self._files[number] = KeptFile(fd, nbytes)
            return
        try:
            self._files[number] = MappedFile(fd, nbytes, is_private=True)
        finally:
            os.close(fd)

    def lease(self, number: int) -> Any:
        """The claim of a message on a segment that it names: the memory, or the `SegmentLease` on a kept one.

        It ends when this, and the last view of the memory, is collected. It is None if the segment is not attached.
        """
        file = self._files.get(number)
        if file is None:
            return None
        claim = SegmentLease(file) if isinstance(file, KeptFile) else file.array()
        self.leases.watch(claim, number)
        return claim

    def payload(self, number: int, claim: Any) -> Payload:
        """The payload in a segment that is not kept, in writable private memory that keeps the claim on it."""
        memory = self._files[number]
        assert isinstance(memory, MappedFile), "kept segments are claimed as rows"
        if number in self._were_read and _may_differ(memory):
            memory.forget_writes()  # what this reader wrote into it the last time must not show
        self._were_read.add(number)
        return payload_in(claim)

    def note_fork(self) -> None:
        """Note the segments under lease, which the fork that is about to happen may read for as long as it lives."""
        self._were_forked.update(self.leases.living())

    def was_forked(self, number: int) -> bool:
        """Whether a fork of this process may read a segment, so that its writer must not reuse it."""
        return number in self._were_forked

    def forget(self, ids: Iterable[int]) -> None:
        """Unmap segments that their writer has closed or is to close, once no array lies in them."""
        for number in ids:
            self._files.pop(number, None)
            self._were_read.discard(number)
            self._were_forked.discard(number)

    def close(self) -> None:
        """Unmap all segments; arrays that lie in a segment keep its mapping, and leases its descriptor."""
        self.forget(list(self._files))


_readers: weakref.WeakKeyDictionary[SegmentReader, None] = weakref.WeakKeyDictionary()


def _note_fork() -> None:
    for reader in living(_readers.keyrefs()):
        reader.note_fork()


os.register_at_fork(before=_note_fork)


def layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """The offset of each chunk, behind a header of their count and sizes; and the offset behind the last chunk."""
    end = LENGTH_NBYTES * (1 + len(sizes))
    offsets = []
    for size in sizes:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        offsets.append(start)
        end = start + size
    return offsets, end


def payload_in(whole: Any) -> Payload:
    """The payload in the memory of a segment."""
    view = memoryview(whole)
    (n_chunks,) = struct.unpack_from("<Q", view)
    sizes = struct.unpack_from(f"<{n_chunks}Q", view, LENGTH_NBYTES)
    offsets, _ = layout(sizes)
    head, *buffers = [view[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]
    return Payload(head, tuple(buffers))


def start_of(whole: Any) -> memoryview:
    """The memory of a segment up to the end of its first chunk: with the sizes of all chunks."""
    view = memoryview(whole)
    n_chunks, size = struct.unpack_from("<2Q", view)
    return view[: -(-LENGTH_NBYTES * (1 + n_chunks) // ALIGNMENT) * ALIGNMENT + size]


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
