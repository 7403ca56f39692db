"""Ctrl-C, threads, forks and garbage at awkward moments: no answer is lost, shifted or seen by the wrong reader."""

import os
import signal
import threading
import time
import weakref

import numpy as np
import pytest

import bandmaster as bm
from bandmaster import Dispatch, register
from bandmaster.backends import Call, Reply
from bandmaster.testing import standing
from bandmaster.wire.codec import Payload, encode


def fork_for_a_moment():
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)


def n_segments():
    """How many segments this process has a descriptor of: those it writes."""
    return len(standing(["segments"]).segments)


class Forks(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def fork_with(self, array):
        """Fork a child that looks at the array later, when told; the ends of its pipes."""
        self.ask, asked = os.pipe()[::-1]
        told, tell = os.pipe()
        if os.fork() == 0:
            os.read(asked, 1)
            os.write(tell, str(float(array[-1])).encode())
            os._exit(0)
        self.told = told

    @register(Dispatch.ONE_TO_ALL)
    def fork_for_a_moment(self):
        fork_for_a_moment()

    @register(Dispatch.ONE_TO_ALL)
    def n_segments(self):
        return n_segments()

    @register(Dispatch.ONE_TO_ALL)
    def take(self, array):
        return float(array[-1])

    @register(Dispatch.ONE_TO_ALL)
    def what_the_child_sees(self):
        os.write(self.ask, b"?")
        return os.read(self.told, 100).decode()

    @register(Dispatch.ONE_TO_ALL)
    def hang(self):
        time.sleep(300)

    @register(Dispatch.DP_PROTO)
    def rows_of(self, rows):
        return rows

    @register(Dispatch.ONE_TO_ALL)
    def echo(self, value):
        return value

    @register(Dispatch.ONE_TO_ALL)
    def write_to(self, path):
        with open(path, "w") as file:
            file.write("done")


@pytest.fixture
def group(zygote):
    with bm.ResourcePool([1], backend="local") as pool:
        yield bm.WorkerGroup(pool, Forks)


@pytest.mark.timeout(60)
def test_what_a_fork_of_a_worker_has_is_not_overwritten(group):
    group.fork_with(np.full(100_000, 7.0))
    for _ in range(5):
        assert group.take(np.full(100_000, 99.0)) == [99.0]
    assert group.what_the_child_sees() == ["7.0"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("who_forks", ["worker", "controller"])
def test_segments_are_used_again_though_somebody_forks_between_the_calls(group, who_forks):
    fork = group.fork_for_a_moment if who_forks == "worker" else fork_for_a_moment
    array, counts = np.zeros(100_000), []
    for _ in range(8):
        group.echo(array)
        fork()
        counts.append((n_segments(), group.n_segments()))
    assert counts[-1] == counts[2]


@pytest.mark.timeout(60)
def test_closing_a_group_wakes_who_waits_for_it(group):
    future, errors = group.hang.submit(), []
    waiting = threading.Thread(target=lambda: errors.append(future.exception()))
    waiting.start()
    group.close()
    waiting.join(timeout=10)
    assert [type(error) for error in errors] == [bm.WorkerDied]


@pytest.mark.timeout(60)
def test_an_interrupted_send_does_not_shift_the_answers(group, monkeypatch):
    lane = group._tenancy.crew._lanes[0]
    real = lane.send

    def interrupted(*message):
        signal.raise_signal(signal.SIGINT)
        real(*message)

    monkeypatch.setattr(lane, "send", interrupted)
    with pytest.raises(KeyboardInterrupt):
        group.echo("lost")
    monkeypatch.setattr(lane, "send", real)
    assert group.echo("one") == ["one"]
    assert group.echo("two") == ["two"]


@pytest.mark.timeout(60)
def test_groups_that_are_garbage_while_another_one_starts(zygote):
    import gc

    with bm.ResourcePool([1], backend="local") as pool:
        gc.disable()
        try:
            for _ in range(5):
                group = bm.WorkerGroup(pool, Forks)
                group.cycle = group
            del group
            gc.set_threshold(1)
        finally:
            gc.enable()
        try:
            assert bm.WorkerGroup(pool, Forks).echo(1) == [1]
        finally:
            gc.set_threshold(700, 10, 10)


@pytest.mark.timeout(60)
def test_more_calls_than_a_busy_worker_takes_can_be_submitted_and_run_in_order(group):
    group.echo(0)
    hanging = group.hang.submit()
    values = list(range(3000))
    start = time.monotonic()
    futures = [group.echo.submit(value) for value in values]
    given_up = futures.pop()
    assert given_up.cancel()
    assert time.monotonic() - start < 10, "nobody waits for the worker"
    hanging.cancel()
    assert [future.result(timeout=20) for future in futures] == [[value] for value in values[:-1]]


@pytest.mark.timeout(60)
def test_calls_that_nobody_waits_for_are_sent_nevertheless(group):
    told, tell = os.pipe()
    hanging = group.hang.submit()
    for value in range(2000):
        group.echo.submit(value)
    group.write_to.submit(f"/proc/{os.getpid()}/fd/{tell}")
    hanging.cancel()
    assert os.read(told, 10) == b"done", "though this thread waits for something else"
    os.close(told)
    os.close(tell)


@pytest.mark.timeout(60)
def test_threads_can_call_one_group(group):
    outcomes = []

    def work():
        for n in range(200):
            array = np.full(3000, n)
            (echoed,) = group.echo.options(timeout=20)(array)
            outcomes.append(bool((echoed == n).all()))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [True] * 600


class Something:
    pass


@pytest.mark.timeout(60)
@pytest.mark.parametrize("ends", ["answers", "is closed"])
def test_what_is_lent_for_a_call_is_kept_until_its_ranks_have_answered_or_gone(group, tmp_path, ends):
    """As memory of a GPU is, which this does not need: who keeps it does not look at it."""
    crew, path, loan, tickets = group._tenancy.crew, tmp_path / "pipe", Something(), {}
    os.mkfifo(path)
    is_kept = weakref.ref(loan)
    (part,) = crew.put([encode(((0, str(path)),))])
    crew.call([Call((0,), "write_to", (part,), Reply.VALUE, (loan,))], tickets)
    del loan
    assert crew.wait([tickets[0]], 0.1) == []  # it waits for somebody to read from the pipe
    assert is_kept()
    if ends == "is closed":
        group.close()
    else:
        assert path.read_text() == "done"
        assert crew.wait([tickets[0]], None) == [tickets[0]]
    assert not is_kept()


@pytest.mark.timeout(60)
def test_what_is_lent_to_one_rank_does_not_decide_about_the_call_of_another(zygote, monkeypatch):
    """Each rank's call names what was lent to it alone: a rank on another host has no part in that."""
    sent = []
    with bm.ResourcePool([2], backend="local") as pool:
        group = bm.WorkerGroup(pool, Forks)
        crew = group._tenancy.crew
        monkeypatch.setattr(crew, "call", lambda calls, tickets: sent.extend(calls))
        monkeypatch.setattr(
            "bandmaster.group.encode_parcel",
            lambda parcel, *_: Payload(b"", loans=("lent",) if 0 in parcel.ranks else ()),
        )
        group.rows_of.submit(np.ones(2))
    assert [(tuple(call.ranks), call.loans) for call in sent] == [((0,), ("lent",)), ((1,), ())]


@pytest.mark.timeout(60)
def test_a_worker_without_a_gpu_says_that_it_cannot_copy_from_one(group):
    crew = group._tenancy.crew
    ticket = crew.send(0, "borrow", (bytes(64), 0, b"sample"))
    crew.wait([ticket], None)
    assert crew.fetch(ticket) is False
