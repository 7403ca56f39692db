"""Locks, conditions, events, threads and queues of the world, in place of those of Python; and its clock."""

from __future__ import annotations

import itertools
import math
import queue
import threading
import time
from collections import deque
from concurrent.futures import Executor, Future
from threading import get_ident
from typing import Any

from simulation import world as worlds
from simulation.world import START, Task

_names = itertools.count(1)


def _block(ready, timeout, waits, is_interruptible=True):
    """Wait in the world; where no program runs, what is waited for must be there."""
    world = worlds.world
    if world is None:
        raise worlds.WorldEnded
    return world.block(ready, math.inf if timeout is None else world.now + timeout, waits, is_interruptible)


class Lock:
    """As `threading.Lock`."""

    _owner: int | None = None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        worlds.tick()
        if self._owner is not None:
            if not blocking or timeout == 0:
                return False
            if not _block(lambda: self._owner is None, None if timeout < 0 else timeout, "a lock"):
                return False
        self._owner = get_ident()
        return True

    __enter__ = acquire

    def release(self) -> None:
        if self._owner is None:
            raise RuntimeError("release unlocked lock")
        self._owner = None
        worlds.tick()

    def __exit__(self, *_: object) -> None:
        self.release()

    def locked(self) -> bool:
        return self._owner is not None


class RLock:
    """As `threading.RLock`."""

    __slots__ = ("__weakref__", "_count", "_owner")

    def __init__(self) -> None:
        self._owner: int | None = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = get_ident()
        if self._owner == me:
            self._count += 1
            return True
        worlds.tick()
        if self._owner is not None:
            if not blocking or timeout == 0:
                return False
            if not _block(lambda: self._owner is None, None if timeout < 0 else timeout, "a lock"):
                return False
        self._owner, self._count = me, 1
        return True

    __enter__ = acquire

    def release(self) -> None:
        if self._owner != get_ident():
            raise RuntimeError("cannot release un-acquired lock")
        self._count -= 1
        if not self._count:
            self._owner = None  # another thread may run at the next step of this one

    def __exit__(self, *_: object) -> None:
        self.release()

    def _is_owned(self) -> bool:
        return self._owner == get_ident()

    def _release_save(self) -> tuple[int, Any]:
        if self._owner != get_ident():
            raise RuntimeError("cannot release un-acquired lock")
        saved = self._count, self._owner
        self._owner, self._count = None, 0
        worlds.tick()
        return saved

    def _acquire_restore(self, saved: tuple[int, Any]) -> None:
        if self._owner is not None:
            _block(lambda: self._owner is None, None, "a lock", is_interruptible=False)
        self._count, self._owner = saved


class _Told:
    """Whether a thread that waits was notified."""

    __slots__ = ("is_told",)

    def __init__(self) -> None:
        self.is_told = False


class Condition:
    """As `threading.Condition`."""

    def __init__(self, lock: Any = None) -> None:
        self._lock = RLock() if lock is None else lock
        self.acquire, self.release = self._lock.acquire, self._lock.release
        self._waiting: deque[_Told] = deque()

    def __enter__(self) -> Any:
        return self._lock.__enter__()

    def __exit__(self, *args: object) -> None:
        self._lock.__exit__(*args)

    def wait(self, timeout: float | None = None) -> bool:
        told = _Told()
        self._waiting.append(told)
        saved = self._lock._release_save() if isinstance(self._lock, RLock) else self._lock.release()
        try:
            return _block(lambda: told.is_told, timeout, "a condition")
        finally:
            if isinstance(self._lock, RLock):
                self._lock._acquire_restore(saved)
            else:
                self._lock.acquire()
            if not told.is_told:
                self._waiting.remove(told)

    def wait_for(self, predicate: Any, timeout: float | None = None) -> Any:
        deadline = None if timeout is None else now() + timeout
        while not (result := predicate()):
            left = None if deadline is None else deadline - now()
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    def notify(self, n: int = 1) -> None:
        while n > 0 and self._waiting:
            self._waiting.popleft().is_told = True
            n -= 1

    def notify_all(self) -> None:
        self.notify(len(self._waiting))

    notifyAll = notify_all


