"""``group.cancel()``: which calls it ends, what their futures say, and that the group goes on."""

import asyncio
import contextlib
import os
import signal
import threading
import time

import pytest
from ends import outstay, wait_for

import bandmaster as bm
from bandmaster import Dispatch, register


class Slow(bm.Worker):
    def __init__(self):
        self.n_closed = 0

    @register(Dispatch.DP_PROTO)
    def rows(self, rows, gate=None):
        while gate is not None and not os.path.exists(gate):
            pass
        return rows

    @register(Dispatch.REQUEST)
    def ask(self, rows, gate=None):
        return self.rows(rows, gate)

    @register(Dispatch.DP_PROTO)
    def items(self, rows):
        try:
            yield from rows
        finally:
            self.n_closed += 1

    @register(Dispatch.ONE_TO_ALL)
    def closed(self):
        return self.n_closed

    @register(Dispatch.ONE_TO_ALL)
    def stays(self, folder):
        """Say that it has begun and that it was interrupted, which it is as nothing else ends it."""
        try:
            (folder / f"{self.rank} begun").touch()
            while True:
                time.sleep(0.001)
        finally:
            (folder / f"{self.rank} interrupted").touch()


class Ends(bm.Worker):
    def __init__(self):
        self.next_begins = self.has_ended = False

    @register(Dispatch.ONE_TO_ALL)
    async def stays(self, begun, interrupts=False):
        """Wait to be cancelled, or press Ctrl-C; then end slowly, but at once if the next call begins."""
        try:
            begun.touch()
            if interrupts:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            await asyncio.sleep(60)
        finally:
            until = time.monotonic() + 0.3
            while not self.next_begins and time.monotonic() < until:
                await asyncio.sleep(0.001)
            self.has_ended = True

    @register(Dispatch.ONE_TO_ALL)
    def looks(self):
        self.next_begins = True
        return self.has_ended


class Stubborn(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    async def call(self, begun, gate):
        """Stay until the gate opens, whatever is cancelled."""
        begun.touch()
        while not os.path.exists(gate):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.001)

    @register(Dispatch.REQUEST)
    async def request(self, begun, gate):
        await self.call(begun, gate)


class Other(Slow):
    pass


@pytest.fixture(scope="module")
def slow(backend):
    with bm.ResourcePool([2], backend=backend) as pool:
        yield bm.WorkerGroup(pool, Slow)


def in_vain(gate):
    """The argument that has a call never end by itself: the gate opens after the test."""
    return {"gate": str(gate)}


@pytest.mark.backends("local", "ray")
def test_calls_that_run_wait_or_were_not_sent_are_cancelled(slow, gate):
    before = slow.rows.submit([1, 2])
    assert before.result() == [1, 2]
    running = slow.rows.submit([1, 2], **in_vain(gate))
    queued = slow.rows.submit([3, 4])
    not_sent = slow.rows.submit(running)
    derived = running[:1]

    assert slow.cancel() == 3
    for future in (running, queued, not_sent, derived):
        with pytest.raises(bm.CallCancelled):
            future.result(timeout=20)
    assert running.cancelled() and queued.cancelled() and not_sent.cancelled()
    assert slow.rows([5, 6]) == [5, 6], "the group goes on"
    assert before.result() == [1, 2] and not before.cancelled()
    assert slow.cancel() == 0


@pytest.mark.backends("local", "ray")
def test_ranks_are_interrupted_though_nobody_waits_for_the_call(slow, tmp_path):
    def wait_for_both(what):
        end = time.monotonic() + 20
        while not all((tmp_path / f"{rank} {what}").exists() for rank in (0, 1)):
            assert time.monotonic() < end, f"not both ranks were {what}"
            time.sleep(0.001)

    future = slow.stays.submit(tmp_path)
    wait_for_both("begun")
    assert future.cancel()
    wait_for_both("interrupted")
    with pytest.raises(bm.CallCancelled):
        future.result(timeout=20)


@pytest.mark.parametrize("method", ["call", "request"])
@pytest.mark.backends("local", "ray")
def test_a_wait_for_a_cancelled_call_that_does_not_stop_is_not_advised_to_cancel_it(make_group, tmp_path, gate, method):
    group, begun = make_group(1, Stubborn), tmp_path / "begun"
    future = getattr(group, method).submit(begun, gate)
    wait_for(begun)
    future.cancel()
    with pytest.raises(bm.CallTimeout, match="was cancelled and still runs: wait for its end") as late:
        future.result(timeout=0.2)
    assert "future.cancel()" not in str(late.value)
    gate.touch()
    with pytest.raises(bm.CallCancelled):
        future.result(timeout=20)


