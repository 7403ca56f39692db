"""Large payloads in shared segments, each kept as long as a call may still name it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bandmaster.codec import Payload
from bandmaster.errors import ResourceError
from bandmaster.platform.reference_queue import ReferenceQueue
from bandmaster.wire.kept import KeptSegment
from bandmaster.wire.segments import OWNER, Segment, SegmentWriter, fill, places_in

__all__ = ["SegmentPayload", "SharedPayload", "SharedPayloads"]


class SharedPayload:
    """A payload that has a segment.

    The first call that names the payload copies it there, so that one worker runs while the next one's rows are copied.
    """

    def __init__(self, segment: Segment, payload: Payload | None) -> None:
        self._segment = segment
        self._payload: Payload | None = payload

    @property
    def segment(self) -> Segment:
        """The segment, with the payload in it."""
        if self._payload is not None:
            fill(self._segment, [self._payload.head, *self._payload.buffers])
            self._payload = None
        return self._segment


class SegmentPayload(Payload):
    """A payload that lies in a segment already.

    Attributes:
        placed: What calls name it by.
        owner: Whose calls.
        is_kept: Whether it is named as kept rows.
    """

    __slots__ = ("is_kept", "owner", "placed")

    def __init__(
        self, head: Any, buffers: tuple[Any, ...], placed: SharedPayload, owner: SharedPayloads, is_kept: bool
    ) -> None:
        super().__init__(head, buffers)
        self.placed, self.owner, self.is_kept = placed, owner, is_kept


class SharedPayloads:
    """Puts the payloads of one writer into segments. Not thread-safe: its owner holds a lock.

    The segment of a `SharedPayload` that was collected becomes free when the next payload comes, or with `let_go`.

    Attributes:
        released: True, as a collection that is not empty, when `let_go` would let go of any.
    """

    def __init__(self, writer: SegmentWriter) -> None:
        self._writer = writer
        self._written: ReferenceQueue[Segment] = ReferenceQueue()
        self.released = self._written.has_records

    def put(self, payload: Payload, is_kept: bool = False) -> SharedPayload:
        """Reserve a segment for a payload, whose memory is read when `SharedPayload.segment` is first asked for.

        Args:
            payload: The payload.
            is_kept: Whether readers may read it several times, as rows that are kept.

        Raises:
            ResourceError: There is no memory or no descriptor for it.
        """
        sizes = [memoryview(chunk).nbytes for chunk in (payload.head, *payload.buffers)]
        return self._watched(SharedPayload(self._reserved(sizes, is_kept), payload))

    def reserve(self, sizes: Sequence[int], is_kept: bool = False) -> SegmentPayload:
        """A payload in a segment of its own, whose head and buffers of these sizes are still to be written.

        Raises:
            ResourceError: There is no memory or no descriptor for it.
        """
        segment = self._reserved(sizes, is_kept)
        head, *buffers = places_in(segment, sizes)
        return SegmentPayload(head, tuple(buffers), self._watched(SharedPayload(segment, None)), self, is_kept)

    def _reserved(self, sizes: Sequence[int], is_kept: bool) -> Segment:
        self.let_go()
        try:
            return self._writer.reserve(sizes, is_kept)
        except OSError as error:
            raise ResourceError(
                f"cannot share {sum(sizes):,} bytes with the workers ({error}); free memory, or raise the "
                "limit on open files (ulimit -n)"
            ) from error

    def adopt(self, kept: KeptSegment) -> SharedPayload:
        """The segment of kept rows, which another process has written, as one of this writer's."""
        self.let_go()
        return self._watched(SharedPayload(self._writer.adopt(kept.lease), None))

    def let_go(self) -> None:
        """Let go of the segments of payloads that were collected."""
        if self.released:
            self._writer.end_leases([segment.id for segment in self._written.drain()], OWNER)

    def _watched(self, shared: SharedPayload) -> SharedPayload:
        self._written.watch(shared, shared._segment)
        return shared
