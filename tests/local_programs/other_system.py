"""Without what Linux alone has, backend inprocess works, and the others say what they need."""

import importlib
import os
import sys

OF_LINUX = {
    "select": "epoll EPOLLIN EPOLLOUT EPOLLERR EPOLLHUP",  # first, as others import it
    "os": "memfd_create MFD_CLOEXEC pidfd_open eventfd eventfd_read eventfd_write EFD_CLOEXEC EFD_NONBLOCK pipe2 "
    "sched_getaffinity sched_setaffinity posix_fallocate splice",
    "signal": "pidfd_send_signal sigtimedwait sigwaitinfo SIGRTMIN SIGRTMAX",
    "socket": "SO_PEERCRED SO_PASSCRED SCM_CREDENTIALS MSG_CMSG_CLOEXEC SOCK_CLOEXEC SOCK_NONBLOCK TCP_USER_TIMEOUT",
}
for name, attributes in OF_LINUX.items():
    for attribute in attributes.split():
        vars(importlib.import_module(name)).pop(attribute, None)  # an older Python may lack it


def deny_proc(event, args):
    if event in ("open", "os.listdir", "os.scandir") and str(args[0]).startswith(("/proc", "/sys")):
        raise FileNotFoundError(2, "there is no such file on this system", args[0])


sys.addaudithook(deny_proc)

sys.modules["resource"] = None  # as on Windows
try:
    import bandmaster as bm
except ImportError as refused:
    assert "on Windows, use WSL" in str(refused)
else:
    raise AssertionError("it was imported")
del sys.modules["resource"]

import asyncio  # noqa: E402
import gc  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402

import numpy as np  # noqa: E402

import bandmaster as bm  # noqa: E402
from bandmaster import Dispatch, register  # noqa: E402


class Works(bm.Worker):
    def on_yield(self):
        pass

    @register(Dispatch.DP_PROTO)
    def double(self, rows):
        return 2 * rows

    @register(Dispatch.REQUEST)
    def twice(self, rows):
        return 2 * rows

    @register(Dispatch.ONE_TO_ALL)
    async def later(self):
        await asyncio.sleep(0)
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def count(self, n, end=os.devnull):
        try:
            yield from range(n)
        finally:
            open(end, "w").close()

    @register(Dispatch.ONE_TO_ALL)
    def fail(self):
        raise KeyError("planned")


async def awaited(group, rows):
    async with group.turn():
        return await group.double.submit(rows)


rows = np.arange(6)
with bm.ResourcePool([2], backend="inprocess") as pool:
    group, other = bm.WorkerGroup(pool, Works), bm.WorkerGroup(pool, Works)
    with group.turn(), bm.trace() as trace:
        assert (group.double(rows) == 2 * rows).all()
        assert (group.double(group.double.submit(rows)[::-1]) == 4 * rows[::-1]).all()
        assert group.later() == [0, 1]
        assert (group.twice.map(rows, chunk=1).result() == 2 * rows).all()
        assert sorted(item.result() for item in group.count.stream(2)) == [0, 0, 1, 1]
        with tempfile.TemporaryDirectory() as folder:
            end = os.path.join(folder, "end")
            stream = group.count.stream(2, end)
            next(stream)
            del stream
            gc.collect()
            deadline = time.monotonic() + 20
            while not os.path.exists(end):
                assert time.monotonic() < deadline, "a stream that nobody has closes its generators"
        error = group.fail.submit().exception()
        assert isinstance(error.__cause__, KeyError), error
    group.on_death(print)
    assert group.healthy
    assert "Works" in group.describe() and str(group.calls()) and trace
    assert (asyncio.run(awaited(other, rows)) == 2 * rows).all()
    group.restart()
with bm.colocate(bm.ResourcePool([1], backend="inprocess"), one=Works, two=Works) as both:
    assert both.two.later() == [0]

for backend in ("local", "ray"):
    try:
        with bm.ResourcePool([1], backend=backend):
            raise AssertionError(f"{backend} has started")
    except bm.UsageError as refused:
        assert f"backend '{backend}' needs Linux" in str(refused) and "backend='inprocess'" in str(refused)
