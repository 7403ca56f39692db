"""Threads that call a group until they are told to stop, while something is done to it."""

import threading

from soaking.expected import Wrong

import bandmaster as bm

N_CALLERS = 3
MAY_COME = (bm.WorkerDied, bm.ClosedError, bm.CallCancelled)  # when the group is closed, restarted, or loses a rank
JOIN_TIMEOUT_S = 10.0


class Callers:
    """Each thread sends rows with its own number to all ranks, and makes sure that they come back.

    Args:
        group: Of `Subject`.
        may_fail: Whether something is done to the group that calls may fail for.
    """

    def __init__(self, group, may_fail):
        self._group, self._may_fail = group, may_fail
        self._is_over = threading.Event()
        self._have_called = threading.Barrier(N_CALLERS + 1, timeout=JOIN_TIMEOUT_S)
        self._wrong = []
        self._threads = [threading.Thread(target=self._call, args=[number]) for number in range(N_CALLERS)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        self._have_called.wait()
        return self

    def __exit__(self, kind, *_):
        self._is_over.set()
        for thread in self._threads:
            thread.join(JOIN_TIMEOUT_S)
        if kind is None and any(thread.is_alive() for thread in self._threads):
            raise Wrong("a thread's call has not ended")
        if kind is None and self._wrong:
            raise self._wrong[0]

    def _call(self, number):
        n = 0
        try:
            while n < 2 or not self._is_over.is_set():
                rows = [(number, n)] * self._group.world_size
                try:
                    if self._group.note(rows) != rows:
                        raise Wrong("rows have come back as others")
                except MAY_COME as error:
                    if not self._may_fail:
                        raise Wrong("a call has failed for nothing") from error
                n += 1
                if n == 1:
                    self._have_called.wait()
        except BaseException as error:
            self._have_called.abort()
            self._wrong.append(error)


def check_order(heard):
    """Whether all ranks have heard the same calls in the same order, and those of each thread as they were sent.

    Raises:
        Wrong: They have not.
    """
    first, *others = heard
    if any(other != first for other in others):
        raise Wrong(f"the ranks have heard calls in different orders: {heard}")
    for number in range(N_CALLERS):
        own = [n for who, n in first if who == number]
        if own != sorted(own):
            raise Wrong(f"the calls of one thread have come as {own}")