class Event:
    """As `threading.Event`."""

    def __init__(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        worlds.tick()
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        worlds.tick()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        worlds.tick()
        return self._is_set or _block(lambda: self._is_set, timeout, "an event")


class Thread:
    """As `threading.Thread`."""

    def __init__(self, group=None, target=None, name=None, args=(), kwargs=None, *, daemon=None) -> None:
        self.name = name or f"thread-{next(_names)}"
        self._target, self._args, self._kwargs = target, args, kwargs or {}
        self.daemon = daemon
        self._task: Task | None = None

    def start(self) -> None:
        if worlds.world is not None:  # else a coroutine of a killed process is collected after its program
            self._task = worlds.world.spawn(self.name, self._run)

    def _run(self) -> None:
        target, args, kwargs = self._target, self._args, self._kwargs
        del self._target, self._args, self._kwargs
        target(*args, **kwargs)

    @property
    def ident(self) -> int | None:
        return None if self._task is None else self._task.ident

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.is_over

    def join(self, timeout: float | None = None) -> None:
        task = self._task
        if task is not None and not task.is_over:
            _block(lambda: task.is_over, timeout, f"the end of {self.name}")


class SimpleQueue:
    """As `queue.SimpleQueue`."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)
        worlds.tick()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        worlds.tick()
        deadline = None if timeout is None else now() + timeout
        while not self._items:
            left = None if deadline is None else deadline - now()
            if not block or (left is not None and left <= 0):
                raise queue.Empty
            _block(lambda: bool(self._items), left, "an item of a queue")
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        worlds.tick()
        return not self._items


class ThreadPoolExecutor(Executor):
    """As `concurrent.futures.ThreadPoolExecutor`, with one thread."""

    def __init__(self, max_workers: int, name: str = "") -> None:
        self._jobs: deque[Any] = deque()
        self._is_over = False
        self._name, self._thread = name, None

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs.append((future, function, args, kwargs))
        if self._thread is None:
            self._thread = Thread(target=self._run, name=self._name)
            self._thread.start()
        worlds.tick()
        return future

    def _run(self) -> None:
        while True:
            _block(lambda: bool(self._jobs) or self._is_over, None, "something to compute")
            if not self._jobs:
                return
            future, function, args, kwargs = self._jobs.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function(*args, **kwargs)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            del future, function, args, kwargs

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._is_over = True
        if wait and self._thread is not None:
            self._thread.join()


def now() -> float:
    """The virtual time; reading it takes a moment."""
    world = worlds.world
    if world is None:
        return time.monotonic()
    world.tick()
    return world.now


def sleep(seconds: float) -> None:
    """Let virtual time pass."""
    _block(_never, seconds, "the end of a sleep")


def _never() -> bool:
    return False


def main_thread() -> Any:
    """The main thread of the process."""
    world = worlds.world
    if world is None or not world.current.process:
        return threading.main_thread()
    return world.processes[world.current.process].main


def current_thread() -> Any:
    """The thread that runs."""
    main = main_thread()
    return main if main.ident == get_ident() else threading.current_thread()


class PerProcess:
    """Stands for an object of a module, of which each process has its own.

    Args:
        make: Makes that of a process.
    """

    def __init__(self, make: Any) -> None:
        self.__dict__.update(_make=make, _outside=make())

    def _own(self) -> Any:
        world = worlds.world
        if world is None:
            return self._outside
        state = world.processes[world.current.process].state
        return state[self] if self in state else state.setdefault(self, self._make())  # as threads may make two

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._own(), name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._own()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._own()[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._own()[key]

    def __contains__(self, key: Any) -> bool:
        return key in self._own()


class Threading:
    """Stands for the module `threading`."""

    Lock, RLock, Condition, Event, Thread = Lock, RLock, Condition, Event, Thread
    main_thread, current_thread = staticmethod(main_thread), staticmethod(current_thread)

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)


class Queue:
    """Stands for the module `queue`."""

    SimpleQueue = SimpleQueue

    def __getattr__(self, name: str) -> Any:
        return getattr(queue, name)


class Time:
    """Stands for the module `time`."""

    monotonic = perf_counter = staticmethod(now)
    sleep = staticmethod(sleep)

    @staticmethod
    def monotonic_ns() -> int:
        return int(now() * 1e9)

    perf_counter_ns = monotonic_ns

    @staticmethod
    def time() -> float:
        return now() - START + 1.7e9

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)
