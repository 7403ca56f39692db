"""Descriptors of the world: sockets, pipes, event counters, and the polls that wait for them."""

from __future__ import annotations

import array
import errno
import math
import os
import select
import socket
from collections import deque
from typing import Any

from simulation import sync
from simulation import world as worlds

FIRST = 1 << 20  # descriptors of the world; lower ones are the system's
IN, OUT, HUP = int(select.EPOLLIN), int(select.EPOLLOUT), int(select.EPOLLHUP)


def _world():
    world = worlds.world
    assert world is not None, "a program runs"
    return world


class File:
    """What has a descriptor of the world.

    Attributes:
        fd: The lowest that is free, as in a system; -1 once it was closed.
        process: The process that it belongs to.
    """

    def __init__(self) -> None:
        self.world = _world()
        self.process = self.world.current.process
        files = self.world.files
        self.fd = next(fd for fd in range(FIRST, FIRST + len(files) + 1) if fd not in files)
        files[self.fd] = self
        self.polls: list[Any] = []  # that watch it

    def fileno(self) -> int:
        return self.fd

    @property
    def closed(self) -> bool:
        return self.fd < 0

    def events(self) -> int:
        """What can be done without waiting."""
        return 0

    def close(self) -> None:
        if self.fd >= 0:
            del self.world.files[self.fd]
            for poll in self.polls:
                poll.entries.pop(self.fd, None)
            self.fd = -1
            self.world.version += 1

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class EventCounter(File):
    """As an eventfd that does not block."""

    n = 0

    def events(self) -> int:
        return IN if self.n else 0


