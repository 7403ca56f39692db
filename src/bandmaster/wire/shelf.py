"""Payloads in memory segments, kept there as long as somebody may still call with them."""

from __future__ import annotations

from bandmaster.errors import ResourceError
from bandmaster.wire.codec import Payload
from bandmaster.wire.segments import OWNER, Segment, SegmentWriter, fill
from bandmaster.wire.traces import Traces

__all__ = ["Shelf", "Written"]


class Written:
    """A payload in a segment.

    It is copied there by the first call that names it, so that one worker is at work while the next one's is copied.
    """

    def __init__(self, segment: Segment, payload: Payload) -> None:
        self._segment = segment
        self._payload: Payload | None = payload

    @property
    def segment(self) -> Segment:
        """With the payload in it."""
        if self._payload is not None:
            fill(self._segment, [self._payload.head, *self._payload.buffers])
            self._payload = None
        return self._segment


class Shelf:
    """The payloads of one writer. Not thread-safe: its owner holds a lock.

    When a payload is gone, the next one that comes gives its segment back.
    """

    def __init__(self, writer: SegmentWriter) -> None:
        self._writer = writer
        self._written: Traces[Segment] = Traces()

    def put(self, payload: Payload) -> Written:
        """Make room for a payload; its memory is read when `Written.segment` is asked for the first time.

        Raises:
            ResourceError: There is no memory or no descriptor for it.
        """
        self._writer.give_back([trace.of.id for trace in self._written.take_ended()], OWNER)
        try:
            segment = self._writer.reserve([memoryview(chunk).nbytes for chunk in (payload.head, *payload.buffers)])
        except OSError as error:
            raise ResourceError(
                f"cannot share {payload.nbytes:,} bytes with the workers ({error}); free memory, or raise the "
                "limit on open files (ulimit -n)"
            ) from error
        written = Written(segment, payload)
        self._written.follow(written, segment)
        return written
