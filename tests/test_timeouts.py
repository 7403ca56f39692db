"""What the message of each timeout says to do next works as it says."""

import asyncio
import os
import threading
import time
from fractions import Fraction

import pytest
from clock import idle_time

import bandmaster as bm
from bandmaster import Dispatch, register

SHORT = {"timeout": 0.2}
WAIT_OR_CANCEL = "wait again with error.future.result(), or cancel it with error.future.cancel()"


class Slow(bm.Worker):
    def __init__(self, gate=None):
        _wait_for(gate)

    @register(Dispatch.DP_PROTO)
    def rows(self, rows, gate=None):
        _wait_for(gate)
        return rows

    @register(Dispatch.REQUEST)
    def ask(self, rows, gate=None):
        _wait_for(gate)
        return rows

    @register(Dispatch.DP_PROTO)
    def items(self, rows, gate):
        _wait_for(gate)
        yield from rows

    def on_yield(self):
        _wait_for(os.environ.get("GATE_OF_HOOK"))

    @register(Dispatch.ONE_TO_ALL)
    def set_gate(self, gate):
        os.environ["GATE_OF_HOOK"] = gate


def _wait_for(gate):
    while gate is not None and not os.path.exists(gate):
        time.sleep(0.01)


@pytest.fixture(scope="module")
def slow(zygote):
    with bm.ResourcePool([2]) as pool:
        yield bm.WorkerGroup(pool, Slow)


def in_time(step):
    """The result of a step that waits again, perhaps in vain a few times, as the call keeps its short timeout."""
    deadline = idle_time() + 30
    while True:
        try:
            return step()
        except bm.CallTimeout:
            assert idle_time() < deadline


CALLS = {
    "blocking": lambda method, gate: method.options(**SHORT)([1, 2], gate),
    "future": lambda method, gate: method.submit([1, 2], gate).result(timeout=0.2),
    "map": lambda method, gate: method.map([1, 2], gate, chunk=1).result(timeout=0.2),
}


@pytest.mark.parametrize("way", CALLS)
def test_a_call_can_be_waited_for_again_or_cancelled(slow, gate, way):
    method = slow.ask if way == "map" else slow.rows
    with pytest.raises(bm.CallTimeout) as caught:
        CALLS[way](method, str(gate))
    assert WAIT_OR_CANCEL in str(caught.value) and caught.value.missing == (0, 1)
    gate.touch()
    assert in_time(caught.value.future.result) == [1, 2]

    gate.unlink()
    with pytest.raises(bm.CallTimeout) as caught:
        CALLS[way](method, str(gate))
    assert caught.value.future.cancel()
    with pytest.raises(bm.CallCancelled):
        caught.value.future.result()
    assert slow.rows([1, 2]) == [1, 2]


STREAMS = {
    "shares": lambda group, gate: group.rows.options(**SHORT).stream([1, 2], gate),
    "items": lambda group, gate: group.items.options(**SHORT).stream([1, 2], gate),
}


@pytest.mark.parametrize("way", STREAMS)
def test_a_stream_can_be_iterated_over_further_or_closed(slow, gate, way):
    for next_step in ("go on", "close"):
        with pytest.raises(bm.CallTimeout) as caught:
            for _ in STREAMS[way](slow, str(gate)):  # which has no name
                pass
        words = "go on iterating over error.stream to wait again, or end it with error.stream.close()"
        assert words in str(caught.value) and caught.value.future is None
        if next_step == "go on":
            gate.touch()
            items = [in_time(lambda: next(caught.value.stream)).result() for _ in range(2)]
            assert sorted(map(str, items)) in (["1", "2"], ["[1]", "[2]"])
            gate.unlink()
        else:
            caught.value.stream.close()
            assert list(caught.value.stream) == []
    assert slow.rows([1, 2]) == [1, 2]


async def _awaited(future, timeout_s=30):
    async def wait():
        return await future

    return await asyncio.wait_for(wait(), timeout_s)


