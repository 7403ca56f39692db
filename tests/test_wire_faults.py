"""Ctrl-C, threads, forks and garbage at awkward moments: no answer is lost, shifted or seen by the wrong reader."""

import contextlib
import gc
import os
import signal
import socket
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
from clock import idle_time

import bandmaster as bm
from bandmaster import Dispatch, register
from bandmaster.testing import held_resources
from bandmaster.wire import lane
from bandmaster.wire.messages import MAX_MESSAGE_NBYTES, Closed
from bandmaster.wire.status_page import stacks


def fork_for_a_moment():
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)


def n_segments():
    """How many segments this process has a descriptor of: those it writes."""
    return len(held_resources(["segments"]).segments)


def raise_timeout(*_):
    raise TimeoutError("a stale alarm")


def await_delivery(pid):
    """Until no signal is on its way to a process."""
    while any(
        "Pnd:" in line and int(line.split()[1], 16) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    ):
        time.sleep(0.001)  # polling for the kernel


class Finalized:
    def __init__(self, *fifos):
        self.fifos = fifos

    def __del__(self):
        write(*self.fifos)


class Referred:
    def __init__(self, *fifos):
        weakref.finalize(self, write, *fifos)


def write(*fifos):
    for fifo in fifos:
        Path(fifo).write_text("")


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
    def fork_with_and_wait(self, array):
        """As a DataLoader with workers does in a method."""
        fork_for_a_moment()
        return float(array[-1])

    @register(Dispatch.ONE_TO_ALL)
    def raise_on(self, number):
        signal.signal(number, raise_timeout)

    @register(Dispatch.ONE_TO_ALL)
    def n_segments(self):
        return n_segments()

    @register(Dispatch.ONE_TO_ALL)
    def take(self, array):
        return float(array[-1])

    @register(Dispatch.ONE_TO_ALL)
    def count_in(self, rows):
        return len(rows)

    @register(Dispatch.ONE_TO_ALL)
    def what_the_child_sees(self):
        os.write(self.ask, b"?")
        return os.read(self.told, 100).decode()

    @register(Dispatch.ONE_TO_ALL)
    def count(self):
        self.n = getattr(self, "n", 0) + 1
        return self.n

    @register(Dispatch.ONE_TO_ALL)
    def hang(self):
        time.sleep(300)

    @register(Dispatch.ONE_TO_ALL)
    def hang_after_a_finalizer(self, kind, begins, ends):
        kind(begins, ends)
        time.sleep(300)

    @register(Dispatch.ONE_TO_ALL)
    def value_of_module(self, folder):
        sys.path.insert(0, folder)
        try:
            import module_that_waits
        finally:
            sys.path.remove(folder)
        return module_that_waits.value

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


def test_what_a_fork_of_a_worker_has_is_not_overwritten(group):
    group.fork_with(np.full(100_000, 7.0))
    for _ in range(5):
        assert group.take(np.full(100_000, 99.0)) == [99.0]
    assert group.what_the_child_sees() == ["7.0"]


@pytest.mark.parametrize("who_forks", ["worker", "controller"])
def test_segments_are_used_again_though_somebody_forks_between_the_calls(group, who_forks):
    fork = group.fork_for_a_moment if who_forks == "worker" else fork_for_a_moment
    array, counts = np.zeros(100_000), []
    for _ in range(8):
        group.echo(array)
        fork()
        counts.append((n_segments(), group.n_segments()))
    assert max(counts[3:]) <= max(counts[:3])


@pytest.mark.parametrize("who_forks", ["worker", "controller"])
def test_a_fork_while_arrays_are_held_leaks_no_segment(group, who_forks):
    """What the forking process was sent is not used again, as its fork may read it, but it is not kept for ever."""
    array, counts = np.zeros(100_000), []
    for n in range(12):
        array[:] = n
        if who_forks == "worker":
            assert group.fork_with_and_wait(array) == [n]
        else:
            (held,) = group.echo(array)
            fork_for_a_moment()
            assert held[-1] == n
        counts.append((n_segments(), group.n_segments()))
    assert max(counts[4:]) <= max(counts[:4])


def test_calls_that_are_cancelled_before_they_begin_leave_no_argument_behind(group):
    def open_segments():
        hanging = group.hang.submit()
        calls = [group.take.submit(np.zeros(20_000)) for _ in range(20)]
        for call in [*calls, hanging]:
            call.cancel()
        del call, calls
        gc.collect()
        for _ in range(3):  # calls tell the other end of what they have ended
            group.count()
        return n_segments()

    assert open_segments() == open_segments() == open_segments()


