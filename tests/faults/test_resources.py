"""No memory, no descriptors: a clear error before anything is sent, and the group goes on when there is room again."""

import os
import re
import resource
import socket
import time

import numpy as np
import pytest

import bandmaster as bm
from bandmaster import Dispatch, register

pytestmark = pytest.mark.backends("local", "ray")


class Echo(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def echo(self, value):
        return value

    @register(Dispatch.DP_PROTO)
    def rows(self, rows):
        return rows

    def on_replace(self, rank, state):
        pass

    @register(Dispatch.ONE_TO_ALL)
    def nap(self, seconds):
        time.sleep(seconds)

    @register(Dispatch.ONE_TO_ALL)
    def make(self, n_bytes):
        """An array, to be had later: that takes a while, and ranks that are late to fail are interrupted."""
        self.array = np.ones(n_bytes, np.uint8)

    @register(Dispatch.ONE_TO_ALL)
    def give(self, limit):
        """The array, while the process may map only a little more than it has."""
        before = limited(resource.RLIMIT_AS, limit)
        self.restore = lambda: resource.setrlimit(resource.RLIMIT_AS, before)
        return self.array

    @register(Dispatch.ONE_TO_ALL)
    def relieve(self):
        self.restore()


def limited(what, extra):
    """Limit this process to a little more than it uses; the limits before."""
    before = resource.getrlimit(what)
    if what == resource.RLIMIT_AS:
        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
    else:
        used = os.open(os.devnull, os.O_RDONLY)  # the first number that is free: the limit is one on numbers
        os.close(used)
    resource.setrlimit(what, (used + extra, before[1]))
    return before


@pytest.fixture
def group(zygote):
    with bm.ResourcePool([2], backend="local") as pool:
        yield bm.WorkerGroup(pool, Echo)


@pytest.mark.parametrize("what", [resource.RLIMIT_AS, resource.RLIMIT_NOFILE], ids=["memory", "descriptors"])
def test_the_controller_has_no_room_for_a_segment(group, what):
    array = np.ones(200 << 20, np.uint8)
    before = limited(what, {resource.RLIMIT_AS: 50 << 20, resource.RLIMIT_NOFILE: 0}[what])
    try:
        with pytest.raises(bm.ResourceError, match="cannot share 209,715,"):
            group.echo(array)
        assert group.echo(1) == [1, 1], "what fits goes on"
    finally:
        resource.setrlimit(what, before)
    assert [value.sum() for value in group.echo(array)] == [200 << 20] * 2


def test_the_controller_has_no_descriptor_for_an_answer(group):
    group.make(200 << 20)
    before = limited(resource.RLIMIT_NOFILE, 0)
    try:
        words = (
            r"the controller cannot take the reply of rank 0, 1: .*segment of shared memory cannot be opened.*ulimit -n"
        )
        with pytest.raises(bm.ResourceError, match=words):
            group.give(1 << 40)
        assert group.echo(1) == [1, 1], "what fits goes on"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert [value.sum() for value in group.give(1 << 40)] == [200 << 20] * 2


def test_a_group_stays_although_the_controller_has_no_descriptor_for_a_while(make_group):
    group = make_group(2, Echo)
    before = limited(resource.RLIMIT_NOFILE, 0)
    try:
        group.nap(1.5)  # the controller looks twice a second whether Ray is there
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert group.echo(1) == [1, 1]


def test_a_group_is_refused_without_descriptors_by_an_error_that_names_the_host(zygote):
    with bm.ResourcePool([2], backend="local") as pool:
        group = bm.WorkerGroup(pool, Echo)
        for n in range(3):
            before = limited(resource.RLIMIT_NOFILE, n)
            try:
                with pytest.raises(bm.ResourceError, match=rf"on host {re.escape(socket.gethostname())}.*ulimit -n"):
                    bm.WorkerGroup(pool, Echo)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert group.echo(1) == [1, 1]


def test_the_controller_has_no_room_for_rows_that_were_kept(group):
    rows = group.rows.submit(np.ones((2, 100 << 20), np.uint8))
    assert len(rows) == 2
    half = rows[1:]
    before = limited(resource.RLIMIT_AS, 50 << 20)
    try:
        for future in rows, half:
            with pytest.raises(
                bm.ResourceError, match=r"the controller cannot read rows . to . of Echo\.rows, which rank"
            ):
                future.result()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert [len(future.result()) for future in (rows, half)] == [2, 1], "it is the controller's limit, and no failure"


def test_the_controller_has_room_for_rows_that_were_kept_but_not_to_join_them(group):
    rows = group.rows.submit(np.ones((2, 60 << 20), np.uint8))
    assert len(rows) == 2
    before = limited(resource.RLIMIT_AS, 170 << 20)
    try:
        with pytest.raises(bm.ResourceError, match=r"the controller has no memory to join .* of Echo\.rows"):
            rows.result()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert rows.result().shape == (2, 60 << 20), "it is the controller's limit, and no failure"


@pytest.mark.parametrize("is_busy", [False, True])
def test_large_values_wait_for_a_busy_worker_unharmed(group, is_busy):
    if is_busy:
        group.nap.submit(0.5)
    arrays = [np.full(90_000, n % 251, np.uint8) for n in range(400)]
    futures = [group.echo.submit(array) for array in arrays]
    for array, future in zip(arrays, futures, strict=True):
        for echoed in future.result(timeout=30):
            np.testing.assert_array_equal(echoed, array)


def test_the_controller_has_no_descriptor_for_a_new_worker(group):
    before = limited(resource.RLIMIT_NOFILE, 0)
    try:
        with pytest.raises(bm.ResourceError, match=r"cannot start rank 1 of 2.*ulimit -n"):
            group.replace(1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert not group.healthy
    group.replace(1)
    assert group.echo(1) == [1, 1]


def test_a_worker_has_no_room_for_its_answer(group):
    group.make(200 << 20)
    with pytest.raises(bm.RemoteError, match=r"memory|Memory"):
        group.give(50 << 20)
    assert group.relieve() == [None, None]
    assert group.echo(1) == [1, 1]
