"""Rows that were kept where they were made, read as arguments of a call.

Rows that become a part of the argument as they lie there, in one range, are read in memory of the call's own: the
method may write to them. Others are copied anyway, out of a *view* that nobody writes to: the decoded segment, which
stays mapped for as long as this process has it. A shuffled mini-batch of a large result so costs its own rows, rather
than a mapping or a copy of every part.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from bandmaster.codec import Payload, decode
from bandmaster.plan.batch import Batch, as_batch, copies_rows, learn_batch_type, required_batch
from bandmaster.rows.table import Elsewhere, assemble
from bandmaster.wire.segment_reader import KeptFile, RowReaders, payload_in, start_of

MAX_HEAD_NBYTES = 1 << 20  # of a segment that is viewed: the head is compared each time


def with_rows(
    items: Sequence[tuple[int | str, Any]],
    rows: RowReaders,
    rank: int,
    decode: Callable[[Payload], Any],
    has_views: bool,
) -> Iterator[tuple[int | str, Any]]:
    """The arguments of a call for a rank, with the rows that some refer to.

    Args:
        items: ``(position or keyword, value)`` for each argument.
        rows: What reads the rows.
        rank: The rank.
        decode: Decodes payloads.
        has_views: Whether rows may be copied out of views, which are on the CPU.
    """

    def view_of(label: Any) -> Batch | None:
        file = rows[label].file
        return _view(file) if has_views and file is not None else None

    def read(label: Any) -> Any:
        return decode(rows[label].payload())

    present = {label: reader.present for label, reader in rows.items() if reader.present is not None}
    for key, argument in items:
        if type(argument) is Elsewhere:
            for pickled in argument.batch_types:
                _learn(pickled)
            value = assemble(argument.share(rank), read, view_of, present)
            yield key, required_batch(value).row(0) if argument.is_row else value
        else:
            yield key, argument


@lru_cache
def _learn(pickled: bytes) -> None:
    with suppress(Exception):  # if the user's functions cannot be imported here, other rows can still be read
        learn_batch_type(*pickle.loads(pickled))


def _view(file: KeptFile) -> Batch | None:
    """The decoded content of a kept segment; None if what is copied of it might share something with it.

    The segment may have other content each time. The arrays show it, if the start of the segment is the same, with the
    sizes of all chunks and the head.
    """
    memory, start, known, batch = file.view or (file.memory(), b"", b"", None)
    if not known or bytes(start) != known:
        start, batch = start_of(memory), None
        if len(start) <= MAX_HEAD_NBYTES:
            value = decode(payload_in(memory))
            batch = as_batch(value) if copies_rows(value) else None
        file.view = memory, start, bytes(start[:MAX_HEAD_NBYTES]), batch
    return batch
