"""What is said where the system allows no more threads or processes, or the working directory is gone."""

import errno
import sys
import threading
import uuid

import pytest

import bandmaster as bm
from bandmaster import Dispatch, register
from bandmaster.backends import local, register_backend
from bandmaster.platform import limits
from bandmaster.platform.cgroups import Limit


class Echo(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def echo(self, x):
        return x

    @register(Dispatch.ONE_TO_ALL)
    async def echo_async(self, x):
        return x


@pytest.fixture
def no_more_threads(monkeypatch):
    """As where a user has as many threads as he may: that limit does not hold for root, whom tests may run as."""

    def refuse(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as context:
        context.setattr(threading.Thread, "start", refuse)
        context.setattr(limits, "process_limit", lambda: Limit(512, 512))
        yield
    # what the test leaves behind is ended with threads at hand


def refused(thread):
    words = rf"cannot start thread '{thread}': can't start new thread; 512 of at most 512 processes and threads"
    return rf"{words} exist; raise the limits .*ulimit -u"


def test_a_thread_that_cannot_be_started_is_named_with_both_numbers(no_more_threads):
    with pytest.raises(bm.ResourceError, match=refused("reader")):
        limits.start_thread("reader", print)


def test_a_watch_that_cannot_be_started_costs_the_group_nothing(make_group, request):
    group = make_group(1, Echo)
    request.getfixturevalue("no_more_threads")
    with pytest.raises(bm.ResourceError, match=refused("bandmaster-progress")):
        group.on_death(print)
    assert group.echo(1) == [1]


def test_an_async_method_without_a_thread_for_its_loop_fails_alone(request):
    with bm.ResourcePool([1], backend="inprocess") as pool:
        group = bm.WorkerGroup(pool, Echo)
        request.getfixturevalue("no_more_threads")
        with pytest.raises(bm.RemoteError, match=refused("bandmaster-async-methods")):
            group.echo_async(1)
        assert group.echo(1) == [1]


def test_threads_start_as_daemons_with_their_arguments():
    seen = []
    thread = limits.start_thread("reader", seen.append, 3)
    thread.join()
    assert (thread.daemon, thread.name, seen) == (True, "reader", [3])


def test_workers_are_not_started_in_a_directory_that_was_removed(zygote, monkeypatch, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(bm.ResourceError, match=r"the working directory .* was removed; change .*os\.chdir"):
        bm.WorkerGroup(bm.ResourcePool([2], backend="local"), Echo)


@pytest.fixture
def fresh_pool():
    """A pool of local workers whose zygote has not been started."""
    name = f"local-{uuid.uuid4().hex}"
    register_backend(name, local.LocalBackend)
    with bm.ResourcePool([1], backend=name) as pool:
        yield pool


@pytest.mark.parametrize("path", [None, "", "/no/such/python"])
def test_an_executable_that_cannot_be_run_is_named(fresh_pool, monkeypatch, path):
    monkeypatch.setattr(sys, "executable", path)
    with pytest.raises(
        bm.UsageError, match=rf"sys\.executable, but {path!r} is not an executable file; .*backend 'inprocess'"
    ):
        bm.WorkerGroup(fresh_pool, Echo)


def test_a_process_that_cannot_be_started_is_named_with_both_numbers(fresh_pool, monkeypatch):
    def refuse(*_, **__):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(local, "Zygote", refuse)
    monkeypatch.setattr(limits, "process_limit", lambda: Limit(512, 511))
    with pytest.raises(
        bm.ResourceError, match=r"cannot start the process that .*temporarily unavailable; 511 of at mo"
    ):
        bm.WorkerGroup(fresh_pool, Echo)
