"""Objects that are known by weak references are listed as other threads make some."""

import sys
import weakref

import pytest

import bandmaster as bm
from bandmaster.callers import called
from bandmaster.pool.resource_pool import open_pools
from bandmaster.wire import segment_reader

OF_PYTHON = [weakref.WeakSet.__iter__, weakref.WeakKeyDictionary.items, weakref.WeakValueDictionary.values]


class Empty:
    """In place of a group that was given to this worker."""


@pytest.mark.parametrize(
    "look, make",
    [
        (open_pools, lambda: bm.ResourcePool([1], backend="inprocess")),
        (segment_reader._note_fork, segment_reader.SegmentReader),
        (called._told_of_calls, lambda: called._one_of(object(), Empty)),
    ],
    ids=["bm.close_all()", "os.fork()", "bandmaster stack"],
)
def test_what_is_listed_may_grow_meanwhile(look, make):
    more = [make(), make()]
    codes = [function.__code__ for function in (look, *OF_PYTHON)]

    def at_line(*_):
        sys.settrace(None)
        more.append(make())  # as another thread could do
        sys.settrace(trace)
        return at_line

    def trace(frame, *_):
        return at_line if frame.f_code in codes else None

    sys.settrace(trace)
    try:
        look()
    finally:
        sys.settrace(None)
    assert len(more) > 2