@pytest.mark.parametrize("end", ["release", "del"])
def test_groups_that_are_idle_free_what_nobody_has_any_more(group, end):
    """No call tells any more of what has ended: of rows that another group has read, either."""

    def n_held():
        """Segments with rows: mapped by the worker that has made them, and known to this process."""
        mapped = Path(f"/proc/{group.workers[0].pid}/maps").read_text().count("memfd:bandmaster-rows")
        return mapped, sum("memfd:bandmaster-rows" in name for name in held_resources(["segments"]).segments.values())

    with bm.ResourcePool([1], backend="local") as pool:
        reader = bm.WorkerGroup(pool, Forks)
        rows = [group.rows_of.submit(np.zeros((1, 20_000))) for _ in range(30)]
        assert [reader.count_in(one) for one in rows] == [[1]] * 30
        assert min(n_held()) >= 30
        if end == "release":
            for one in rows:
                one.release()
        else:
            del rows
        until = idle_time() + 20
        while max(n_held()) > 10:
            assert idle_time() < until, n_held()
            time.sleep(0.05)  # polling what other processes have
    group.close()
    while any(thread.name == "bandmaster-leases" for thread in threading.enumerate()):
        assert idle_time() < until
        time.sleep(0.01)  # polling the threads that look for what has ended


def test_rows_that_several_calls_take_stay_as_they_are_until_the_last_has_run(group, tmp_path):
    os.mkfifo(fifo := tmp_path / "fifo")
    rows = group.put(np.full(100_000, 7.0))
    first, _, last = group.rows_of.submit(rows), group.write_to.submit(str(fifo)), group.rows_of.submit(rows)
    assert first.result()[-1] == 7
    del rows
    other = group.rows_of.submit(group.put(np.full(100_000, 99.0)))
    assert fifo.read_text() == "done"  # the worker waits until somebody reads
    assert (last.result()[-1], other.result()[-1]) == (7, 99)


def test_rows_that_several_calls_take_can_be_read_though_the_first_forks(group):
    rows = group.put(np.full(100_000, 7.0))
    calls = [group.fork_with_and_wait.submit(rows) for _ in range(3)]
    assert [call.result() for call in calls] == [[7.0]] * 3


def test_a_call_that_is_cancelled_in_an_import_is_interrupted_behind_it(group, tmp_path):
    begins, ends = fifos = [tmp_path / "begins", tmp_path / "ends"]
    for fifo in fifos:
        os.mkfifo(fifo)
    part = tmp_path / "part_of_module_that_waits.py"
    part.write_text(
        f"from pathlib import Path\nPath({str(begins)!r}).write_text('')\nPath({str(ends)!r}).read_text()\n"
    )
    module = tmp_path / "module_that_waits.py"
    module.write_text("import part_of_module_that_waits\nvalue = 7\n")
    call = group.value_of_module.submit(str(tmp_path))
    begins.read_text()
    call.cancel()
    pid = group.workers[0].pid
    for _ in range(20):
        assert stacks([pid])[pid], "it can be asked meanwhile"
    ends.write_text("")
    assert isinstance(call.exception(timeout=10), bm.CallCancelled)
    part.write_text("raise ImportError('it was interrupted')")
    assert group.value_of_module(str(tmp_path)) == [7]


@pytest.mark.parametrize("kind", [Finalized, Referred])
def test_a_call_that_is_cancelled_while_a_finalizer_runs_is_interrupted_behind_it(group, kind, tmp_path):
    fifos = [tmp_path / "begins", tmp_path / "ends"]
    for fifo in fifos:
        os.mkfifo(fifo)
    group.set_default_options(grace=20)
    call = group.hang_after_a_finalizer.submit(kind, *map(str, fifos))
    fifos[0].read_text()
    call.cancel()
    fifos[1].read_text()
    assert group.count.options(timeout=10)() == [1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_a_signal_between_two_calls_concerns_neither(number, zygote):
    with bm.ResourcePool([2], backend="local") as pool:
        group = bm.WorkerGroup(pool, Forks)
        group.raise_on(signal.SIGUSR1)
        for n in range(5):
            pid = group.workers[n % 2].pid
            os.kill(pid, number)
            await_delivery(pid)
            assert group.echo(n) == [n, n]


def test_signals_whose_handler_raises_fail_the_call_that_runs_and_no_other(group):
    group.raise_on(signal.SIGUSR1)
    pid, is_over = group.workers[0].pid, threading.Event()

    def send():
        while not is_over.wait(0.0007):
            os.kill(pid, signal.SIGUSR1)

    sending = threading.Thread(target=send)
    sending.start()
    outcomes = []
    try:
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            array = np.full(20_000, len(outcomes))
            try:
                (echoed,) = group.echo.options(timeout=20)(array)
                outcomes.append(bool((echoed == array).all()))
            except bm.RemoteError as error:
                outcomes.append("a stale alarm" in str(error))
    finally:
        is_over.set()
        sending.join()
    assert len(outcomes) > 50
    assert all(outcomes)
    assert group.echo("still there") == ["still there"]


@pytest.mark.parametrize("buffer_nbytes", [None, 4_000_000], ids=["as it is", "of a tuned host"])
def test_calls_that_are_given_up_are_not_run_however_much_a_socket_holds(group, buffer_nbytes):
    if buffer_nbytes is not None:
        group._ownership.workers()._lanes[0].socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_nbytes)
    hanging = group.hang.submit()
    futures = [group.count.submit() for _ in range(1500)]
    assert {future.cancel() for future in futures} == {True}
    hanging.cancel()
    assert group.count() == [1]