@pytest.mark.backends("inprocess", "local")
def test_a_cancelled_coroutine_has_ended_when_the_next_call_begins(make_group, backend, tmp_path):
    group, begun = make_group(1, Ends), tmp_path / "begun"
    if backend == "inprocess":
        with pytest.raises(KeyboardInterrupt):
            group.stays(begun, interrupts=True)
    else:
        future, until = group.stays.submit(begun), time.monotonic() + 20
        while not begun.exists():
            assert time.monotonic() < until
            time.sleep(0.001)
        assert future.cancel()
    assert group.looks() == [True]


@pytest.mark.backends("local")
def test_streams_end_with_an_error_and_generators_are_closed(slow, gate):
    n_closed = slow.closed()
    items = slow.items.stream([1, 2, 3, 4, 5, 6, 7, 8])
    assert {next(items).rank for _ in range(5)} == {0, 1}, "both generators have begun"
    shares = slow.rows.stream([1, 2], **in_vain(gate))
    assert slow.cancel() == 2
    with pytest.raises(bm.CallCancelled):
        list(shares)
    with pytest.raises(bm.CallCancelled):
        list(items)
    assert list(items) == [], "a stream that has raised is closed"
    assert slow.closed() == [n + 1 for n in n_closed]


@pytest.mark.backends("local")
def test_maps_send_no_more_requests(slow, gate):
    future = slow.ask.map(list(range(20)), chunk=1, **in_vain(gate)).future
    behind = slow.rows.submit([1, 2])
    assert slow.cancel() == 2
    for cancelled in (future, behind):
        with pytest.raises(bm.CallCancelled):
            cancelled.result(timeout=20)

    mapped = slow.ask.map(list(range(20)), on_error="return", **in_vain(gate))
    assert slow.cancel() == 1
    with pytest.raises(bm.CallCancelled):
        list(mapped)
    assert slow.rows([5, 6]) == [5, 6]


@pytest.mark.backends("local")
def test_a_call_behind_requests_is_cancelled_with_them_and_does_not_run(slow, gate):
    for _ in range(30):
        future = slow.ask.map(list(range(6)), **in_vain(gate)).future
        behind = slow.rows.submit([1, 2])
        assert slow.cancel() == 2
        for cancelled in (future, behind):
            with pytest.raises(bm.CallCancelled):
                cancelled.result(timeout=20)


@pytest.mark.backends("local")
def test_a_role_cancels_its_own_calls_and_the_colocated_group_all(make_pool, gate, tmp_path):
    group = bm.colocate(make_pool([2]), actor=Slow, critic=Other)
    other_gate = tmp_path / "other gate"
    critics = group.critic.rows.submit([1, 2], **in_vain(other_gate))
    actors = group.actor.rows.submit([1, 2])
    assert group.actor.cancel() == 1
    assert actors.cancelled() and not critics.cancelled()
    other_gate.touch()
    assert critics.result(timeout=20) == [1, 2]

    futures = [role.rows.submit([1, 2], **in_vain(gate)) for role in (group.actor, group.critic)]
    assert group.cancel() == 2
    for future in futures:
        with pytest.raises(bm.CallCancelled):
            future.result(timeout=20)
    assert group.actor.rows([1, 2]) == [1, 2]


def test_nothing_to_cancel_and_closed_groups(make_group):
    group = make_group(2, Slow)
    future = group.rows.submit([1, 2])
    assert future.result() == [1, 2]
    assert group.cancel() == 0
    group.close()
    with pytest.raises(bm.ClosedError):
        group.cancel()


class Pair(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def stay(self, begun):
        if self.rank == 1:
            outstay(begun)

    @register(Dispatch.ONE_TO_ALL)
    def meet(self):
        raise RuntimeError("Connection closed by peer")


@pytest.mark.backends("local", "ray")
def test_a_call_behind_one_whose_cancel_ends_a_rank_tells_of_that_death(make_group, tmp_path):
    group = make_group(2, Pair)
    stays = group.stay.options(grace=0.1).submit(tmp_path / "begun")
    wait_for(tmp_path / "begun")
    stays.cancel()
    with pytest.raises(bm.WorkerDied, match=r"rank 1 .*had not stopped in time after Pair.stay was cancelled"):
        group.meet()
    with pytest.raises(bm.CallCancelled):
        stays.result()
