"""Descriptors of the world: sockets, pipes, event counters, and the polls that wait for them."""

from __future__ import annotations

import array
import errno
import math
import os
import select
import socket
import struct
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
    timeout_s: float | None = None  # in which something has to arrive

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
        if self.fd < 0:
            raise OSError(errno.EBADF, "Bad file descriptor")
        if not self.can_send(len(data)):
            if flags & socket.MSG_DONTWAIT or not self.is_blocking:
                raise BlockingIOError(errno.EAGAIN, "the other end does not read")
            sync._block(lambda: self.can_send(len(data)), None, "a socket that is read")
        if other.closed or self.is_shut:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        other.arrived.append((data, [_sent(fd) for fd in fds]))
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
            is_there = lambda: bool(self.arrived) or self.other.closed or self.is_shut or self.fd < 0  # noqa: E731
            if not sync._block(is_there, self.timeout_s, "a message"):
                raise BlockingIOError(errno.EAGAIN, "nothing has arrived in time")
            return self.recvmsg_into(buffers, n_ancillary, flags)
        data, fds = self.arrived.popleft()
        for fd in fds:
            if fd >= FIRST:
                self.world.files[fd].process = self.world.current.process
        self.n_bytes -= len(data) + self.OVERHEAD
        self.world.version += 1
        if self.other.on_arrival is not None:
            self.other.on_arrival()  # it may send again
        view = memoryview(buffers[0])
        view[: len(data)] = data
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())] if fds else []
        return len(data), rights, 0, None

    def setsockopt(self, level: int, option: int, value: Any) -> None:
        if option == socket.SO_RCVTIMEO:
            seconds, micros = struct.unpack("@ll", value)
            self.timeout_s = seconds + micros / 1e6 or None

    def getsockopt(self, level: int, option: int) -> int:
        return self.has_room_for

    def setblocking(self, is_blocking: bool) -> None:
        self.is_blocking = is_blocking

    def moved(self) -> Socket:
        """This end with another descriptor, in place of this one."""
        made = Socket()
        made.other, made.other.other = self.other, made
        made.arrived, self.arrived = self.arrived, deque()
        made.n_bytes, made.is_shut, made.is_reset = self.n_bytes, self.is_shut, self.is_reset
        return made

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
                Os.close(fd)
        self.arrived.clear()
        self.n_bytes = 0
        if self.other.on_arrival is not None and not self.other.closed and self.other.other is self:
            self.other.on_arrival()


def _sent(fd: int) -> int:
    """The descriptor of a file that is on its way to another process."""
    if fd < FIRST:
        return os.dup(fd)
    moved: Socket = _file(fd).moved()
    moved.process = ""  # until it is received: it outlives the process that has sent it
    return moved.fd


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

    @staticmethod
    def fromfd(fd: int) -> Owner:
        return Owner(_file(fd))

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

    def register(self, fd: int, events: int = IN) -> None:
        self.entries[fd] = events

    def poll(self, timeout: float | None = None, maxevents: int = -1) -> list[tuple[int, int]]:
        known = self.world.files
        before = self.entries = {fd: asked for fd, asked in self.entries.items() if fd in known}
        self.entries, files = dict(before), [known[fd] for fd in before]
        for file in files:
            file.polls.append(self)
        self._known = (-1, False)
        try:
            return super().poll(None if timeout is None or timeout < 0 else math.ceil(timeout) / 1000)
        finally:
            for file in files:
                file.polls.remove(self)
            self.entries = before


class Same(File):
    """A further descriptor of a file."""

    def __init__(self, file: File) -> None:
        super().__init__()
        self._file = file

    def events(self) -> int:
        return 0 if self._file.closed else self._file.events()


class Owner:
    """As an object of `select.epoll.fromfd`: it closes a descriptor when it is collected."""

    def __init__(self, file: File) -> None:
        self.fileno, self.close = file.fileno, file.close

    def __del__(self) -> None:
        self.close()


class Named(Socket):
    """A socket that is bound to a name of its host, or connected to one."""

    def __init__(self) -> None:
        super().__init__()
        self.other = self  # until it is connected
        self.waiting: deque[Named] = deque()
        self._name = ""

    def events(self) -> int:
        return (IN if self.waiting or self.is_shut else 0) if self._name else super().events()

    def bind(self, name: str) -> None:
        self._name = name
        self.world.names[_host(), name] = self

    def listen(self, backlog: int = 0) -> None:
        return

    def accept(self) -> tuple[Named, Any]:
        worlds.tick()
        if not self.waiting:
            raise BlockingIOError(errno.EAGAIN, "nobody connects")
        found = self.waiting.popleft()
        found.process = self.world.current.process
        self.world.version += 1
        return found, ""

    def connect(self, name: str) -> None:
        worlds.tick()
        listening = self.world.names.get((_host(), name))
        if listening is None or listening.closed or listening.is_shut:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        theirs = Named()
        theirs.process = listening.process
        theirs.other, self.other = self, theirs
        listening.waiting.append(theirs)
        self.world.version += 1

    def connect_ex(self, name: str) -> int:
        try:
            self.connect(name)
        except OSError as error:
            return error.errno or 0
        return 0

    def settimeout(self, seconds: float | None) -> None:
        self.timeout_s, self.is_blocking = seconds or None, seconds != 0

    def setblocking(self, is_blocking: bool) -> None:
        self.timeout_s, self.is_blocking = None, is_blocking

    def recv(self, n: int, flags: int = 0) -> bytes:
        if flags & socket.MSG_PEEK and self.arrived:
            return self.arrived[0][0][:n]
        buffer, had_limit = bytearray(n), self.timeout_s is not None
        try:
            size, *_ = self.recvmsg_into([buffer], 0, flags)
        except BlockingIOError:
            if had_limit and not flags & socket.MSG_DONTWAIT:
                raise TimeoutError("timed out") from None
            raise
        return bytes(buffer[:size])

    def close(self) -> None:
        for one in self.waiting:
            one.close()
        self.waiting.clear()
        self.world.names.pop((self._name and _host_of(self.process), self._name), None)
        super().close()


def _host() -> str:
    return _host_of(_world().current.process)


def _host_of(process: str) -> str:
    found: str = _world().processes[process].host
    return found


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
    def getpid() -> int:
        world = worlds.world
        return os.getpid() if world is None else world.processes[world.current.process].pid

    @property
    def environ(self) -> dict[str, str]:
        """The environment of the process."""
        found: dict[str, str] = _world().processes[_world().current.process].state.setdefault("environ", {})
        return found

    @staticmethod
    def register_at_fork(**_: Any) -> None:
        """There are no forks."""

    @staticmethod
    def dup(fd: int) -> int:
        return os.dup(fd) if fd < FIRST else Same(_file(fd)).fd

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