@pytest.mark.parametrize("who", ["the call itself", "one behind it"])
def test_a_call_that_timed_out_before_it_was_sent_holds_nobody_up_who_awaits(slow, gate, who):
    rows = slow.rows.submit([1, 2], str(gate))
    with pytest.raises(bm.CallTimeout) as caught:
        slow.rows.options(**SHORT)(rows)
    awaited = caught.value.future if who == "the call itself" else slow.rows.submit([1, 2])
    with pytest.raises(bm.CallTimeout):
        awaited.result(timeout=0)

    async def wait():
        asyncio.get_running_loop().call_later(0.1, gate.touch)  # when it is awaited already
        return await _awaited(awaited)

    assert in_time(lambda: asyncio.run(wait())) == [1, 2]


@pytest.mark.parametrize("timeout", [None, 30])
def test_a_call_behind_a_map_that_waits_for_rows_waits_as_long_as_it_takes(slow, gate, timeout):
    with bm.ResourcePool([1]) as pool:
        rows = bm.WorkerGroup(pool, Slow).rows.submit([1, 2, 3, 4, 5], str(gate))
        mapped = slow.ask.map(rows, chunk=1)  # more chunks than ranks, so that not all are sent at once
        behind = slow.rows.submit([6, 7])
        threading.Timer(0.2, gate.touch).start()
        assert behind.result(timeout) == [6, 7]
        assert mapped.result() == [1, 2, 3, 4, 5]


def test_what_a_long_chain_of_calls_waits_for_is_found_at_once(slow, gate):
    rows = slow.rows.submit([1, 2], str(gate))
    for _ in range(30):  # each of which is in the queue before the next, and makes its rows
        rows = slow.rows.submit(slow.ask.map(rows, chunk=1).future[::-1])
    began = idle_time()
    with pytest.raises(bm.CallTimeout, match=r"Slow.rows got no reply from rank 0, 1 within 0\.2 s"):
        rows.result(timeout=0.2)
    assert idle_time() - began < 5, "it took 2 ** 30 steps"
    gate.touch()
    assert rows.result() == [1, 2]


def test_a_call_that_was_not_sent_can_be_waited_for_or_cancelled_with_what_it_waits_for(slow, gate):
    rows = slow.rows.submit([1, 2], str(gate))
    with pytest.raises(bm.CallTimeout) as caught:
        slow.rows.options(**SHORT)(rows)
    error = caught.value
    assert "takes its rows, and so was not sent: wait again with error.future.result()" in str(error)
    assert f"cancel all calls of group {slow.name!r} with its cancel()" in str(error)
    gate.touch()
    assert in_time(error.future.result) == [1, 2]

    gate.unlink()
    rows = slow.rows.submit([1, 2], str(gate))
    for wait in (slow.rows.submit(rows).result, rows[:1].result):
        with pytest.raises(bm.CallTimeout) as caught:
            wait(timeout=0.2)
        assert ("cancel it alone" in str(caught.value)) == caught.value.future.cancel()
    assert slow.cancel() == 1
    with pytest.raises(bm.CallCancelled):
        rows.result()


def test_constructors_get_longer_with_start_timeout(zygote, gate):
    with bm.ResourcePool([1]) as pool:
        with pytest.raises(
            bm.CallTimeout, match=r"Slow\.__init__ .* within 2\.5 s; .* longer with start_timeout"
        ) as caught:
            bm.WorkerGroup(pool, Slow, str(gate), start_timeout=Fraction(5, 2))
        assert "in _wait_for" in caught.value.stacks[0] and caught.value.future is None
        gate.touch()
        assert bm.WorkerGroup(pool, Slow, str(gate), start_timeout=60).rows([1]) == [1]


def test_turns_can_be_waited_for_longer(zygote, gate):
    with bm.ResourcePool([1]) as pool:
        actor, critic = bm.WorkerGroup(pool, Slow), bm.WorkerGroup(pool, Slow)
        with actor.turn():
            actor.set_gate(str(gate))
        late = pytest.raises(bm.CallTimeout, match=r"Slow\.on_yield got no reply from rank 0")
        with late as caught, critic.turn(timeout=0.2):
            pass
        assert WAIT_OR_CANCEL in str(caught.value)
        gate.touch()
        caught.value.future.result()
        with critic.turn(timeout=30):
            assert critic.rows([1]) == [1]