class PipeEnd(File):
    """One end of a pipe."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0
        self.other: PipeEnd

    def events(self) -> int:
        return IN if self.n else 0


class Socket(File):
    """One end of a connection between two sockets of sequenced packets, which the reader has to empty.

    Attributes:
        arrived: What has come: a packet and its descriptors.
        n_bytes: Bytes of that, beside what the kernel adds.
        on_arrival: Called when something has come, or the other end was closed, if it is set.
        other: The other end.
        has_room_for: Bytes that the other end may leave unread.
    """

    has_room_for = 208 * 1024
    OVERHEAD = 512
    is_blocking = True

    def __init__(self) -> None:
        super().__init__()
        self.arrived: deque[tuple[bytes, list[int]]] = deque()
        self.n_bytes = 0
        self.on_arrival: Any = None
        self.other: Socket
        self.is_shut = self.is_reset = False

    def events(self) -> int:
        other = self.other
        is_gone = other.fd < 0 or self.is_shut
        room = OUT if is_gone or 4 * other.n_bytes <= other.has_room_for else 0
        return (IN if self.arrived or is_gone else 0) | room | (HUP if is_gone else 0)

    def can_send(self, n: int) -> bool:
        """Whether a packet of so many bytes can be sent without waiting, or fails."""
        other = self.other
        return other.closed or self.is_shut or other.n_bytes + n + self.OVERHEAD <= other.has_room_for

    def send(self, data: Any, flags: int = 0) -> int:
        return self._send(bytes(data), [], flags)

    def sendmsg(self, parts: Any, rights: Any = (), flags: int = 0, address: Any = None) -> int:
        return self._send(b"".join(parts), [fd for _, _, fds in rights for fd in fds], flags)

    def _send(self, data: bytes, fds: list[int], flags: int) -> int:
        worlds.tick()
        other = self.other
        if not self.can_send(len(data)):
            if flags & socket.MSG_DONTWAIT or not self.is_blocking:
                raise BlockingIOError(errno.EAGAIN, "the other end does not read")
            sync._block(lambda: self.can_send(len(data)), None, "a socket that is read")
        if other.closed or self.is_shut:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        other.arrived.append((data, [os.dup(fd) for fd in fds]))
        other.n_bytes += len(data) + self.OVERHEAD
        self.world.version += 1
        if other.on_arrival is not None:
            other.on_arrival()
        return len(data)

    def recvmsg_into(self, buffers: Any, n_ancillary: int = 0, flags: int = 0) -> tuple[int, Any, int, Any]:
        worlds.tick()
        if self.is_reset:
            self.is_reset = False
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        if not self.arrived:
            if self.other.closed or self.is_shut:
                return 0, [], 0, None
            if flags & socket.MSG_DONTWAIT or not self.is_blocking:
                raise BlockingIOError(errno.EAGAIN, "nothing has arrived")
            sync._block(lambda: bool(self.arrived) or self.other.closed, None, "a message")
            return self.recvmsg_into(buffers, n_ancillary, flags)
        data, fds = self.arrived.popleft()
        self.n_bytes -= len(data) + self.OVERHEAD
        self.world.version += 1
        if self.other.on_arrival is not None:
            self.other.on_arrival()  # it may send again
        view = memoryview(buffers[0])
        view[: len(data)] = data
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())] if fds else []
        return len(data), rights, 0, None

    def setsockopt(self, *_: Any) -> None:
        return

    def shutdown(self, how: int) -> None:
        self.is_shut = self.other.is_shut = True
        self.world.version += 1
        if self.other.on_arrival is not None:
            self.other.on_arrival()

    def close(self) -> None:
        if self.fd < 0:
            return
        super().close()
        if self.arrived:
            self.other.is_reset = True
        for _, fds in self.arrived:
            for fd in fds:
                os.close(fd)
        self.arrived.clear()
        self.n_bytes = 0
        if self.other.on_arrival is not None and not self.other.closed:
            self.other.on_arrival()


def socket_pair() -> tuple[Socket, Socket]:
    """Two ends of a connection."""
    first, second = Socket(), Socket()
    first.other, second.other = second, first
    return first, second


class Poll(File):
    """As `select.epoll`; what is ready is told in the order that the seed says."""

    def __init__(self, *_: Any, has_fd: bool = True) -> None:
        self.entries: dict[int, int] = {}
        self._known = (-1, False)
        if has_fd:
            super().__init__()
        else:
            self.world, self.fd, self.polls = _world(), 0, []

    def register(self, fd: int, events: int = IN) -> None:
        self.world.files[fd].polls.append(self)
        self.entries[fd] = events
        self.world.version += 1

    def unregister(self, fd: int) -> None:
        del self.entries[fd]
        self.world.files[fd].polls.remove(self)

    def modify(self, fd: int, events: int) -> None:
        if fd not in self.entries:
            raise FileNotFoundError(errno.ENOENT, "not registered")
        self.entries[fd] = events
        self.world.version += 1

    def fileno(self) -> int:
        if self.fd < 0:
            raise ValueError("I/O operation on closed epoll object")
        return self.fd

    def ready(self) -> list[tuple[int, int]]:
        """What is ready."""
        files, found = self.world.files, []
        for fd, asked in self.entries.items():
            if events := files[fd].events() & (asked | HUP):
                found.append((fd, events))
        if len(found) > 1:
            self.world.random.shuffle(found)
        return found

    def events(self) -> int:
        """Whether anything is ready."""
        version, is_ready = self._known
        if version != self.world.version:
            files = self.world.files
            is_ready = False
            for fd, asked in self.entries.items():
                if files[fd].events() & (asked | HUP):
                    is_ready = True
                    break
            self._known = self.world.version, is_ready
        return IN if is_ready else 0

    def poll(self, timeout: float | None = None, maxevents: int = -1) -> list[tuple[int, int]]:
        if self.fd < 0:
            raise ValueError("I/O operation on closed epoll object")
        worlds.tick()
        if not self.events():
            if timeout == 0:
                return []
            waits = None if timeout is None or timeout < 0 else timeout
            if not sync._block(self._has_news, waits, "an event of a descriptor") or self.fd < 0:
                return []
        return self.ready()

    def _has_news(self) -> bool:
        return self.fd < 0 or bool(self.events())

    def close(self) -> None:
        if self.fd > 0:
            for fd in self.entries:
                self.world.files[fd].polls.remove(self)
            super().close()


class OldPoll(Poll):
    """As `select.poll`, whose times are in milliseconds."""

    def __init__(self) -> None:
        super().__init__(has_fd=False)

    def poll(self, timeout: float | None = None, maxevents: int = -1) -> list[tuple[int, int]]:
        try:
            return super().poll(None if timeout is None or timeout < 0 else math.ceil(timeout) / 1000)
        finally:
            for fd in self.entries:  # each is polled once
                self.world.files[fd].polls.remove(self)
            self.entries = {}

    def __del__(self) -> None:
        for fd in self.entries:
            if fd in self.world.files and self in self.world.files[fd].polls:
                self.world.files[fd].polls.remove(self)


class Select:
    """Stands for the module `select`."""

    epoll, poll = Poll, OldPoll

    def __getattr__(self, name: str) -> Any:
        return getattr(select, name)


class Os:
    """Stands for the module `os`."""

    @staticmethod
    def eventfd(n: int, flags: int = 0) -> int:
        return EventCounter().fd

    @staticmethod
    def eventfd_write(fd: int, n: int) -> None:
        worlds.tick()
        counter = _world().files.get(fd)
        if not isinstance(counter, EventCounter):
            raise OSError(errno.EBADF, "Bad file descriptor")
        counter.n += n
        counter.world.version += 1

    @staticmethod
    def eventfd_read(fd: int) -> int:
        worlds.tick()
        counter = _world().files.get(fd)
        if not isinstance(counter, EventCounter):
            raise OSError(errno.EBADF, "Bad file descriptor")
        if not counter.n:
            raise BlockingIOError(errno.EAGAIN, "nothing was written")
        n, counter.n = counter.n, 0
        counter.world.version += 1
        return n

    @staticmethod
    def pipe() -> tuple[int, int]:
        first, second = PipeEnd(), PipeEnd()
        first.other, second.other = second, first
        return first.fd, second.fd

    @staticmethod
    def set_blocking(fd: int, is_blocking: bool) -> None:
        if fd < FIRST:
            os.set_blocking(fd, is_blocking)

    @staticmethod
    def write(fd: int, data: bytes) -> int:
        if fd < FIRST:
            return os.write(fd, data)
        worlds.tick()
        end = _file(fd)
        if end.other.n > 65536:
            raise BlockingIOError(errno.EAGAIN, "the pipe is full")
        end.other.n += len(data)
        end.world.version += 1
        return len(data)

    @staticmethod
    def read(fd: int, n: int) -> bytes:
        if fd < FIRST:
            return os.read(fd, n)
        worlds.tick()
        end = _file(fd)
        if not end.n:
            sync._block(lambda: bool(end.n), None, "a pipe")
        n_read, end.n = min(end.n, n), end.n - min(end.n, n)
        end.world.version += 1
        return b"1" * n_read

    @staticmethod
    def close(fd: int) -> None:
        if fd < FIRST:
            os.close(fd)
        else:
            _file(fd).close()

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def _file(fd: int) -> Any:
    file = _world().files.get(fd)
    if file is None:
        raise OSError(errno.EBADF, "Bad file descriptor")
    return file


def opened(fd: Any, *args: Any, **options: Any) -> Any:
    """As `open`, for a descriptor of the world."""
    if isinstance(fd, int) and fd >= FIRST:
        return _world().files[fd]
    return open(fd, *args, **options)