def test_giving_up_a_call_takes_as_many_steps_however_many_wait_before_it(group):
    n_steps = 0

    def count(_, kind, __):
        nonlocal n_steps
        n_steps += kind == "call"

    hanging = group.hang.submit()
    futures = [group.count.submit() for _ in range(300)]
    sys.setprofile(count)
    for future in futures:
        future.cancel()
    sys.setprofile(None)
    hanging.cancel()
    assert group.count() == [1]
    assert n_steps < 300 * len(futures)  # and not each of those before it


def test_sockets_have_the_buffer_that_messages_need_or_the_host_is_said_to_be_at_fault(monkeypatch):
    for end in lane.lane_pair():
        with end:
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == lane.BUFFER_NBYTES
    monkeypatch.setattr(lane, "BUFFER_NBYTES", 2**31 - 1)
    message = r"2,147,483,647 bytes.*this host allows.*net\.core\.wmem_max"
    with bm.ResourcePool([1], backend="local") as pool, pytest.raises(bm.ResourceError, match=message):
        bm.WorkerGroup(pool, Forks)


def test_no_message_is_cut():
    with contextlib.ExitStack() as closing:
        ends = [lane.Lane(end, lane.SegmentWriter()) for end in lane.lane_pair()]
        for end in ends:
            closing.callback(end.close)
        ends[0].send(bytes(MAX_MESSAGE_NBYTES))
        assert len(ends[1].receive()) == MAX_MESSAGE_NBYTES - lane.LENGTH_NBYTES
        for send in (ends[0].send, ends[0].send_beside):
            with pytest.raises(OSError, match=r"163,841 bytes .*at most 163,840"):
                send(bytes(MAX_MESSAGE_NBYTES + 1))
        ends[0].socket.send(bytes(MAX_MESSAGE_NBYTES + 1))  # as no lane does
        with pytest.raises(Closed):
            ends[1].receive()


def test_closing_a_pool_while_threads_call_its_groups_ends_all_of_them(zygote):
    value = [np.zeros(1000) for _ in range(500)]
    gc.collect()
    before, errors = n_segments(), set()

    def call_until_it_is_closed(group, is_calling):
        try:
            while True:
                group.echo(value)
                is_calling.set()
        except Exception as error:
            errors.add(type(error))

    for _ in range(5):
        pool = bm.ResourcePool([2], backend="local")
        other, group, is_calling = bm.WorkerGroup(pool, Forks), bm.WorkerGroup(pool, Forks), threading.Event()
        threads = [threading.Thread(target=call_until_it_is_closed, args=[group, is_calling]) for _ in range(3)]
        for thread in threads:
            thread.start()
        is_calling.wait()
        pool.close()
        for thread in threads:
            thread.join(timeout=20)
            assert not thread.is_alive()
        with pytest.raises(bm.ClosedError):
            other.echo(1)
        gc.collect()  # the errors refer to frames, and these to results
        assert n_segments() == before
    assert errors <= {bm.ClosedError, bm.WorkerDied}


def test_closing_a_group_wakes_who_waits_for_it(group):
    future, errors = group.hang.submit(), []
    waiting = threading.Thread(target=lambda: errors.append(future.exception()))
    waiting.start()
    group.close()
    waiting.join(timeout=10)
    assert [type(error) for error in errors] == [bm.WorkerDied]


def test_an_interrupted_send_does_not_shift_the_answers(group, monkeypatch):
    first = group._ownership.workers()._lanes[0]
    real = first.send

    def interrupted(*message):
        signal.raise_signal(signal.SIGINT)
        real(*message)

    monkeypatch.setattr(first, "send", interrupted)
    with pytest.raises(KeyboardInterrupt):
        group.echo("lost")
    monkeypatch.setattr(first, "send", real)
    assert group.echo("one") == ["one"]
    assert group.echo("two") == ["two"]


def test_groups_that_are_garbage_while_another_one_starts(zygote):
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


def test_more_calls_than_a_busy_worker_takes_can_be_submitted_and_run_in_order(group):
    group.echo(0)
    hanging = group.hang.submit()
    values = list(range(3000))
    start = idle_time()
    futures = [group.echo.submit(value) for value in values]
    given_up = futures.pop()
    assert given_up.cancel()
    assert idle_time() - start < 10, "nobody waits for the worker"
    hanging.cancel()
    assert [future.result(timeout=20) for future in futures] == [[value] for value in values[:-1]]


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
